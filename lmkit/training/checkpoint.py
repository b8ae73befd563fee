"""The format of checkpoints: write, publish, verify, repair, delete, list and open their folders.

A checkpoint is a folder `checkpoints/step-00000100/`:

    model.safetensors                          weights by parameter name; of sharded weights, one file per rank:
    model-00000-of-00002.safetensors ...
    optimizer-00000-of-00002.safetensors ...   optimizer state, one file per shard
    state.json                                 `TrainingState`: step, model, recipe, random generators
    manifest.json                              size and SHA-256 of every other file, and its own checksum

It is atomic: whole or absent. All files are written and fsynced in `step-00000100.lmkit-partial/`, the manifest last;
then one rename gives the folder its name (`publish`). A kill at any moment leaves the older checkpoints intact and at
most `step-00000100.lmkit-partial`, which is never read, and removed at the next start (`clean_leftovers`).

`resume.py` saves trainings and resumes them, `weights.py` opens weights from anywhere. No file is a pickle.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict

import safetensors
import torch
from pydantic import Field, ValidationError

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.recipe import tables
from lmkit.recipe.run_folder import CHECKPOINTS
from lmkit.recipe.values import UnregisteredName
from lmkit.storage.atomic import PARTIAL_SUFFIX, fsync, keep_damaged, sha256_file
from lmkit.storage.inputs import open_input, read_input, read_object

log = logging.getLogger("lmkit")

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model.safetensors"
_MODEL_NAME = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_STEP_NAME = re.compile(r"step-(\d{8,12})")
_OWN_NAME = re.compile(
    r"(model(-\d{5}-of-\d{5})?|optimizer-\d{5}-of-\d{5})\.safetensors|(state|manifest)\.json"
)
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BLOCK = 1 << 24
"""Bytes handed to write() and to the hash at a time: large blocks release the GIL for long."""
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_USE_AN_OLDER = "use an older checkpoint, or delete the damaged one"
STATE_FORMAT: Final = 1


class DamagedCheckpoint(LmkitError):
    """A part of a checkpoint is missing or is not what was saved. An older checkpoint may be whole."""


def damaged(path: object, what: str) -> DamagedCheckpoint:
    """Return the error that names the file and what is wrong with it."""
    return DamagedCheckpoint("checkpoint.damaged", f"{path}: {what}", hint=_USE_AN_OLDER)


def _unread(path: Path, error: OSError) -> LmkitError:
    """Return the error for a file that was not read: damage only where there is none, or the disk is at fault."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO):
        return damaged(path, reason(error))
    hint = "checkpoints are as they were; try again when it can be read"
    return LmkitError("checkpoint.unreadable", f"{path}: {reason(error)}", hint=hint)


def newer(path: object, what: str, found: object, known: int) -> LmkitError:
    """Return the error for a whole checkpoint in a format that a later lmkit wrote."""
    message = f"{path}: {what} format {found}, this lmkit knows {known}"
    return LmkitError("checkpoint.newer_format", message, hint="upgrade lmkit: pip install --upgrade lmkit")


class FileEntry(TypedDict):
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


def model_name(rank: int, ranks: int) -> str:
    """Return the name of the file of `rank`, from 0, of so many ranks that each save some of the weights."""
    return MODEL if ranks == 1 else f"model-{rank:05d}-of-{ranks:05d}.safetensors"


def model_files(names: Iterable[str]) -> list[str]:
    """Return which of a checkpoint's files hold the weights; [] if one of them is missing."""
    names = set(names)
    if MODEL in names:
        return [MODEL]
    counts = {int(match[2]) for name in names if (match := _MODEL_NAME.fullmatch(name))}
    wanted = [model_name(rank, count) for count in counts for rank in range(count)]
    return wanted if len(counts) == 1 and names.issuperset(wanted) else []


