"""Exchange models with Hugging Face: write a folder that transformers opens, make a run of such a folder.

Weights pass one by one: no more than two are in memory at a time.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmkit.errors import UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.tables import size_of
from lmkit.model.accounting import count_parameters
from lmkit.model.hugging_face import config_json, output_biases, reordered, weight_names
from lmkit.recipe import run_folder
from lmkit.recipe.load import recipe_to_toml, validate
from lmkit.storage.atomic import atomic_folder
from lmkit.storage.inputs import read_input
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.chat import ChatTemplate, beside, from_jinja, named_template
from lmkit.tokenizer.marks import CONFIG
from lmkit.training.checkpoint import (
    MODEL,
    STATE,
    shard_name,
    step_name,
    write_file,
    write_manifest,
    write_tensors,
)
from lmkit.training.setup import initial_state
from lmkit.training.weights import ONE_FILE, GivenWeights, cast_weight, open_hugging_face, open_weights

log = logging.getLogger("lmkit")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PADS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>")
"""Special tokens that serve as the pad token, the first that is there: Qwen2's is the last where it ends no text."""
_JINJA = "chat_template.jinja"
_FOR_OTHERS = {"format": "pt"}
"""Metadata of safetensors files: transformers refuses other formats."""


@dataclass(frozen=True)
class ExportResult:
    """What `export_model` wrote."""

    source: str
    folder: str
    architecture: str
    parameters: int
    dtype: str
    bytes: int
    files: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.source} -> {self.folder}\n"
            f"{self.architecture}, {self.parameters:,} parameters in {self.dtype}, {size_of(self.bytes)}\n"
            f"files: {', '.join(self.files)}"
        )


def _is_qwen2(tokenizer: Tokenizer) -> bool:
    """Return whether transformers' Qwen2Tokenizer, which builds its own words, encodes as this tokenizer."""
    words = (tokenizer.pattern, tokenizer.nfc, tokenizer.whole_words, tokenizer.unk_id)
    added = {token.text for token in tokenizer.added_tokens}
    return words == ("qwen2", True, False, None) and "<|endoftext|>" in added


def export_model(source: str | Path, output: str | Path, *, dtype: str | None = None) -> ExportResult:
    """Write a Hugging Face folder: LlamaForCausalLM, with `qk_norm` Qwen3ForCausalLM.

    With biases of q, k and v it is Qwen2ForCausalLM if transformers' own tokenizer of Qwen2 finds the words of the
    model's tokenizer, because transformers uses no other with it. Else it is a Llama, whose attention has one bias
    more, which is 0.

    Args:
        source: a run folder or a checkpoint.
        output: a new folder; it appears when it is complete.
        dtype: of the weights, "fp32", "bf16" or "fp16"; None leaves each as it is.

    Raises:
        UsageError: the output exists, the tokenizer is not the model's, or the architecture cannot express the model;
            the message names the key.
        LmkitError: the checkpoint is damaged, or a weight is not finite, also in `dtype` alone.
    """
    source, output = Path(source), Path(output)
    weights = open_weights(source)
    tokenizer = None if weights.tokenizer is None else weights.open_tokenizer()
    if tokenizer is None:
        log.warning("%s: has no %s: exporting the weights alone", source, run_folder.TOKENIZER)
    kept = next(spec.dtype for spec in weights.specs.values() if spec.dim() == 2)
    biased_llama = weights.config.qkv_bias and tokenizer is not None and not _is_qwen2(tokenizer)
    content = config_json(
        weights.config,
        dtype=str(_DTYPES[dtype] if dtype else kept).removeprefix("torch."),
        begin=None if tokenizer is None else tokenizer.start_id,
        end=None if tokenizer is None else tokenizer.end_of_text_id,
        biased_llama=biased_llama,
    )
    with atomic_folder(output) as partial:
        zeros = output_biases(weights.config) if biased_llama else []
        num_bytes = _write_weights(partial / ONE_FILE, weights, _DTYPES[dtype] if dtype else None, zeros)
        _write_json(partial / CONFIG, content)
        if tokenizer is not None:
            tokenizer.save(partial / run_folder.TOKENIZER)
            _describe_tokenizer(partial, tokenizer, beside(weights.tokenizer), weights.config.context_length)
        files = tuple(sorted(path.name for path in partial.iterdir() if not path.name.startswith(".")))
    return ExportResult(
        str(weights.path),
        str(output),
        content["architectures"][0],
        count_parameters(weights.config).total,
        content["torch_dtype"],
        num_bytes,
        files,
    )


def _write_weights(path: Path, weights: GivenWeights, dtype: torch.dtype | None, zeros: list[str]) -> int:
    """Write the weights under the names of transformers; return the bytes of all tensors."""
    names = {theirs: ours for ours, theirs in weight_names(weights.config)}
    specs: dict[str, torch.Tensor] = {}
    for theirs in (*names, *zeros):
        spec = weights.specs[names.get(theirs, "layers.0.attn.q_proj.bias")]  # shaped as the zeros
        specs[theirs] = spec.to(dtype or spec.dtype)

    def read(theirs: str) -> torch.Tensor:
        if theirs not in names:
            return torch.zeros_like(specs[theirs], device="cpu")
        weight = reordered(names[theirs], weights[names[theirs]], weights.config, pairs=False)
        return cast_weight(weight, specs[theirs].dtype, name=theirs, origin=weights.path)

    write_tensors(path, specs, read=read, metadata=_FOR_OTHERS)
    return sum(spec.nbytes for spec in specs.values())


