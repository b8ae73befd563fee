"""Say how much of a held-out text stands in the training text: whole documents, and runs of 13 words.

A sketch of a text holds 64-bit hashes of its documents, and of a sample of its 13-grams: of those whose hash is
divisible by `modulus`. The rule is the same for both texts: one in `modulus` of the 13-grams they share is found.
A sketch that grows too large doubles the modulus, and keeps a part of what it had.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from lmkit.data.shards import read_meta
from lmkit.errors import LmkitError, UsageError
from lmkit.storage.atomic import atomic_path
from lmkit.storage.inputs import read_input
from lmkit.tokenizer.engine import library

OVERLAP = ".overlap"
"""Ends the name of the sketch beside a token file."""
WORDS = 13
MODULUS = 64
"""Of a sketch of at most `MOST` 13-grams: 6 GB of English."""
MOST = 1 << 24
MOST_SHARED = 0.01
"""Share of the 13-grams that a strict comparison accepts."""
_FORMAT = 1
_END = b"\xff"  # ends a document; no byte of UTF-8
_NEW = 1 << 20  # hashes that wait to be sorted
_HEADER = 9  # numbers before the hashes in a file
_MASK = (1 << 64) - 1
_FIRST, _PRIME, _FACTOR = 0xCBF29CE484222325, 0x100000001B3, 0xD6E8FEB86659FD95
_LAST = pow(_FACTOR, WORDS, 1 << 64)  # factor of the word that leaves a 13-gram
_LONGEST = 1 << 20  # bytes without white space
# Chinese characters and kana, which begin with these bytes and are written without blanks, begin words.
_WORDS = re.compile(rb"[\xe3-\xe9]?[0-9a-z\x80-\xe2\xea-\xfe]+|[\xe3-\xe9]")
_BLANK = re.compile(rb"[ \t\n\v\f\r\xff](?=[^ \t\n\v\f\r\xff]*\Z)")


class Hashes(NamedTuple):
    """Hashes of the documents that end in a part of a text, and of its sampled 13-grams; `numbers`: of the documents
    with the 13-grams, counted from 0 in the text with the empty ones."""

    documents: np.ndarray
    ngrams: np.ndarray
    numbers: np.ndarray


Hasher = Callable[[bytes], Hashes]
"""Hashes more of a text, in which `_END` ends documents.

The hash of a document does not change with the kind and amount of white space, but with everything else. A word is a
run of letters and digits; the case of ASCII letters, and what stands between words, do not count.
"""


def new_hasher() -> Hasher:
    """Return a hasher for one text: in C if the machine can compile it, otherwise in Python."""
    code = library()
    return python_hasher() if code is None else native_hasher(code)


def python_hasher() -> Hasher:
    """Return a hasher. A run of `_LONGEST` bytes without white space is cut."""
    waiting = b""
    document, num_runs, number = (
        0,
        0,
        0,
    )  # of the open document: hash, runs without white space, place in the text
    words: list[int] = []  # its last ones

    def mixed(value: int) -> int:
        """Return the result of SplitMix64's finalizer (Steele et al. 2014)."""
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        return value ^ value >> 31

    @lru_cache(1 << 16)
    def hash_of(letters: bytes) -> int:
        value = _FIRST
        for letter in letters:
            value = (value ^ letter) * _PRIME & _MASK
        return mixed(value)

    def hash_more(text: bytes) -> Hashes:
        nonlocal waiting, document, num_runs, number, words
        text = waiting + text
        end = _BLANK.search(text, max(0, len(text) - _LONGEST))
        cut = len(text) if end is None and len(text) >= _LONGEST else 0 if end is None else end.end()
        waiting = text[cut:]
        documents, ngrams, numbers = [], [], []
        for place, part in enumerate(text[:cut].split(_END)):
            if place:
                documents += [mixed(document)] if num_runs else []
                document, num_runs, number, words = 0, 0, number + 1, []
            for run in part.split():
                document = (document ^ hash_of(run)) * _FACTOR & _MASK
                num_runs += 1
            words += map(hash_of, _WORDS.findall(part.lower()))
            total = 0
            for last, word in enumerate(words, 1):
                total = (
                    total * _FACTOR + word - (words[last - WORDS - 1] * _LAST if last > WORDS else 0) & _MASK
                )
                if last >= WORDS and not (ngram := mixed(total)) % MODULUS:
                    ngrams.append(ngram)
                    numbers.append(number)
            words = words[1 - WORDS :]
        made = (np.array(documents, np.uint64), np.array(ngrams, np.uint64), np.array(numbers, np.int64))
        return Hashes(*made)

    return hash_more


