"""Encoding and counting in C (`words.c`): compiled once by the machine's own compiler, then called through ctypes.

Where there is no compiler, both run in numpy (`NumpyEncoder`, `NumpyCounter`), which is said once. The results are
the same; C is several times faster, and gives up the interpreter's lock, so that threads run side by side.
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
from pathlib import Path

import numpy as np

from lmkit.errors import reason
from lmkit.tokenizer.bpe import MergeTable
from lmkit.tokenizer.chunk_encoder import ChunkEncoder, NumpyEncoder
from lmkit.tokenizer.pattern import character_classes
from lmkit.tokenizer.special_tokens import SpecialTokens
from lmkit.tokenizer.word_counter import NumpyCounter, WordCounter, WordCounts

_SOURCE = Path(__file__).with_name("words.c")
_ROOM = 1 << 21  # ids; more than a chunk of text has
_FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC")

_log = logging.getLogger("lmkit")


def chunk_encoder(merges: MergeTable) -> ChunkEncoder:
    """Return a new encoder: the one in C where it can be had, else the one in numpy."""
    code = library()
    return NumpyEncoder(merges) if code is None else NativeEncoder(code, merges)


def word_counter(specials: SpecialTokens) -> WordCounter:
    """Return a new counter: the one in C where it can be had, else the one in numpy."""
    code = library()
    return NumpyCounter(specials) if code is None else NativeCounter(code, specials)


def chunk_bytes() -> int:
    """Return how many bytes of text to encode or count at a time.

    In C so few that a chunk stays in cache, that malloc hands out the memory of the chunk before, and that no worker
    waits long for another at the end; in numpy enough to amortise dozens of calls, between which one thread runs.
    """
    return 1 << 20 if library() is None else 1 << 18


def is_utf8(data: bytes) -> bool:
    """Tell whether `data` is valid UTF-8."""
    code = library()
    if code is not None:
        return bool(code.lmkit_is_utf8(data, len(data)))  # without the lock, and without making a str of it
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class NativeEncoder:
    """The encoder in C; a `ChunkEncoder`."""

    def __init__(self, code: ctypes.CDLL, merges: MergeTable) -> None:
        self._code = code
        self._classes = character_classes()  # the encoder only borrows it
        self._encoder = code.lmkit_encoder_new(
            self._classes.ctypes.data,
            merges.byte_ids.ctypes.data,
            merges.left.ctypes.data,
            merges.right.ctypes.data,
            merges.merged.ctypes.data,
            len(merges.merged),
        )
        if not self._encoder:
            raise MemoryError("no memory for the encoder")
        self._room = np.empty(_ROOM, np.int32)

    def encode(self, data: bytes, specials: SpecialTokens) -> np.ndarray:
        # A token has at least one byte. Reusing the room spares the faults of fresh pages, a tenth of the time.
        ids = self._room if len(data) <= len(self._room) else np.empty(len(data), np.int32)
        packed = specials.packed
        count = self._code.lmkit_encode(self._encoder, data, len(data), packed, len(packed), ids.ctypes.data)
        if count < 0:
            raise MemoryError("no memory to encode a chunk")
        return ids[:count].copy()

    def __del__(self) -> None:
        encoder = getattr(self, "_encoder", None)
        if encoder:
            self._code.lmkit_encoder_free(encoder)


class NativeCounter:
    """The counter in C; a `WordCounter`."""

    def __init__(self, code: ctypes.CDLL, specials: SpecialTokens) -> None:
        self._code = code
        self._packed_specials = specials.packed
        self._classes = character_classes()  # the counter only borrows it
        self._counter = code.lmkit_counter_new(self._classes.ctypes.data)
        if not self._counter:
            raise MemoryError("no memory for the counter")

    def add(self, data: bytes) -> None:
        packed = self._packed_specials
        if self._code.lmkit_count(self._counter, data, len(data), packed, len(packed)):
            raise MemoryError("no memory to count the words of a chunk")

    def absorb(self, other: NativeCounter) -> None:
        if self._code.lmkit_count_together(self._counter, other._counter):
            raise MemoryError("no memory to add up the counts")

    def result(self) -> WordCounts:
        sizes = np.empty(3, np.int64)
        self._code.lmkit_counter_sizes(self._counter, sizes.ctypes.data)
        num_words, num_bytes, num_special = sizes.tolist()
        text = np.empty(num_bytes, np.uint8)
        lengths, counts = np.empty(num_words, np.int64), np.empty(num_words, np.int64)
        self._code.lmkit_counter_words(
            self._counter, text.ctypes.data, lengths.ctypes.data, counts.ctypes.data
        )
        return WordCounts(text, lengths, counts, num_special)

    def __del__(self) -> None:
        counter = getattr(self, "_counter", None)
        if counter:
            self._code.lmkit_counter_free(counter)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled code, compiling it if this version was never compiled here; None where that fails."""
    try:
        code = _loaded()
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning(
            "no C compiler (%s): the tokenizer encodes and counts in numpy, several times slower", error
        )
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    data = (ctypes.c_char_p, size)
    for name, result, *arguments in (
        ("lmkit_is_utf8", ctypes.c_int, *data),
        ("lmkit_encoder_new", pointer, pointer, pointer, pointer, pointer, pointer, size),
        ("lmkit_encoder_free", None, pointer),
        ("lmkit_encode", size, pointer, *data, *data, pointer),
        ("lmkit_counter_new", pointer, pointer),
        ("lmkit_counter_free", None, pointer),
        ("lmkit_count", ctypes.c_int, pointer, *data, *data),
        ("lmkit_count_together", ctypes.c_int, pointer, pointer),
        ("lmkit_counter_sizes", None, pointer, pointer),
        ("lmkit_counter_words", None, pointer, pointer, pointer, pointer),
    ):
        function = getattr(code, name)
        function.restype, function.argtypes = result, arguments
    return code


def _loaded() -> ctypes.CDLL:
    """Load the shared library from the cache, named there after everything that decides what is in it."""
    compiler = os.environ.get("CC", "cc")
    recipe = "\0".join([_SOURCE.read_text("utf-8"), compiler, *_FLAGS, platform.platform()])
    name = f"words-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.so"
    try:
        kept = _cache_folder() / name
        if kept.exists():
            return ctypes.CDLL(str(kept))
        kept.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=kept.parent)  # several processes may compile at once
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where home is
        why = f"{kept.parent}: {reason(error)}" if isinstance(error, OSError) else str(error)
        _log.warning("%s: the tokenizer's C code is compiled again for each process", why)
        with tempfile.TemporaryDirectory() as private:
            return ctypes.CDLL(str(_compiled(compiler, Path(private) / name)))
    with folder:
        _compiled(compiler, Path(folder.name) / name).replace(kept)
    return ctypes.CDLL(str(kept))


def _compiled(compiler: str, output: Path) -> Path:
    command = [*compiler.split(), *_FLAGS, "-o", str(output), str(_SOURCE)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return output


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lmkit"
