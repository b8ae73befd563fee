"""The weights of trained models, wherever they lie: a run, a checkpoint, or a Hugging Face folder.

All three become a `ModelConfig` and tensors under lmkit's names, read one by one. Pickles are never read.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from lmkit.core.step import has_slices
from lmkit.errors import LmkitError, UsageError, reason, some_of
from lmkit.model.accounting import count_parameters
from lmkit.model.transformer import TransformerLM, plain_name
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.run_folder import TOKENIZER
from lmkit.recipe.tables import ModelConfig
from lmkit.registry import ATTENTION, OPERATIONS
from lmkit.storage.inputs import read_object
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.marks import CONFIG
from lmkit.training.checkpoint import (
    MODEL,
    Checkpoint,
    TensorFile,
    TrainingState,
    damaged_file,
    is_finite,
    model_files,
    newest_checkpoint,
    unsupported_dtype,
    verify_file,
)
from lmkit.training.precision import hold_weights
from lmkit.training.run_data import Data, resolved_tables

log = logging.getLogger("lmkit")
INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
_PICKLES = ("*.bin", "*.pth", "*.pt", "*.ckpt")
FREE = (
    *("preset", "depth", "context_length", "attention", "operations", "compile"),
    *("activation_checkpointing", "activation_gb"),
    "zero_init",  # of weights that are loaded
    "separate_documents",  # a single document is computed the same with and without it
)
"""Keys of [model] that may differ: weights of one model compute the same under all their values."""


# A model's weights by name


def model_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live weights by plain name, tied ones once; waits for weights that are still being gathered. Of
    `FSDP` modules, they are copies."""
    return _plain(model.state_dict(keep_vars=True))


def _plain(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            plain[plain_name(name)] = tensor.detach()
    return plain


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor], *, origin: Path) -> None:
    """Copy saved weights into a model, whether it is plain, compiled or wrapped.

    Raises:
        UsageError: other names or shapes; the message lists the first differences.
        LmkitError: a number is too large for the model's dtype ("weights.not_finite").
    """
    state = model.state_dict(keep_vars=True)
    wanted = _plain(state)
    if wrong := _differences(tensors, wanted):
        message = f"{origin}: weights of another model: {wrong}"
        hint = "use the recipe that the checkpoint was made with"
        raise UsageError("checkpoint.other_model", message, hint=hint)
    for name, tensor in wanted.items():
        tensor.copy_(cast_weight(tensors[name], tensor.dtype, name=name, origin=origin))
    if has_slices(model.parameters()):  # FSDP gave copies
        model.load_state_dict(state)


def cast_weight(weight: torch.Tensor, dtype: torch.dtype, *, name: str, origin: Path) -> torch.Tensor:
    """Return a weight in another dtype."""
    cast = weight.to(dtype)
    if cast.dtype != weight.dtype and not torch.equal(cast.isfinite(), weight.isfinite()):
        largest = f"{torch.finfo(dtype).max:.4g}"
        kind = str(dtype).removeprefix("torch.")
        message = f"{origin}: {name} has numbers beyond {largest}, the largest of {kind}"
        hint = 'use a wider dtype: export with --dtype fp32, train with train.precision = "fp32"'
        raise LmkitError("weights.not_finite", message, hint=hint)
    return cast


