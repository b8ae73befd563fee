"""The `[corpus]` table of a recipe -> text files to train on and text files held out."""

from __future__ import annotations

import codecs
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lmkit.data.download import DATASETS, download
from lmkit.data.synth import write_stories
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.progress import Progress
from lmkit.recipe.corpus import CorpusConfig
from lmkit.recipe.vocabulary import END_OF_TEXT
from lmkit.storage import atomic_path
from lmkit.tokenizer.chunks import ErrorMode, text_file_status

END_OF_DOCUMENT = END_OF_TEXT.encode()

_BLOCK = 1 << 20
# Another stream of stories than any seed a user would give to the training part.
_HELD_OUT_SEED = 1 << 32


@dataclass(frozen=True)
class CorpusFiles:
    """Text files, UTF-8; documents end with `<|endoftext|>`."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...]


def prepare_corpus(table: CorpusConfig, folder: Path, *, progress: Progress | None = None) -> CorpusFiles:
    """Make or find the text that a recipe names.

    - `synth`: `size_mb` of stories, and `valid_fraction` of that much again from another seed, in `folder`.
    - `tinystories`, `owt`: downloaded to `table.folder` unless they are there.
    - `files`: text files are used where they lie if `valid` files are named too. Otherwise `folder` gets
      `train.txt` and `valid.txt`: the last documents, `valid_fraction` of the bytes, are held out. A text with
      one document only (a book without `<|endoftext|>`) is cut at a line border instead, or, without one,
      between two characters. The border taken is the last before the held-out bytes, so that all of them are
      held out. Files ending in `.jsonl` have one document a line, under the key `table.field`.

    Everything is streamed; what it writes appears under its name when it is complete. Text files that are used
    where they lie are not read here: whoever reads them reports invalid UTF-8.

    Raises:
        UsageError: a file is missing or has no text; a line of a `.jsonl` file has no such field.
        LmkitError: invalid UTF-8 (with the byte offset) unless `errors` is "replace"; a broken JSON line.
    """
    if table.source == "synth":
        return _synthesise(table, folder, progress)
    if table.source != "files":
        train, valid = download(DATASETS[table.source], table.folder, progress=progress)
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
    paths: Sequence[Path],
    folder: Path | None = None,
    *,
    errors: ErrorMode = "strict",
    progress: Progress | None = None,
) -> Iterator[list[Path]]:
    """The files, for commands without a recipe: those ending in `.jsonl` as text files of the documents under "text".

    Args:
        folder: gets a temporary folder for what is made; None takes the system's, which may be small.

    Raises:
        UsageError: a `.jsonl` file is missing or has no text, or one of its lines has no such field.
        LmkitError: as `prepare_corpus`.
    """
    table = CorpusConfig(errors=errors)
    if not any(path.suffix == ".jsonl" for path in paths):
        yield list(paths)
        return
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        texts = []
        for number, path in enumerate(paths):
            if path.suffix != ".jsonl":
                texts.append(path)
                continue
            size = text_file_status(path).st_size
            texts.append(Path(made) / f"{number}.txt")
            with open(texts[-1], "wb") as file:
                for read, document in _json_documents(path, table):
                    file.write(document)
                    if progress is not None:
                        progress("corpus", read, size)
            if not texts[-1].stat().st_size:
                raise UsageError(f"{path}: has no text", hint="a corpus needs some text")
        yield texts


def _synthesise(table: CorpusConfig, folder: Path, progress: Progress | None) -> CorpusFiles:
    train, valid = folder / "train.txt", folder / "valid.txt"
    write_stories(train, size_mb=table.size_mb, seed=table.seed, progress=progress)
    write_stories(valid, size_mb=table.size_mb * table.valid_fraction, seed=table.seed + _HELD_OUT_SEED)
    return CorpusFiles((train,), (valid,))


def _check_files(key: str, paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{key}: {path} is not a file", hint="give the path of a text or .jsonl file")
    if paths and not any(path.stat().st_size for path in paths):
        raise UsageError(f"{key}: {paths[0]} is empty", hint="a corpus needs some text")


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
    # One file first, then cut in two: where the cut belongs is known only when the size is.
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
    """Return where the held-out part begins: the border of a document, else of a line, else of a character."""
    size = file.seek(0, 2)
    wanted = max(1, int(size * (1 - table.valid_fraction)))
    for mark in (END_OF_DOCUMENT + b"\n", END_OF_DOCUMENT, b"\n"):
        cut = _nearest_border(file, mark, wanted, size)
        if cut is not None:
            return cut
    if wanted < size:
        start = max(0, wanted - 3)
        file.seek(start)
        before = file.read(wanted - start + 1)
        while before and before[-1] & 0xC0 == 0x80:  # a byte that continues a character
            before = before[:-1]
            wanted -= 1
    if not 0 < wanted < size:
        raise UsageError(
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
        end = start + len(mark) - 1 if start else 0  # a mark may lie across the block's border
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
            # A mark that ends the file, perhaps with a line break behind it, is no border.
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
            ending = (ending + piece)[-len(END_OF_DOCUMENT) - 1 :]
            if progress is not None:
                progress("corpus", done + read, total)
        done += path.stat().st_size
        if len(paths) > 1 and ending and END_OF_DOCUMENT not in ending:
            file.write(END_OF_DOCUMENT + b"\n")  # two files are two documents
    if not written:
        raise UsageError(f"{key}: {paths[0]} has no text", hint="a corpus needs some text")


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
                    f"{path}, line {number}: not JSON ({error})", hint="every line must hold one JSON object"
                ) from None
            document = record.get(table.field) if isinstance(record, dict) else None
            if not isinstance(document, str):
                raise UsageError(
                    f'{path}, line {number}: no text under "{table.field}"',
                    hint="a recipe names the key that holds the text: corpus.field",
                )
            # A lone surrogate (\ud800) is valid JSON, but no text.
            yield read, document.encode("utf-8", "replace") + END_OF_DOCUMENT + b"\n"


def _invalid_utf8(path: Path, offset: int) -> LmkitError:
    return LmkitError(
        f"{path}: invalid UTF-8 at byte {offset}",
        hint='convert the file, or replace what is invalid: corpus.errors = "replace", or --errors replace',
    )
