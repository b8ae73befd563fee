"""Write and read safetensors files with checksums, without pickle and without memory maps.

The format is https://github.com/huggingface/safetensors. The library reads our files. We write them ourselves:
this writer hashes while it writes, releases the GIL, and reports a full disk as an OSError.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from lmkit.errors import LmkitError, reason
from lmkit.storage import sha256_file

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
# Bytes handed to write() and to the hash at a time: large blocks release the GIL for long.
_BLOCK = 1 << 24


class DamagedCheckpoint(LmkitError):
    """A part of a checkpoint is missing or is not what was saved. An older checkpoint may be whole."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str = "use an older checkpoint, or delete the damaged one",
    ) -> None:
        super().__init__(code, message, hint=hint)


class NewerFormat(LmkitError):
    """The checkpoint is whole, but in a format that this version does not know."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str = "upgrade lmkit: pip install --upgrade lmkit",
    ) -> None:
        super().__init__(code, message, hint=hint)


@dataclass(frozen=True)
class FileEntry:
    """Hash and size of a file, as the manifest lists them."""

    sha256: str
    bytes: int


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write contiguous CPU tensors to a safetensors file, fsync it, and return its hash and size.

    Raises:
        OSError: the disk is full, for example.
    """
    header: dict[str, dict[str, object]] = {}
    # Readers of the format need every tensor aligned to its element size: write wide types first.
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
    contents = (tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in names)
    return _write(path, (memoryview(len(text).to_bytes(8, "little") + text), *contents))


def write_text(path: Path, text: str) -> FileEntry:
    """Write UTF-8 text, fsync it, and return its hash and size."""
    return _write(path, (memoryview(text.encode()),))


def _write(path: Path, contents: Iterable[memoryview]) -> FileEntry:
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        for data in contents:
            position = 0
            while position < len(data):
                written = os.write(file.fileno(), data[position : position + _BLOCK])
                digest.update(data[position : position + written])
                position += written
        os.fsync(file.fileno())
        return FileEntry(digest.hexdigest(), os.fstat(file.fileno()).st_size)


def check_file(path: Path, entry: FileEntry) -> None:
    """Compare a file with its entry in constant memory.

    Raises:
        DamagedCheckpoint: the file is missing, or has another size or hash.
    """
    try:
        size = path.stat().st_size
        if size == entry.bytes and sha256_file(path) == entry.sha256:
            return
    except OSError as error:
        raise DamagedCheckpoint("checkpoint.damaged", f"{path}: {reason(error)}") from error
    raise _differs(path, size, entry)


def read_verified(path: Path, entry: FileEntry) -> bytes:
    """Return the content of a file after comparing it with its entry.

    The bytes that are hashed are the bytes that are used: the file may change or shrink afterwards.

    Raises:
        DamagedCheckpoint: the file is missing, or has another size or hash.
    """
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size == entry.bytes else b""
    except OSError as error:
        raise DamagedCheckpoint("checkpoint.damaged", f"{path}: {reason(error)}") from error
    if size != entry.bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise _differs(path, size, entry)
    return data


def _differs(path: Path, size: int, entry: FileEntry) -> DamagedCheckpoint:
    if size != entry.bytes:
        return DamagedCheckpoint("checkpoint.damaged", f"{path}: {size} bytes instead of {entry.bytes}")
    return DamagedCheckpoint("checkpoint.damaged", f"{path}: checksum error")


def parse_tensors(data: bytes, *, path: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file that was read into memory; they own their memory.

    Raises:
        DamagedCheckpoint: the data is not in that format.
    """
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError, AssertionError) as error:
        raise DamagedCheckpoint("checkpoint.damaged", f"{path}: not a safetensors file ({error})") from error


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors in a safetensors file; reads only its header.

    Raises:
        DamagedCheckpoint: the file is not in that format.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except safetensors.SafetensorError as error:
        raise DamagedCheckpoint("checkpoint.damaged", f"{path}: not a safetensors file ({error})") from error
