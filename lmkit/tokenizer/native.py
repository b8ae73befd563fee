"""The encoder in C (`encode.c`): compiled once by the machine's own compiler, then called through ctypes.

Where there is no compiler, encoding runs in numpy (`chunk_encoder.NumpyEncoder`) and says so once. Both give the same
ids; the C one is several times faster, and releases the interpreter's lock, so that threads run side by side.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lmkit.tokenizer.bpe import MergeTable
from lmkit.tokenizer.chunk_encoder import ChunkEncoder, NumpyEncoder
from lmkit.tokenizer.pattern import character_classes
from lmkit.tokenizer.special_tokens import Span

_SOURCE = Path(__file__).with_name("encode.c")
_FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC")

_log = logging.getLogger("lmkit")


def chunk_encoder(merges: MergeTable) -> ChunkEncoder:
    """Return a new encoder: the one in C where it can be had, else the one in numpy."""
    code = library()
    return NumpyEncoder(merges) if code is None else NativeEncoder(code, merges)


class NativeEncoder:
    """The encoder in C; a `ChunkEncoder`."""

    def __init__(self, code: ctypes.CDLL, merges: MergeTable) -> None:
        self._code = code
        self._classes = character_classes()  # the engine only borrows it
        self._engine = code.lmkit_new(
            self._classes.ctypes.data,
            merges.byte_ids.ctypes.data,
            merges.left.ctypes.data,
            merges.right.ctypes.data,
            merges.merged.ctypes.data,
            len(merges.merged),
        )
        if not self._engine:
            raise MemoryError("no memory for the encoder")

    def encode(self, data: bytes, specials: Sequence[Span] = ()) -> np.ndarray:
        ids = np.empty(len(data), np.int32)  # a token has at least one byte
        spans = np.array(specials, np.int64)  # (number, 3): start, end, id
        count = self._code.lmkit_encode(
            self._engine, data, len(data), spans.ctypes.data, len(specials), ids.ctypes.data
        )
        if count < 0:
            raise MemoryError("no memory to encode a chunk")
        return ids[:count]

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine:
            self._code.lmkit_free(engine)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled code, compiling it if this version was never compiled here; None where that fails."""
    try:
        code = ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _log.warning(
            "no C compiler for the fast encoder (%s): encoding in numpy, several times slower", error
        )
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    code.lmkit_new.argtypes = [pointer, pointer, pointer, pointer, pointer, size]
    code.lmkit_new.restype = pointer
    code.lmkit_encode.argtypes = [pointer, ctypes.c_char_p, size, pointer, size, pointer]
    code.lmkit_encode.restype = size
    code.lmkit_free.argtypes = [pointer]
    code.lmkit_free.restype = None
    return code


def _compiled() -> Path:
    """Return the shared library, named after everything that decides what is in it."""
    compiler = os.environ.get("CC", "cc")
    recipe = "\0".join([_SOURCE.read_text("utf-8"), compiler, *_FLAGS, platform.platform()])
    path = _cache_folder() / f"encode-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # several processes may compile at once
            built = Path(folder) / path.name
            command = [*compiler.split(), *_FLAGS, "-o", str(built), str(_SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            built.replace(path)
    return path


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lmkit"