def shard_name(rank: int, shards: int) -> str:
    """Return the name of the optimizer file of `rank`, from 0, of `shards` ranks."""
    return f"optimizer-{rank:05d}-of-{shards:05d}.safetensors"


def saved_steps(folder: Path) -> list[SavedStep]:
    """List the folders with a checkpoint's name, lowest step first; [] where nothing has the name of `folder`."""
    paths = folder.iterdir() if os.path.lexists(folder) else ()
    return sorted(SavedStep(int(m[1]), path) for path in paths if (m := _STEP_NAME.fullmatch(path.name)))


# state.json


class RngState(tables.Table):
    """torch's generators on one rank, in base64. Training draws from no others."""

    cpu: str
    cuda: str | None = None


class LossScaleState(tables.Table):
    """Dynamic loss scaling (fp16)."""

    scale: tables.PositiveFloat
    good_steps: tables.Count


class DataIdentity(tables.Table):
    """The token file, or all shards in their order, that the batches come from. A resumed run must find the same."""

    num_tokens: tables.Int64
    vocab_size: tables.PositiveInt
    source_sha256: str
    tokenizer_sha256: str
    weights: tuple[float, ...] = ()
    """Of the sources of a mixture."""


class TrainingState(tables.Table):
    """A training run after `step` optimizer steps.

    The position in the data is `step` itself: a batch is a pure function of (seed, step).
    """

    format: Literal[1] = STATE_FORMAT
    """Of this file; the manifest has its own."""
    lmkit: str
    step: tables.Count
    seconds: tables.NonNegativeFloat
    """Time spent training so far, over all sessions."""
    time_fraction: tables.NonNegativeFloat | None = None
    """Share of `train.max_minutes` that is used, where that is set."""
    tokens: tables.Int64
    """Tokens seen by the optimizer."""
    skipped_in_a_row: tables.Count = 0
    valid_loss: float | None = None
    """From an evaluation at exactly this step."""
    best_loss: float | None = None
    """The lowest held-out loss up to this step."""
    loss_scale: LossScaleState | None = None
    spikes: tuple[float, ...] | None = None
    """State of `SpikeGuard`."""

    world_size: tables.PositiveInt
    strategy: str
    optimizer_shards: tables.PositiveInt
    optimizer_layout: dict[str, Any] | None = None
    """How the optimizer state is cut into shards (see `lmkit.parallel.shards`); None: it is whole."""
    optimizer_groups: tuple[dict[str, int | float], ...] = ()
    """Numbers of its groups, see `group_numbers`."""
    rng: Annotated[tuple[RngState, ...], Field(min_length=1)]

    model: tables.ModelConfig
    """With the vocabulary size filled in."""
    recipe: dict[str, Any]
    recipe_sha256: str
    data: DataIdentity | None = None


def capture_rng(device: torch.device) -> RngState:
    """Return the state of this rank's generators."""
    cpu, cuda = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(), None
    if device.type == "cuda":
        cuda = base64.b64encode(torch.cuda.get_rng_state(device).numpy().tobytes()).decode()
    return RngState(cpu=cpu, cuda=cuda)


def restore_rng(state: RngState, device: torch.device) -> None:
    """Set this rank's generators to a saved state."""
    try:
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state.cpu)), dtype=torch.uint8))
        if state.cuda is not None and device.type == "cuda":
            bits = torch.frombuffer(bytearray(base64.b64decode(state.cuda)), dtype=torch.uint8)
            torch.cuda.set_rng_state(bits, device)
    except (ValueError, RuntimeError) as error:
        hint = "another version of PyTorch saved it, or it was changed; use another checkpoint"
        message = "the checkpoint's random generators cannot be restored"
        raise LmkitError("checkpoint.bad_rng", message, hint=hint) from error


