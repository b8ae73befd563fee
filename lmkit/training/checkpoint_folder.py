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
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.errors import LmkitError, reason
from lmkit.storage import sha256_file
from lmkit.storage.atomic import PARTIAL_SUFFIX, fsync_folder
from lmkit.training.tensor_files import FileEntry, write_text

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model.safetensors"
REPLACED_SUFFIX = ".replaced"
UPGRADE = "upgrade lmkit: pip install --upgrade lmkit"
_STEP_NAME = re.compile(r"step-(\d{8,12})")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_MANIFEST_BYTES = 1 << 24


class DamagedCheckpoint(LmkitError):
    """Something of a checkpoint is missing or not what was saved; an older one may be whole."""


class NewerFormat(LmkitError):
    """A whole checkpoint, in a format that this version does not know."""


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
