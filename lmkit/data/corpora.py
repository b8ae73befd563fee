"""Turn the `[corpus]` table of a recipe into text files to train on and text files to hold out."""

from __future__ import annotations

import codecs
import json
import logging
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lmkit.data.formats import COMPRESSED, Stream, holds_documents, holds_parquet, opened
from lmkit.data.json_lines import is_learned, json_records, messages_of
from lmkit.data.parquet import parquet_texts
from lmkit.data.synth import write_stories
from lmkit.errors import UsageError, some_of
from lmkit.recipe import END_OF_TEXT
from lmkit.recipe.tables import CorpusConfig
from lmkit.storage.atomic import atomic_path, naming, scratch_folder
from lmkit.storage.inputs import files_of
from lmkit.storage.outputs import refuse_too_large
from lmkit.streams import Progress
from lmkit.tokenizer.chunks import Chunk, ErrorMode, text_file_status, valid_utf8
from lmkit.tokenizer.engine import CHUNK_BYTES
from lmkit.tokenizer.marks import no_end_of_text

PathOrPaths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_TAIL_BYTES = 4096  # the end of a file, which is searched for its last mark
_LINE_BREAK = re.compile(rb"(\r?\n)?")
_HELD_OUT_SEED = 1 << 32  # added to the seed of the training part: held-out stories come from another stream

log = logging.getLogger("lmkit")


