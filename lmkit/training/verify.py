"""Verify that files on the disk are whole, and that a resumed run is the same run."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.data.shards import SUFFIXES, open_tokens, shard_paths
from lmkit.errors import LmkitError, UsageError, reason, some_of
from lmkit.measure.tables import size_of
from lmkit.parallel.ranks import local_device
from lmkit.recipe import run_folder
from lmkit.recipe.load import load_recipe, required
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import TokenizerConfig, WandbConfig
from lmkit.storage.atomic import PARTIAL_SUFFIX, sha256_file
from lmkit.storage.inputs import read_object
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.marks import CONFIG
from lmkit.training import checkpoint
from lmkit.training.metrics import check_metrics
from lmkit.training.run_data import (
    check_recipe,
    has_valid,
    made_files,
    open_data,
    resolve,
    resolved_tables,
    token_paths,
)
from lmkit.training.session import train
from lmkit.training.weights import open_hugging_face, weights_of


@dataclass(frozen=True)
class Check:
    """The result of checking one file or folder."""

    subject: str
    ok: bool
    found: str

    def __str__(self) -> str:
        return f"{'ok   ' if self.ok else 'WRONG'}  {self.subject}: {self.found}"


@dataclass(frozen=True)
class VerifyResult:
    """The results of all checks; `ok` if all of them are."""

    path: str
    checks: tuple[Check, ...]
    ok: bool

    def __str__(self) -> str:
        wrong = sum(not check.ok for check in self.checks)
        verdict = "all is well" if self.ok else f"{wrong} of {len(self.checks)} checks failed"
        return "\n".join([*map(str, self.checks), f"{self.path}: {verdict}"])


def verify_path(path: Path) -> VerifyResult:
    """Check a run or Hugging Face folder, a checkpoint, a token file or a glob of them, a tokenizer, a recipe or a
    metrics file; UsageError: there is no such file, or not one that lmkit makes."""
    checks = tuple(check for file in shard_paths(path) for check in _checks_of(file))
    return VerifyResult(str(path), checks, all(check.ok for check in checks))


def _checks_of(path: Path) -> Iterator[Check]:
    if not path.exists():
        hint = checkpoint.hint_at_run(path, otherwise="name a run folder, or a file that lmkit made")
        raise UsageError("verify.not_found", f"{path}: no such file or folder", hint=hint)
    if path.is_file() and (path.parent / checkpoint.MANIFEST).exists():
        yield _check(path.parent, _checkpoint)  # the manifest has the checksum of this file
    elif (path / CONFIG).is_file():
        yield _check(path, _hugging_face)
    elif any((path / name).exists() for name in (checkpoint.MANIFEST, checkpoint.STATE, checkpoint.MODEL)):
        yield _check(path, _checkpoint)
    elif any((path / name).exists() for name in (run_folder.CHECKPOINTS, run_folder.METRICS)) or (
        (path / run_folder.RECIPE).exists()
        and not any(path.glob("*_results.jsonl"))  # of benches, which have a recipe, too
    ):
        yield from _checks_of_run(path)
    elif path.is_dir() and (saved := checkpoint.saved_steps(path)):
        for step in saved:
            yield _check(step.path, _checkpoint)
    elif path.suffix == ".json" and path.with_suffix(".npy").exists():
        yield _check(path.with_suffix(".npy"), _token_file)
    elif path.name == run_folder.ENVIRONMENT:
        yield _check(path, _json)
    elif path.is_file() and path.suffix in _FILES:
        yield _check(path, _FILES[path.suffix])
    else:
        message = f"{path}: neither a run, a checkpoint, nor a file that can be verified"
        files, manifest = ", ".join(sorted(_FILES)), checkpoint.MANIFEST
        hint = f"a run folder has a {run_folder.RECIPE}, a checkpoint a {manifest}; files: {files}"
        raise UsageError("verify.unknown_kind", message, hint=hint)


def _checks_of_run(folder: Path) -> Iterator[Check]:
    made, tokens = made_files(folder)[0], sorted(folder.glob("tokens/*.npy"))
    tables = [folder / name for name in run_folder.RUN_FILES if name.endswith(".json") and "/" not in name]
    files = [folder / name for name in (run_folder.RECIPE, run_folder.ENVIRONMENT, run_folder.METRICS)]
    files += [path for path in tables if path.exists()]
    for path in dict.fromkeys([*files, *sorted(made.keys() - {*tokens})]):
        look = _BY_NAME.get(path.name, _json if path in files else _size)
        yield _check(path, look, made.get(path))
    sha256 = None
    with suppress(LmkitError, OSError):
        sha256 = Tokenizer.load(folder / run_folder.TOKENIZER).sha256
    for path in tokens:
        yield _check(path, lambda path: _token_file(path, sha256), made.get(path))
    checkpoints = checkpoint.saved_steps(folder / run_folder.CHECKPOINTS)
    if not checkpoints:
        yield Check(str(folder / run_folder.CHECKPOINTS), ok=False, found="no checkpoint")
    for saved in checkpoints:
        yield _check(saved.path, lambda path: _checkpoint(path, sha256))
    for left in sorted(folder.rglob(f"*{PARTIAL_SUFFIX}")):
        yield Check(str(left), ok=False, found="half written, or being written")


def _check(path: Path, look: Callable[[Path], str], sha256: str | None = None) -> Check:
    """Return what `look` finds in a file, or what is wrong with it; `sha256` is the hash that it had, if known."""
    if not path.exists():
        return Check(str(path), ok=False, found="missing")
    try:
        if sha256 is not None and sha256_file(path) != sha256:
            return Check(str(path), ok=False, found="changed or damaged since `lmkit run` made it")
        return Check(str(path), ok=True, found=look(path))
    except LmkitError as error:
        return Check(str(path), ok=False, found=re.sub(f"^{re.escape(str(path))}(: |/| )", "", error.message))
    except OSError as error:
        return Check(str(path), ok=False, found=reason(error))


def _checkpoint(path: Path, tokenizer_sha256: str | None = None) -> str:
    checkpoint.verify(path)
    opened = checkpoint.open_checkpoint(path, is_verified=True)
    weights_of(opened)
    data = opened.state.data
    if data is not None and tokenizer_sha256 not in (None, data.tokenizer_sha256):
        own = f"not with the run's {run_folder.TOKENIZER}"
        message = f"{path}: trained with tokenizer {data.tokenizer_sha256[:12]}, {own}"
        hint = "put the tokenizer of its token files back"
        raise LmkitError("verify.wrong_tokenizer", message, hint=hint)
    size = sum(entry["bytes"] for entry in opened.entries.values()) / 1e6
    return f"{size:.1f} MB, checksums and weights right"


def _hugging_face(path: Path) -> str:
    weights = open_hugging_face(path)
    for name in weights:
        weights[name]
    return f"weights are finite and fit {CONFIG}; there are no checksums"


def _token_file(path: Path, tokenizer_sha256: str | None = None) -> str:
    meta = open_tokens(path, tokenizer_sha256=tokenizer_sha256).meta
    made = "" if tokenizer_sha256 is None else ", tokenizer ok"
    return f"{meta.num_tokens:,} tokens below {meta.vocab_size:,}{made}"


def _tokenizer(path: Path) -> str:
    tokenizer = Tokenizer.load(path)
    return f"{tokenizer.vocab_size:,} tokens, sha256 {tokenizer.sha256[:12]}"


def _recipe(path: Path) -> str:
    load_recipe(path, benches=True)
    return "valid"


def _json(path: Path) -> str:
    try:
        read_object(path)
    except ValueError as error:
        raise LmkitError("verify.damaged", f"{path}: {error}") from None
    return "readable"


def _record(path: Path) -> str:
    _json(path)
    record = run_folder.read_record(path.parent)
    stages = record.keys() - {"lmkit", "files"}
    wrong = [name for name in sorted(stages) if not run_folder.is_entry(record[name])]
    if wrong or not record:
        raise LmkitError("verify.damaged", f"{path}: lmkit did not write {some_of(wrong) or 'it'}")
    return f"{len(stages)} stages"


def _metrics(path: Path) -> str:
    records, mistakes = check_metrics(path)
    if mistakes:
        lines = len(records) + len(mistakes)
        what = f"{len(mistakes)} of {lines} lines are no whole records: {some_of(mistakes)}"
        raise LmkitError("verify.damaged", f"{path}: {what}")
    return f"{len(records)} records"


def _size(path: Path) -> str:
    return f"{size_of(path.stat().st_size)}, as `lmkit run` left it"


Look = Callable[[Path], str]
_FILES: dict[str, Look] = {".json": _tokenizer, ".toml": _recipe, ".jsonl": _metrics}
_FILES |= dict.fromkeys(SUFFIXES, _token_file)
_BY_NAME: dict[str, Look] = {
    run_folder.RECIPE: _recipe,
    run_folder.METRICS: _metrics,
    run_folder.RECORD: _record,
    run_folder.TOKENIZER: _tokenizer,
}


def verify_resume(recipe: Recipe, *, steps: int = 5) -> VerifyResult:
    """Train 2 x `steps` in one go and in two halves; compare weights, optimizer state and random generators.

    Everything happens in a temporary folder, on one rank, with the recipe's own schedule. `train.max_minutes` is
    ignored, because clocks do not repeat. On a GPU, kernels are deterministic: with others, no run repeats bit for
    bit.
    """
    check_recipe(recipe)  # before `_moved` renames what errors would name
    table = required(recipe.train, "train", recipe, command="verify --resume")
    if table.epochs is not None:
        table = resolved_tables(resolve(recipe, open_data(recipe)))[1]
    half = min(steps, table.steps // 2)
    if half < 1:
        hint = "raise train.steps"
        raise UsageError("verify.too_few_steps", "train.steps: resuming needs at least 2 steps", hint=hint)
    with tempfile.TemporaryDirectory(prefix="lmkit-verify-") as folder:
        whole, parts = (_moved(recipe, Path(folder), name) for name in ("whole", "parts"))
        train(whole, stop_at_step=2 * half)
        train(parts, stop_at_step=half)
        train(parts, stop_at_step=2 * half)
        left, right = (_hashes(moved, 2 * half) for moved in (whole, parts))
    checks = [
        Check(what, left[what] == right[what], f"{left[what][:12]} in one go, {right[what][:12]} resumed")
        for what in left
    ]
    return VerifyResult(f"{2 * half} steps = {half} + {half}", tuple(checks), left == right)


def _moved(recipe: Recipe, folder: Path, name: str) -> Recipe:
    """Return the recipe with another run folder, on the same data."""
    assert recipe.train is not None
    train_tokens, valid_tokens = token_paths(recipe)
    tokenizer, table = recipe.run.path / run_folder.TOKENIZER, recipe.tokenizer
    if tokenizer.exists() and (table is None or table.path is None):
        table = (table or TokenizerConfig()).changed(path=tokenizer)
    data: dict[str, Any] = {"valid": valid_tokens if has_valid(recipe) else None}
    if recipe.data.is_made:
        data["train"] = train_tokens
    on_gpu = local_device(recipe.run.device, local_rank=0).type == "cuda"
    run = {"folder": folder, "name": name, "deterministic": on_gpu or recipe.run.deterministic}
    return recipe.changed(
        run=run,
        data=data,
        tokenizer=table,
        train={"max_minutes": None, "sample_interval": 0, "tensorboard": False},
        checkpoint={"resume": "auto", "interval": 0},
        wandb=WandbConfig(),
    )


def _hashes(recipe: Recipe, step: int) -> dict[str, str]:
    folder = recipe.run.path / run_folder.CHECKPOINTS
    saved = checkpoint.open_checkpoint(folder / checkpoint.step_name(step))
    return {
        "weights": saved.entries[checkpoint.MODEL]["sha256"],  # equal tensors are written as equal files
        "optimizer": saved.entries[checkpoint.shard_name(0, 1)]["sha256"],
        "random generators": hashlib.sha256(str(saved.state.rng).encode()).hexdigest(),
    }
