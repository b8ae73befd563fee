"""Read safetensors files tensor by tensor, into memory of their own: no file is mapped, and no header is trusted.

A file is the length of its header in 8 bytes, the header in JSON (name -> dtype, shape, offsets), then the tensors.
`atomic_checkpoint.write_tensors` writes such files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.storage.inputs import open_input
from lmkit.training.atomic_checkpoint import DTYPE_CODES

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_MOST_HEADER_BYTES = 1 << 24  # a model of 1,000 layers has a header of 1 MB
_MOST_DIMENSIONS = 8


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def damaged_file(path: Path, what: str) -> LmkitError:
    """Return the error that names the file and what is wrong with it."""
    hint = "copy or download the file again"
    return LmkitError("weights.damaged_file", f"{path}: {what}", hint=hint)


class TensorFile:
    """An open safetensors file: the header is read and checked, tensors are read on demand.

    Attributes:
        tensors: by name, in the order of the header.

    Raises:
        LmkitError: there is no such file, or its header does not describe exactly its bytes.
        UsageError: a tensor has a dtype that lmkit does not read ("import.unsupported").
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with open_input(path) as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > size - 8:
                    raise damaged_file(path, f"cut: a header of {length} bytes in a file of {size}")
                if length > _MOST_HEADER_BYTES:
                    raise damaged_file(path, f"a header of {length} bytes, more than any model needs")
                text = file.read(length)
        except OSError as error:
            raise damaged_file(path, reason(error)) from error
        try:
            header = json.loads(text, object_pairs_hook=_distinct)
            if not isinstance(header, dict):
                raise ValueError("not an object")
            header.pop("__metadata__", None)
            self.tensors = {name: _stored(path, name, entry) for name, entry in header.items()}
            expected = 0
            for name, stored in sorted(self.tensors.items(), key=lambda item: item[1].begin):
                if stored.begin != expected:
                    raise ValueError(f"{name} begins at byte {stored.begin}, not at {expected}")
                expected = stored.end
            if expected != size - 8 - length:
                raise ValueError(f"{expected} bytes of tensors, the file holds {size - 8 - length}")
        except RecursionError as error:
            raise damaged_file(path, "header: nested too deeply") from error
        except ValueError as error:  # also of JSON and of UTF-8
            raise damaged_file(path, f"header: {error}") from error
        self._data = 8 + length

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU.

        Raises:
            LmkitError: the file has become shorter.
        """
        stored = self.tensors[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        rest = tensor.view(-1).view(torch.uint8).numpy().data
        try:
            with open_input(self.path) as file:
                file.seek(self._data + stored.begin)
                while rest:
                    count = file.readinto(rest)
                    if not count:
                        raise damaged_file(self.path, f"cut while it was read, in {name}")
                    rest = rest[count:]
        except OSError as error:
            raise damaged_file(self.path, reason(error)) from error
        return tensor


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found


def unsupported_dtype(path: Path, name: str, dtype: str) -> UsageError:
    """Return the error that names a tensor whose dtype lmkit does not read."""
    hint = "lmkit reads weights in float32, float16 and bfloat16, not quantized ones"
    return UsageError("import.unsupported", f"{path}: {name} is {dtype}, which is not supported", hint=hint)


def _stored(path: Path, name: str, entry: Any) -> Stored:
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [begin, end], **others} if not others:
            pass
        case _:
            raise ValueError(f"{name}: not dtype, shape and offsets")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name}: a size or an offset is not a whole number")
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name}: {len(shape)} dimensions")
    if code not in _DTYPES:
        raise unsupported_dtype(path, name, json.dumps(code)[:40])
    dtype = _DTYPES[code]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {end - begin} bytes for a shape of {math.prod(shape)} elements")
    return Stored(dtype, tuple(shape), begin, end)
