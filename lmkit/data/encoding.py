"""Encode text files into one token file, in parallel and in constant memory.

Every worker encodes whole chunks by itself, and the ids are written in the order of the text: the file is the same
for any number of workers.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from lmkit.data.bin_files import BinWriter, bin_name, bin_writer, shard_name, written
from lmkit.data.corpora import PathOrPaths, as_paths, blank_behind, mark_of, plain_text_files
from lmkit.data.formats import holds_documents, opened
from lmkit.data.json_lines import json_records, messages_of
from lmkit.data.overlap import OVERLAP, Sketch
from lmkit.data.token_files import DOCUMENTS, PARTS, SIDECAR, TokenFileWriter, TokenMeta
from lmkit.errors import UsageError, some_of
from lmkit.measure.environment import usable_cpus
from lmkit.storage.outputs import refuse_existing, refuse_replacing
from lmkit.streams import Progress
from lmkit.tokenizer import END_OF_TEXT, Tokenizer
from lmkit.tokenizer.chunks import Chunk, ErrorMode, TextFiles, valid_utf8
from lmkit.tokenizer.engine import Encoder, new_encoder, share_out
from lmkit.tokenizer.marks import no_end_of_text
from lmkit.tokenizer.pretokenize import AddedToken, SpecialTokens

if TYPE_CHECKING:
    from lmkit.tokenizer.chat import ChatTemplate

SHARD_TOKENS = 100_000_000
MakeWriter = Callable[[], AbstractContextManager[TokenFileWriter | BinWriter]]
_log = logging.getLogger("lmkit")
_TAIL_BYTES = 4096  # the end of a source, which is searched for its last end-of-text token


def encode_corpus(
    sources: PathOrPaths,
    output: str | Path,
    tokenizer: Tokenizer,
    *,
    workers: int = 0,
    errors: ErrorMode = "strict",
    field: str | None = None,
    separator: str | None = None,
    format: Literal["npy", "bin"] = "npy",  # noqa: A002  the option's name
    shard_tokens: int = SHARD_TOKENS,
    force: bool = False,
    progress: Progress | None = None,
) -> TokenMeta:
    """Encode UTF-8 text files into one token file or `.bin` shards, in memory that does not grow with their size. A
    sketch beside a `.npy` file (`lmkit.data.overlap`) says later whether held-out text was learned.

    A document ends with the tokenizer's end-of-text token (`Tokenizer.marks`), at each `separator` and at the end of
    each source; white space behind the last separator of a source is no document. The tokenizer's prefix and suffix
    stand around every document, unless its text has them already.

    Args:
        sources: one path or several; `.jsonl`, `.ndjson` and `.json` hold documents under a key of JSON objects,
            `.parquet` in a column.
        output: the token file; ends in `.npy`. Of `.bin` shards, NAME in `NAME_000000.bin`, or a folder, whose name
            they get.
        workers: threads that encode; 0 takes one per usable CPU. The file does not depend on it.
        errors: stop at text that is not UTF-8 ("strict") or read it as U+FFFD ("replace").
        field: the key of a JSON object, or the column of a Parquet file, that holds the text; None: "text". Refused
            where no source has any.
        separator: what ends a document in text files; None: the end-of-text token, as the tokenizer writes it. The
            text of a JSON object or a row is one document; a separator at its end is left out.
        format: "bin": shards as of llm.c, in which the end-of-text token comes before each document.
        shard_tokens: tokens of each `.bin` shard but the last.
        force: overwrite `output`.
        progress: called with ("encode", bytes done, bytes in all).

    Raises:
        UsageError: a source is missing ("text.unreadable") or all are empty ("text.empty"); `separator` is empty
            ("corpus.empty_separator"); `output`, or .documents or .overlap beside it, exists ("output.exists");
            `output` does not end in `.npy` ("tokens.name") or would replace a source ("output.replaces_source");
            there are several documents, and the tokenizer has no end-of-text token ("tokenizer.no_end_of_text"); or a
            `.bin` file has no room for its ids ("tokens.bin_vocabulary").
        LmkitError: a source is not UTF-8 ("text.not_utf8") or changed while it was read ("corpus.changed").
    """
    output, paths = Path(output), as_paths(sources)
    if format == "bin":
        name = bin_name(output)
        refuse_existing(next(iter(written(name)), shard_name(name, 0)), force=force)
        refuse_replacing(written(name), paths)
        make_writer: MakeWriter = partial(bin_writer, name, tokenizer, shard_tokens)
    elif output.suffix != ".npy":
        hint = f"name it {output.with_suffix('.npy')}" + ", or add --format bin" * (output.suffix == ".bin")
        raise UsageError("tokens.name", f"{output}: a token file ends in .npy", hint=hint)
    else:
        refuse_existing(output, force=force)
        refuse_replacing(map(output.with_suffix, (*PARTS, OVERLAP)), paths)
        if not output.with_suffix(SIDECAR).exists():  # else a part of a token file
            for beside in (DOCUMENTS, OVERLAP):
                refuse_existing(output.with_suffix(beside), force=force)
        make_writer = partial(
            TokenFileWriter, output, vocab_size=tokenizer.vocab_size, tokenizer_sha256=tokenizer.sha256
        )
    if separator == "":
        hint = "leave it out: a document ends with the end-of-text token, and with its file"
        raise UsageError("corpus.empty_separator", "--separator: is empty", hint=hint)
    end = tokenizer.marks.end
    if end is None and (separator is not None or len(paths) > 1 or any(map(holds_documents, paths))):
        raise no_end_of_text(paths[0])
    mark = mark_of(paths, separator, end)
    if tokenizer.missing_bytes:
        _log.warning(
            "the tokenizer has no token for %d bytes of UTF-8: characters with them are lost from %s",
            *(len(tokenizer.missing_bytes), some_of(list(map(str, paths)))),
        )
    with plain_text_files(
        paths, output.parent, errors=errors, field=field, mark=mark, separator=separator, progress=progress
    ) as texts:
        specials = tokenizer.specials
        if end is not None and mark is not None and mark != end:
            known = {token: i for token, i in specials.ids.items() if token.text != mark}
            specials = SpecialTokens({**known, AddedToken(mark): tokenizer.special_ids[end]})
        files = TextFiles(texts, specials, errors)
        encoding = _Encoding(files, tokenizer, mark, paths)
        meta = encoding.write(make_writer, workers or usable_cpus(), progress)
    if format == "npy":
        encoding.sketch.save(output, meta.source_sha256)
    return meta


class _Encoded(NamedTuple):
    """A chunk's ids, without prefixes and suffixes; the indices of its end-of-text tokens; the bytes of its text; how
    often it has `END_OF_TEXT` as ordinary text; its other special tokens; `sizes`: see `_Encoding._sizes_in`."""

    ids: np.ndarray
    ends: np.ndarray
    num_bytes: int
    unknown_marks: int
    inside: Counter[int]
    sizes: list[int]


class _Encoding:
    """Text files on their way into a token file. `mark`, one of their special tokens, ends a document (None: each
    file is one). `sources`: the files as the user knows them."""

    def __init__(self, files: TextFiles, tokenizer: Tokenizer, mark: str | None, sources: list[Path]) -> None:
        self._files, self._tokenizer, self._sources = files, tokenizer, sources
        self._mark = b"" if mark is None else mark.encode()
        # Another spelling of the end-of-text token than the tokenizer's is no text either.
        self._longer = len(self._mark) - len((tokenizer.marks.end or "").encode())
        is_known = END_OF_TEXT in map(attrgetter("text"), files.specials.ids)
        self._unknown = b"" if is_known else END_OF_TEXT.encode()
        self._digest = hashlib.sha256()
        # Whether tokens have other bytes than the text.
        self._is_sized = tokenizer.nfc or bool(tokenizer.missing_bytes)
        self.sketch = Sketch()

    def write(self, make_writer: MakeWriter, workers: int, progress: Progress | None) -> TokenMeta:
        tokenizer, files = self._tokenizer, self._files
        num_bytes = done_bytes = unknown_marks = open_size = 0
        inside: Counter[int] = Counter()
        begins = True  # whether the next token begins a document
        # An encoder serves one thread.
        threads = [partial(self._encode, new_encoder(tokenizer.merge_table)) for _ in range(workers)]
        with (
            make_writer() as writer,
            closing(share_out(self._chunks(), threads)) as results,
        ):
            for chunk, encoded in results:
                begins = begins or chunk.offset == 0
                ids, documents, begins = _framed(encoded.ids, encoded.ends, tokenizer, begins)
                encoded.sizes[0] += open_size
                *sizes, open_size = encoded.sizes
                writer.append(ids, documents=documents, sizes=sizes)
                num_bytes += encoded.num_bytes
                unknown_marks += encoded.unknown_marks
                inside.update(encoded.inside)
                done_bytes += chunk.num_bytes
                if progress is not None:
                    progress("encode", done_bytes, files.num_bytes)
            if tokenizer.marks.end is None and not begins:  # the end of the only document
                sizes = [open_size] if self._is_sized else []
                writer.append(np.array(tokenizer.suffix, np.int32), sizes=sizes)
            if unknown_marks:
                _log.warning(
                    "%s: %d times %s, which is no token of this tokenizer and stays text; if it ends a document, "
                    'say so: corpus.separator = "%s", or --separator',
                    *(some_of(self._sources), unknown_marks, END_OF_TEXT, END_OF_TEXT),
                )
            if inside:
                counted = (f"{n} times {tokenizer.vocab[i].decode()}" for i, n in inside.most_common(3))
                _log.warning(
                    "%s: %s inside documents: special tokens, which are no text and have no bytes; if one ends a "
                    "document, say so: corpus.separator or tokenizer.end_of_text, --separator or --end-of-text",
                    *(some_of(self._sources), ", ".join(counted)),
                )
            return writer.finish(num_bytes=num_bytes, source_sha256=self._digest.hexdigest())

    def _chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of all files, each file with a mark at its end and no white space behind it."""
        for source, size in enumerate(self._files.sizes):
            tail, last = b"", None
            for chunk in self._files.chunks(source):
                self._digest.update(chunk.data)
                self.sketch.add(chunk.data, end=self._mark)
                if last is not None:
                    yield last
                tail, last = (tail + chunk.data[-_TAIL_BYTES:])[-_TAIL_BYTES:], chunk
            self.sketch.add(b"", last=True)
            if last is None:
                continue
            behind = blank_behind(tail, self._mark)
            yield last._replace(data=last.data[: max(0, len(last.data) - (behind or 0))])
            if self._mark and behind is None:
                yield Chunk(source, size, 0, self._mark)

    def _encode(self, encode: Encoder, chunk: Chunk) -> _Encoded:
        tokenizer, end = self._tokenizer, self._tokenizer.end_of_text_id
        text = valid_utf8(chunk, self._files.paths[chunk.source], self._files.errors)
        ids, places = encode(text, self._files.specials)
        places, no_text = tokenizer.specials_in(ids, places)
        ends = places[ids[places] == end]
        if self._longer:
            no_text += self._longer * text.count(self._mark)
        unknown_marks = text.count(self._unknown) if self._unknown else 0
        sizes = self._sizes_in(text, len(places), len(ends)) if self._is_sized else [0]
        inside = Counter(ids[places].tolist() if len(places) > len(ends) else ())
        for frame in (end, *tokenizer.prefix, *tokenizer.suffix, tokenizer.start_id):
            inside.pop(frame, None)
        return _Encoded(ids, ends, len(text) - no_text, unknown_marks, inside, sizes)

    def _sizes_in(self, text: bytes, num_specials: int, num_ends: int) -> list[int]:
        """Return the bytes of the text before each end-of-text token of a chunk, and behind the last one, given how
        many special tokens the chunk has, and how many of them end a text."""
        parts = text.split(self._mark) if self._mark else [text]
        if num_specials == num_ends == len(parts) - 1:
            return list(map(len, parts))
        sizes, tokenizer = [0], self._tokenizer
        marks = {*tokenizer.special_ids.values()} - {tokenizer.unk_id}
        for part, token_id in self._files.specials.split(text):
            sizes[-1] += len(part)
            if token_id == tokenizer.end_of_text_id and token_id is not None:
                sizes.append(0)
            elif token_id is not None and token_id not in marks:
                sizes[-1] += len(tokenizer.vocab[token_id])
        return sizes


