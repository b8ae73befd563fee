"""Tensors <-> safetensors files, with checksums, without pickle and without memory maps.

The writer is ours because it hashes while it writes, lets other threads run meanwhile, and reports a full disk as
the OSError it is; the format is the one of https://github.com/huggingface/safetensors, which also reads the files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from lmkit.errors import LmkitError, reason

_DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Bytes handed to write() and to the hash at a time: large enough to release the GIL for long.
_BLOCK = 1 << 24


UPGRADE = "upgrade lmkit: pip install --upgrade lmkit"


class DamagedCheckpoint(LmkitError):
    """Something of a checkpoint is missing or not what was saved; an older one may be whole."""


class NewerFormat(LmkitError):
    """A whole checkpoint, in a format that this version does not know."""


@dataclass(frozen=True)
class FileEntry:
    """What the manifest says about one file."""

    sha256: str
    bytes: int


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write contiguous CPU tensors to a safetensors file, fsync it, and return its hash and size.

    Raises:
        OSError: the disk is full, say.
    """
    header: dict[str, dict[str, object]] = {}
    # Wide types first keeps every tensor aligned to its own element size, which readers of the format rely on.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    offset = 0
    for name in names:
        tensor = tensors[name]
        assert tensor.device.type == "cpu", name
        assert tensor.is_contiguous(), name
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text), digest)
        for name in names:
            raw = tensors[name].reshape(-1).view(torch.uint8).numpy()
            _write_all(file.fileno(), raw.data, digest)
        os.fsync(file.fileno())
        return FileEntry(digest.hexdigest(), os.fstat(file.fileno()).st_size)


def _write_all(descriptor: int, data: memoryview, digest: hashlib._Hash) -> None:
    position = 0
    while position < len(data):
        written = os.write(descriptor, data[position : position + _BLOCK])
        digest.update(data[position : position + written])
        position += written


def write_text(path: Path, text: str) -> FileEntry:
    """Write UTF-8 text, fsync it, and return its hash and size."""
    data = text.encode()
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(data), digest)
        os.fsync(file.fileno())
    return FileEntry(digest.hexdigest(), len(data))


def read_verified(path: Path, entry: FileEntry) -> bytes:
    """Return the file's bytes if they are the ones that the manifest promises.

    The bytes that were hashed are the bytes that are used: the file may change or shrink afterwards.

    Raises:
        LmkitError: missing, another size, or another hash.
    """
    try:
        if path.stat().st_size != entry.bytes:
            raise LmkitError(
                f"{path}: {path.stat().st_size} bytes, the manifest says {entry.bytes}", hint=_DAMAGED
            )
        data = path.read_bytes()
    except OSError as error:
        raise LmkitError(f"{path}: {reason(error)}", hint=_DAMAGED) from error
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise LmkitError(f"{path}: checksum error, the content is not what was saved", hint=_DAMAGED)
    return data


_DAMAGED = "the checkpoint is damaged; use an older one"


def parse_tensors(data: bytes, *, path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file that was read into memory; they own their memory.

    Raises:
        LmkitError: not in that format.
    """
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError, AssertionError) as error:
        raise LmkitError(f"{path}: not a safetensors file ({error})", hint=_DAMAGED) from error


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a safetensors file; reads its header only.

    Raises:
        LmkitError: not in that format.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except safetensors.SafetensorError as error:
        raise LmkitError(f"{path}: not a safetensors file ({error})", hint=_DAMAGED) from error
