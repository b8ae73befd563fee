"""Publish, verify, load and delete checkpoints.

A checkpoint is a folder `checkpoints/step-00000100/`:

    model.safetensors                          weights by parameter name
    optimizer-00000-of-00002.safetensors ...   optimizer state, one file per shard
    state.json                                 `TrainingState`: step, model, recipe, random generators
    manifest.json                              size and SHA-256 of every other file, and its own checksum

It is atomic. All files are written and fsynced in `step-00000100.partial/`, the manifest last; then one rename gives
the folder its name (`publish`). A kill at any moment leaves the older checkpoints intact and at most

- `step-00000100.partial`: being written or being deleted; never read, removed at the next start (`clean_leftovers`);
- `step-00000100.replaced`: the older of two checkpoints of one step, between two renames.

`CheckpointWriter` writes checkpoints in the background. No file is a pickle, and none is memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from pydantic import ValidationError

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.recipe.tables import RunConfig
from lmkit.storage.atomic import PARTIAL_SUFFIX, fsync_folder, sha256_file
from lmkit.training.state import STATE_FORMAT, TrainingState

log = logging.getLogger("lmkit")

FORMAT = 1
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model.safetensors"
TOKENIZER = "tokenizer.json"
REPLACED_SUFFIX = ".replaced"
_STEP_NAME = re.compile(r"step-(\d{8,12})")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_MANIFEST_BYTES = 1 << 24


class DamagedCheckpoint(LmkitError):
    """A part of a checkpoint is missing or is not what was saved. An older checkpoint may be whole."""


class NewerFormat(LmkitError):
    """The checkpoint is whole, but in a format that this version does not know."""


_USE_AN_OLDER = "use an older checkpoint, or delete the damaged one"


def damaged(path: object, what: str) -> DamagedCheckpoint:
    """Return the error that names the file and what is wrong with it."""
    return DamagedCheckpoint("checkpoint.damaged", f"{path}: {what}", hint=_USE_AN_OLDER)


def _newer(path: object, what: str, found: object, known: int) -> NewerFormat:
    return NewerFormat(
        "checkpoint.newer_format",
        f"{path}: {what} format {found}, this lmkit knows {known}",
        hint="upgrade lmkit: pip install --upgrade lmkit",
    )


@dataclass(frozen=True)
class FileEntry:
    """Hash and size of a file, as the manifest lists them."""

    sha256: str
    bytes: int


class SavedStep(NamedTuple):
    """A folder with a checkpoint's name; its content is unknown."""

    step: int
    path: Path


def step_name(step: int) -> str:
    """Return `step-00000100` for 100."""
    return f"step-{step:08d}"


def shard_name(rank: int, shards: int) -> str:
    """Return the name of the optimizer file of `rank`, from 0, of `shards` ranks."""
    return f"optimizer-{rank:05d}-of-{shards:05d}.safetensors"


