"""Read and write `.bin` token files, as llm.c and modded-nanogpt do.

A header of 256 little-endian int32 (magic, version, number of tokens, zeros) comes before the ids. The end-of-text
token stands before each document, which may go on in the next file. Nothing says which tokenizer made a file.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from lmkit.data.token_files import FORMAT, TokenFile, TokenMeta, beyond, parts
from lmkit.errors import LmkitError, UsageError
from lmkit.storage.atomic import PARTIAL_SUFFIX, atomic_path, fsync
from lmkit.storage.inputs import open_input
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.marks import no_end_of_text


class _Form(NamedTuple):
    version: int
    dtype: np.dtype
    end_of_text: int


_GPT2 = 20240520
_FORMS = {_GPT2: _Form(1, np.dtype("<u2"), 50256), 20240801: _Form(7, np.dtype("<u4"), 128000)}
"""By magic: GPT-2's ids, and Llama 3's."""
_HEADER_BYTES = 256 * 4
_CONVERT = (
    "encode the text with lmkit data encode; raw ids of uint16, as nanoGPT writes them, need this header: "
    "python -c \"import numpy as np; i = np.fromfile('train.bin', '<u2'); h = np.zeros(256, '<i4'); "
    "h[:3] = 20240520, 1, len(i); open('new.bin', 'wb').write(h.tobytes() + i.tobytes())\""
)
_AGAIN = "download the file again, or encode the text again with: lmkit data encode --format bin"


def open_bin(
    path: Path,
    *,
    tokenizer_sha256: str,
    vocab_size: int | None,
    end_of_text: int | None,
    before: int | None = None,
) -> TokenFile:
    """Open one `.bin` file; see `lmkit.data.shards.open_tokens`.

    Args:
        tokenizer_sha256: is believed; "": not known.
        end_of_text: the id between documents; None: GPT-2's, or Llama 3's.
        before: the last id of the shard before, whose last document may go on; None: there is none.
    """
    with open_input(path) as file:
        content, size = file.read(_HEADER_BYTES), os.fstat(file.fileno()).st_size
    header = np.frombuffer(content[: len(content) // 4 * 4], "<i4").tolist()
    form = _FORMS.get(header[0]) if header else None
    if form is None:
        found = header[0] if header else "nothing"
        problem = f"{path}: begins with {found}, not with the magic number of a .bin file"
        raise LmkitError("tokens.no_header", problem, hint=_CONVERT)
    if len(content) < _HEADER_BYTES:
        problem = f"{path}: ends at byte {size}, in its header of {_HEADER_BYTES}"
        raise LmkitError("tokens.damaged", problem, hint=_AGAIN)
    version, count = header[1:3]
    if version != form.version:
        problem = f"{path}: version {version} at byte 4, but this lmkit reads version {form.version}"
        raise LmkitError("tokens.other_format", problem, hint="upgrade lmkit, or encode the text again")
    if size != _HEADER_BYTES + count * form.dtype.itemsize:
        held = (size - _HEADER_BYTES) / form.dtype.itemsize
        problem = f"{path}: {held:.10g} tokens from byte {_HEADER_BYTES} on, {count} in its header"
        raise LmkitError("tokens.damaged", problem, hint=_AGAIN)
    if count == 0:
        raise LmkitError("tokens.empty", f"{path}: no tokens in it", hint="encode a text that is not empty")
    tokens = np.memmap(path, form.dtype, "r", _HEADER_BYTES, (count,))
    mark = form.end_of_text if end_of_text is None else end_of_text
    begins = tokens[0] != mark if before is None else before == mark
    starts = [np.zeros(int(begins), np.int64)]
    digest, largest = hashlib.sha256(), 0
    for start, part in parts(tokens):
        if vocab_size is not None and (wrong := beyond(part, start, vocab_size)) is not None:
            hint = "give the vocabulary of these ids: model.vocab_size, or their tokenizer"
            raise LmkitError("tokens.damaged", f"{path}: {wrong}", hint=hint)
        largest = max(largest, int(part.max()))
        digest.update(part.data)
        starts.append(np.flatnonzero(part == mark) + (start + 1))
    documents = np.concatenate(starts).astype("<u8")
    documents = documents[documents < count]  # none follows an end-of-text token at the end
    meta = TokenMeta(
        tokenizer_sha256=tokenizer_sha256,
        vocab_size=vocab_size or largest + 1,
        num_tokens=count,
        num_documents=len(documents),
        num_bytes=0,
        source_sha256=digest.hexdigest(),
        format=FORMAT,
    )
    return TokenFile(tokens, meta, None, documents)


def bin_name(output: Path) -> Path:
    """Return the NAME of the shards of an output, which may be a folder, or end in `.bin`."""
    if output.is_dir():
        return output / output.resolve().name
    return output.with_suffix("") if output.suffix == ".bin" else output


def shard_name(name: Path, number: int) -> Path:
    """Return the name of a shard, `NAME_000000.bin`."""
    return name.with_name(f"{name.name}_{number:06d}.bin")


def first_shard(path: Path) -> Path:
    """Return the first shard of those of which `path` may be one; it gets its name last."""
    return path.with_name(re.sub(r"_\d{6}\.bin$", "_000000.bin", path.name))


def written(name: Path, ending: str = "") -> list[Path]:
    """Return the shards of this name that there are."""
    return sorted(name.parent.glob(f"{glob.escape(name.name)}_{'[0-9]' * 6}.bin{ending}"))


class BinWriter:
    """Write `.bin` shards piece by piece, as `TokenFileWriter` writes a `.npy` file; see `bin_writer`."""

    def __init__(self, name: Path, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._tokenizer, self._form, self._shard_tokens = tokenizer, _FORMS[_GPT2], shard_tokens
        # A document is followed by its end-of-text token; here the token of the one before comes first.
        self._held = np.array([tokenizer.end_of_text_id], self._form.dtype)
        self._num_documents = 0
        self._name, self._sizes = name, [0]
        self._file = self._begun(0)
        self.meta: TokenMeta | None = None

    def append(
        self, ids: np.ndarray, *, documents: Sequence[int] | np.ndarray = (), sizes: Sequence[int] = ()
    ) -> None:
        """Add ids at the end; `documents` are as of `TokenFileWriter`; `sizes` have no place in a `.bin` file."""
        self._num_documents += len(documents)
        stream = np.concatenate((self._held, ids.astype(self._form.dtype)))
        stream, self._held = stream[:-1], stream[-1:]
        while len(stream):
            if self._sizes[-1] == self._shard_tokens:
                self._end()
                self._file = self._begun(len(self._sizes))
                self._sizes.append(0)
            part = stream[: self._shard_tokens - self._sizes[-1]]
            self._file.write(part.data)
            self._sizes[-1] += len(part)
            stream = stream[len(part) :]

    def finish(self, *, num_bytes: int, source_sha256: str) -> TokenMeta:
        """Complete the shards; they appear when the `with` block ends."""
        self._end()
        self.meta = TokenMeta(
            tokenizer_sha256=self._tokenizer.sha256,
            vocab_size=self._tokenizer.vocab_size,
            num_tokens=sum(self._sizes),
            num_documents=self._num_documents,
            num_bytes=num_bytes,
            source_sha256=source_sha256,
            format=FORMAT,
        )
        return self.meta

    def name_all(self) -> None:
        """Remove older shards, and give all new ones but the first their names."""
        partials = [_partial(shard_name(self._name, number)) for number in range(1, len(self._sizes))]
        for partial in partials:
            fsync(partial)
        for old in written(self._name):
            old.unlink()
        for partial in partials:
            os.replace(partial, partial.with_name(partial.name.removesuffix(PARTIAL_SUFFIX)))

    def close(self) -> None:
        """Remove shards without their names, also those of a killed process, but for the first, which is not ours."""
        self._file.close()
        for left in written(self._name, PARTIAL_SUFFIX):
            if left != _partial(shard_name(self._name, 0)):
                left.unlink()

    def _begun(self, number: int) -> BinaryIO:
        file = open(_partial(shard_name(self._name, number)), "wb")  # noqa: SIM115 (closed by _end)
        file.write(bytes(_HEADER_BYTES))
        return file

    def _end(self) -> None:
        header = np.zeros(_HEADER_BYTES // 4, "<i4")
        header[:3] = _GPT2, self._form.version, self._sizes[-1]
        self._file.seek(0)
        self._file.write(header.data)
        self._file.close()


@contextmanager
def bin_writer(name: Path, tokenizer: Tokenizer, shard_tokens: int) -> Iterator[BinWriter]:
    """Yield a writer of shards. All get their names at the end, the first one last, and older ones of the same name
    are removed. If the block fails or ends without `finish`, no shard is left.

    UsageError: the tokenizer has no end-of-text token ("tokenizer.no_end_of_text"), or more ids than uint16 holds
    ("tokens.bin_vocabulary").
    """
    if tokenizer.end_of_text_id is None:
        raise no_end_of_text(name)
    if tokenizer.vocab_size > 1 << 16:
        message = (
            f"{name}: the tokenizer has {tokenizer.vocab_size:,} ids, and a .bin file has room for 65,536"
        )
        raise UsageError("tokens.bin_vocabulary", message, hint="write a .npy file: leave out --format")
    with atomic_path(shard_name(name, 0)):  # locks all of them
        writer = BinWriter(name, tokenizer, shard_tokens)
        try:
            yield writer
            if writer.meta is None:
                raise RuntimeError("the token file was not finished")
            writer.name_all()
        finally:
            writer.close()


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)
