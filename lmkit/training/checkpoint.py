"""The folder `checkpoints/`: names, manifests, which checkpoint is good, what may be deleted.

A checkpoint is a folder `step-00000100/` that appears by one rename once everything in it is on the disk. Its
`manifest.json`, written last, lists every other file with size and SHA-256, and carries its own checksum.
Other names that may be met after a kill:

- `step-00000100.partial`: being written, or being deleted. Never read; removed at the next start.
- `step-00000100.replaced`: the older of two checkpoints of one step, between two renames.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.recipe.tables import RunConfig
from lmkit.storage import sha256_file
from lmkit.storage.atomic import PARTIAL_SUFFIX, fsync_folder
from lmkit.training.state import TrainingState, parse_state
from lmkit.training.tensor_files import (
    UPGRADE,
    DamagedCheckpoint,
    FileEntry,
    NewerFormat,
    parse_tensors,
    read_verified,
    write_text,
)

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model.safetensors"


REPLACED_SUFFIX = ".replaced"


_STEP_NAME = re.compile(r"step-(\d{8,12})")


_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


_MAX_MANIFEST_BYTES = 1 << 24


@dataclass(frozen=True)
class SavedStep:
    """A folder with a checkpoint's name; nothing is known about its content."""

    step: int
    path: Path


def step_name(step: int) -> str:
    """`step-00000100`."""
    return f"step-{step:08d}"


def shard_name(rank: int, shards: int) -> str:
    """The optimizer file of one of `shards` ranks, counted from 0."""
    return f"optimizer-{rank:05d}-of-{shards:05d}.safetensors"


def saved_steps(folder: Path) -> list[SavedStep]:
    """Folders with a checkpoint's name, lowest step first; [] where there is no such folder."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _STEP_NAME.fullmatch(path.name))]
    return sorted((SavedStep(int(match[1]), path) for match, path in found), key=lambda saved: saved.step)


def clean_leftovers(folder: Path) -> list[Path]:
    """Put right what a killed process left; return what was removed. The caller holds the run folder's lock."""
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


def remove_folder(path: Path) -> None:
    """Delete a checkpoint so that a kill half-way leaves nothing under a final name."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    if partial.exists():
        shutil.rmtree(partial)
    os.replace(path, partial)
    shutil.rmtree(partial)


def publish(partial: Path, final: Path) -> None:
    """Give a complete folder its final name; an older checkpoint of the same step goes only afterwards."""
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


def write_manifest(folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """Write and fsync `manifest.json`: the last file of a checkpoint."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "files": {
            name: {"sha256": entry.sha256, "bytes": entry.bytes} for name, entry in sorted(entries.items())
        },
    }
    content["checksum"] = _checksum(content)
    write_text(folder / MANIFEST, json.dumps(content, indent=2))


def _checksum(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """The files of a checkpoint as its manifest lists them; looks at no other file.

    Raises:
        NewerFormat: written by a later lmkit.
        DamagedCheckpoint: no manifest, or not a whole one.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise DamagedCheckpoint(f"{path}: larger than any manifest", hint=_HINT)
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing, the checkpoint is incomplete", hint=_HINT) from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {reason(error)}", hint=_HINT) from error
    except (ValueError, RecursionError):
        raise DamagedCheckpoint(f"{path}: not JSON", hint=_HINT) from None
    try:
        whole = isinstance(content, dict) and content.get("checksum") == _checksum(content)
    except RecursionError:  # deeper than what is written can be, if not than what is read
        whole = False
    if not whole:
        raise DamagedCheckpoint(f"{path}: checksum error", hint=_HINT)
    if not isinstance(content.get("format"), int) or content["format"] > FORMAT:
        raise NewerFormat(
            f"{path}: checkpoint format {content.get('format')}, this lmkit knows {FORMAT}",
            hint=UPGRADE,
        )
    return {name: _entry(path, name, fields) for name, fields in _files(path, content).items()}


_HINT = "use an older checkpoint, or delete this one"


def _files(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    files = content.get("files")
    if not isinstance(files, dict) or not {MODEL, STATE} <= files.keys():
        raise DamagedCheckpoint(f"{path}: does not list {MODEL} and {STATE}", hint=_HINT)
    return files


def _entry(path: Path, name: str, fields: Any) -> FileEntry:
    if not _FILE_NAME.fullmatch(name):
        raise DamagedCheckpoint(f"{path}: {name!r} is not a name for a file of a checkpoint", hint=_HINT)
    if (
        not isinstance(fields, dict)
        or not isinstance(fields.get("sha256"), str)
        or type(fields.get("bytes")) is not int
    ):
        raise DamagedCheckpoint(f"{path}: {name} has no sha256 and bytes", hint=_HINT)
    return FileEntry(fields["sha256"], fields["bytes"])


def verify(folder: Path) -> dict[str, FileEntry]:
    """Read every file of a checkpoint and compare it with the manifest; constant memory.

    Raises:
        DamagedCheckpoint: naming the first file that is missing, cut or changed.
        NewerFormat: written by a later lmkit.
    """
    entries = read_manifest(folder)
    for name, entry in entries.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                raise DamagedCheckpoint(f"{path}: {size} bytes instead of {entry.bytes}", hint=_HINT)
            if sha256_file(path) != entry.sha256:
                raise DamagedCheckpoint(f"{path}: checksum error", hint=_HINT)
        except OSError as error:
            raise DamagedCheckpoint(f"{path}: {reason(error)}", hint=_HINT) from error
    return entries


@dataclass(frozen=True)
class Choice:
    """The newest good checkpoint, and why newer ones were passed over."""

    path: Path | None
    skipped: tuple[str, ...]


def newest_valid(folder: Path) -> Choice:
    """Choose by step (clocks may go back), highest first, the first that verifies.

    Raises:
        LmkitError: there are checkpoints, and none is good (each is named with what is wrong).
        NewerFormat: the highest one was written by a later lmkit; falling back silently would lose its steps.
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
            f"{folder}: no good checkpoint: " + "; ".join(skipped),
            hint="copy the checkpoint again, or name another one; to train afresh, delete these folders",
        )
    return Choice(None, ())