def _framed(
    ids: np.ndarray, ends: np.ndarray, tokenizer: Tokenizer, begins: bool
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Put prefix and suffix around the documents of a chunk.

    `ends` are the indices of the end-of-text tokens, `begins` says whether the first id begins a document. Return the
    ids, the indices at which documents begin, and whether the id after the last one begins a document.
    """
    if not len(ids):
        return ids, np.empty(0, np.int64), begins
    starts = np.concatenate((np.zeros(int(begins), np.int64), ends + 1))
    begins = bool(len(ends)) and int(ends[-1]) == len(ids) - 1
    starts = starts[: len(starts) - begins]
    prefix, suffix = tokenizer.prefix, tokenizer.suffix
    if suffix[-1:] == (tokenizer.end_of_text_id,):  # the end-of-text token ends every document anyway
        suffix = suffix[:-1]
    if not (prefix or suffix):
        return ids, starts, begins
    bare = [at for at in starts.tolist() if tuple(ids[at : at + len(prefix)].tolist()) != prefix]
    open_ = [at for at in ends.tolist() if tuple(ids[max(at - len(suffix), 0) : at].tolist()) != suffix]
    places = np.concatenate((np.repeat(bare, len(prefix)), np.repeat(open_, len(suffix)))).astype(np.int64)
    added = np.concatenate((np.tile(prefix, len(bare)), np.tile(suffix, len(open_)))).astype(np.int32)
    # A document begins with its prefix: it moves by what is inserted before it.
    moved = starts + np.searchsorted(np.sort(places), starts, side="left")
    return np.insert(ids, places, added), moved, begins


def encode_chat(
    sources: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    progress: Progress | None = None,
) -> TokenMeta:
    """Encode conversations, a JSON line each, into one token file with its mask; it is replaced.

    The assistant's words count, with the token that ends its turn. The end-of-text token ends every conversation,
    unless it ends its last message. A conversation is a document.

    Errors are those of `messages_of`; UsageError: there is no word of an assistant to learn ("chat.no_answer").
    """
    from lmkit.tokenizer.chat import Part

    end_of_text = tokenizer.end_of_text_id
    closing = [] if end_of_text in (None, tokenizer.special_ids[template.end]) else [end_of_text]
    sizes = [path.stat().st_size for path in sources]
    done = num_bytes = counted_bytes = 0
    digest, sketch = hashlib.sha256(), Sketch()
    with TokenFileWriter(
        output, vocab_size=tokenizer.vocab_size, tokenizer_sha256=tokenizer.sha256, masked=True
    ) as writer:
        for path, size in zip(sources, sizes, strict=True):
            with opened(path) as (source, stream):
                for where, record in json_records(stream, path):
                    messages = messages_of(record, where)
                    sketch.add("\n".join(message.content for message in messages).encode(), last=True)
                    documents = [0]
                    for part, counts in [*template.encode(messages, tokenizer), Part(closing, False)]:
                        ids, text = np.array(part, np.int64), tokenizer.decode_bytes(part)
                        size_of_text = len(text) - tokenizer.specials_in(ids)[1]
                        num_bytes += size_of_text
                        counted_bytes += size_of_text * counts
                        digest.update(b"%d %d " % (len(text), counts) + text)
                        writer.append(ids, counts=counts, documents=documents if part else ())
                        documents = documents if not part else []
                    if progress is not None:
                        progress("encode", done + source.tell(), sum(sizes))
            done += size
        if not counted_bytes:
            hint = "conversations to learn from, and to hold out, need messages of the role assistant"
            raise UsageError("chat.no_answer", f"{sources[0]}: no words of an assistant", hint=hint)
        meta = writer.finish(
            num_bytes=num_bytes, source_sha256=digest.hexdigest(), counted_bytes=counted_bytes
        )
    sketch.save(output, meta.source_sha256)
    return meta