def saved_steps(folder: Path) -> list[SavedStep]:
    """List the folders with a checkpoint's name, lowest step first; [] where there is no such folder."""
    if not folder.is_dir():
        return []
    found = [(_STEP_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(SavedStep(int(match[1]), path) for match, path in found if match)


# Publish


def publish(partial: Path, final: Path) -> None:
    """Give a complete folder its final name. An older checkpoint of the same step is deleted afterwards."""
    fsync_folder(partial)
    replaced = final.with_name(final.name + REPLACED_SUFFIX)
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        os.replace(final, replaced)
    os.replace(partial, final)
    fsync_folder(final.parent)
    if replaced.exists():
        remove_folder(replaced)


def remove_folder(path: Path) -> None:
    """Delete a checkpoint. A kill half-way leaves nothing under a final name."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    if partial.exists():
        shutil.rmtree(partial)
    os.replace(path, partial)
    shutil.rmtree(partial)


def clean_leftovers(folder: Path) -> list[Path]:
    """Repair what a killed process left; return what was removed. The caller holds the run folder's lock."""
    removed = []
    for path in sorted(folder.glob(f"step-*{REPLACED_SUFFIX}")):
        final = path.with_name(path.name.removesuffix(REPLACED_SUFFIX))
        if final.exists():
            remove_folder(path)
            removed.append(path)
        else:
            os.replace(path, final)
            fsync_folder(folder)
    for path in sorted(folder.glob(f"step-*{PARTIAL_SUFFIX}")):
        shutil.rmtree(path)
        removed.append(path)
    return removed


# Verify


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Return the files of a checkpoint as its manifest lists them; reads no other file."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise damaged(path, "larger than any manifest")
        content = json.loads(path.read_bytes())
        is_whole = isinstance(content, dict) and content.get("checksum") == manifest_checksum(content)
    except FileNotFoundError:
        what = f"{path}: missing, the checkpoint is incomplete"
        raise DamagedCheckpoint("checkpoint.incomplete", what, hint=_USE_AN_OLDER) from None
    except OSError as error:
        raise damaged(path, reason(error)) from error
    except (ValueError, RecursionError):
        raise damaged(path, "not JSON") from None
    if not is_whole:
        raise damaged(path, "checksum error")
    found = content.get("format")
    if not isinstance(found, int) or found > FORMAT:
        raise _newer(path, "checkpoint", found, FORMAT)
    files = content.get("files")
    if not isinstance(files, dict) or not {MODEL, STATE} <= files.keys():
        raise damaged(path, f"does not list {MODEL} and {STATE}")
    return {name: _entry(path, name, fields) for name, fields in files.items()}


def manifest_checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum that a manifest carries, of everything else in it."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _entry(path: Path, name: str, fields: Any) -> FileEntry:
    match fields:
        case {"sha256": str(sha256), "bytes": int(size)} if _FILE_NAME.fullmatch(name):
            return FileEntry(sha256, size)
    raise damaged(path, f"{name!r} is no file of a checkpoint")


def verify(folder: Path) -> dict[str, FileEntry]:
    """Read every file of a checkpoint and compare it with the manifest, in constant memory.

    Raises:
        DamagedCheckpoint: naming the first file that is missing, cut or changed.
        NewerFormat: written by a later lmkit.
    """
    entries = read_manifest(folder)
    for name, entry in entries.items():
        path = folder / name
        try:
            size = path.stat().st_size
            sha256 = sha256_file(path) if size == entry.bytes else ""
        except OSError as error:
            raise damaged(path, reason(error)) from error
        _compare(path, FileEntry(sha256, size), entry)
    return entries


def read_verified(path: Path, entry: FileEntry) -> bytes:
    """Return the content of a file after comparing it with its entry.

    The bytes that are hashed are the bytes that are used: the file may change or shrink afterwards.
    """
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size == entry.bytes else b""
    except OSError as error:
        raise damaged(path, reason(error)) from error
    _compare(path, FileEntry(hashlib.sha256(data).hexdigest(), size), entry)
    return data


def _compare(path: Path, found: FileEntry, entry: FileEntry) -> None:
    if found.bytes != entry.bytes:
        raise damaged(path, f"{found.bytes} bytes instead of {entry.bytes}")
    if found.sha256 != entry.sha256:
        raise damaged(path, "checksum error")


class Choice(NamedTuple):
    """The newest good checkpoint, and why newer ones were skipped."""

    path: Path | None
    skipped: tuple[str, ...]


def newest_valid(folder: Path) -> Choice:
    """Return the checkpoint with the highest step (clocks may go back) that verifies.

    Raises:
        LmkitError: there are checkpoints, but none is good; the message names each.
        NewerFormat: the newest was written by a later lmkit; an older one would silently lose its steps.
    """
    skipped: list[str] = []
    for saved in reversed(saved_steps(folder)):
        try:
            verify(saved.path)
        except DamagedCheckpoint as error:
            skipped.append(error.message)
            continue
        return Choice(saved.path, tuple(skipped))
    if skipped:
        raise LmkitError(
            "checkpoint.none_good",
            f"{folder}: no good checkpoint: " + "; ".join(skipped),
            hint="copy the checkpoint again, or name another one; to start over, delete these folders",
        )
    return Choice(None, ())


# Load


def parse_tensors(data: bytes, *, path: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file that was read into memory; they own their memory."""
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError, AssertionError) as error:
        raise damaged(path, f"not a safetensors file ({error})") from error


def parse_state(text: bytes, *, path: object) -> TrainingState:
    """Read `state.json`."""
    try:
        return TrainingState.model_validate_json(text)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        found = next((mistake["input"] for mistake in wrong if mistake["loc"] == ("format",)), None)
        if isinstance(found, int) and found > STATE_FORMAT:
            raise _newer(path, "state", found, STATE_FORMAT) from None
        key = ".".join(str(part) for part in wrong[0]["loc"])
        raise damaged(path, f"{key}: {wrong[0]['msg']}") from None


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: manifest and state are read, tensors are read and verified on demand."""

    path: Path
    state: TrainingState
    entries: Mapping[str, FileEntry]

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights by parameter name, on the CPU, in memory of their own."""
        return self._tensors(MODEL)

    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name; reads only the header of their file."""
        path = self.path / MODEL
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            raise damaged(path, f"not a safetensors file ({error})") from error

    def optimizer_tensors(self, shard: int = 0) -> dict[str, torch.Tensor]:
        """Return one shard of the optimizer state, or all of it where it is not sharded."""
        return self._tensors(shard_name(shard, self.state.optimizer_shards))

    def all_optimizer_shards(self) -> list[dict[str, torch.Tensor]]:
        """Return every shard of the optimizer state, in the order of the ranks."""
        return [self.optimizer_tensors(rank) for rank in range(self.state.optimizer_shards)]

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        path = self.path / name
        return parse_tensors(read_verified(path, self.entries[name]), path=path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and state.

    Raises:
        LmkitError: it is damaged, lacks an optimizer shard, or has a newer format.
        UsageError: not a checkpoint folder.
    """
    if not (path / MANIFEST).is_file() and not (path / MODEL).is_file():
        raise UsageError(
            "checkpoint.not_found",
            f"{path}: not a checkpoint folder (no {MANIFEST})",
            hint="a checkpoint is a folder like <run>/checkpoints/step-00000100",
        )
    entries = read_manifest(path)
    state = parse_state(read_verified(path / STATE, entries[STATE]), path=path / STATE)
    for rank in range(state.optimizer_shards):
        name = shard_name(rank, state.optimizer_shards)
        if name not in entries or not (path / name).is_file():
            raise LmkitError(
                "checkpoint.incomplete",
                f"{path / name}: missing, the optimizer state of rank {rank}",
                hint="copy the whole checkpoint folder, or use an older one",
            )
    return Checkpoint(path, state, entries)


def newest_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint folder, or the newest good checkpoint of a run folder.

    Newer checkpoints that are damaged are named in the log.

    Raises:
        UsageError: there is no checkpoint.
        LmkitError: there are checkpoints, but none is good.
    """
    if not path.is_dir():
        hint = hint_at_run(path, otherwise="name a run folder (artifacts/runs/...) or a checkpoint")
        raise UsageError("checkpoint.not_found", f"{path}: no such folder", hint=hint)
    if (path / MANIFEST).exists() or (path / STATE).exists():
        return open_checkpoint(path)
    is_folder_of_checkpoints = path.name == CHECKPOINTS or path.name.startswith(f"{CHECKPOINTS}.old-")
    choice = newest_valid(path if is_folder_of_checkpoints else path / CHECKPOINTS)
    if choice.path is None:
        hint = "train first: lmkit train, or lmkit run"
        raise UsageError("checkpoint.not_found", f"{path}: holds no checkpoint", hint=hint)
    for why in choice.skipped:
        log.warning("skipped %s", why)
    return open_checkpoint(choice.path)


def hint_at_run(path: Path, *, otherwise: str) -> str:
    """Return a hint at the run of that name in the default folder, if there is one."""
    run = RunConfig().folder / path
    return f"did you mean {run}?" if run.is_dir() else otherwise


def run_tokenizer(checkpoint: Path) -> Path | None:
    """Return `tokenizer.json` of the run that holds a checkpoint; of old checkpoints, the one beside them."""
    folder = checkpoint.resolve().parent
    return next((path for path in (folder / TOKENIZER, folder.parent / TOKENIZER) if path.is_file()), None)


# Retain


class Retention:
    """Delete checkpoints that are no longer wanted.

    Damaged checkpoints do not count towards those to keep. Every checkpoint is read in full once before it counts,
    except those that this process wrote.

    Args:
        keep_last: keep this many checkpoints with the highest steps, at least 1.
        keep_best: also keep this many with the lowest validation loss.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_best: int) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._losses: dict[int, float | None] = {}  # of the good ones seen so far
        self._foreign: set[int] = set()  # whole, but not of a format that we can judge

    def remember(self, step: int, valid_loss: float | None) -> None:
        """Count this checkpoint as good: it was just written and synced."""
        self._losses[step] = valid_loss

    def prune(self) -> list[Path]:
        """Delete the others and return them. Damaged ones are deleted once a good one with a higher step exists."""
        saved = saved_steps(self._folder)
        good = [item.step for item in saved if self._is_good(item)]
        kept = set(good[-self._keep_last :]) | self._foreign
        rated = [(loss, step) for step in good if (loss := self._losses[step]) is not None]
        kept.update(step for _, step in sorted(rated)[: self._keep_best])
        newest = good[-1] if good else -1
        doomed = [item.path for item in saved if item.step not in kept and item.step < newest]
        for path in doomed:
            remove_folder(path)
        return doomed

    def _is_good(self, saved: SavedStep) -> bool:
        if saved.step in self._losses:
            return True
        try:
            with suppress(NewerFormat):  # which open_checkpoint raises again
                verify(saved.path)
        except DamagedCheckpoint:
            return False
        try:
            self._losses[saved.step] = open_checkpoint(saved.path).state.valid_loss
        except LmkitError:  # the checksums are right: another version wrote it
            self._foreign.add(saved.step)
            return False
        return True