log = logging.getLogger("lmkit")


CHECKPOINTS = "checkpoints"


TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest and state were read; tensors are read, and verified, when asked for."""

    path: Path
    state: TrainingState
    entries: Mapping[str, FileEntry]

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Weights by plain parameter name, on the CPU, in memory of their own."""
        return self._tensors(MODEL)

    def optimizer_tensors(self, shard: int = 0) -> dict[str, torch.Tensor]:
        """One shard of the optimizer state (the whole state where it was not sharded)."""
        return self._tensors(shard_name(shard, self.state.optimizer_shards))

    def all_optimizer_shards(self) -> list[dict[str, torch.Tensor]]:
        """Every rank's shard, in the order of the ranks."""
        return [self.optimizer_tensors(rank) for rank in range(self.state.optimizer_shards)]

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        path = self.path / name
        return parse_tensors(read_verified(path, self.entries[name]), path=path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and state.

    Raises:
        LmkitError: damaged, incomplete (an optimizer shard is missing, say), or of a newer format.
        UsageError: not a checkpoint folder.
    """
    if not (path / MANIFEST).is_file() and not (path / MODEL).is_file():
        raise UsageError(
            f"{path}: not a checkpoint folder (no {MANIFEST})",
            hint="a checkpoint is a folder like <run>/checkpoints/step-00000100",
        )
    entries = read_manifest(path)
    state = parse_state(read_verified(path / STATE, entries[STATE]), path=path / STATE)
    for rank in range(state.optimizer_shards):
        name = shard_name(rank, state.optimizer_shards)
        if name not in entries or not (path / name).is_file():
            raise LmkitError(
                f"{path / name}: missing, the optimizer state of rank {rank}",
                hint="copy the whole checkpoint folder, or use an older one",
            )
    return Checkpoint(path, state, entries)


def find_checkpoint(path: Path) -> Choice:
    """The checkpoint that a run folder or a checkpoint folder stands for.

    Raises:
        UsageError: there is none.
        LmkitError: there are some, but none is good.
    """
    if not path.is_dir():
        otherwise = "name a run folder (artifacts/runs/...) or a checkpoint"
        raise UsageError(f"{path}: no such folder", hint=hint_at_run(path, otherwise=otherwise))
    if (path / MANIFEST).exists() or (path / STATE).exists():
        return Choice(path, ())
    folder = path if path.name == CHECKPOINTS else path / CHECKPOINTS
    if not saved_steps(folder):
        raise UsageError(f"{path}: holds no checkpoint", hint="train first: lmkit train, or lmkit run")
    return newest_valid(folder)


def hint_at_run(path: Path, *, otherwise: str) -> str:
    """For a path that is not there: the run folder of that name, if recipes that set no `run.folder` made one."""
    run = RunConfig().folder / path
    return f"did you mean {run}?" if run.is_dir() else otherwise


def newest_checkpoint(path: Path) -> Checkpoint:
    """Open what `find_checkpoint` finds; newer ones that are damaged are named in the log.

    Raises:
        UsageError, LmkitError: as `find_checkpoint` and `open_checkpoint`.
    """
    choice = find_checkpoint(path)
    for why in choice.skipped:
        log.warning("skipped %s", why)
    assert choice.path is not None
    return open_checkpoint(choice.path)


def run_tokenizer(checkpoint: Path) -> Path | None:
    """`tokenizer.json` of the run that a checkpoint lies in."""
    tokenizer = checkpoint.resolve().parent.parent / TOKENIZER
    return tokenizer if tokenizer.is_file() else None


class Retention:
    """Deletes what is no longer wanted. Damaged checkpoints never count as kept ones.

    Every checkpoint is read in full once before it counts, except those that this process wrote itself.

    Args:
        keep_last: this many with the highest steps, at least 1.
        keep_best: and this many with the lowest validation loss, of those that have one.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_best: int) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._losses: dict[int, float | None] = {}  # of the good ones seen so far
        self._foreign: set[int] = set()  # of a format that we do not know: not ours to judge

    def remember(self, step: int, valid_loss: float | None) -> None:
        """Count this checkpoint as good: it was just written and synced."""
        self._losses[step] = valid_loss

    def prune(self) -> list[Path]:
        """Delete the others; return them. Damaged ones go once a good one with a higher step exists."""
        saved = saved_steps(self._folder)
        good = [item.step for item in saved if self._is_good(item.step, item.path)]
        kept = set(good[-self._keep_last :])
        rated = [(loss, step) for step in good if (loss := self._losses[step]) is not None]
        kept.update(step for _, step in sorted(rated)[: self._keep_best])
        newest = good[-1] if good else -1
        kept |= self._foreign
        doomed = [item.path for item in saved if item.step not in kept and item.step < newest]
        for path in doomed:
            remove_folder(path)
        return doomed

    def _is_good(self, step: int, path: Path) -> bool:
        if step not in self._losses:
            try:
                entries = verify(path)
                state = parse_state(read_verified(path / STATE, entries[STATE]), path=path / STATE)
            except DamagedCheckpoint:
                return False
            except LmkitError:  # whole, but of a later version
                self._foreign.add(step)
                return False
            self._losses[step] = state.valid_loss
        return True