def native_hasher(code: CDLL) -> Hasher:
    """Return a hasher that does the same with `words.c`."""
    state, counts = np.zeros(32, np.uint64), np.zeros(2, np.int64)

    def hash_more(text: bytes) -> Hashes:
        documents, ngrams, numbers = np.empty((3, len(text)), np.uint64)
        places = (array.ctypes.data for array in (documents, ngrams, numbers, counts))
        code.lmkit_hash_text(state.ctypes.data, text, len(text), MODULUS, *places)
        ended, kept = counts.tolist()
        return Hashes(documents[:ended].copy(), ngrams[:kept].copy(), numbers[:kept].astype(np.int64))

    return hash_more


def _is_kept(hashes: np.ndarray, modulus: int) -> np.ndarray:
    return hashes & np.uint64(modulus - 1) == 0


class _Sample:
    """Distinct hashes, of which at most `MOST` are kept: those divisible by `modulus`, a power of two."""

    def __init__(self, hashes: np.ndarray | None = None, modulus: int = 1) -> None:
        self._sorted = np.empty(0, np.uint64) if hashes is None else hashes
        self._new: list[np.ndarray] = []
        self._num_new, self.modulus = 0, modulus

    def add(self, hashes: np.ndarray) -> None:
        kept = hashes[_is_kept(hashes, self.modulus)]
        self._new.append(kept)
        self._num_new += len(kept)
        if self._num_new >= max(_NEW, len(self._sorted) // 4):
            self.sorted()

    def sorted(self) -> np.ndarray:
        if self._num_new:
            hashes = np.concatenate((self._sorted, *self._new))
            self._new, self._num_new = [], 0
            hashes.sort()
            hashes = hashes[np.concatenate(([True], hashes[1:] != hashes[:-1]))]
            while len(hashes) > MOST:
                self.modulus *= 2
                hashes = hashes[_is_kept(hashes, self.modulus)]
            self._sorted = hashes
        return self._sorted

    def has(self, hashes: np.ndarray) -> np.ndarray:
        """Return which of some hashes are here."""
        known = self.sorted()
        if not len(known):
            return np.zeros(len(hashes), bool)
        return known[np.searchsorted(known[:-1], hashes)] == hashes


class Sketch:
    """Hashes of the documents of a text, and of a sample of their 13-grams, in bounded memory."""

    def __init__(self) -> None:
        self.documents, self.ngrams = _Sample(), _Sample(modulus=MODULUS)
        self._hash = new_hasher()

    def add(self, text: bytes, *, end: bytes = b"", last: bool = False) -> None:
        """Add more text; `end` ends documents in it, and a document ends with the `last` text."""
        hashes = self._hash((text.replace(end, _END) if end else text) + (_END if last else b""))
        self.documents.add(hashes.documents)
        self.ngrams.add(hashes.ngrams)

    def save(self, path: Path, source_sha256: str) -> None:
        """Write the sketch of the text with this hash beside its token file."""
        samples = (self.documents, self.ngrams)
        hashes = [sample.sorted() for sample in samples]
        numbers = [number for sample in samples for number in (sample.modulus, len(sample.sorted()))]
        header = np.array([_FORMAT, *numbers, *_words_of(source_sha256)], np.uint64)
        shape: Any = {
            "descr": "<u8",
            "fortran_order": False,
            "shape": (len(header) + sum(map(len, hashes)) + 1,),
        }
        with atomic_path(path.with_suffix(OVERLAP)) as partial, open(partial, "wb") as file:
            npy.write_array_header_1_0(file, shape)
            for part in (header, *hashes, _check_sum(header, *hashes)):
                file.write(part.astype("<u8", copy=False).data)

    @classmethod
    def load(cls, path: Path, source_sha256: str) -> Sketch | None:
        """Read the sketch beside a token file; None: it is of another text than that with this hash. LmkitError: the
        file is damaged ("overlap.damaged")."""
        path = path.with_suffix(OVERLAP)
        data = read_input(path)
        size = int.from_bytes(data[8:10], "little") + 10
        whole = len(data) > size + 8 * _HEADER and not (len(data) - size) % 8
        numbers = np.frombuffer(data, "<u8", offset=size) if whole else np.zeros(_HEADER, np.uint64)
        form, *facts = map(int, numbers[:_HEADER])
        if form != _FORMAT or len(numbers) != _HEADER + facts[1] + facts[3] + 1:
            raise _damaged(path, "has another size than it says, or another format")
        if _check_sum(numbers[:-1])[0] != numbers[-1]:
            raise _damaged(path, "its check sum is wrong")
        if facts[4:] != _words_of(source_sha256):
            return None
        sketch = cls()
        documents, ngrams = np.split(numbers[_HEADER:-1].astype(np.uint64, copy=False), [facts[1]])
        sketch.documents, sketch.ngrams = _Sample(documents, facts[0]), _Sample(ngrams, facts[2])
        return sketch


def _words_of(digest: str) -> list[int]:
    return [int(digest[place : place + 16], 16) for place in range(0, 64, 16)]


def _check_sum(*parts: np.ndarray) -> np.ndarray:
    return np.array([sum(int(part.sum(dtype=np.uint64)) for part in parts) & _MASK], np.uint64)


def _damaged(path: Path, what: str) -> LmkitError:
    hint = "delete it; encoding the text again makes it anew"
    return LmkitError("overlap.damaged", f"{path}: {what}", hint=hint)


@dataclass(frozen=True)
class Overlap:
    """How much of a held-out text stands in the training text.

    Attributes:
        kind: "documents" or "questions".
        documents: distinct ones of the held-out text; `exact`: those that are documents of the training text, apart
            from white space.
        ngrams: distinct 13-grams of the held-out text in the sample; `shared`: those that the training text has.
        sharing: documents with one of these at least; None: not known.
        one_in: one in so many 13-grams is in the sample.
    """

    kind: str
    documents: int
    exact: int
    ngrams: int
    shared: int
    sharing: int | None
    one_in: int

    @property
    def is_clean(self) -> bool:
        return not self.exact and self.shared <= MOST_SHARED * self.ngrams

    def __str__(self) -> str:
        share = f"{self.shared / self.ngrams:.2%}" if self.ngrams else "none"
        sharing = "" if self.sharing is None else f", of {self.sharing:,} {self.kind}"
        return (
            f"{self.exact:,} of {self.documents:,} {self.kind} are whole in the training text, and {share} of "
            f"their {WORDS}-grams ({self.shared:,} of {self.ngrams:,} in a sample of one in {self.one_in}{sharing})"
        )


def shown(overlap: Overlap | None) -> str:
    """Return the line of a result that ends with it, or nothing."""
    return "" if overlap is None else f"\noverlap     {overlap}"


def overlap_of(
    learned: Sequence[Path],
    held_out: Sequence[Path] = (),
    *,
    questions: Sequence[str] = (),
    name: object,
    strict: bool = False,
) -> Overlap | None:
    """Compare held-out token files, or questions with their answers, with the token files that a model learned. None:
    a sketch is missing beside one of the files, or no file is known.

    Args:
        name: what the user named, for errors.
        strict: raise an error if a sketch is missing, if any document is whole in the training text, or if more than
            `MOST_SHARED` of the 13-grams are.

    Raises:
        UsageError: a sketch is missing, and `strict` ("overlap.no_sketch").
        LmkitError: too much overlaps, and `strict` ("overlap.found"); a sketch is damaged ("overlap.damaged").
    """
    files = {*learned, *held_out}
    sketches = {path: sketch for path in files if (sketch := _sketch_beside(path)) is not None}
    if not learned or len(sketches) < len(files):
        if strict:
            lacking = min(files - sketches.keys(), default=name)
            message = f"--strict: {lacking}: no {OVERLAP} file says what text is in the token file"
            hint = "encode the texts again: lmkit run --from encode, or lmkit data encode"
            raise UsageError("overlap.no_sketch", message, hint=hint)
        return None
    known = [sketches[path] for path in learned]
    numbers = None
    if held_out:
        kinds = [(sketches[path].documents.sorted(), sketches[path].ngrams.sorted()) for path in held_out]
        documents, ngrams = (np.unique(np.concatenate(parts)) for parts in zip(*kinds, strict=True))
    else:
        documents, ngrams, numbers = new_hasher()(b"".join(text.encode() + _END for text in questions))
    # What both samples keep
    of_documents, of_ngrams = (
        max(getattr(sketch, kind).modulus for sketch in sketches.values()) for kind in ("documents", "ngrams")
    )
    documents, kept = documents[_is_kept(documents, of_documents)], _is_kept(ngrams, of_ngrams)
    exact = reduce(np.logical_or, (sketch.documents.has(documents) for sketch in known))
    shared = reduce(np.logical_or, (sketch.ngrams.has(ngrams[kept]) for sketch in known))
    found = Overlap(
        kind="documents" if numbers is None else "questions",
        documents=len(documents),
        exact=int(exact.sum()),
        ngrams=int(kept.sum()),
        shared=int(shared.sum()),
        sharing=None if numbers is None else len({*numbers[kept][shared].tolist()}),
        one_in=of_ngrams,
    )
    if strict and not found.is_clean:
        hint = f"hold out other text; --strict accepts no whole document, and {MOST_SHARED:.0%} of the {WORDS}-grams"
        raise LmkitError("overlap.found", f"{name}: {found}", hint=hint)
    return found


def _sketch_beside(path: Path) -> Sketch | None:
    return Sketch.load(path, read_meta(path).source_sha256) if path.with_suffix(OVERLAP).is_file() else None
