"""Open the data of a run: check its token files against recipe and tokenizer, make batches from them."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmkit.core.batches import BatchSource, RandomTokens, Sampler, TokenBatches
from lmkit.data import token_files
from lmkit.data.corpora import PathOrPaths, as_paths
from lmkit.data.shards import joined_meta, name_of, open_tokens, shard_paths, with_num_bytes
from lmkit.data.token_files import TokenFile
from lmkit.errors import UsageError
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import required
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.run_folder import CHAT_TEMPLATE, RECIPE, TOKENIZER, is_entry, read_record, token_file
from lmkit.recipe.tables import ModelConfig, TrainConfig
from lmkit.storage.atomic import noted_digest
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.vocabulary import template_for
from lmkit.training.checkpoint import DataIdentity


class Source(NamedTuple):
    """Token files that are sampled by themselves, with their weight in the mixture."""

    name: str
    file: TokenFile
    weight: float


@dataclass(frozen=True)
class Data:
    """The token files of a run, and what a resumed run must find again of those to train on.

    Attributes:
        sources: one, or those of a mixture; () for random tokens.
    """

    sources: tuple[Source, ...] = ()
    valid: TokenFile | None = None
    identity: DataIdentity | None = None


def open_data(recipe: Recipe) -> Data:
    """Open the token files that the recipe names, or those in the run folder."""
    if recipe.data.source == "random":
        return Data()
    train_paths, valid_paths = token_paths(recipe)
    shard_paths(train_paths)  # refuses a file in two sources
    own, table = recipe.run.path / TOKENIZER, recipe.tokenizer
    named = own if table is None or table.path is None else table.path
    end_of_text = None if table is None else table.end_of_text
    tokenizers = {
        path: Tokenizer.load(path, end_of_text=None if path == own else end_of_text)
        for path in {named, own}
        if path.exists()
    }
    # The run folder's own may be that of another text.
    tokenizer = None if table is None or table.path is None else tokenizers.get(named)
    parts = [(part.name or name_of(part.train), part.train, part.weight) for part in recipe.data.sources]
    sources = tuple(
        Source(name, _open(recipe, paths, tokenizer), weight)
        for name, paths, weight in parts or [(name_of(train_paths), train_paths, 1.0)]
    )
    valid, others = None, [*sources[1:]]
    if has_valid(recipe):
        valid = with_num_bytes(_open(recipe, valid_paths, tokenizer), tokenizer)
        others.append(Source(name_of(valid_paths), valid, 1.0))
    ours = sources[0].file.meta.tokenizer_sha256
    for name, file, _ in others:
        if (theirs := file.meta.tokenizer_sha256) != ours:
            hint = "encode both with one tokenizer; that of .bin files is named by tokenizer.path"
            own_one, other = (sha256[:12] or "not known" for sha256 in (ours, theirs))
            message = f"{name}: its tokenizer is {other}, that of {sources[0].name} {own_one}"
            raise UsageError("data.other_tokenizer", message, hint=hint)
    # `lmkit generate` will read and write with the run's tokenizer.
    for path, its_tokenizer in tokenizers.items():
        if (theirs := its_tokenizer.sha256) != ours:
            hint = "encode the text again, or name its tokenizer: --set tokenizer.path=FILE"
            if path == own != named:
                hint = "move it away, or name a new run: --set run.name=..."
            message = f"{sources[0].name}: its tokenizer is {ours or 'not known'}, but {path} is {theirs}"
            raise UsageError("data.other_tokenizer", message, hint=hint)
    metas = [source.file.meta for source in sources]
    weights = tuple(part.weight for part in recipe.data.sources)
    meta = joined_meta(metas) if weights else metas[0]
    identity = DataIdentity.model_validate(meta, from_attributes=True).changed(weights=weights)
    return Data(sources, valid, identity)


def _open(recipe: Recipe, paths: PathOrPaths, tokenizer: Tokenizer | None) -> TokenFile:
    """Open token files. Only those that end in .npy say by themselves which tokenizer they have."""
    if all(path.suffix == ".npy" for path in shard_paths(paths)):
        return open_tokens(paths)
    vocab_size = None if recipe.model is None else recipe.model.vocab_size
    if tokenizer is None and vocab_size is None:
        message = f"{name_of(paths)}: .bin files do not say how many ids there are (key model.vocab_size)"
        hint = "give it: --set model.vocab_size=50304 for GPT-2's; or name their tokenizer: tokenizer.path"
        raise UsageError("data.no_vocabulary", message, hint=hint)
    return open_tokens(paths, tokenizer=tokenizer, vocab_size=vocab_size)


def notes_on(recipe: Recipe, data: Data) -> list[str]:
    """Return lines for people on the data of a resolved recipe."""
    model, train = resolved_tables(recipe)
    notes = []
    if recipe.data.sources:
        total = sum(source.weight for source in data.sources)
        drawn = train.steps * train.batch_size * model.context_length
        epochs = [
            f"{name} {drawn * weight / total / file.meta.num_tokens:.3g} ({weight / total:.1%})"
            for name, file, weight in data.sources
        ]
        notes.append(f"epochs in {train.steps} steps, and share of the tokens: {', '.join(epochs)}")
    if data.valid is not None and not data.valid.meta.tokenizer_sha256:
        why = "bits per byte need the tokenizer of the .bin files, key tokenizer.path"
        notes.append(f"held-out loss in nats only: {why}")
    return notes


def keep_tokenizer(recipe: Recipe) -> None:
    """Save the tokenizer that a recipe names, and its chat template, to the run folder if that has none.

    Whatever opens the model finds it there, as `lmkit run` leaves it.
    """
    table, own = recipe.tokenizer, recipe.run.path / TOKENIZER
    if table is None or table.path is None or not table.path.exists() or own.exists():
        return
    tokenizer = Tokenizer.load(table.path, end_of_text=table.end_of_text).for_training()
    template = template_for(table, tokenizer, source="" if recipe.corpus is None else recipe.corpus.source)
    if template is not None:
        template.save(own.with_name(CHAT_TEMPLATE))
    tokenizer.save(own)


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe without its tables or its token files; reads none of these."""
    required(recipe.model, "model", recipe, command="train")
    required(recipe.train, "train", recipe, command="train")
    check_token_files(recipe)