def _differences(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str:
    """Name the first tensors that only one side has, or in another shape; "" if there are none."""
    wrong = []
    for name in {**wanted, **found}:
        if name not in wanted or name not in found or found[name].shape != wanted[name].shape:
            wrong.append(f"{name}: saved {_shape(found.get(name))}, model {_shape(wanted.get(name))}")
    return some_of(wrong, separator="; ")


def _shape(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else "x".join(map(str, tensor.shape)) or "scalar"


def filled_model(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], *, device: torch.device | str, origin: Path
) -> TransformerLM:
    """Return a model with these weights in eval mode, neither compiled nor wrapped.

    Its matrices are bf16 if all of them are given so. Where its attention kernel does not run on the device, it uses
    `sdpa`, and the log says so. Where its operations do not, it uses others.
    """
    place, attention, operations = torch.device(device).type, config.attention, config.operations
    if place not in ATTENTION.facts(attention).devices:
        log.warning("attention %s does not run on %s: using sdpa", attention, place)
        attention = "sdpa"
    if operations in OPERATIONS.names and place not in OPERATIONS.facts(operations).devices:
        operations = "auto"
    model = TransformerLM(config.changed(attention=attention, operations=operations), device=device)
    if {tensor.dtype for tensor in tensors.values() if tensor.dim() > 1} == {torch.bfloat16}:
        hold_weights(model, "bf16")
    load_weights(model, tensors, origin=origin)
    return model.eval()


# Weights of runs, checkpoints and Hugging Face folders


@dataclass(frozen=True, eq=False)
class GivenWeights(Mapping[str, torch.Tensor]):
    """The weights of a trained model. Names, shapes and dtypes are known; `[name]` reads the values.

    Attributes:
        path: the checkpoint or the folder.
        config: with the vocabulary size filled in.
        tokenizer: the `tokenizer.json` that belongs to them, if there is one.
        tokenizer_sha256: of the tokenizer that they were trained with; None: not known.
        specs: name -> a tensor on "meta", with the shape that `config` asks for and the dtype of the file.
        places: name -> the file, and the name in it.
        state: of the checkpoint; None: a Hugging Face folder, in whose order q and k lie.
    """

    path: Path
    config: ModelConfig
    tokenizer: Path | None
    tokenizer_sha256: str | None
    specs: Mapping[str, torch.Tensor]
    places: Mapping[str, tuple[TensorFile, str]]
    state: TrainingState | None

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a weight on the CPU, in memory of its own."""
        file, stored_as = self.places[name]
        weight = file.read(stored_as)
        if not is_finite(weight):
            wrong = [known for holder, known in self.places.values() if not is_finite(holder.read(known))]
            raise LmkitError(
                "weights.not_finite",
                f"{self.path}: not finite: {some_of(wrong)}",
                hint="download or copy the weights again; if they are as they were trained, use an older checkpoint",
            )
        if self.state is not None:
            return weight
        from lmkit.model.hugging_face import reordered  # only folders of Hugging Face need its tables

        return reordered(name, weight, self.config, pairs=True)

    def open_tokenizer(self, path: Path | None = None) -> Tokenizer:
        """Return the tokenizer at `path`, or the model's own; refuse another one than it was trained with."""
        path = path or self.tokenizer
        if path is None:
            hint = "encode the text with lmkit data encode, and name the token file: --tokens FILE.npy"
            raise UsageError("evaluate.no_tokenizer", f"{self.path}: has no {TOKENIZER}", hint=hint)
        tokenizer, trained_with = Tokenizer.load(path), self.tokenizer_sha256
        if trained_with not in (None, tokenizer.sha256):
            found = f"{path}: is tokenizer {tokenizer.sha256[:12]}"
            message = f"{found}, but the model was trained with {trained_with[:12]}"
            hint = "use the tokenizer that encoded its token files"
            raise UsageError("checkpoint.wrong_tokenizer", message, hint=hint)
        self.refuse_more_ids(tokenizer.vocab_size, path)
        return tokenizer

    def refuse_more_ids(self, vocab_size: int, path: Path) -> None:
        """Refuse a file with ids that the model does not have."""
        rows = self.config.vocab_size or 0
        if vocab_size > rows:
            message = f"{path}: has ids up to {vocab_size - 1}, the embedding of {self.path} {rows} rows"
            raise UsageError("weights.more_ids", message, hint="use the tokenizer of the model")

    def model(self, device: torch.device | str = "cpu") -> TransformerLM:
        """Return the model, neither compiled nor wrapped, in eval mode, with kernels that run on the device."""
        return filled_model(self.config, dict(self), device=device, origin=self.path)


def open_weights(path: str | Path) -> GivenWeights:
    """Open a run's newest good checkpoint, a checkpoint, or a Hugging Face folder; `model()` builds the model.

    Raises:
        UsageError: there are no weights, pickled ones, or those of a model that lmkit cannot express.
        LmkitError: a file is damaged, or missing.
    """
    path = Path(path)
    return open_hugging_face(path) if is_hugging_face(path) else weights_of(newest_checkpoint(path))


def weights_of(checkpoint: Checkpoint) -> GivenWeights:
    """Return the weights of a checkpoint, after verifying their files if that is still to be done; LmkitError: a file
    is damaged or missing, or the weights are not those of the checkpoint's model."""
    path, state = checkpoint.path, checkpoint.state
    places: dict[str, tuple[TensorFile, str]] = {}
    for file_name in model_files(checkpoint.entries):
        if not checkpoint.is_verified:
            verify_file(path / file_name, checkpoint.entries[file_name])
        file = TensorFile(path / file_name)
        for name in file.tensors:
            places[name] = file, name
    specs = _specs(path / MODEL, state.model, places)
    tokenizer = path.resolve().parent.parent / TOKENIZER  # of the run that holds it
    own = tokenizer if tokenizer.is_file() else None
    trained_with = None if state.data is None else state.data.tokenizer_sha256 or None
    return GivenWeights(path, state.model, own, trained_with, specs, places, state)


def is_hugging_face(path: Path) -> bool:
    """Return whether a path is a Hugging Face folder, perhaps one that lmkit does not read."""
    return (path / CONFIG).is_file() or any(chain.from_iterable(map(path.glob, (*_PICKLES, INDEX))))


def open_hugging_face(folder: Path, *, context_length: int | None = None) -> GivenWeights:
    """Open a folder with `config.json` and `model.safetensors`, or its shards and their index.

    Every tensor becomes a weight, or is known to say nothing new: see `_drop_copies`. Both matrices of a tied model
    become weights if they differ, as in transformers 5. `context_length` is at most the folder's; None: the folder's.
    """
    from lmkit.model.hugging_face import EMBEDDING, HEAD, read_config, weight_names

    config = read_config(folder / CONFIG, context_length=context_length)
    theirs = _tensors(folder)
    config = _drop_copies(folder, config, theirs)
    places: dict[str, tuple[TensorFile, str]] = {}
    missing: list[str] = []
    for ours, stored_as in weight_names(config):
        if config.tie_embeddings and stored_as == EMBEDDING and stored_as not in theirs:
            stored_as = HEAD  # the other name of the same matrix
        if stored_as in theirs:
            places[ours] = (theirs.pop(stored_as), stored_as)
        else:
            missing.append(stored_as)
    if missing:
        message = f"{folder}: no tensor {some_of(missing)}"
        hint = f"copy or download the folder again; {CONFIG} and the weights belong together"
        raise LmkitError("weights.missing", message, hint=hint)
    if theirs:
        message = f"{folder}: tensors that lmkit's model does not have: {some_of(sorted(theirs))}"
        hint = "lmkit imports Llama, Mistral, Qwen2 and Qwen3 as transformers saves them, without adapters"
        raise UsageError("import.unsupported", message, hint=hint)
    specs, tokenizer = _specs(folder, config, places), folder / TOKENIZER
    own = tokenizer if tokenizer.is_file() else None
    return GivenWeights(folder, config, own, None, specs, places, None)


def _drop_copies(folder: Path, config: ModelConfig, theirs: dict[str, TensorFile]) -> ModelConfig:
    """Drop the tensors from `theirs` that say nothing new: a head that equals the embedding to which it is tied, the
    frequencies of RoPE, which older versions saved, and biases of attention's output that are 0.
    """
    from lmkit.model.hugging_face import EMBEDDING, HEAD, output_biases

    if config.tie_embeddings and HEAD in theirs and EMBEDDING in theirs:
        head, embedding = (theirs[name].read(name) for name in (HEAD, EMBEDDING))
        if head.dtype == embedding.dtype and torch.equal(head, embedding):
            del theirs[HEAD]
        else:
            log.warning(
                "%s: %s says tie_word_embeddings, but %s and %s differ: they stay two matrices, as in transformers 5",
                *(folder, CONFIG, HEAD, EMBEDDING),
            )
            config = config.changed(tie_embeddings=False)
    for name in [name for name in theirs if name.endswith("rotary_emb.inv_freq")]:
        del theirs[name]  # the configuration's count, as in transformers
    for name in theirs.keys() & set(output_biases(config)):
        if not theirs[name].read(name).any():
            del theirs[name]
    return config


def _tensors(folder: Path) -> dict[str, TensorFile]:
    """Return the tensors of a Hugging Face folder. Of two shards with a tensor, the index says which counts."""
    index = folder / INDEX
    if (folder / ONE_FILE).exists():  # transformers looks for it first
        if index.is_file() and {*_read_index(index).values()} != {ONE_FILE}:
            log.warning("%s: has %s: the shards of %s are left out", folder, ONE_FILE, INDEX)
        file = TensorFile(folder / ONE_FILE)
        return dict.fromkeys(file.tensors, file)
    if index.is_file():
        weight_map = _read_index(index)
        files = {name: TensorFile(folder / name) for name in sorted(set(weight_map.values()))}
        for tensor, name in weight_map.items():
            if tensor not in files[name].tensors:
                raise damaged_file(index, f"lists {tensor}, which {name} lacks")
        if unlisted := {tensor for file in files.values() for tensor in file.tensors} - weight_map.keys():
            log.warning("%s: does not list %s: left out", index, some_of(sorted(unlisted)))
        return {tensor: files[name] for tensor, name in weight_map.items()}
    if any(chain.from_iterable(map(folder.glob, _PICKLES))):
        message = f"{folder}: holds pickled weights, which lmkit never reads: loading them runs code"
        hint = "download the safetensors files, or convert with transformers: save_pretrained(FOLDER)"
        raise UsageError("import.pickle", message, hint=hint)
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    message = f"{folder}: neither {ONE_FILE} nor {INDEX}" + (f", but {some_of(others)}" if others else "")
    hint = f"a folder holds {ONE_FILE}, or shards with {INDEX}; rename the file if it is the whole model"
    raise UsageError("import.no_weights", message, hint=hint)


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor name -> file name."""
    try:
        weight_map = read_object(path).get("weight_map")
    except (OSError, ValueError) as error:
        raise damaged_file(path, reason(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged_file(path, "no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or _FILE_NAME.fullmatch(name) is None:
            raise damaged_file(path, f"{json.dumps(name)[:80]} is no name of a safetensors file")
    return weight_map


def _specs(
    path: Path, config: ModelConfig, places: Mapping[str, tuple[TensorFile, str]]
) -> dict[str, torch.Tensor]:
    """Compare what is stored with the model of `config`; return name -> a tensor on "meta"."""
    if config.vocab_size is None:
        hint = "use another checkpoint"
        raise LmkitError("weights.other_model", f"{path}: model.vocab_size is missing", hint=hint)
    specs, held, wanted = {}, 0, count_parameters(config).total
    for name, (file, stored_as) in places.items():
        spec = specs[name] = file.tensors[stored_as]
        held += spec.numel()
        if spec.dtype not in _DTYPES:
            raise unsupported_dtype(path, stored_as, str(spec.dtype).removeprefix("torch."))
    wrong = "" if held == wanted else f"{held:,} parameters, the configuration asks for {wanted:,}"
    if not wrong:  # so the sizes are possible: make the model, without memory, and compare them
        changes = {"context_length": 1, "attention": "sdpa", "operations": "plain"}
        model = TransformerLM(config.changed(**changes), device="meta")
        wrong = _differences(specs, model_weights(model))
    if wrong:
        raise LmkitError(
            "weights.other_model",
            f"{path}: {wrong}",
            hint="the weights and the file that describes their model belong together; copy the whole folder again",
        )
    return specs


def open_given(recipe: Recipe, data: Data) -> GivenWeights:
    """Open the weights that a resolved recipe names in `train.init_from`."""
    model, train = resolved_tables(recipe)
    path = train.init_from
    assert path is not None
    given = open_weights(path)
    if data.sources and given.tokenizer is not None:
        sha256 = given.open_tokenizer().sha256
        encoded_with = data.sources[0].file.meta.tokenizer_sha256
        if encoded_with not in ("", sha256):
            made = f"the token file was made with {encoded_with[:12]}"
            message = f"train.init_from: {path} was trained with tokenizer {sha256[:12]}, {made}"
            own = shlex.quote(str(given.tokenizer))
            hint = f"encode the text with its tokenizer: --set tokenizer.path={own}"
            raise UsageError("train.other_tokenizer", message, hint=hint)
    ours, theirs = (config.changed(num_kv_heads=config.kv_heads) for config in (model, given.config))
    differing = [
        f"model.{key}: {getattr(ours, key)}, the weights have {getattr(theirs, key)}"
        for key in ModelConfig.model_fields
        if key not in FREE and getattr(ours, key) != getattr(theirs, key)
    ]
    if differing:
        message = f"train.init_from: {path} is another model: {'; '.join(differing)}"
        raise UsageError("train.other_model", message, hint="take over its values in [model] of the recipe")
    return given
