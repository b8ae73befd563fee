"""Read and write token files: a flat array of token ids in a `.npy` file, described by a `.json` file.

A `.documents` file beside it holds the position at which each document begins, as little-endian uint64; behind them,
if its tokens have other bytes than its text, the bytes of the text of each document. The arrays are memory-mapped, so
that a corpus larger than RAM can be sampled. The `.npy` file gets its name last: a token file never lies under its
final name without its description, or half written.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, BinaryIO

import numpy as np
from numpy.lib import format as npy
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.recipe.run_folder import RECIPE, read_record, token_file
from lmkit.storage.atomic import atomic_path, write_atomic
from lmkit.storage.inputs import open_input, read_object

if TYPE_CHECKING:  # the batches need torch
    from lmkit.core.batches import Tokens

FORMAT = 2
SIDECAR, DOCUMENTS, MASK = ".json", ".documents", ".mask"
"""Endings of the files beside a token file: description; where documents begin; a bit for each token that counts."""
PARTS = (".npy", SIDECAR, DOCUMENTS, MASK)
"""Endings of all files of which a token file may consist."""
_MAX_SIDECAR_BYTES = 1 << 16
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<>|]\w{1,8})', 'fortran_order': False, 'shape': \((\d{1,19}),\), \} *\n"
)
_WRITE_BACK_BYTES = 1 << 22  # passed to the disk at a time
_CHECK_TOKENS = 1 << 24  # compared at a time when ids are checked

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class TokenMeta:
    """The description of a token file, as its `.json` file holds it.

    Attributes:
        tokenizer_sha256: "": not known, of a `.bin` file.
        num_bytes: size of the text; special tokens have none. 0: not known, of a `.bin` file.
        source_sha256: SHA-256 of the text files, concatenated; of several shards, of their numbers and hashes.
        counted_tokens, counted_bytes: tokens that count as targets, and their text; None: all of them.
    """

    tokenizer_sha256: str
    vocab_size: Annotated[int, Field(gt=0, le=1 << 32)]
    num_tokens: Count
    num_documents: Count
    num_bytes: Count
    source_sha256: str
    format: int
    counted_tokens: Count | None = None
    counted_bytes: Count | None = None


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """An open token file, or several as one.

    Attributes:
        tokens: a read-only memory map, one-dimensional, uint16 or uint32; of several files, what reads like one.
        mask: a memory map with a bit for each token, the highest bit of a byte first: whether it counts as a target.
            None: all count.
        documents: a read-only memory map of the positions at which documents begin, uint64, ascending. None: not
            known: the `.documents` file is missing.
        sizes: the bytes of the text of each document, uint64; None: those of its tokens.
    """

    tokens: Tokens
    meta: TokenMeta
    mask: np.ndarray | None = None
    documents: np.ndarray | None = None
    sizes: np.ndarray | None = None


def token_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 if it holds every id, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclasses.dataclass(eq=False, kw_only=True)
class TokenFileWriter:
    """Write a token file (`.npy`), and a mask beside it if `masked`, piece by piece.

    Call `append` for each piece, then `finish`.

    If the `with` block fails or ends without `finish`, no file is left. UsageError: the description would replace
    another JSON file, such as the tokenizer ("tokens.replaces_json").
    """

    path: Path = dataclasses.field(kw_only=False)
    vocab_size: int
    tokenizer_sha256: str
    masked: bool = False

    def __enter__(self) -> TokenFileWriter:
        if self.path.suffix != ".npy":
            raise ValueError(f"a token file ends in .npy: {self.path}")
        self._dtype = token_dtype(self.vocab_size)
        self._meta: TokenMeta | None = None
        self._num_tokens = self._num_documents = self._counted_tokens = self._write_back_from = 0
        sidecar = self.path.with_suffix(SIDECAR)
        try:
            is_ours = not sidecar.exists() or "tokenizer_sha256" in read_object(sidecar)
        except (OSError, ValueError):  # no JSON object: a damaged description only if there is a token file
            is_ours = self.path.exists()
        if not is_ours:
            message = f"{sidecar}: exists; the description of {self.path.name} would replace it"
            raise UsageError("tokens.replaces_json", message, hint="give the token file another name")
        with ExitStack() as stack:
            files: list[BinaryIO] = []
            for suffix in (".npy", DOCUMENTS, *([MASK] if self.masked else [])):
                partial = stack.enter_context(atomic_path(self.path.with_suffix(suffix)))
                files.append(stack.enter_context(open(partial, "wb")))
            self._file, self._documents_file = files[:2]
            self._mask_file = files[-1]  # written to if `masked`
            self._sizes_file = stack.enter_context(tempfile.TemporaryFile(dir=self.path.parent))
            self._counts_file = stack.enter_context(tempfile.TemporaryFile(dir=self.path.parent))
            self._header = npy.header_data_from_array_1_0(np.empty(0, self._dtype))
            npy.write_array_header_1_0(self._file, self._header)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if value is not None:
            return self._stack.__exit__(kind, value, trace)
        with self._stack:
            if self._meta is None:
                raise RuntimeError("the token file was not finished")
            for old in (self.path, self.path.with_suffix(DOCUMENTS)):  # must not meet the new description
                old.unlink(missing_ok=True)
            described = TypeAdapter(TokenMeta).dump_json(self._meta, indent=2, exclude_none=True)
            write_atomic(self.path.with_suffix(SIDECAR), described + b"\n")
        return None

    def append(
        self,
        ids: np.ndarray,
        *,
        counts: bool = True,
        documents: Sequence[int] | np.ndarray = (),
        sizes: Sequence[int] = (),
    ) -> None:
        """Add ids at the end; ValueError: they are no integers of the vocabulary in one dimension.

        Args:
            counts: whether they count as targets.
            documents: indices of `ids` at which documents begin, ascending.
            sizes: bytes of the text of documents, in order: at the end of all documents or of none.
        """
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"ids must be integers in one dimension, got {ids.dtype} {ids.shape}")
        # Negative ids are the largest of their unsigned type.
        if len(ids) and int(ids.view(ids.dtype.str.replace("i", "u")).max()) >= self.vocab_size:
            raise ValueError(f"ids must be 0 to {self.vocab_size - 1}")
        self._file.write(ids.astype(self._dtype).data)
        self._documents_file.write((np.asarray(documents, "<u8") + np.uint64(self._num_tokens)).data)
        if len(sizes):
            self._sizes_file.write(np.asarray(sizes, "<u8").data)
        self._num_documents += len(documents)
        self._num_tokens += len(ids)
        size = self._num_tokens * self._dtype.itemsize
        if size - self._write_back_from >= _WRITE_BACK_BYTES and sys.platform == "linux":
            # Linux begins to write dirty pages back without waiting: little is left for the fsync at the end.
            part = self._write_back_from, size - self._write_back_from
            os.posix_fadvise(self._file.fileno(), *part, os.POSIX_FADV_DONTNEED)
            self._write_back_from = size
        if self.masked:
            self._counts_file.write(bytes([counts]) * len(ids))
            self._counted_tokens += len(ids) * counts

    def finish(self, *, num_bytes: int, source_sha256: str, counted_bytes: int | None = None) -> TokenMeta:
        """Complete the file; it appears when the `with` block ends."""
        self._sizes_file.seek(0)
        shutil.copyfileobj(self._sizes_file, self._documents_file)
        self._documents_file.flush()
        self._counts_file.seek(0)
        while counts := self._counts_file.read(1 << 20):  # bits of whole bytes, but for the last one
            self._mask_file.write(np.packbits(np.frombuffer(counts, bool)).data)
        self._mask_file.flush()
        # numpy leaves room in the header for the count to grow, so that it can be overwritten in place.
        self._file.seek(0)
        npy.write_array_header_1_0(self._file, self._header | {"shape": (self._num_tokens,)})
        self._file.flush()
        self._meta = TokenMeta(
            tokenizer_sha256=self.tokenizer_sha256,
            vocab_size=self.vocab_size,
            num_tokens=self._num_tokens,
            num_documents=self._num_documents,
            num_bytes=num_bytes,
            source_sha256=source_sha256,
            format=FORMAT,
            counted_tokens=self._counted_tokens if self.masked else None,
            counted_bytes=counted_bytes,
        )
        return self._meta


def open_npy(path: Path, tokenizer_sha256: str | None) -> TokenFile:
    """Open one `.npy` file; see `lmkit.data.shards.open_tokens`."""
    meta = read_npy_meta(path)
    tokens = _map(path, meta)
    if tokenizer_sha256 is not None and tokenizer_sha256 != meta.tokenizer_sha256:
        message = f"{path}: made with tokenizer {meta.tokenizer_sha256}, not with {tokenizer_sha256}"
        hint = "encode the text again, or use the tokenizer that the file was made with"
        raise UsageError("tokens.wrong_tokenizer", message, hint=hint)
    mask = None if meta.counted_tokens is None else _map_mask(path, meta)
    return TokenFile(tokens, meta, mask, *_map_documents(path, meta))


def _damaged(path: Path, problem: str) -> LmkitError:
    return LmkitError("tokens.damaged", problem, hint=_way_back(path))


def _way_back(path: Path) -> str:
    """Return the hint that names the command which makes `path` again."""
    folder = path.parent.parent
    again = f"lmkit data encode TEXT {shlex.quote(str(path))} --tokenizer TOKENIZER.json"
    if path == token_file(folder, path.stem) and "encode" in read_record(folder):
        again = f"lmkit run {shlex.quote(str(folder / RECIPE))}"
    return f"move {path} away and make it again with: {again}"


def read_npy_meta(path: Path) -> TokenMeta:
    """Return the description of one `.npy` file."""
    if not os.path.lexists(sidecar := path.with_suffix(SIDECAR)):
        hint = f"lmkit.data.TokenFileWriter writes ids of your own; if lmkit wrote it: {_way_back(path)}"
        message = f"{path}: no {sidecar.name} beside it describes it"
        raise UsageError("tokens.not_described", message, hint=hint)
    try:
        content = read_object(sidecar, most_bytes=_MAX_SIDECAR_BYTES)
    except (OSError, ValueError) as error:
        raise _damaged(path, f"{sidecar}: {reason(error)}; it has to describe {path.name}") from None
    if content.get("format", FORMAT) != FORMAT:
        message = f"{sidecar}: format {content['format']!r}, but this lmkit reads {FORMAT}"
        raise LmkitError("tokens.other_format", message, hint="encode the text again, or upgrade lmkit")
    try:
        return TokenMeta(**content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "a key"
        raise _damaged(path, f"{sidecar}: {where}: {first['msg']}") from None


def _map(path: Path, meta: TokenMeta) -> np.ndarray:
    """Map the ids of a token file, and check that all are in the vocabulary.

    Only the form in which numpy writes a flat array of numbers is accepted: numpy's own reader evaluates the header
    as Python, fails with different errors for different damage, and may unpickle an array of objects.
    """
    with open_input(path) as file:
        magic = file.read(len(_MAGIC) + 2)
        header = file.read(int.from_bytes(magic[-2:], "little"))
        offset, size = file.tell(), os.fstat(file.fileno()).st_size
    match = _HEADER.fullmatch(header) if magic.startswith(_MAGIC) else None
    if match is None:
        raise _damaged(path, f"{path}: not a .npy file with one row of whole numbers")
    dtype, length, expected = match[1].decode(), int(match[2]), token_dtype(meta.vocab_size)
    if dtype != expected.str:
        raise _damaged(path, f"{path}: holds {dtype}, not {expected.str}")
    if length != meta.num_tokens or size != offset + length * expected.itemsize:
        held = (size - offset) // expected.itemsize
        said = f"{length} in its header, {meta.num_tokens} in its description"
        raise _damaged(path, f"{path}: {held} tokens in the file, {said}")
    if length == 0:
        raise LmkitError("tokens.empty", f"{path}: no tokens in it", hint="encode a text that is not empty")
    tokens = np.memmap(path, expected, "r", offset, (length,))
    if meta.vocab_size < 1 << 8 * expected.itemsize:
        for start, part in parts(tokens):
            if (wrong := beyond(part, start, meta.vocab_size)) is not None:
                raise _damaged(path, f"{path}: {wrong}")
    return tokens


def parts(tokens: Tokens) -> Iterator[tuple[int, np.ndarray]]:
    """Yield positions and the tokens from there on, so many that their check needs little memory."""
    for start in range(0, len(tokens), _CHECK_TOKENS):
        yield start, tokens[start : start + _CHECK_TOKENS]


def beyond(part: np.ndarray, start: int, vocab_size: int) -> str | None:
    """Return which of the tokens from position `start` on is beyond the vocabulary, for messages; None: none is."""
    if int(part.max()) < vocab_size:
        return None
    at = int(np.argmax(part >= vocab_size))
    return f"token {int(part[at])} at position {start + at}, but the vocabulary has {vocab_size}"


def _map_mask(path: Path, meta: TokenMeta) -> np.ndarray:
    mask = path.with_suffix(MASK)
    size = mask.stat().st_size if mask.is_file() else 0
    if size != -(-meta.num_tokens // 8):
        raise _damaged(path, f"{mask}: {size} bytes for {meta.num_tokens} tokens")
    bits = np.memmap(mask, np.uint8, "r")
    starts = range(0, len(bits), _CHECK_TOKENS // 8)
    counted = sum(int(np.unpackbits(bits[i : i + _CHECK_TOKENS // 8]).sum()) for i in starts)
    beyond = int(bits[-1]) & (0xFF >> meta.num_tokens % 8) if meta.num_tokens % 8 else 0
    if beyond or counted != meta.counted_tokens:
        raise _damaged(path, f"{mask}: {counted} tokens count, {meta.counted_tokens} in the description")
    return bits


def _map_documents(path: Path, meta: TokenMeta) -> tuple[np.ndarray | None, np.ndarray | None]:
    beside, count = path.with_suffix(DOCUMENTS), meta.num_documents
    if not beside.is_file():  # few read it, and they ask for it
        return None, None
    size = beside.stat().st_size
    if size not in (8 * count, 16 * count):
        raise _damaged(path, f"{beside}: {size} bytes for {count} documents")
    content = np.memmap(beside, "<u8", "r") if size else np.empty(0, "<u8")
    starts, sizes = content[:count], content[count:]
    if count and (int(starts[-1]) >= meta.num_tokens or not bool((starts[1:] > starts[:-1]).all())):
        problem = f"{beside}: not the ascending positions of documents in {meta.num_tokens} tokens"
        raise _damaged(path, problem)
    return starts, sizes if len(sizes) else None


_log = logging.getLogger("lmkit")


def document_starts(file: TokenFile) -> np.ndarray:
    """Return the positions at which documents begin; UsageError: no `.documents` file ("tokens.no_documents")."""
    if file.documents is None:
        message = f"{_name(file.tokens)}: no .documents beside it says where its documents begin"
        hint = 'copy it, too, or encode the text again; or use data.sampling = "windows"'
        raise UsageError("tokens.no_documents", message, hint=hint)
    return file.documents


def starts_that_count(file: TokenFile, starts: np.ndarray, context_length: int) -> np.ndarray:
    """Return the document starts whose windows of `context_length` tokens have a target that counts.

    UsageError: no document is followed by enough tokens ("tokens.too_short"), or no target counts
    ("tokens.no_targets").
    """
    starts = starts[starts <= len(file.tokens) - context_length - 1]
    if len(starts) == 0:
        message = f"{_name(file.tokens)}: no document is followed by {context_length + 1} tokens"
        raise UsageError("tokens.too_short", message, hint="lower model.context_length or sample raw windows")
    if file.mask is None:
        return starts
    before = np.concatenate(([0], np.cumsum(np.unpackbits(file.mask)[: len(file.tokens)], dtype=np.int64)))
    places = starts.astype(np.int64)
    counts = before[places + context_length + 1] > before[places + 1]
    hint = 'raise model.context_length, or use data.sampling = "windows"'
    if not counts.any():
        message = f"{_name(file.tokens)}: no document has a target that counts among its first tokens"
        raise UsageError("tokens.no_targets", message, hint=hint)
    if lost := int((~counts).sum()):
        _log.warning(
            "%s: %d of %d documents begin with more tokens than the context, none of which counts; %s",
            *(_name(file.tokens), lost, len(starts), hint),
        )
    return starts[counts]


def check_divisible(batch_size: int, ranks: int, accumulation: int) -> None:
    """Refuse a batch that ranks x accumulation steps do not divide ("batches.indivisible")."""
    if batch_size % (ranks * accumulation):
        parts = f"{ranks} ranks x {accumulation} accumulation steps"
        message = f"train.batch_size = {batch_size} is not divisible by {parts}"
        raise UsageError("batches.indivisible", message, hint=f"use a multiple of {ranks * accumulation}")


def check_length(tokens: Tokens, context_length: int) -> None:
    """Refuse fewer than `context_length + 1` token ids, one window and its targets ("tokens.too_short")."""
    if len(tokens) < (needed := context_length + 1):
        message = f"{_name(tokens)}: {len(tokens)} tokens, but model.context_length + 1 = {needed}"
        hint = "use a longer text or a shorter model.context_length"
        raise UsageError("tokens.too_short", message, hint=hint)


def _name(tokens: Tokens) -> str:
    return str(getattr(tokens, "filename", None) or "token file")
