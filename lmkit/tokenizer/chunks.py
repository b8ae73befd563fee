"""Cut a stream of text into chunks that can be encoded apart.

A cut is exact if a word begins there whatever text follows: then the ids of the chunks, joined, are the ids of the
text. No word of any pattern contains a space after a character that is no whitespace, or a newline after a letter or
number. So these always begin a word, and no look-ahead of a pattern reaches across them. The same holds between a
letter or number and a character that is neither, which serves scripts without spaces; a mark is left with its letter,
because normal forms compose the two. A special token is never cut.
"""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import regex

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.storage.inputs import open_input
from lmkit.tokenizer.engine import CHUNK_BYTES, is_utf8
from lmkit.tokenizer.pretokenize import SpecialTokens

ErrorMode = Literal["strict", "replace"]
REPLACE = (
    'convert the file, or read what is invalid as U+FFFD: corpus.errors = "replace", or --errors replace'
)

# Between a letter or number and another character that is no mark, or visible ASCII and a space; from the end
_CUT = regex.compile(r"(?r)(?<=[\p{L}\p{N}])(?=[^\p{L}\p{N}\p{M}])|(?<=[!-~])(?= )")
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_TRIES = 16  # places to try per window; some may lie in special tokens


class Chunk(NamedTuple):
    """`num_bytes` bytes of text from byte `offset` of source number `source`."""

    source: int
    offset: int
    num_bytes: int
    data: bytes


def text_file_status(path: Path) -> os.stat_result:
    """Return the status of a regular file; UsageError for others (a pipe could be read only once)."""
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, reason(error)) from error
    if not stat.S_ISREG(status.st_mode):
        is_folder = stat.S_ISDIR(status.st_mode)
        raise unreadable(path, "is a directory" if is_folder else "is not a regular file")
    return status


def read_blocks(path: Path, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the content of a file, `size` bytes at a time; UsageError if it cannot be read."""
    try:
        with open_input(path) as file:
            while block := file.read(size):
                yield block
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise unreadable(path, reason(error)) from error


def unreadable(path: Path, why: str) -> UsageError:
    return UsageError("text.unreadable", f"{path}: {why}", hint="give the path of a text file")


def exact_chunks(
    blocks: Iterable[bytes], specials: SpecialTokens, *, size: int = CHUNK_BYTES, source: int = 0
) -> Iterator[Chunk]:
    """Regroup a stream of bytes into chunks of about `size` bytes that can be encoded apart.

    Memory: `size` bytes plus the longest stretch of text without a cut (usually one word).

    >>> [chunk.data for chunk in exact_chunks([b"one two thr", b"ee four"], SpecialTokens({}), size=10)]
    [b'one two', b' three', b' four']
    """
    waiting: list[bytes] = []
    length = offset = 0
    wanted = size
    for block in blocks:
        waiting.append(block)
        length += len(block)
        if length < wanted:
            continue
        data = b"".join(waiting)
        cut = last_cut(data, specials)
        if cut == 0:
            # One enormous word: searching again only when the text has doubled keeps the search linear.
            waiting, wanted = [data], 2 * length
            continue
        yield Chunk(source, offset, cut, data[:cut])
        offset += cut
        waiting, length, wanted = [data[cut:]], length - cut, size
    if length:
        yield Chunk(source, offset, length, b"".join(waiting))


def last_cut(data: bytes, specials: SpecialTokens) -> int:
    """Return the last offset at which `data` may be cut, whatever follows; 0 if there is none."""
    # The end of `data` may be the beginning of a special token or of a character.
    limit = len(data) - max(specials.longest, _LONGEST_CHARACTER)
    window = 1 << 6
    while True:
        low, tries = max(0, limit - window), _TRIES
        # Bytes that are not UTF-8 become surrogates, which are neither letters nor numbers.
        # Decode beyond `limit`: a character that it divides would look like a surrogate after a letter.
        text = data[low:].decode("utf-8", "surrogateescape")
        for match in _CUT.finditer(text):
            cut = low + len(text[: match.start()].encode("utf-8", "surrogateescape"))
            if cut > limit:
                continue
            if not specials.would_be_cut(data, cut):
                return cut
            if not (tries := tries - 1):
                break
        if low == 0:
            return 0
        window *= 16


def valid_utf8(chunk: Chunk, path: Path, errors: ErrorMode) -> bytes:
    """Return the chunk as valid UTF-8, without a byte order mark, with which some editors begin a file.

    With errors="replace", invalid bytes become U+FFFD. "strict": LmkitError names the offset ("text.not_utf8").
    """
    bom = len(codecs.BOM_UTF8) if not chunk.offset and chunk.data.startswith(codecs.BOM_UTF8) else 0
    data = chunk.data[bom:] if bom else chunk.data
    if is_utf8(data):
        return data
    try:
        return data.decode("utf-8", errors).encode()
    except UnicodeDecodeError as error:
        message = f"{path}: invalid UTF-8 at byte {chunk.offset + bom + error.start}"
        raise LmkitError("text.not_utf8", message, hint=REPLACE) from None


class TextFiles:
    """Text files to be read once, in chunks.

    UsageError: a file is missing or not a regular file ("text.unreadable"), or all are empty ("text.empty").
    """

    def __init__(self, paths: Sequence[Path], specials: SpecialTokens, errors: ErrorMode) -> None:
        self.paths, self.specials, self.errors = list(paths), specials, errors
        self.sizes = [text_file_status(path).st_size for path in paths]
        self.num_bytes = sum(self.sizes)
        if not self.num_bytes:
            names = ", ".join(map(str, paths)) or "no files"
            message = f"the corpus is empty: {names}"
            raise UsageError("text.empty", message, hint="give a file that contains text")

    def chunks(self, source: int) -> Iterator[Chunk]:
        """Yield the chunks of file number `source`; LmkitError: it changes meanwhile ("corpus.changed")."""
        path, num_bytes = self.paths[source], 0
        before = text_file_status(path)
        for chunk in exact_chunks(read_blocks(path), self.specials, source=source):
            num_bytes += chunk.num_bytes
            yield chunk
        # A write to the file changes its size or its time.
        if text_file_status(path).st_mtime_ns != before.st_mtime_ns or num_bytes != self.sizes[source]:
            message = f"{path}: changed while it was being read"
            raise LmkitError("corpus.changed", message, hint="run again when it is complete")
