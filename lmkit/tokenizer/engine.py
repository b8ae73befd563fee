"""Encode chunks of text and count their words in C (`words.c`), on several threads.

The C code is compiled once by the machine's compiler, kept in the user's cache folder, and called through ctypes. It
releases the interpreter's lock, so that threads run in parallel. Without a compiler, `python_engine.py` does the same
work, much slower; one warning says so.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import logging
import os
import platform
import queue
import subprocess
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

from lmkit.storage.compiled import load_compiled
from lmkit.tokenizer.pretokenize import PATTERNS, SpecialTokens, character_classes
from lmkit.tokenizer.python_engine import MergeTable, PythonCounter, PythonEncoder, WordCounts

CHUNK_BYTES = 1 << 18
"""Bytes of text to encode or count at a time: a chunk stays in the cache, and no thread waits long for another."""

_SOURCE = Path(__file__).with_name("words.c")
_FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-falign-functions=64")
_ROOM = 1 << 21  # ids; more than one chunk of text has

_log = logging.getLogger("lmkit")


def new_encoder(merges: MergeTable) -> Encoder:
    """Return a new encoder: in C if the machine can compile it, otherwise in Python."""
    code = library()
    encoder = PythonEncoder(merges) if code is None else NativeEncoder(code, merges)
    return NormalizingEncoder(encoder) if merges.nfc else encoder


def new_counter(specials: SpecialTokens) -> WordCounter:
    """Return a new counter: in C if the machine can compile it, otherwise in Python."""
    code = library()
    return PythonCounter(specials) if code is None else NativeCounter(code, specials)


def is_utf8(data: bytes) -> bool:
    """Tell whether `data` is valid UTF-8."""
    code = library()
    if code is not None:
        return bool(code.lmkit_is_utf8(data, len(data)))  # releases the lock, and builds no str
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# ---- in C


class NativeEncoder:
    """Does what `PythonEncoder` does, with `words.c`, for valid UTF-8. It remembers words, and serves one thread."""

    def __init__(self, code: ctypes.CDLL, merges: MergeTable) -> None:
        self._code = code
        self._classes = character_classes()  # the C encoder borrows it
        byte_ids = np.array(merges.byte_ids, np.int32)
        table = np.fromiter(chain.from_iterable(merges.merges), np.int32, 3 * len(merges.merges))
        left, right, merged = table.reshape(-1, 3).T.copy()
        addresses = [column.ctypes.data for column in (self._classes, byte_ids, left, right, merged)]
        words = b"".join(merges.whole)
        sizes, ids = (
            np.array([*numbers], np.int64) for numbers in (map(len, merges.whole), merges.whole.values())
        )
        self._encoder = code.lmkit_encoder_new(
            *addresses,
            len(merged),
            list(PATTERNS).index(merges.pattern),
            *(words, len(words), sizes.ctypes.data, ids.ctypes.data, len(ids)),
        )
        if not self._encoder:
            raise MemoryError("no memory for the encoder")
        self._room = np.empty(_ROOM, np.int32)

    def encode(self, data: bytes, specials: SpecialTokens) -> np.ndarray:
        # A token has at least one byte. Reusing the room avoids page faults on fresh memory.
        ids = self._room if len(data) <= len(self._room) else np.empty(len(data), np.int32)
        count = self._code.lmkit_encode(self._encoder, data, len(data), specials.packed, ids.ctypes.data)
        if count < 0:
            raise MemoryError("no memory to encode a chunk")
        return ids[:count].copy()

    def __del__(self) -> None:
        if encoder := getattr(self, "_encoder", None):
            self._code.lmkit_encoder_free(encoder)


class NormalizingEncoder:
    """Encodes in Unicode's normal form C what lies between special tokens.

    Texts may be cut before a space, or between a letter or number and a character that is neither one of them nor a
    mark: nothing composes across such a cut.
    """

    def __init__(self, encoder: NativeEncoder | PythonEncoder) -> None:
        self._encoder = encoder

    def encode(self, data: bytes, specials: SpecialTokens) -> np.ndarray:
        if unicodedata.is_normalized("NFC", data.decode("utf-8", "surrogateescape")):
            return self._encoder.encode(data, specials)
        parts = []
        for text, special_id in specials.first.split(data):
            normal = unicodedata.normalize("NFC", text.decode("utf-8", "surrogateescape"))
            found = normal.encode("utf-8", "surrogateescape")
            parts.append(self._encoder.encode(found, specials.of_normal_form))
            if special_id is not None:
                parts.append(np.array([special_id], np.int32))
        return np.concatenate(parts)


class NativeCounter:
    """Does what `PythonCounter` does, with `words.c`. It serves one thread."""

    def __init__(self, code: ctypes.CDLL, specials: SpecialTokens) -> None:
        self._code = code
        self._packed_specials = specials.packed
        self._classes = character_classes()  # the C counter borrows it
        self._counter = code.lmkit_counter_new(self._classes.ctypes.data)
        if not self._counter:
            raise MemoryError("no memory for the counter")

    def add(self, data: bytes) -> None:
        if self._code.lmkit_count(self._counter, data, len(data), self._packed_specials):
            raise MemoryError("no memory to count the words of a chunk")

    def absorb(self, other: NativeCounter) -> None:
        if self._code.lmkit_count_together(self._counter, other._counter):
            raise MemoryError("no memory to add the counts")

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
        if counter := getattr(self, "_counter", None):
            self._code.lmkit_counter_free(counter)


Encoder = NativeEncoder | PythonEncoder | NormalizingEncoder
WordCounter = NativeCounter | PythonCounter


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled code, or None if this machine cannot compile it. Compiles it on first use."""
    try:
        code = _load_or_compile()
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("%s: the tokenizer runs in Python, much slower", _why_not_compiled(error))
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    data = (ctypes.c_char_p, size)
    for name, result, *arguments in (
        ("lmkit_is_utf8", ctypes.c_int, *data),
        ("lmkit_encoder_new", pointer, *5 * (pointer,), size, ctypes.c_int, *data, pointer, pointer, size),
        ("lmkit_encoder_free", None, pointer),
        ("lmkit_encode", size, pointer, *data, ctypes.c_char_p, pointer),
        ("lmkit_counter_new", pointer, pointer),
        ("lmkit_counter_free", None, pointer),
        ("lmkit_count", ctypes.c_int, pointer, *data, ctypes.c_char_p),
        ("lmkit_count_together", ctypes.c_int, pointer, pointer),
        ("lmkit_counter_sizes", None, pointer, pointer),
        ("lmkit_counter_words", None, pointer, pointer, pointer, pointer),
    ):
        function = getattr(code, name)
        function.restype, function.argtypes = result, arguments
    return code