def check_token_files(recipe: Recipe, *, are_made: bool = True) -> None:
    """Refuse a recipe without its token files; reads none."""
    if recipe.data.source == "random":
        return
    train, valid = map(shard_paths, token_paths(recipe))
    folder = recipe.run.path
    later = () if are_made else (token_file(folder, "train"), token_file(folder, "valid"))
    missing = [path for path in train if not path.exists() and path not in later]
    if missing:
        command = f"lmkit data encode TEXT {shlex.quote(str(missing[0]))} --tokenizer TOKENIZER.json"
        if recipe.corpus is not None and recipe.data.is_made:
            command = f"lmkit run {shlex.quote(recipe.source)}"
            if recipe.run.name != recipe.source:  # most shipped recipes name their run as themselves
                command += f" --set run.name={shlex.quote(recipe.run.name)}"
        key = "data.sources" if recipe.data.sources else "data.train"
        message = f"{missing[0]}: no such token file to train on (key {key})"
        hint = f"make it with: {command}; or name another: --set data.train=FILE.npy"
        raise UsageError("data.no_tokens", message, hint=hint)
    missing = [path for path in valid if not path.exists() and path not in later]
    if recipe.data.valid is not None and missing:
        message = f"{missing[0]}: no such token file to evaluate on (key data.valid)"
        raise UsageError("data.no_tokens", message, hint="leave the key out to train without evaluation")


def refuse_changed(recipe: Recipe) -> None:
    """Refuse token files that are not as `lmkit run` made them; see `refuse_changed_files`."""
    if recipe.data.source != "random":
        for key, paths in zip(("data.train", "data.valid"), token_paths(recipe), strict=True):
            refuse_changed_files(paths, other=f"--set {key}=FILE.npy")


def refuse_changed_files(paths: PathOrPaths, *, other: str) -> None:
    """Refuse a token file that is not as `lmkit run` made it; `other` is the option that names another, for the hint.
    It is read only if its size or time changed."""
    named = [tokens for tokens in shard_paths(paths) if tokens.suffix == ".npy"]
    for path in [tokens.with_suffix(part) for tokens in named for part in token_files.PARTS]:
        folder = path.parent.parent
        made, noted = made_files(folder)
        if path not in made:
            continue
        is_there = path.is_file()
        if not is_there or noted_digest(path, noted.get(str(path.absolute()), ()))[-1] != made[path]:
            again = f"lmkit run {shlex.quote(str(folder / RECIPE))}"
            what = "changed" if is_there else "gone"
            message = f"{path}: {what} since `lmkit run` made it ({other} names another)"
            hint = f"{again} makes it again; other tokens have to lie elsewhere: {other}"
            raise UsageError("data.changed", message, hint=hint)


def made_files(folder: Path) -> tuple[dict[Path, str], dict[str, list[Any]]]:
    """Return what `lmkit run` noted of the files that training reads: file -> SHA-256 when it was made; absolute name
    -> `noted_digest` when it was last read."""
    record = read_record(folder)
    stages = [record[stage] for stage in ("corpus", "tokenizer", "encode") if is_entry(record.get(stage))]
    made = {folder / name: str(digest) for stage in stages for name, digest in stage.get("made", {}).items()}
    files = record.get("files")
    noted = files.items() if isinstance(files, dict) else ()
    return made, {name: facts for name, facts in noted if isinstance(facts, list)}