def _describe_tokenizer(
    folder: Path, tokenizer: Tokenizer, template: ChatTemplate | None, length: int
) -> None:
    """Write the files beside a `tokenizer.json` that name its marks; generation stops at any of its stops."""
    stops = [*tokenizer.marks.stops]
    turn = None if template is None else tokenizer.special_ids.get(template.end)
    if turn is not None and turn not in stops:
        stops.append(turn)
    pad = next((tokenizer.special_ids[name] for name in _PADS if name in tokenizer.special_ids), None)
    ids = {"bos": tokenizer.start_id, "eos": tokenizer.end_of_text_id}
    ids["pad"] = ids["eos"] if pad is None else pad
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 adds one that Llama refuses
        "padding_side": "left",  # generation goes on at the right
        **{f"{key}_token": tokenizer.vocab[i].decode() for key, i in ids.items() if i is not None},
    }
    if template is not None:
        described["chat_template"] = template.to_jinja()
    _write_json(folder / run_folder.TOKENIZER_CONFIG, described)
    # No pad token in config.json: transformers would never train its embedding, and it may be end-of-text.
    numbers: dict[str, Any] = {f"{key}_token_id": i for key, i in ids.items()}
    numbers["eos_token_id"] = stops[0] if len(stops) == 1 else stops or None
    _write_json(folder / run_folder.GENERATION_CONFIG, numbers)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_file(path, f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode())


@dataclass(frozen=True)
class ImportResult:
    """What `import_model` wrote."""

    source: str
    folder: str
    checkpoint: str
    parameters: int
    dtype: str
    tokenizer: str | None

    def __str__(self) -> str:
        tokens = "no tokenizer" if self.tokenizer is None else self.tokenizer
        return (
            f"{self.source} -> {self.folder}\n"
            f"{self.parameters:,} parameters in {self.dtype}; {tokens}\n"
            f"write text: lmkit generate {self.folder}{' --tokenizer TOKENIZER.json' * (self.tokenizer is None)}"
        )


def import_model(
    folder: str | Path,
    output: str | Path,
    *,
    context_length: int | None = None,
    with_tokenizer: bool = True,
    chat_template: str | None = None,
) -> ImportResult:
    """Make a run folder of a Hugging Face folder: one checkpoint at step 0 with a fresh optimizer.

    The weights keep their dtype.

    Args:
        folder: of a Llama, Mistral, Qwen2 or Qwen3 model; see `lmkit.model.hugging_face.read_config`.
        output: the new run folder; it appears when it is complete.
        context_length: replaces the folder's, which may be longer.
        with_tokenizer: False imports the weights alone.
        chat_template: one of `lmkit.tokenizer.chat.TEMPLATES`, in place of the folder's.

    Raises:
        UsageError: the output exists, or lmkit cannot express the model or its tokenizer; the message says why.
        LmkitError: a file is damaged or missing, or a weight is not finite.
    """
    folder, output = Path(folder), Path(output)
    weights = open_hugging_face(folder, context_length=context_length)
    tokenizer = template = None
    if with_tokenizer:
        alone = "--without-tokenizer imports the weights alone"
        if weights.tokenizer is None:
            raise UsageError("import.no_tokenizer", f"{folder}: holds no {run_folder.TOKENIZER}", hint=alone)
        try:
            tokenizer = weights.open_tokenizer()
        except UsageError as error:
            raise UsageError("import.tokenizer", error.message, hint=alone) from error
        template = named_template(chat_template, tokenizer) if chat_template else their_template(folder)
        if template is not None:
            template.check(tokenizer, folder / run_folder.TOKENIZER)
    dtypes = {spec.dtype for spec in weights.specs.values() if spec.dim() == 2}
    tables = {
        "run": {"folder": str(output.parent), "name": output.name},
        "model": weights.config.model_dump(mode="json", exclude_none=True),
        "train": {"precision": "bf16" if dtypes == {torch.bfloat16} else "fp32"},
    }
    recipe = validate(tables, origin=str(output), resolved=True)
    # Nothing has been trained, so that the state's recipe has no [train].
    state = initial_state(recipe.changed(train=None))
    with atomic_folder(output) as partial:
        step = partial / run_folder.CHECKPOINTS / step_name(0)
        step.mkdir(parents=True)
        entries = {
            MODEL: write_tensors(step / MODEL, weights.specs, read=weights.__getitem__),
            shard_name(0, 1): write_tensors(step / shard_name(0, 1), {}),
            STATE: write_file(step / STATE, f"{state.model_dump_json(indent=1)}\n".encode()),
        }
        write_manifest(step, entries)
        write_file(partial / run_folder.RECIPE, recipe_to_toml(recipe).encode())
        _write_json(partial / run_folder.ENVIRONMENT, describe_environment())
        write_file(partial / run_folder.METRICS, b"")
        if tokenizer is not None:
            tokenizer.save(partial / run_folder.TOKENIZER)
        if template is not None:
            template.save(partial / run_folder.CHAT_TEMPLATE)
    return ImportResult(
        str(folder),
        str(output),
        str(output / run_folder.CHECKPOINTS / step_name(0)),
        count_parameters(weights.config).total,
        " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
        None if tokenizer is None else f"vocabulary {tokenizer.vocab_size:,}",
    )


def their_template(folder: Path) -> ChatTemplate | None:
    """Return the template of a folder if `lmkit export` wrote it.

    Any other template is a program: it is left out, with a warning.
    """
    found = run_folder.object_in(folder / run_folder.TOKENIZER_CONFIG).get("chat_template")
    with suppress(OSError, ValueError):
        found = read_input(folder / _JINJA).decode()
    template = from_jinja(found) if isinstance(found, str) else None
    if found is not None and template is None:
        log.warning(
            "%s: its chat template is a program, which is left out; import --chat-template names one of lmkit's",
            folder,
        )
    return template