def _load_or_compile() -> ctypes.CDLL:
    """Load the shared library; its name has a hash of everything that decides its content."""
    compiler = os.environ.get("CC") or "cc"
    ingredients = "\0".join([_SOURCE.read_text("utf-8"), compiler, *_FLAGS, platform.platform()])
    name = f"words-{hashlib.sha256(ingredients.encode()).hexdigest()[:16]}"
    return load_compiled(name, functools.partial(_compile, compiler), what="the tokenizer's C code")


def _why_not_compiled(error: OSError | subprocess.SubprocessError) -> str:
    """Return why there is no compiled code; a compiler that failed is quoted."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode("utf-8", "replace").splitlines() or ["it said nothing"]
        words = next((line for line in lines if "error" in line.lower()), lines[-1])
        return (
            f"the C compiler {error.cmd[0]} failed with exit code {error.returncode} ({words.strip()[:200]})"
        )
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return f"no C compiler ({error})"
    return f"no compiled code ({error})"


def _compile(compiler: str, output: Path) -> None:
    command = [*compiler.split(), *_FLAGS, "-o", str(output), str(_SOURCE)]
    done = subprocess.run(command, check=True, capture_output=True, timeout=120)
    if not output.exists():
        raise subprocess.CalledProcessError(done.returncode, command, stderr=b"it made no file")


# ---- threads

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 3  # chunks per worker that are under way or wait to be finished


def share_out(
    items: Iterable[T], workers: Sequence[Callable[[T], R]], finish: Callable[[T, R], None] | None = None
) -> None:
    """Pass every item to a free worker, and every result to `finish` in the order of the items.

    Each worker is used by one thread at a time; `items` and `finish` run in the calling thread. At most `_AHEAD`
    items per worker are under way, which bounds the memory. The first error, in the order of the items, stops
    everything and is raised. One worker does everything in the calling thread.

    >>> share_out([2, 3], [lambda x: x * x, lambda x: x * x], lambda x, square: print(x, square))
    2 4
    3 9
    """
    finish = finish or (lambda item, result: None)
    if len(workers) == 1:
        for item in items:
            finish(item, workers[0](item))
        return
    free: queue.SimpleQueue[Callable[[T], R]] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def work(item: T) -> R:
        worker = free.get()
        try:
            return worker(item)
        finally:
            free.put(worker)

    under_way: collections.deque[tuple[T, Future[R]]] = collections.deque()

    def finish_first() -> None:
        item, result = under_way.popleft()
        finish(item, result.result())

    with ThreadPoolExecutor(len(workers)) as pool:
        for item in items:
            under_way.append((item, pool.submit(work, item)))
            if len(under_way) >= _AHEAD * len(workers):
                finish_first()
        while under_way:
            finish_first()
