"""Which files hold what, by the endings of their names; open them, decompressed."""

from __future__ import annotations

import gzip
import importlib
import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any, BinaryIO

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.storage.inputs import open_input
from lmkit.tokenizer.chunks import unreadable

Stream = IO[bytes] | gzip.GzipFile
"""An open file, or the decompressed content of one."""
COMPRESSED = (".gz", ".zst")
"""Ends the name of a compressed file."""
_ZSTD_BYTES = 128  # to decompress at a time: they may hold 4 MiB of text

log = logging.getLogger("lmkit")


def kind_of(path: Path) -> str:
    """Return the ending of a file's name, in lower case; of a compressed file, the ending of its content's."""
    name = Path(path.name.lower())
    return (name.with_suffix("") if name.suffix in COMPRESSED else name).suffix


def holds_json(path: Path) -> bool:
    """Return whether the name of a file says that it holds JSON objects, a document each."""
    return kind_of(path) in (".jsonl", ".ndjson", ".json")


def holds_parquet(path: Path) -> bool:
    """Return whether the name of a file says that it holds a Parquet table, whose rows are documents."""
    return path.suffix.lower() == ".parquet"


def holds_documents(path: Path) -> bool:
    """Return whether a file says itself where its documents end."""
    return holds_json(path) or holds_parquet(path)


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, Stream]]:
    """Yield an open file or pipe, and the stream of its content, decompressed if the file is compressed."""
    if path.is_fifo():
        log.info("reading the pipe %s until its writer closes it", path)
    try:
        file = open_input(path, pipes=True)
    except OSError as error:
        raise unreadable(path, reason(error)) from error
    suffix = path.suffix.lower()
    with file:
        if suffix not in COMPRESSED:
            yield file, file
            return
        kind = "gzip" if suffix == ".gz" else "zstd"
        damages: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
        if kind == "zstd":
            damages = (EOFError, text_package("zstandard", path).ZstdError)
        try:
            with gzip.GzipFile(fileobj=file) if kind == "gzip" else BufferedReader(_Zstd(file)) as stream:
                yield file, stream
        except damages as error:
            hint = f"make or download it again; a text that is not compressed has no {suffix} at its end"
            message = f"{path}: not a whole {kind} file ({error})"
            raise LmkitError(f"corpus.damaged_{kind}", message, hint=hint) from error


def text_package(name: str, path: Path) -> Any:
    """Import the package that reads a file; UsageError: it is not installed ("corpus.not_installed")."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        message = f"{path}: is read with the package {error.name}, which is not installed"
        hint = "in the checkout of lmkit: pip install -e '.[text]'"
        raise UsageError("corpus.not_installed", message, hint=hint) from None


class _Zstd(RawIOBase):
    """The content of a zstd file of one or several frames; EOFError: the last frame has no end.

    zstandard's own reader takes a frame without its end for a whole one.
    """

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file = file
        self._frame: Any = None
        self._packed, self._content = b"", memoryview(b"")
        # `zstd --long=31` asks for 2 GiB.
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        while not self._content:
            if not (packed := self._packed or self._file.read(_ZSTD_BYTES)):
                if self._frame is not None:
                    raise EOFError("its last frame has no end")
                return 0
            self._frame = frame = self._frame or self._new_frame()
            self._content, self._packed = memoryview(frame.decompress(packed)), frame.unused_data
            if frame.eof:
                self._frame = None
        count = min(len(room), len(self._content))
        room[:count], self._content = self._content[:count], self._content[count:]
        return count