def token_paths(recipe: Recipe) -> tuple[Path | tuple[Path, ...], Path | tuple[Path, ...]]:
    """Return the token files to train and to evaluate on, and globs of them; they need not exist."""
    folder, train = recipe.run.path, recipe.data.train
    if recipe.data.sources:
        train = tuple(path for source in recipe.data.sources for path in as_paths(source.train))
    return train or token_file(folder, "train"), recipe.data.valid or token_file(folder, "valid")


def has_valid(recipe: Recipe) -> bool:
    """Return whether there is a token file to evaluate on."""
    return recipe.data.valid is not None or token_file(recipe.run.path, "valid").exists()


def resolve(recipe: Recipe, data: Data) -> Recipe:
    """Fill in the vocabulary size and the steps of `train.epochs` from the token file."""
    model, train = recipe.model, recipe.train
    assert model is not None
    assert train is not None
    if data.valid is not None:  # refused now, not at the first evaluation
        token_files.check_length(data.valid.tokens, model.context_length)
    if train.epochs is not None and (recipe.data.sources or not data.sources):
        why = "a mixture has epochs of each source" if data.sources else 'data.source = "random" has no end'
        message, hint = f"train.epochs: {why}", "give train.steps, or train.max_minutes, instead"
        raise UsageError("train.endless_epoch", message, hint=hint)
    if not data.sources:
        return recipe
    metas = [source.file.meta for source in data.sources]
    if train.epochs is not None:
        tokens_per_step = train.batch_size * model.context_length
        steps = math.ceil(train.epochs * metas[0].num_tokens / tokens_per_step)
        recipe = recipe.changed(train={"steps": steps})
    if recipe.data.sampling == "packed" and not model.separate_documents:
        recipe = recipe.changed(model={"separate_documents": True})
    needed = max(meta.vocab_size for meta in metas)
    if model.vocab_size is None:
        return recipe.changed(model={"vocab_size": needed})
    if model.vocab_size < needed:
        message = f"model.vocab_size: {model.vocab_size} is smaller than the token file's {needed}"
        raise UsageError("data.vocab_size", message, hint="leave it out to take the token file's")
    return recipe


def make_batches(recipe: Recipe, data: Data, ranks: Ranks) -> BatchSource:
    """Return the source of this rank's batches."""
    model, train = resolved_tables(recipe)
    token_files.check_divisible(train.batch_size, ranks.world_size, train.accumulation)
    shared: dict[str, Any] = {
        "batch_size": train.batch_size,
        "context_length": model.context_length,
        "seed": recipe.run.seed,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "accumulation": train.accumulation,
    }
    if not data.sources:
        assert model.vocab_size is not None
        return RandomTokens(model.vocab_size, **shared)
    samplers = [_sampler(recipe.data.sampling, source.file, model, shared) for source in data.sources]
    if not recipe.data.sources:
        return samplers[0]
    from lmkit.data.mixing import MixedBatches

    return MixedBatches(sources=samplers, weights=[source.weight for source in data.sources], **shared)


def _sampler(sampling: str, file: TokenFile, model: ModelConfig, shared: dict[str, Any]) -> Sampler:
    """Return the sampler of one source; `shared`: its arguments that do not depend on the file."""
    shared = {**shared, "mask": file.mask}
    starts = None
    if sampling in ("documents", "packed") or model.separate_documents:
        starts = token_files.document_starts(file)
    if sampling == "packed":
        from lmkit.data.packing import PackedBatches

        assert starts is not None
        if not len(starts):
            message = "data.train: a token file of which no token follows an end-of-text token"
            raise UsageError("tokens.empty", message, hint="encode a text that is not empty")
        return PackedBatches(file.tokens, **shared, document_starts=starts)
    shared["borders"] = starts if model.separate_documents else None
    token_files.check_length(file.tokens, model.context_length)
    if sampling == "shuffled":
        from lmkit.data.packing import ShuffledBatches

        return ShuffledBatches(file.tokens, **shared)
    if sampling == "documents":
        assert starts is not None
        shared["document_starts"] = token_files.starts_that_count(file, starts, model.context_length)
    return TokenBatches(file.tokens, **shared)


def resolved_tables(recipe: Recipe) -> tuple[ModelConfig, TrainConfig]:
    """Return the [model] and [train] tables of a resolved recipe."""
    assert recipe.model is not None
    assert recipe.model.vocab_size is not None
    assert recipe.train is not None
    return recipe.model, recipe.train
