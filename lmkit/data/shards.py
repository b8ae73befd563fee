"""Open token files: one, or several, the shards, as one sequence."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmkit.data.bin_files import first_shard, open_bin
from lmkit.data.corpora import PathOrPaths, as_paths
from lmkit.data.token_files import TokenFile, TokenMeta, open_npy, parts, read_npy_meta
from lmkit.errors import LmkitError, UsageError, some_of
from lmkit.storage.atomic import PARTIAL_SUFFIX
from lmkit.storage.inputs import files_of
from lmkit.tokenizer import Tokenizer

if TYPE_CHECKING:  # the batches need torch
    from lmkit.core.batches import Tokens

SUFFIXES = (".npy", ".bin")
"""Endings of token files."""


def shard_paths(paths: PathOrPaths) -> list[Path]:
    """Return the token files that paths and globs name, in their order; those of a glob are sorted by name.

    A glob that matches no token file stays, for the reader to say that there is no such file. UsageError: a file is
    named twice ("tokens.twice").
    """
    found: dict[str, Path] = {}
    for path in as_paths(paths):
        matches = [name for name in files_of(path) if name.suffix in SUFFIXES] or [path]
        for match in matches:
            if (before := found.setdefault(os.path.realpath(match), match)) is not match:
                message = f"{match}: is named twice" + (f", also as {before}" if before != match else "")
                raise UsageError("tokens.twice", message, hint="name every shard once")
    if not found:
        raise ValueError("no token file is named")
    return [*found.values()]


def name_of(paths: PathOrPaths) -> str:
    """Return the names of the first token files, for messages."""
    return some_of(shard_paths(paths))


class ShardedTokens:
    """The tokens of several shards as one read-only sequence, which indexes and slices read like an array.

    Only what is read is touched. A slice of one shard is a view; that of several is a copy.
    """

    ndim = 1

    def __init__(self, shards: Sequence[Tokens]) -> None:
        self.dtype = shards[0].dtype
        self.filename = some_of([str(getattr(shard, "filename", "an array")) for shard in shards])
        self._shards = [np.asarray(shard) for shard in shards]  # np.memmap itself is slow to slice
        self._ends = np.cumsum([0, *map(len, shards)]).tolist()

    @property
    def shape(self) -> tuple[int]:
        return (self._ends[-1],)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._parts(places, places + 1)[0][0]
        if not places:
            return np.empty(0, self.dtype)
        first, last = sorted((places[0], places[-1]))
        parts = self._parts(first, last + 1)
        return (parts[0] if len(parts) == 1 else np.concatenate(parts))[:: places.step]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def _parts(self, start: int, end: int) -> list[np.ndarray]:
        """Return the views of the shards that hold the tokens from `start` to `end`, at least one."""
        parts, number = [], bisect_right(self._ends, start) - 1
        while start < end:
            begin, stop = self._ends[number], min(end, self._ends[number + 1])
            parts.append(self._shards[number][start - begin : stop - begin])
            start, number = stop, number + 1
        return parts


def split(tokens: Tokens, place: int) -> tuple[Tokens, Tokens]:
    """Return the tokens before and from `place`, without reading them."""
    if not isinstance(tokens, ShardedTokens):
        return tokens[:place], tokens[place:]
    return ShardedTokens(tokens._parts(0, place)), ShardedTokens(tokens._parts(place, len(tokens)))


def open_tokens(
    paths: PathOrPaths,
    *,
    tokenizer_sha256: str | None = None,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
) -> TokenFile:
    """Open a token file for reading, or several, the shards, as one. They are read once to check that every id is in
    the vocabulary.

    Args:
        paths: of one file or several, in this order; a glob names its files sorted by name.
        tokenizer_sha256: `Tokenizer.sha256` of the tokenizer to use with the file.
        tokenizer: the tokenizer itself. It says of `.bin` files, which do not, how many ids there are, and which of
            them ends a document.
        vocab_size: of `.bin` files without a tokenizer; None: one more than the largest id.

    Raises:
        UsageError: no such file ("tokens.missing"), no description ("tokens.not_described"), or another tokenizer
            made it ("tokens.wrong_tokenizer"); shards of different tokenizers ("tokens.other_shard"), or a shard that
            is named twice ("tokens.twice").
        LmkitError: the file or its description is damaged ("tokens.damaged"), empty ("tokens.empty") or of
            another format ("tokens.other_format").
    """
    shards = _existing(paths)
    if tokenizer is not None:
        tokenizer_sha256, vocab_size = tokenizer.sha256, tokenizer.vocab_size
    about: dict[str, Any] = {"tokenizer_sha256": tokenizer_sha256 or "", "vocab_size": vocab_size}
    about["end_of_text"] = None if tokenizer is None else tokenizer.end_of_text_id
    _refuse_different({path: read_npy_meta(path) for path in shards if path.suffix == ".npy"})  # soon seen
    files: list[TokenFile] = []
    for path in shards:
        if path.suffix == ".npy":
            files.append(open_npy(path, tokenizer_sha256))
        else:
            files.append(open_bin(path, before=int(files[-1].tokens[-1]) if files else None, **about))
    return _joined(shards, files)


def with_num_bytes(file: TokenFile, tokenizer: Tokenizer | None) -> TokenFile:
    """Return a token file whose description has the bytes of its text, from `.bin` files too; they are decoded."""
    if tokenizer is None or file.meta.num_bytes:
        return file
    lengths = np.zeros(tokenizer.vocab_size, np.int32)
    for token_id, token in tokenizer.vocab.items():
        lengths[token_id] = len(token)
    lengths[tokenizer.specials_in(np.arange(tokenizer.vocab_size))[0]] = 0
    num_bytes = sum(int(lengths[part].sum(dtype=np.int64)) for _, part in parts(file.tokens))
    return dataclasses.replace(file, meta=dataclasses.replace(file.meta, num_bytes=num_bytes))


def read_meta(paths: PathOrPaths) -> TokenMeta:
    """Return the description of a token file or of several as one. Errors are those of `open_tokens`."""
    shards = _existing(paths)
    if any(path.suffix != ".npy" for path in shards):
        return open_tokens(shards).meta
    metas = {path: read_npy_meta(path) for path in shards}
    _refuse_different(metas)
    return joined_meta([*metas.values()])


def _existing(paths: PathOrPaths) -> list[Path]:
    shards, hint = shard_paths(paths), "make one with: lmkit data encode"
    for path in shards:
        if path.is_dir() or not path.exists():
            what = "is a folder, not a token file" if path.is_dir() else "no such token file"
            raise UsageError("tokens.missing", f"{path}: {what}", hint=hint)
        if path.suffix not in SUFFIXES:
            raise UsageError("tokens.name", f"{path}: a token file ends in .npy or .bin", hint=hint)
        first = first_shard(path)
        if not first.exists() and first.with_name(first.name + PARTIAL_SUFFIX).exists():
            message = f"{path}: the command that wrote it was killed before {first.name} had its name"
            raise LmkitError("tokens.damaged", message, hint="encode the text again, with --force")
    return shards


def _joined(paths: Sequence[Path], files: Sequence[TokenFile]) -> TokenFile:
    """Return open shards as one token file."""
    if len(files) == 1:
        return files[0]
    metas = [file.meta for file in files]
    _refuse_different(dict(zip(paths, metas, strict=True)))
    lengths = [len(file.tokens) for file in files]
    offsets = np.cumsum([0, *lengths[:-1]]).astype("<u8")
    for path, file in zip(paths, files, strict=True):
        if file.tokens.dtype != files[0].tokens.dtype:
            message = f"{path}: holds {file.tokens.dtype}, but {paths[0]} {files[0].tokens.dtype}"
            raise UsageError("tokens.other_shard", message, hint="name shards of one kind")
    meta, changes = joined_meta(metas), dict[str, Any]()
    if meta.counted_tokens is not None:
        bits = [
            np.ones(length, bool) if file.mask is None else np.unpackbits(file.mask, count=length)
            for file, length in zip(files, lengths, strict=True)
        ]
        changes["mask"] = np.packbits(np.concatenate(bits))
    starts = [
        file.documents + at for file, at in zip(files, offsets, strict=True) if file.documents is not None
    ]
    changes["documents"] = np.concatenate(starts) if len(starts) == len(files) else None
    sizes = [file.sizes for file in files if file.sizes is not None]
    changes["sizes"] = np.concatenate(sizes) if len(sizes) == len(files) else None
    return dataclasses.replace(
        files[0], tokens=ShardedTokens([file.tokens for file in files]), meta=meta, **changes
    )


def _refuse_different(metas: Mapping[Path, TokenMeta]) -> None:
    """Refuse shards of different tokenizers ("tokens.other_shard")."""
    for path, meta in metas.items():
        first = next(iter(metas))
        # The vocabulary of a `.bin` file may be just that of the ids in it.
        for key in ("tokenizer_sha256", "vocab_size") if path.suffix == ".npy" else ("tokenizer_sha256",):
            if (theirs := getattr(meta, key)) != (ours := getattr(metas[first], key)):
                message = f"{path}: has {key} {str(theirs)[:12]}, but {first} has {str(ours)[:12]}"
                hint = "shards need one tokenizer: encode all of them with the same one"
                raise UsageError("tokens.other_shard", message, hint=hint)


def joined_meta(metas: Sequence[TokenMeta]) -> TokenMeta:
    """Return the description of several token files together."""
    if len(metas) == 1:
        return metas[0]
    content = "".join(f"{meta.num_tokens} {meta.source_sha256}\n" for meta in metas)
    changes: dict[str, Any] = {"source_sha256": hashlib.sha256(content.encode()).hexdigest()}
    for key in ("num_tokens", "num_documents", "num_bytes"):
        changes[key] = sum(getattr(meta, key) for meta in metas)
    if not all(meta.num_bytes for meta in metas):  # of some it is not known
        changes["num_bytes"] = 0
    if any(meta.counted_tokens is not None for meta in metas):
        for key, everything in (("counted_tokens", "num_tokens"), ("counted_bytes", "num_bytes")):
            is_masked = [meta.counted_tokens is not None for meta in metas]
            named = [key if masked else everything for masked in is_masked]
            changes[key] = sum(getattr(meta, name) or 0 for meta, name in zip(metas, named, strict=True))
    changes["vocab_size"] = max(meta.vocab_size for meta in metas)
    return dataclasses.replace(metas[0], **changes)
