"""Read the tokens of several files, the shards, as one sequence."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmkit.data.corpora import PathOrPaths, as_paths
from lmkit.errors import UsageError, some_of

if TYPE_CHECKING:
    from lmkit.core.batches import Tokens
    from lmkit.data.token_files import TokenFile, TokenMeta

SUFFIXES = (".npy",)
"""Endings of token files."""


def shard_paths(paths: PathOrPaths) -> list[Path]:
    """Return the token files that paths and globs name, in their order; those of a glob are sorted by name.

    A glob that matches no token file stays, for the reader to say that there is no such file. UsageError: a file is
    named twice ("tokens.twice").
    """
    found: dict[str, Path] = {}
    for path in as_paths(paths):
        matches = [path]
        if glob.has_magic(str(path)) and not os.path.lexists(path):
            names = sorted(glob.glob(str(path)))
            matches = [Path(name) for name in names if name.endswith(SUFFIXES)] or matches
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


def joined(files: Sequence[TokenFile], meta: TokenMeta) -> TokenFile:
    """Return open shards as one token file; `meta` is as `joined_meta` returns it."""
    if len(files) == 1:
        return files[0]
    lengths = [len(file.tokens) for file in files]
    offsets = np.cumsum([0, *lengths[:-1]]).astype("<u8")
    changes: dict[str, Any] = {}
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


def joined_meta(paths: Sequence[Path], metas: Sequence[TokenMeta]) -> TokenMeta:
    """Return the description of all shards together; refuse those of different tokenizers ("tokens.other_shard")."""
    first = metas[0]
    if len(metas) == 1:
        return first
    for path, meta in zip(paths, metas, strict=True):
        for key in ("tokenizer_sha256", "vocab_size"):
            if (theirs := getattr(meta, key)) != (ours := getattr(first, key)):
                message = f"{path}: has {key} {str(theirs)[:12]}, but {paths[0]} has {str(ours)[:12]}"
                hint = "shards need one tokenizer: encode all of them with the same one"
                raise UsageError("tokens.other_shard", message, hint=hint)
    content = "".join(f"{meta.num_tokens} {meta.source_sha256}\n" for meta in metas)
    changes: dict[str, Any] = {"source_sha256": hashlib.sha256(content.encode()).hexdigest()}
    for key in ("num_tokens", "num_documents", "num_bytes"):
        changes[key] = sum(getattr(meta, key) for meta in metas)
    if any(meta.counted_tokens is not None for meta in metas):
        for key, everything in (("counted_tokens", "num_tokens"), ("counted_bytes", "num_bytes")):
            is_masked = [meta.counted_tokens is not None for meta in metas]
            named = [key if masked else everything for masked in is_masked]
            changes[key] = sum(getattr(meta, name) or 0 for meta, name in zip(metas, named, strict=True))
    return dataclasses.replace(first, **changes)
