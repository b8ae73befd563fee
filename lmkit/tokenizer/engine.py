"""Encode chunks of text and count their words in C (`words.c`), on several threads.

The C code is compiled once by the machine's compiler, kept in the user's cache folder, and called through ctypes. It
releases the interpreter's lock, so that threads run in parallel. Without a compiler, Python does the same work, much
slower; one warning says so.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import heapq
import logging
import os
import platform
import queue
import subprocess
import unicodedata
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from lmkit.core import bpe
from lmkit.core.bpe import NEVER
from lmkit.storage.compiled import load_compiled
from lmkit.tokenizer.pretokenize import PATTERNS, SpecialTokens, character_classes, normal_form, word_finder

CHUNK_BYTES = 1 << 18
"""Bytes of text to encode or count at a time: a chunk stays in the cache, and no thread waits long for another."""

_SOURCE = Path(__file__).with_name("words.c")
_FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-falign-functions=64")
_ROOM = 1 << 21  # ids; more than one chunk of text has

_log = logging.getLogger("lmkit")


Encoder = Callable[[bytes, SpecialTokens], tuple[np.ndarray, np.ndarray]]
"""Takes a chunk of text, and the special tokens to find in it. Returns the ids of the chunk, and the indices of the
special tokens among them, both int32."""


def new_encoder(merges: MergeTable) -> Encoder:
    """Return a new encoder, for one thread: in C if the machine can compile it, otherwise in Python."""
    code = library()
    encode = python_encoder(merges) if code is None else native_encoder(code, merges)
    return functools.partial(encode_normal_form, encode) if merges.nfc else encode


def new_counter(specials: SpecialTokens) -> WordCounter:
    """Return a new counter: in C if the machine can compile it, otherwise in Python."""
    code = library()
    return PythonCounter(specials) if code is None else NativeCounter(code, specials)


def is_utf8(data: bytes) -> bool:
    code = library()
    if code is not None:
        return bool(code.lmkit_is_utf8(data, len(data)))  # releases the lock, and builds no str
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# ---- in Python: `lmkit.core.bpe` has the algorithm to read

_LONG_WORD = 64  # bytes; for a longer word a heap is faster than looking at every pair for each merge
_MOST_WORDS = 1 << 18  # that an encoder in Python remembers


class MergeTable(bpe.MergeTable):
    """`lmkit.core.bpe.MergeTable`, also of tokenizers from elsewhere, and fast for long words.

    Args:
        byte_ids: the token id of each of the 256 bytes; -1 for a byte that is left out, -2 - i if a run of such
            bytes is the token i.
        merges: as of the core's.
        pattern: finds words, see `PATTERNS`.
        whole: words that are tokens without any merge -> id.
        nfc: whether texts are put into Unicode's normal form C first.
    """

    def __init__(
        self,
        byte_ids: Sequence[int],
        merges: Sequence[tuple[int, int, int]],
        *,
        pattern: str = "gpt2",
        whole: Mapping[bytes, int] | None = None,
        nfc: bool = False,
    ) -> None:
        super().__init__(byte_ids, merges)
        self._lacks_bytes = min(self.byte_ids) < 0
        self.pattern = pattern
        self.whole = whole or {}
        self.nfc = nfc

    def encode_word(self, word: bytes) -> list[int]:
        if (whole := self.whole.get(word)) is not None:
            return [whole]
        ids = [self.byte_ids[byte] for byte in word]
        if self._lacks_bytes:
            runs = [(i, before) for before, i in pairwise([0, *ids])]
            ids = [i if i >= 0 else -2 - i for i, before in runs if i >= 0 or i < -1 <= before]
        return self._encode_long(ids) if len(ids) > _LONG_WORD else self.merge(ids)

    def _encode_long(self, ids: list[int]) -> list[int]:
        """Do the same in n log n steps: a linked list of tokens, and a heap of (rank, place of the left token)."""
        end = len(ids)
        following = list(range(1, end + 1))
        previous = list(range(-1, end - 1))
        rank_at = [self.ranks.get(pair, NEVER) for pair in pairwise(ids)] + [NEVER]
        heap = [(rank, i) for i, rank in enumerate(rank_at) if rank != NEVER]
        heapq.heapify(heap)
        while heap:
            rank, i = heapq.heappop(heap)
            if rank_at[i] != rank:  # an earlier merge has changed this pair
                continue
            second = following[i]
            ids[i], ids[second] = self.merges[rank][2], -1
            rank_at[second] = NEVER
            following[i] = following[second]
            if following[i] < end:
                previous[following[i]] = i
            for left in (previous[i], i):
                if left < 0:
                    continue
                right = following[left]
                rank_at[left] = self.ranks.get((ids[left], ids[right]), NEVER) if right < end else NEVER
                if rank_at[left] != NEVER:
                    heapq.heappush(heap, (rank_at[left], left))
        return [token for token in ids if token >= 0]


@dataclass(frozen=True)
class WordCounts:
    """The distinct words of a corpus, joined (uint8); the bytes and the occurrences of each (int64); and how often
    special tokens, which belong to no word, occur."""

    text: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    num_special: int = 0

    @classmethod
    def from_mapping(cls, words: Mapping[bytes, int], num_special: int = 0) -> WordCounts:
        return cls(
            text=np.frombuffer(b"".join(words), np.uint8),
            lengths=np.array([len(word) for word in words], np.int64),
            counts=np.array(list(words.values()), np.int64),
            num_special=num_special,
        )


class PythonCounter:
    """Counts the words of chunks of UTF-8 text, which are cut as `chunks.exact_chunks` does."""

    def __init__(self, specials: SpecialTokens) -> None:
        self._specials = specials
        self._words: Counter[str] = Counter()
        self._num_special = 0

    def add(self, data: bytes) -> None:
        for text, special_id in self._specials.split(data):
            self._words.update(word_finder("gpt2")(text.decode()))
            self._num_special += special_id is not None

    def result(self, *others: PythonCounter) -> WordCounts:
        """Return the words of this counter and of others, in the order of their first appearance."""
        for other in others:
            self._words.update(other._words)
            self._num_special += other._num_special
        counts = {word.encode(): count for word, count in self._words.items()}
        return WordCounts.from_mapping(counts, self._num_special)


def python_encoder(merges: MergeTable) -> Encoder:
    """Return an encoder. A byte that is not UTF-8 counts as a punctuation mark.

    >>> encode = python_encoder(MergeTable(range(256), [(ord("h"), ord("i"), 256)]))
    >>> encode(b"hi<|end|>", SpecialTokens({"<|end|>": 257}))[0].tolist()
    [256, 257]
    """
    find_words = word_finder(merges.pattern)

    @functools.lru_cache(_MOST_WORDS)
    def ids_of(word: str) -> list[int]:
        return merges.encode_word(word.encode("utf-8", "surrogateescape"))

    def encode(data: bytes, specials: SpecialTokens) -> tuple[np.ndarray, np.ndarray]:
        ids, places = array("i"), array("i")
        for text, special_id in specials.split(data):
            words = find_words(text.decode("utf-8", "surrogateescape"))
            ids.extend(chain.from_iterable(map(ids_of, words)))
            if special_id is not None:
                places.append(len(ids))
                ids.append(special_id)
        return np.array(ids, np.int32), np.array(places, np.int32)

    return encode


def encode_normal_form(
    encode: Encoder, data: bytes, specials: SpecialTokens
) -> tuple[np.ndarray, np.ndarray]:
    """Encode in Unicode's normal form C what lies between special tokens; as of `Encoder`. Nothing composes across a
    cut of `chunks.exact_chunks`."""
    if unicodedata.is_normalized("NFC", data.decode("utf-8", "surrogateescape")):
        return encode(data, specials)
    parts, places, size = [], [], 0
    for text, special_id in specials.first.split(data):
        ids, inside = encode(normal_form(text), specials.of_normal_form)
        parts.append(ids)
        places.append(inside + np.int32(size))
        size += len(ids)
        if special_id is not None:
            parts.append(np.array([special_id], np.int32))
            places.append(np.array([size], np.int32))
            size += 1
    return np.concatenate(parts), np.concatenate(places)


# ---- in C


def native_encoder(code: ctypes.CDLL, merges: MergeTable) -> Encoder:
    """Return an encoder that does the same with `words.c`, for valid UTF-8. It remembers words."""
    classes = character_classes()  # kept for good: the C encoder borrows it
    byte_ids = np.array(merges.byte_ids, np.int32)
    table = np.fromiter(chain.from_iterable(merges.merges), np.int32, 3 * len(merges.merges))
    left, right, merged = table.reshape(-1, 3).T.copy()
    words = b"".join(merges.whole)
    sizes = np.fromiter(map(len, merges.whole), np.int64)
    ids_of_words = np.fromiter(merges.whole.values(), np.int64)
    encoder = code.lmkit_encoder_new(
        *(classes.ctypes.data, byte_ids.ctypes.data),
        *(left.ctypes.data, right.ctypes.data, merged.ctypes.data, len(merged)),
        list(PATTERNS).index(merges.pattern),
        *(words, len(words), sizes.ctypes.data, ids_of_words.ctypes.data, len(ids_of_words)),
    )
    if not encoder:
        raise MemoryError("no memory for the encoder")
    room, num_places = np.empty((2, _ROOM), np.int32), ctypes.c_int64()

    def encode(data: bytes, specials: SpecialTokens) -> tuple[np.ndarray, np.ndarray]:
        # A token has at least one byte. Reusing the room avoids page faults on fresh memory.
        ids, places = room if len(data) <= _ROOM else np.empty((2, len(data)), np.int32)
        count = code.lmkit_encode(
            *(encoder, data, len(data), specials.packed),
            *(ids.ctypes.data, places.ctypes.data, ctypes.byref(num_places)),
        )
        if count < 0:
            raise MemoryError("no memory to encode a chunk")
        return ids[:count].copy(), places[: num_places.value].copy()

    weakref.finalize(encode, code.lmkit_encoder_free, encoder)
    return encode


class NativeCounter:
    """Does what `PythonCounter` does, with `words.c`. It serves one thread."""

    def __init__(self, code: ctypes.CDLL, specials: SpecialTokens) -> None:
        self._code = code
        self._packed_specials = specials.packed
        classes = character_classes()  # kept for good: the C counter borrows it
        self._counter = code.lmkit_counter_new(classes.ctypes.data)
        if not self._counter:
            raise MemoryError("no memory for the counter")
        weakref.finalize(self, code.lmkit_counter_free, self._counter)

    def add(self, data: bytes) -> None:
        if self._code.lmkit_count(self._counter, data, len(data), self._packed_specials):
            raise MemoryError("no memory to count the words of a chunk")

    def result(self, *others: NativeCounter) -> WordCounts:
        for other in others:
            if self._code.lmkit_count_together(self._counter, other._counter):
                raise MemoryError("no memory to add the counts")
        sizes = np.empty(3, np.int64)
        self._code.lmkit_counter_sizes(self._counter, sizes.ctypes.data)
        num_words, num_bytes, num_special = sizes.tolist()
        text = np.empty(num_bytes, np.uint8)
        lengths, counts = np.empty(num_words, np.int64), np.empty(num_words, np.int64)
        self._code.lmkit_counter_words(
            self._counter, text.ctypes.data, lengths.ctypes.data, counts.ctypes.data
        )
        return WordCounts(text, lengths, counts, num_special)


WordCounter = NativeCounter | PythonCounter


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled code, or None if this machine cannot compile it. Compiles it on first use."""
    compiler = os.environ.get("CC") or "cc"
    # Everything that decides what the library contains.
    ingredients = "\0".join([_SOURCE.read_text("utf-8"), compiler, *_FLAGS, platform.platform()])
    name = f"words-{hashlib.sha256(ingredients.encode()).hexdigest()[:16]}"
    try:
        code = load_compiled(name, functools.partial(_compile, compiler), what="the tokenizer's C code")
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("no compiled code (%s): the tokenizer runs in Python, much slower", error)
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    data = (ctypes.c_char_p, size)
    for name, result, *arguments in (
        ("lmkit_is_utf8", ctypes.c_int, *data),
        ("lmkit_encoder_new", pointer, *5 * (pointer,), size, ctypes.c_int, *data, pointer, pointer, size),
        ("lmkit_encoder_free", None, pointer),
        ("lmkit_encode", size, pointer, *data, ctypes.c_char_p, pointer, pointer, pointer),
        ("lmkit_counter_new", pointer, pointer),
        ("lmkit_counter_free", None, pointer),
        ("lmkit_count", ctypes.c_int, pointer, *data, ctypes.c_char_p),
        ("lmkit_count_together", ctypes.c_int, pointer, pointer),
        ("lmkit_counter_sizes", None, pointer, pointer),
        ("lmkit_counter_words", None, pointer, pointer, pointer, pointer),
        ("lmkit_hash_text", None, pointer, *data, ctypes.c_uint64, pointer, pointer, pointer, pointer),
    ):
        function = getattr(code, name)
        function.restype, function.argtypes = result, arguments
    return code


