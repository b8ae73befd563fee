"""Several token files are read as one."""

import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from raising import raises

from lmkit.core.batches import TokenBatches, evaluation_windows, integers
from lmkit.data.packing import PackedBatches, ShuffledBatches
from lmkit.data.shards import ShardedTokens, open_tokens, read_meta, shard_paths, split
from lmkit.data.token_files import TokenFileWriter
from lmkit.errors import UsageError

LENGTHS = (301, 1, 202, 500)
WHOLE = np.random.default_rng(0).integers(0, 900, sum(LENGTHS)).astype(np.uint16)
STARTS = np.array([0, 40, 301, 302, 310, 504, 505, 900])
BOUNDS = np.cumsum([0, *LENGTHS])
SETTINGS = {"batch_size": 6, "context_length": 16, "seed": 1}


def write(path, ids, *, documents=(), counts=None, sizes=(), vocab_size=1000, tokenizer="abc", source="def"):
    with TokenFileWriter(
        path, vocab_size=vocab_size, tokenizer_sha256=tokenizer, masked=counts is not None
    ) as writer:
        if counts is None:
            writer.append(ids, documents=documents, sizes=sizes)
        for at, counted in enumerate(counts or ()):
            writer.append(ids[at : at + 1], counts=bool(counted), documents=[0] * (at in documents))
        counted_bytes = None if counts is None else 2 * sum(counts)
        return writer.finish(num_bytes=len(ids), source_sha256=source, counted_bytes=counted_bytes)


@pytest.fixture
def shards(tmp_path):
    paths = []
    for number, (begin, end) in enumerate(pairwise(BOUNDS.tolist())):
        inside = STARTS[(begin <= STARTS) & (end > STARTS)] - begin
        paths.append(tmp_path / f"train_{number}.npy")
        write(paths[-1], WHOLE[begin:end], documents=inside.tolist(), source=f"{number}")
    return paths


def test_shards_are_indexed_and_sliced_like_one_array(shards):
    tokens = open_tokens(shards).tokens
    assert (len(tokens), tokens.shape, tokens.dtype) == (len(WHOLE), WHOLE.shape, WHOLE.dtype)
    draw = np.random.default_rng(1)
    edges = [None, *(BOUNDS + 1).tolist(), *BOUNDS.tolist(), *(-BOUNDS).tolist()]
    for _ in range(500):
        start, stop = (edges[i] for i in draw.integers(0, len(edges), 2))
        index = slice(start, stop, [None, 1, 2, -1, -7][draw.integers(0, 5)])
        found = tokens[index]
        assert isinstance(found, np.ndarray)
        assert found.dtype == WHOLE.dtype
        assert np.array_equal(found, WHOLE[index]), index
    assert [tokens[i] for i in (0, 300, 301, 302, -1)] == [WHOLE[i] for i in (0, 300, 301, 302, -1)]
    for index in (len(WHOLE), -len(WHOLE) - 1):
        with pytest.raises(IndexError):
            tokens[index]
    assert np.array_equal(np.asarray(tokens), WHOLE)


def test_a_slice_of_one_shard_is_not_copied():
    arrays = [np.arange(10), np.arange(10)]
    tokens = ShardedTokens(arrays)
    assert integers("tokens", tokens) is tokens
    assert np.shares_memory(tokens[12:15], arrays[1])
    before, after = split(tokens, 13)
    assert [np.asarray(part).tolist() for part in (before, after)] == [[*range(10), 0, 1, 2], [*range(3, 10)]]
    assert np.shares_memory(before[11:], arrays[1])
    assert np.shares_memory(after[:1], arrays[1])


def test_their_descriptions_documents_and_masks_are_joined(shards, tmp_path):
    file = open_tokens(tmp_path / "train_*.npy")
    assert file.documents.tolist() == STARTS.tolist()
    assert (file.meta.num_tokens, file.meta.num_documents, file.meta.num_bytes) == (1004, len(STARTS), 1004)
    assert (file.mask, file.sizes, file.meta.counted_tokens) == (None, None, None)
    assert read_meta(shards) == file.meta
    assert read_meta(shards[::-1]).source_sha256 != file.meta.source_sha256

    counts = [1, 0, 0, 1, 1]
    write(tmp_path / "masked.npy", WHOLE[:5], documents=[0, 3], counts=counts)
    joined = open_tokens([tmp_path / "masked.npy", shards[1], shards[2]])
    bits = [*counts, *[1] * 203]
    assert np.unpackbits(joined.mask, count=len(bits)).tolist() == bits
    assert (joined.meta.counted_tokens, joined.meta.counted_bytes) == (sum(bits), 2 * 3 + 203)
    shards[2].with_suffix(".documents").unlink()
    assert open_tokens(shards).documents is None


def test_the_bytes_of_documents_are_joined(tmp_path):
    write(tmp_path / "a.npy", WHOLE[:5], documents=[0, 2], sizes=[7, 8])
    write(tmp_path / "b.npy", WHOLE[:5], documents=[0], sizes=[9])
    assert open_tokens(tmp_path / "[ab].npy").sizes.tolist() == [7, 8, 9]


def test_batches_from_shards_are_those_of_one_file(shards):
    tokens = open_tokens(shards).tokens
    for source in (
        lambda ids: TokenBatches(ids, **SETTINGS),
        lambda ids: TokenBatches(ids, document_starts=STARTS, borders=STARTS, **SETTINGS),
        lambda ids: ShuffledBatches(ids, **SETTINGS),
        lambda ids: PackedBatches(ids, document_starts=STARTS, **SETTINGS),
    ):
        for step in (0, 3, 30):
            torch.testing.assert_close(source(tokens).batch(step), source(WHOLE).batch(step))
    for found, expected in zip(
        evaluation_windows(tokens, 16, 4), evaluation_windows(WHOLE, 16, 4), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_globs_name_token_files_in_the_order_of_their_names(shards, tmp_path):
    assert shard_paths(str(tmp_path / "train_*")) == shards  # and not what describes them
    assert shard_paths([shards[3], tmp_path / "train_[01].npy"]) == [shards[3], *shards[:2]]
    literal = tmp_path / "a[1].npy"
    write(literal, WHOLE)
    assert shard_paths(literal) == [literal]
    with pytest.raises(ValueError, match="no token file"):
        open_tokens([])


def test_shards_that_are_missing_or_named_twice_are_refused_by_name(shards, tmp_path):
    with raises(UsageError, "tokens.missing", "valid_*.npy"):
        open_tokens(tmp_path / "valid_*.npy")
    with raises(UsageError, "tokens.missing", "train_9.npy"):
        open_tokens([*shards, tmp_path / "train_9.npy"])
    os.symlink(shards[2], tmp_path / "zlink.npy")
    for twice in ([*shards, shards[1]], [tmp_path / "train_*.npy", tmp_path / "zlink.npy"]):
        with raises(UsageError, "tokens.twice", twice[-1].name):
            open_tokens(twice)


def test_shards_of_different_tokenizers_are_refused_by_name(shards, tmp_path):
    for change, key in (({"tokenizer": "xyz"}, "tokenizer_sha256"), ({"vocab_size": 999}, "vocab_size")):
        write(tmp_path / "train_4.npy", WHOLE, **change)
        with raises(UsageError, "tokens.other_shard", "train_4.npy", "train_0.npy", key):
            open_tokens(tmp_path / "train_*.npy")