@dataclass(frozen=True)
class CorpusFiles:
    """Text files, UTF-8, whose documents end with a mark. Conversations are JSON lines."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...]


def as_paths(paths: PathOrPaths) -> list[Path]:
    return list(map(Path, [paths] if isinstance(paths, (str, os.PathLike)) else paths))


def prepare_corpus(
    table: CorpusConfig, folder: Path, *, mark: str | None = END_OF_TEXT, progress: Progress | None = None
) -> CorpusFiles:
    """Make or find the text that a recipe names. Everything is streamed; a file has its name when it is complete.

    - `synth`: writes `size_mb` of stories to `folder`, and `valid_fraction` of that from another seed.
    - `files`: uses text files where they are if `valid` names files, too; their reader reports invalid UTF-8.
      Otherwise `folder` gets `train.txt` and `valid.txt`: the last documents are held out, as near to
      `valid_fraction` of the bytes as documents allow. If that is less than half of it, or more than one and a half
      of it and than a tenth of the text, a document is cut at the end of a line, or else between two characters.
      JSON (`.jsonl`, `.ndjson`, `.json`; the key `table.field` holds a document), Parquet (`.parquet`; the column of
      that name), compressed files (`.gz`, `.zst`) and pipes become text.
    - `chat`: the same of conversations, JSON lines of messages; no conversation is cut.
    - any other source is a dataset, see `lmkit.data.download`: downloaded to `table.folder` unless it is there; its
      text files are used where they are, Parquet becomes text.

    Args:
        mark: ends a document in text files; None: each file is one document.

    Raises:
        UsageError: a file is missing ("corpus.missing_file", "corpus.empty_glob"), empty ("corpus.empty"), named
            twice ("corpus.named_twice") or too short to hold out a part ("corpus.too_short"); a JSON object or a
            Parquet file has no such field, or it holds no text ("corpus.no_field"); a key changes what is learned
            ("corpus.unsupported_key"); the package that reads a file is not installed ("corpus.not_installed").
        LmkitError: invalid UTF-8, unless `errors` is "replace" ("text.not_utf8"); a broken JSON line
            ("corpus.not_json"), or one that is too long ("corpus.long_line"); a broken file
            ("corpus.damaged_gzip", "corpus.damaged_zstd", "corpus.damaged_parquet").
    """
    table, suffix = with_files(table), ".jsonl" if table.source == "chat" else ".txt"
    if table.source not in ("synth", "files", "chat"):
        from lmkit.data.download import download_dataset

        *learned, held_out = download_dataset(
            table.source, table.folder, shards=table.shards, progress=progress
        )
        named = {"source": "files", "train": tuple(learned), "valid": (held_out,)}
        table = table.model_copy(update=named)
    train, valid = folder / f"train{suffix}", folder / f"valid{suffix}"
    if table.source == "synth":
        size = table.size_mb
        end = mark or END_OF_TEXT
        write_stories(train, size_mb=size, seed=table.seed, end=end, progress=progress)
        write_stories(valid, size_mb=size * table.valid_fraction, seed=table.seed + _HELD_OUT_SEED, end=end)
    else:
        given = (("corpus.train", table.train, train), ("corpus.valid", table.valid, valid))
        for key, paths, _ in given:
            _check_files(key, paths)
        check_corpus(table, folder)
        parts = []
        for key, paths, target in given:
            if not paths:  # a part of the training text is held out
                continue
            if table.valid and table.source == "files" and not any(map(_is_converted, paths)):
                parts.append(paths)
                continue
            with atomic_path(target) as partial:
                if not _join(paths, table, partial, mark, progress):
                    raise _empty(key, paths)
                if not table.valid:
                    _hold_out(partial, valid, table, mark)
            parts.append((target,))
        if table.valid:
            return CorpusFiles(*parts)
    return CorpusFiles((train,), (valid,))


def with_files(table: CorpusConfig) -> CorpusConfig:
    """Return a table with the files that its globs name; UsageError: a glob names no file ("corpus.empty_glob")."""
    found: dict[str, tuple[Path, ...]] = {}
    for key in ("train", "valid"):
        for path in getattr(table, key):
            if not (files := files_of(path)):
                message = f"corpus.{key}: {path}: no file has such a name"
                hint = (
                    "paths are relative to the current folder; * stands for any letters, ** for any folders"
                )
                raise UsageError("corpus.empty_glob", message, hint=hint)
            found[key] = (*found.get(key, ()), *files)
    return table.model_copy(update=found)


def check_corpus(table: CorpusConfig, folder: Path) -> None:
    """Refuse a corpus that `prepare_corpus` could not make, before anything is made.

    Raises:
        UsageError: more text than is free on the disk of `folder` ("output.too_large"); a file is named twice, and
            would be learned and held out ("corpus.named_twice"); no file has the field ("corpus.unused_field").
    """
    if table.source == "files" and table.field != "text":
        refuse_unused_field("corpus.field", (*table.train, *table.valid))
    if table.source == "synth":
        refuse_too_large(folder, table.size_mb * (1 + table.valid_fraction) * 1e6)
    files = set()
    for path in () if table.valid else table.train:
        status = path.stat()
        if (file := (status.st_dev, status.st_ino)) in files:
            hint = "name it once, or name a held-out file in corpus.valid"
            raise UsageError("corpus.named_twice", f"corpus.train: {path}: is named twice", hint=hint)
        files.add(file)


@contextmanager
def plain_text_files(
    paths: PathOrPaths,
    folder: Path | None = None,
    *,
    errors: ErrorMode = "strict",
    field: str | None = None,
    mark: str | None = END_OF_TEXT,
    separator: str | None = None,
    progress: Progress | None = None,
) -> Iterator[list[Path]]:
    """Yield text files for the given files: what is no plain text file becomes one in a temporary folder.

    Args:
        folder: where the temporary folder is created; None uses the system's, which may be small.
        field: the key of a JSON object, or the column of a Parquet file, that holds the text; None: "text".
        mark: ends a document in text files.
        separator: left out at the end of the text of a JSON object or a row.

    Errors are those of `prepare_corpus`; UsageError: a field, and no file has any ("corpus.unused_field").
    """
    texts = as_paths(paths)
    if field is not None:
        refuse_unused_field("--field", texts)
    if not any(map(_is_converted, texts)):
        yield texts
        return
    with scratch_folder(folder) as made:
        for number, path in enumerate(texts):
            if _is_converted(path):
                texts[number] = Path(made, f"{number}.txt")
                with naming(f"the text of {path}, in {made}"):
                    table = CorpusConfig(errors=errors, field=field or "text", separator=separator)
                    _join([path], table, texts[number], mark, progress)
        if not any(text.stat().st_size for text in texts):
            raise _empty("sources", as_paths(paths))
        yield texts


def _is_converted(path: Path) -> bool:
    """Return whether a file must be made into a text file: JSON, Parquet, a compressed file, a pipe."""
    return path.suffix.lower() in COMPRESSED or holds_documents(path) or path.is_fifo()


def refuse_unused_field(key: str, paths: Sequence[Path]) -> None:
    """Refuse a key or column where no file has any by its name: JSON would be read as text."""
    if not any(map(holds_documents, paths)):
        message = f"{key}: {some_of(paths)} is read as text, not as JSON objects or Parquet"
        hint = "end the name of a file in .jsonl, .ndjson, .json or .parquet, or leave the key out"
        raise UsageError("corpus.unused_field", message, hint=hint)


def mark_of(paths: Sequence[Path], separator: str | None, end: str | None) -> str | None:
    """Return what ends a document when files are one text: `separator` in text files, `end` in JSON and Parquet.

    UsageError: there is a separator, and there are files of both kinds ("corpus.mixed_kinds").
    """
    kinds = set(map(holds_documents, paths))
    if separator is not None and len(kinds) > 1:
        message = f"{some_of(paths)}: a separator ends documents of text files, not of JSON or Parquet"
        hint = "write the text files as JSON lines, or leave the separator out"
        raise UsageError("corpus.mixed_kinds", message, hint=hint)
    return end if separator is None or kinds == {True} else separator


def _check_files(key: str, paths: Sequence[Path]) -> None:
    for path in paths:
        refuse_directory(key, path)
        if not path.is_file() and not path.is_fifo():
            message = f"{key}: {path} is not a file"
            raise UsageError("corpus.missing_file", message, hint="give the path of a text or .jsonl file")
    if paths and not any(path.is_fifo() or path.stat().st_size for path in paths):
        raise _empty(key, paths)


def refuse_directory(key: str, path: Path) -> None:
    """Refuse a directory where a key of a recipe names a text file."""
    if path.is_dir():
        hint = f'name the files in it: {key} = ["{path}/*.txt"]'
        raise UsageError("corpus.directory", f"{key}: {path} is a directory", hint=hint)


def _empty(key: str, paths: Sequence[Path]) -> UsageError:
    return UsageError("corpus.empty", f"{key}: {paths[0]}: has no text", hint="a corpus needs some text")


def _hold_out(train: Path, valid: Path, table: CorpusConfig, mark: str | None) -> None:
    with open(train, "r+b") as file, atomic_path(valid) as partial, open(partial, "wb") as held_out:
        cut = _find_cut(file, table, mark)
        file.seek(cut)
        shutil.copyfileobj(file, held_out)
        file.truncate(cut)


def _find_cut(file: BinaryIO, table: CorpusConfig, mark: str | None) -> int:
    """Return where the held-out part begins: between documents, lines or characters, the first that is near."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        size = len(text)
        # White space at the end is no text to hold out.
        last = next((i for i in range(size, 0, -1) if text[i - 1] not in b" \t\r\n"), 0)
        wanted = max(1, min(int(size * (1 - table.valid_fraction)), last - 1))

        asked = size - wanted
        nearest = range(
            max(size - max(3 * asked // 2, size // 10), -(-wanted // 2)), size - -(-asked // 2) + 1
        )
        for end in [b"\n"] if table.source == "chat" or mark is None else [mark.encode(), b"\n"]:
            reach = len(end) + 2  # with the line break
            before = text.rfind(end, max(0, nearest.start - reach), wanted)
            after = text.find(end, max(0, wanted - len(end) + 1), nearest.stop)
            # A line break behind a document is no part of the next one.
            found = (place + len(end) for place in (before, after) if place >= 0)
            cuts = [cut if end == b"\n" else _LINE_BREAK.match(text, cut).end() for cut in found]  # type: ignore[union-attr]
            if near := [cut for cut in cuts if cut < last and cut in nearest]:
                return min(near, key=lambda cut: abs(cut - wanted))
        if table.source == "chat":
            wanted = 0  # no conversation is cut
        while 0 < wanted < size and text[wanted] & 0xC0 == 0x80:  # UTF-8 continuation byte
            wanted -= 1
    if not 0 < wanted < last:
        message = f"no part of about {table.valid_fraction:.3g} of it can be held out"
        hint = "name a file of its own in corpus.valid, or another corpus.valid_fraction"
        raise UsageError("corpus.too_short", f"corpus.train: {table.train[0]}: {message}", hint=hint)
    return wanted


def _join(
    paths: Sequence[Path],
    table: CorpusConfig,
    target: Path,
    mark: str | None,
    progress: Progress | None,
) -> int:
    """Write the text of all files, with `mark` between files and after each JSON document; return its bytes."""
    # The end of a Parquet file says where its columns are: a pipe has none.
    sizes = [
        0 if path.is_fifo() and not holds_parquet(path) else text_file_status(path).st_size for path in paths
    ]
    end, done, written = (mark or "").encode(), 0, 0
    with open(target, "wb") as file:
        for number, (path, size) in enumerate(zip(paths, sizes, strict=True), 1):
            ending = b""
            with opened(path) as (source, stream):
                if table.source == "chat":
                    _refuse_parquet(path)
                    pieces = _conversations(stream, path, table)
                elif holds_documents(path):
                    if mark is None:
                        raise no_end_of_text(path)
                    texts = parquet_texts if holds_parquet(path) else _json_texts
                    pieces = _documents(texts(stream, path, table), path, table, end)
                else:
                    pieces = _text_pieces(stream, path, table)
                for piece in pieces:
                    written += file.write(piece)
                    ending = (ending + piece)[-_TAIL_BYTES:]
                    if progress is not None and source.seekable():
                        progress("corpus", done + source.tell(), sum(sizes))
            done += size
            if table.source == "chat" or number == len(paths) or not ending:
                continue
            if mark is None:
                raise no_end_of_text(path)
            if blank_behind(ending, end) is None:  # two files are two documents
                file.write(end)
    return written


def blank_behind(tail: bytes, mark: bytes) -> int | None:
    """Return how many bytes of white space stand behind the last `mark` of a text; None: other text, or no mark."""
    behind = tail.rpartition(mark)[2] if mark and mark in tail else None
    return None if behind is None or behind.strip() else len(behind)


def _text_pieces(stream: Stream, path: Path, table: CorpusConfig) -> Iterator[bytes]:
    """Yield valid UTF-8 in pieces that are cut between characters."""
    data, offset = b"", 0
    while block := stream.read(CHUNK_BYTES):
        data += block
        # Without the beginning of a character at the end.
        _, cut = codecs.utf_8_decode(data, "replace", False)
        yield valid_utf8(Chunk(0, offset, cut, data[:cut]), path, table.errors)
        data, offset = data[cut:], offset + cut
    if data:
        yield valid_utf8(Chunk(0, offset, len(data), data), path, table.errors)


def _json_texts(stream: Stream, path: Path, table: CorpusConfig) -> Iterator[bytes]:
    """Yield the text of every JSON object that is learned."""
    for where, record in json_records(stream, path, table.errors):
        keys = record if isinstance(record, dict) else {}
        document = keys.get(table.field)
        if not isinstance(document, str):
            found = f"keys: {', '.join(keys)}" if keys else json.dumps(record)
            if table.field in keys:
                found = f"it is {json.dumps(document)}"
            hint = "name the key that holds the text: corpus.field in a recipe, or --field"
            if "messages" in keys:
                hint = (
                    'conversations are read by recipes, for training and evaluation: corpus.source = "chat"'
                )
            message = f'{where}: no text under "{table.field}" ({found[:80]})'
            raise UsageError("corpus.no_field", message, hint=hint)
        if is_learned(keys, where, field=table.field):
            yield document.encode()


def _documents(texts: Iterable[bytes], path: Path, table: CorpusConfig, end: bytes) -> Iterator[bytes]:
    """Yield every text that is not empty, with its mark."""
    marked = empty = 0
    for text in texts:
        data = text.removesuffix((table.separator or "").encode())
        marked += end in data.removesuffix(end)
        empty += not data
        if data:
            yield data.removesuffix(end) + end  # many write it behind their texts
    if empty:
        log.warning("%s: %d texts are empty, and no documents", path, empty)
    if marked:
        log.warning("%s: %d documents hold %s, which ends a document", path, marked, end.decode())


def _refuse_parquet(path: Path) -> None:
    if holds_parquet(path):
        hint = (
            "write them as JSON lines: pandas.read_parquet(FILE).to_json(OUT, orient='records', lines=True)"
        )
        message = f"{path}: conversations are not read from Parquet"
        raise UsageError("corpus.parquet_chat", message, hint=hint)


def _conversations(stream: Stream, path: Path, table: CorpusConfig) -> Iterator[bytes]:
    for where, record in json_records(stream, path, table.errors):
        messages = [
            {"role": role, "content": content, "weight": int(learned)}
            for role, content, learned in messages_of(record, where)
        ]
        yield json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n"