def _compile(compiler: str, output: Path) -> None:
    command = [*compiler.split(), *_FLAGS, "-o", str(output), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    if done.returncode or not output.exists():
        lines = done.stderr.splitlines() or ["it said nothing"]
        words = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise OSError(f"{compiler} failed with exit code {done.returncode}: {words.strip()[:200]}")


# ---- threads

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 3  # chunks per worker that are under way or wait to be finished


def share_out(items: Iterable[T], workers: Sequence[Callable[[T], R]]) -> Generator[tuple[T, R], None, None]:
    """Pass every item to a free worker; yield every item with its result, in the order of the items.

    `items` is read in the calling thread, and one worker does everything there. At most `_AHEAD` items per worker are
    under way, which bounds the memory. The first error, in the order of the items, stops everything and is raised. A
    caller that may raise one closes the generator.

    >>> list(share_out([2, 3], [lambda x: x * x, lambda x: x * x]))
    [(2, 4), (3, 9)]
    """
    if len(workers) == 1:
        for item in items:
            yield item, workers[0](item)
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
    with ThreadPoolExecutor(len(workers)) as pool:
        for item in items:
            under_way.append((item, pool.submit(work, item)))
            if len(under_way) >= _AHEAD * len(workers):
                first, result = under_way.popleft()
                yield first, result.result()
        for first, result in under_way:
            yield first, result.result()
