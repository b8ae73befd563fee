"""Turn the `[corpus]` table of a recipe into text files to train on and text files to hold out."""

from __future__ import annotations

import codecs
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lmkit.data.download import download_dataset
from lmkit.data.synth import write_stories
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.progress import Progress
from lmkit.recipe.tables import CorpusConfig
from lmkit.recipe.vocabulary import END_OF_TEXT
from lmkit.storage import atomic_path
from lmkit.tokenizer.chunks import ErrorMode, text_file_status

PathOrPaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_END_OF_DOCUMENT = END_OF_TEXT.encode()
_BLOCK = 1 << 20
_HELD_OUT_SEED = 1 << 32  # added to the seed of the training part: held-out stories come from another stream


@dataclass(frozen=True)
class CorpusFiles:
    """Text files, UTF-8; documents end with `<|endoftext|>`."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...]


def as_paths(paths: PathOrPaths) -> list[Path]:
    """Return a list of paths for one path or several."""
    return [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]


def prepare_corpus(table: CorpusConfig, folder: Path, *, progress: Progress | None = None) -> CorpusFiles:
    """Make or find the text that a recipe names.

        >>> from lmkit.recipe.tables import CorpusConfig
        >>> table = CorpusConfig(source="files", train=("book.txt",))
        >>> prepare_corpus(table, Path("corpus"))  # doctest: +SKIP
        CorpusFiles(train=(PosixPath('corpus/train.txt'),), valid=(PosixPath('corpus/valid.txt'),))

    - `synth`: writes `size_mb` of stories to `folder`, and `valid_fraction` of that from another seed.
    - `files`: uses text files where they are if `valid` names files, too. Otherwise `folder` gets `train.txt` and
      `valid.txt`: the last documents, at least `valid_fraction` of the bytes, are held out. A text with one document
      (a book without `<|endoftext|>`) is cut at the end of a line instead, or between two characters if it has one
      line. Files ending in `.jsonl` hold one document a line, under the key `table.field`.
    - any other source is a dataset, see `lmkit.data.download`: downloaded to `table.folder` unless it is there.

    Everything is streamed, and a file appears under its name when it is complete. Text files that are used where
    they are are not read here: their reader reports invalid UTF-8.

    Raises:
        UsageError: a file is missing ("corpus.missing_file"), empty ("corpus.empty") or too short to hold out a part
            ("corpus.too_short"); a line of a `.jsonl` file has no such field ("corpus.no_field").
        LmkitError: invalid UTF-8, with its byte offset, unless `errors` is "replace" ("text.not_utf8"); a broken
            JSON line ("corpus.not_json").
    """
    if table.source == "synth":
        return _synthesise(table, folder, progress)
    if table.source != "files":
        train, valid = download_dataset(table.source, table.folder, progress=progress)
        return CorpusFiles((train,), (valid,))
    for key, paths in (("corpus.train", table.train), ("corpus.valid", table.valid)):
        _check_files(key, paths)
    if not table.valid:
        return _split(table, folder, progress)
    return CorpusFiles(
        _plain_text("corpus.train", table.train, table, folder / "train.txt", progress),
        _plain_text("corpus.valid", table.valid, table, folder / "valid.txt", progress),
    )


@contextmanager
def plain_text_files(
    paths: PathOrPaths,
    folder: Path | None = None,
    *,
    errors: ErrorMode = "strict",
    progress: Progress | None = None,
) -> Iterator[list[Path]]:
    """Yield text files for the given files: a `.jsonl` file becomes a text file of its documents (key "text").

    Args:
        paths: one path or several.
        folder: where a temporary folder for converted files is created; None uses the system's, which may be small.

    Raises:
        UsageError: a `.jsonl` file is missing or has no text ("corpus.empty"), or a line has no "text"
            ("corpus.no_field").
        LmkitError: as `prepare_corpus`.
    """
    table = CorpusConfig(errors=errors)
    texts = as_paths(paths)
    if not any(path.suffix == ".jsonl" for path in texts):
        yield texts
        return
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        for number, path in enumerate(texts):
            if path.suffix != ".jsonl":
                continue
            size = text_file_status(path).st_size
            texts[number] = Path(made) / f"{number}.txt"
            with open(texts[number], "wb") as file:
                for read, document in _json_documents(path, table):
                    file.write(document)
                    if progress is not None:
                        progress("corpus", read, size)
            if not texts[number].stat().st_size:
                raise _empty(str(path))
        yield texts


def _synthesise(table: CorpusConfig, folder: Path, progress: Progress | None) -> CorpusFiles:
    train, valid = folder / "train.txt", folder / "valid.txt"
    write_stories(train, size_mb=table.size_mb, seed=table.seed, progress=progress)
    write_stories(valid, size_mb=table.size_mb * table.valid_fraction, seed=table.seed + _HELD_OUT_SEED)
    return CorpusFiles((train,), (valid,))


def _check_files(key: str, paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise UsageError(
                "corpus.missing_file",
                f"{key}: {path} is not a file",
                hint="give the path of a text or .jsonl file",
            )
    if paths and not any(path.stat().st_size for path in paths):
        raise _empty(f"{key}: {paths[0]}")


def _empty(name: str) -> UsageError:
    return UsageError("corpus.empty", f"{name}: has no text", hint="a corpus needs some text")


def _plain_text(
    key: str, paths: tuple[Path, ...], table: CorpusConfig, joined: Path, progress: Progress | None
) -> tuple[Path, ...]:
    """Return the files themselves if all are text, else one text file made of them."""
    if not any(path.suffix == ".jsonl" for path in paths):
        return paths
    with atomic_path(joined) as partial, open(partial, "wb") as file:
        _write_documents(key, paths, table, file, progress)
    return (joined,)


def _split(table: CorpusConfig, folder: Path, progress: Progress | None) -> CorpusFiles:
    train, valid = folder / "train.txt", folder / "valid.txt"
    # Write one file, then cut it in two: the place of the cut depends on the size.
    with atomic_path(train) as partial:
        with open(partial, "wb") as file:
            _write_documents("corpus.train", table.train, table, file, progress)
        with open(partial, "r+b") as file, atomic_path(valid) as held_out, open(held_out, "wb") as target:
            cut = _find_cut(file, table)
            file.seek(cut)
            while block := file.read(_BLOCK):
                target.write(block)
            file.truncate(cut)
    return CorpusFiles((train,), (valid,))


def _find_cut(file: BinaryIO, table: CorpusConfig) -> int:
    """Return the offset at which the held-out part begins: between documents, else lines, else characters."""
    size = file.seek(0, 2)
    wanted = max(1, int(size * (1 - table.valid_fraction)))
    for mark in (_END_OF_DOCUMENT + b"\n", _END_OF_DOCUMENT, b"\n"):
        cut = _nearest_border(file, mark, wanted, size)
        if cut is not None:
            return cut
    if wanted < size:
        start = max(0, wanted - 3)
        file.seek(start)
        before = file.read(wanted - start + 1)
        while before and before[-1] & 0xC0 == 0x80:  # UTF-8 continuation byte
            before = before[:-1]
            wanted -= 1
    if not 0 < wanted < size:
        raise UsageError(
            "corpus.too_short",
            f"corpus.train: {table.train[0]} is too short to hold out a part",
            hint="name a file of its own in corpus.valid",
        )
    return wanted


def _nearest_border(file: BinaryIO, mark: bytes, wanted: int, size: int) -> int | None:
    """Return the last position up to `wanted` that follows `mark`, else the first after it; None without."""
    before = _last_border(file, mark, wanted)
    return before if before is not None else _first_border(file, mark, wanted - len(mark) + 1, size)


def _last_border(file: BinaryIO, mark: bytes, end: int) -> int | None:
    while end >= len(mark):
        start = max(0, end - len(mark) - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(mark)
        if found >= 0:
            return start + found + len(mark)
        end = start + len(mark) - 1 if start else 0  # a mark may cross the border of the block
    return None


def _first_border(file: BinaryIO, mark: bytes, start: int, size: int) -> int | None:
    start = max(0, start)
    file.seek(start)
    window = b""
    while block := file.read(_BLOCK):
        window += block
        found = window.find(mark)
        if found >= 0:
            border = start + found + len(mark)
            # A mark at the end of the file, even before a line break, leaves nothing to hold out.
            return border if border < size - 1 else None
        searched = max(0, len(window) - len(mark) + 1)
        start += searched
        window = window[searched:]
    return None


def _write_documents(
    key: str, paths: Sequence[Path], table: CorpusConfig, file: BinaryIO, progress: Progress | None
) -> None:
    """Write the text of all files, one after the other, with `<|endoftext|>` between and behind JSON documents."""
    total = sum(path.stat().st_size for path in paths)
    done = written = 0
    for path in paths:
        pieces = _json_documents(path, table) if path.suffix == ".jsonl" else _text_pieces(path, table.errors)
        ending = b""
        for read, piece in pieces:
            written += file.write(piece)
            ending = (ending + piece)[-len(_END_OF_DOCUMENT) - 1 :]
            if progress is not None:
                progress("corpus", done + read, total)
        done += path.stat().st_size
        if len(paths) > 1 and ending and _END_OF_DOCUMENT not in ending:
            file.write(_END_OF_DOCUMENT + b"\n")  # two files are two documents
    if not written:
        raise _empty(f"{key}: {paths[0]}")


def _text_pieces(path: Path, errors: str) -> Iterator[tuple[int, bytes]]:
    """Yield (bytes read so far, valid UTF-8)."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    read = 0
    with open(path, "rb") as file:
        while True:
            block = file.read(_BLOCK)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _invalid_utf8(path, read - pending + error.start) from None
            read += len(block)
            if text:
                yield read, text.encode("utf-8")
            if not block:
                return


def _json_documents(path: Path, table: CorpusConfig) -> Iterator[tuple[int, bytes]]:
    """Yield (bytes read so far, document with its end mark) for every line that is not blank."""
    read = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8", table.errors)
            except UnicodeDecodeError as error:
                raise _invalid_utf8(path, read + error.start) from None
            read += len(line)
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise LmkitError(
                    "corpus.not_json",
                    f"{path}, line {number}: not JSON ({error})",
                    hint="every line must hold one JSON object",
                ) from None
            document = record.get(table.field) if isinstance(record, dict) else None
            if not isinstance(document, str):
                raise UsageError(
                    "corpus.no_field",
                    f'{path}, line {number}: no text under "{table.field}"',
                    hint="a recipe names the key that holds the text: corpus.field",
                )
            # A lone surrogate (\ud800) is valid JSON but cannot be encoded.
            yield read, document.encode("utf-8", "replace") + _END_OF_DOCUMENT + b"\n"


def _invalid_utf8(path: Path, offset: int) -> LmkitError:
    return LmkitError(
        "text.not_utf8",
        f"{path}: invalid UTF-8 at byte {offset}",
        hint='convert the file, or replace what is invalid: corpus.errors = "replace", or --errors replace',
    )