# Write


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    read: Callable[[str], torch.Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> FileEntry:
    """Write contiguous CPU tensors to a safetensors file, fsync it, and return its hash and size.

    Unlike the library's writer, it hashes while it writes, releases the GIL, and reports a full disk as an OSError.

    Args:
        read: returns a tensor when its turn has come; `tensors` then give shapes and dtypes only, on "meta" too.
        metadata: the file's own, for other libraries.
    """
    header: dict[str, Mapping[str, object]] = {} if metadata is None else {"__metadata__": metadata}
    # Readers of the format need every tensor aligned to its element size: write wide types first.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        dtype, shape = DTYPE_CODES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return write_file(path, len(text).to_bytes(8, "little") + text, map(read or tensors.__getitem__, names))


def write_file(path: Path, head: bytes, tensors: Iterable[torch.Tensor] = ()) -> FileEntry:
    """Write bytes and tensors, fsync the file, and return its hash and size."""
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        parts: Iterable[bytes | torch.Tensor] = chain([head], tensors)
        for part in parts:
            data = (
                memoryview(part) if isinstance(part, bytes) else part.view(-1).view(torch.uint8).numpy().data
            )
            position = 0
            while position < len(data):
                written = os.write(file.fileno(), data[position : position + _BLOCK])
                digest.update(data[position : position + written])
                position += written
            del part, data  # before the next tensor is read
        os.fsync(file.fileno())
        return FileEntry(sha256=digest.hexdigest(), bytes=os.fstat(file.fileno()).st_size)


def write_manifest(folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """Write and fsync `manifest.json`, the last file of a checkpoint."""
    content = {"format": FORMAT, "files": dict(sorted(entries.items()))}
    whole = content | {"checksum": manifest_checksum(content)}
    write_file(folder / MANIFEST, json.dumps(whole, indent=2).encode())


def manifest_checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum that a manifest carries, of everything else in it."""
    rest = dict(content)
    rest.pop("checksum", None)
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def publish(partial: Path, final: Path) -> None:
    """Give a complete folder its final name. What has the name already is moved aside."""
    fsync(partial)
    if os.path.lexists(final):
        keep_damaged(final)
    os.replace(partial, final)
    fsync(final.parent)


def remove_folder(path: Path) -> None:
    """Delete a checkpoint, or the link to one. A kill half-way leaves nothing under a final name."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    _delete(partial)
    os.replace(path, partial)
    _delete(partial)


def _delete(path: Path) -> None:
    """Delete a folder if it is there; of a link, only the link: what it names belongs to somebody else."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def holds_others(path: Path) -> bool:
    """Return whether a checkpoint's folder holds files that are not a checkpoint's."""
    return not all(map(_OWN_NAME.fullmatch, os.listdir(path)))


def clean_leftovers(folder: Path) -> list[Path]:
    """Delete what a killed process left, and return it. The caller holds the run folder's lock."""
    removed = sorted(folder.glob(f"step-*{PARTIAL_SUFFIX}"))
    for path in removed:
        _delete(path)
    return removed


# Read


class TensorFile:
    """A safetensors file: its header is read at once, its tensors on demand. `tensors`: name -> a tensor on "meta"
    with the shape and dtype of the stored one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, torch.Tensor] = {}
        try:
            open_input(path).close()  # refuses a pipe, which the library would wait for
            with safetensors.safe_open(path, framework="pt") as file:  # checks the header
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    stored = file.get_slice(name)
                    if (code := stored.get_dtype()) not in _DTYPES:
                        raise unsupported_dtype(path, name, code)
                    self.tensors[name] = torch.empty(stored.get_shape(), dtype=_DTYPES[code], device="meta")
        except OSError as error:
            raise damaged_file(path, reason(error)) from error
        except safetensors.SafetensorError as error:
            if "unknown variant" in str(error):
                raise unsupported_dtype(path, "a tensor", str(error).split("`")[1]) from error
            raise damaged_file(path, str(error)) from error

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, in memory of its own: a mapped file may change."""
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                return file.get_tensor(name).clone()
        except (OSError, safetensors.SafetensorError) as error:
            raise damaged_file(self.path, f"changed while it was read ({error})") from error


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no number of a tensor is infinite or NaN, in one pass."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    smallest, largest = torch.aminmax(tensor)  # NaN propagates
    return bool(torch.isfinite(smallest) and torch.isfinite(largest))


def damaged_file(path: Path, what: str) -> LmkitError:
    """Return the error that names the file and what is wrong with it."""
    return LmkitError("weights.damaged_file", f"{path}: {what}", hint="copy or download the file again")


def unsupported_dtype(path: Path, name: str, dtype: str) -> UsageError:
    """Return the error that names a tensor whose dtype lmkit does not read."""
    hint = "lmkit reads weights in float32, float16 and bfloat16, not quantized ones"
    return UsageError("import.unsupported", f"{path}: {name} is {dtype}, which is not supported", hint=hint)


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Return the files of a checkpoint as its manifest lists them; reads no other file."""
    path = folder / MANIFEST
    try:
        content = read_object(path)
        is_whole = content.get("checksum") == manifest_checksum(content)
    except FileNotFoundError:
        what = f"{path}: missing, the checkpoint is incomplete"
        raise DamagedCheckpoint("checkpoint.incomplete", what, hint=_USE_AN_OLDER) from None
    except OSError as error:
        raise _unread(path, error) from error
    except (ValueError, RecursionError) as error:  # Python may read what it cannot write again
        raise damaged(path, str(error)) from None
    if not is_whole:
        raise damaged(path, "checksum error")
    found = content.get("format")
    if not isinstance(found, int) or found > FORMAT:
        raise newer(path, "checkpoint", found, FORMAT)
    files = content.get("files")
    if not isinstance(files, dict) or STATE not in files or not model_files(files):
        raise damaged(path, f"does not list {MODEL} and {STATE}")
    entries: dict[str, FileEntry] = {}
    for name, fields in files.items():
        match fields:
            case {"sha256": str(sha256), "bytes": int(size)} if _FILE_NAME.fullmatch(name):
                entries[name] = FileEntry(sha256=sha256, bytes=size)
            case _:
                raise damaged(path, f"{name!r} is no file of a checkpoint")
    return entries


def verify(folder: Path) -> None:
    """Read every file of a checkpoint and compare it with the manifest, in constant memory; its state must be of the
    step that the folder's name says."""
    for name, entry in read_manifest(folder).items():
        verify_file(folder / name, entry)
    try:
        step = read_object(folder / STATE).get("step")
    except ValueError as error:
        raise damaged(folder / STATE, str(error)) from None
    if (named := _STEP_NAME.fullmatch(folder.name)) and step != int(named[1]):
        raise damaged(folder, f"renamed: {STATE} is of step {step}")


def verify_file(path: Path, entry: FileEntry) -> None:
    """Read a file and compare it with its entry, in constant memory; see `verify`."""
    try:
        size = path.stat().st_size
        sha256 = sha256_file(path) if size == entry["bytes"] else ""
    except OSError as error:
        raise _unread(path, error) from error
    if size != entry["bytes"]:
        raise damaged(path, f"{size} bytes instead of {entry['bytes']}")
    if sha256 != entry["sha256"]:
        raise damaged(path, "checksum error")


def parse_state(text: bytes, *, path: object) -> TrainingState:
    """Read `state.json`."""
    try:
        return TrainingState.model_validate_json(text)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        found = next((mistake["input"] for mistake in wrong if mistake["loc"] == ("format",)), None)
        if isinstance(found, int) and found > STATE_FORMAT:
            raise newer(path, "state", found, STATE_FORMAT) from None
        key = ".".join(str(part) for part in wrong[0]["loc"])
        cause = wrong[0].get("ctx", {}).get("error")
        if isinstance(cause, UnregisteredName):
            hint = "the checkpoint is whole; it was made with a plugin: name its file with --plugin"
            raise UsageError("checkpoint.unregistered", f"{path}: {key}: {cause}", hint=hint) from None
        raise damaged(path, f"{key}: {cause or wrong[0]['msg']}") from None


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: manifest and state are read, tensors on demand, and verified unless `is_verified`."""

    path: Path
    state: TrainingState
    entries: Mapping[str, FileEntry]
    is_verified: bool = field(default=False, compare=False)

    def optimizer_tensors(self, shard: int = 0) -> dict[str, torch.Tensor]:
        """Return one shard of the optimizer state, or all of it where it is not sharded."""
        name = shard_name(shard, self.state.optimizer_shards)
        if not self.is_verified:
            verify_file(self.path / name, self.entries[name])
        file = TensorFile(self.path / name)
        return {key: file.read(key) for key in file.tensors}

    def all_optimizer_shards(self) -> list[dict[str, torch.Tensor]]:
        """Return every shard of the optimizer state, in the order of the ranks."""
        return [self.optimizer_tensors(rank) for rank in range(self.state.optimizer_shards)]


def open_checkpoint(path: Path, *, is_verified: bool = False) -> Checkpoint:
    """Read a checkpoint's manifest and state; `is_verified`: `verify` has read all of it.

    Raises:
        LmkitError: it is damaged, lacks an optimizer shard, or has a newer format.
        UsageError: not a checkpoint folder.
    """
    if not (path / MANIFEST).is_file() and not (path / MODEL).is_file():
        message = f"{path}: not a checkpoint folder (no {MANIFEST})"
        hint = "a checkpoint is a folder like <run>/checkpoints/step-00000100"
        raise UsageError("checkpoint.not_found", message, hint=hint)
    entries = read_manifest(path)
    if not is_verified:
        verify_file(path / STATE, entries[STATE])
    state = parse_state(read_input(path / STATE), path=path / STATE)
    for rank in range(state.optimizer_shards):
        name = shard_name(rank, state.optimizer_shards)
        if name not in entries or not (path / name).is_file():
            message = f"{path / name}: missing, the optimizer state of rank {rank}"
            hint = "copy the whole checkpoint folder, or use an older one"
            raise LmkitError("checkpoint.incomplete", message, hint=hint)
    return Checkpoint(path, state, entries, is_verified)


class Choice(NamedTuple):
    """The newest good checkpoint, and why newer ones were skipped."""

    path: Path | None
    skipped: tuple[str, ...]


def newest_valid(folder: Path) -> Choice:
    """Return the checkpoint with the highest step (clocks may go back) that verifies."""
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
            hint="copy the checkpoint again, or name another one; to start over and keep these: lmkit run --force",
        )
    return Choice(None, ())


def newest_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint folder, or the newest good checkpoint of a run folder.

    Newer checkpoints that are damaged are named in the log.

    Raises:
        UsageError: there is no checkpoint.
        LmkitError: there are checkpoints, but none is good.
    """
    if not path.is_dir():
        hint = hint_at_run(path, otherwise="name a run folder, a checkpoint or a Hugging Face folder")
        message = f"{path}: {'is a file' if path.exists() else 'no such folder'}"
        raise UsageError("checkpoint.not_found", message, hint=hint)
    if (path / MANIFEST).exists() or (path / STATE).exists():
        return open_checkpoint(path)
    choice = newest_valid(path if path.name == CHECKPOINTS else path / CHECKPOINTS)
    if choice.path is None:
        hint = "train first: lmkit train, or lmkit run"
        raise UsageError("checkpoint.not_found", f"{path}: holds no checkpoint", hint=hint)
    for why in choice.skipped:
        log.warning("skipped %s", why)
    return open_checkpoint(choice.path, is_verified=True)


def hint_at_run(path: Path, *, otherwise: str) -> str:
    """Return a hint at the run of that name in the default folder, if there is one."""
    run = tables.RunConfig().folder / path
    return f"did you mean {run}?" if run.is_dir() else otherwise
