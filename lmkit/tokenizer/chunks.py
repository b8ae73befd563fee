"""Text as a stream of pieces that can be encoded apart: every cut lies where a word begins, whatever follows.

GPT-2's pattern has no word in which whitespace follows a character that is none. So a space or a newline after such
a character always begins a word, and no look-ahead of the pattern reaches across it. The same holds between a letter
or number and what is neither: that serves scripts that are written without spaces. A cut inside a special token is
refused. Pieces in this sense are exact: the ids of the pieces, joined, are the ids of the text.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import regex

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.tokenizer.native import chunk_bytes, is_utf8
from lmkit.tokenizer.special_tokens import SpecialTokens

ErrorMode = Literal["strict", "replace"]

_BEFORE_SPACE = re.compile(rb"[\x21-\x7e](?=[ \n])")
_AFTER_LETTER = regex.compile(r"(?<=[\p{L}\p{N}])(?=[^\p{L}\p{N}])")
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_TRIES = 16  # the last places in a window; some may lie in special tokens


class Chunk(NamedTuple):
    """Some text and where it stands: `num_bytes` bytes from byte `offset` of source number `source`."""

    source: int
    offset: int
    num_bytes: int
    data: bytes  # these bytes, or what `valid_utf8` made of them


def text_file_status(path: Path) -> os.stat_result:
    """Of a file that can be read more than once.

    Raises:
        UsageError: it cannot be looked at, or is no regular file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}", hint="give the path of a text file") from error
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: is not a regular file", hint="give the path of a text file")
    return status


def read_blocks(path: Path, size: int | None = None) -> Iterator[bytes]:
    """Yield the content of a file, `size` bytes at a time (`chunk_bytes`).

    Raises:
        UsageError: there is no such file, or it cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(size or chunk_bytes()):
                yield block
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UsageError(f"{path}: {reason(error)}", hint="give the path of a text file") from error


def exact_chunks(
    blocks: Iterable[bytes], specials: SpecialTokens, *, size: int | None = None, source: int = 0
) -> Iterator[Chunk]:
    """Regroup a stream of bytes into chunks of about `size` bytes (`chunk_bytes`) that can be encoded apart.

    Memory: `size` plus the longest stretch of text without a place to cut (one word, usually).
    """
    waiting: list[bytes] = []
    length = offset = 0
    wanted = size = size or chunk_bytes()
    for block in blocks:
        waiting.append(block)
        length += len(block)
        if length < wanted:
            continue
        data = b"".join(waiting)
        cut = last_cut(data, specials)
        if cut == 0:
            # One enormous word. Looking again only when the text has doubled keeps the search linear.
            waiting, wanted = [data], 2 * length
            continue
        yield Chunk(source, offset, cut, data[:cut])
        offset += cut
        waiting, length, wanted = [data[cut:]], length - cut, size
    if length:
        yield Chunk(source, offset, length, b"".join(waiting))


def last_cut(data: bytes, specials: SpecialTokens) -> int:
    """Return the last offset in `data` at which it may be cut though more text follows; 0 if there is none."""
    # A special token, or a character, may have begun at the end of `data` and not be whole yet.
    limit = len(data) - max(specials.longest, _LONGEST_CHARACTER)
    window = 1 << 8
    while True:
        low = max(0, limit - window)
        for cuts in (_cuts_before_space, _cuts_after_letter):
            for cut in cuts(data, low, limit)[: -_TRIES - 1 : -1]:
                if not specials.would_be_cut(data, cut):
                    return cut
        if low == 0:
            return 0
        window *= 16


def _cuts_before_space(data: bytes, low: int, high: int) -> list[int]:
    return [match.end() for match in _BEFORE_SPACE.finditer(data, low, max(low, high))]


def _cuts_after_letter(data: bytes, low: int, high: int) -> list[int]:
    # Bytes that are not UTF-8 become surrogates, which are neither letters nor numbers, and come back unchanged.
    # To the very end, not to `high`: half a character there would look like a surrogate behind a letter.
    text = data[low:].decode("utf-8", "surrogateescape")
    last_few = [match.start() for match in _AFTER_LETTER.finditer(text)][-2 * _TRIES :]
    cuts = [low + len(text[:cut].encode("utf-8", "surrogateescape")) for cut in last_few]
    return [cut for cut in cuts if cut <= high]


def valid_utf8(chunk: Chunk, name: str, errors: ErrorMode) -> Chunk:
    """Return `chunk` if it is UTF-8; else what U+FFFD makes of it, if `errors` allows that.

    Raises:
        LmkitError: they are not UTF-8 and `errors` is "strict"; names the byte offset.
    """
    if is_utf8(chunk.data):
        return chunk
    if errors == "replace":
        return chunk._replace(data=chunk.data.decode("utf-8", "replace").encode())
    try:
        chunk.data.decode()
    except UnicodeDecodeError as error:
        raise LmkitError(
            f"{name}: invalid UTF-8 at byte {chunk.offset + error.start}",
            hint="fix the file, or replace what is invalid by U+FFFD with --errors replace",
        ) from None
    return chunk
