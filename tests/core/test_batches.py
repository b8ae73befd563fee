"""Batches are a pure function of (seed, step), however they are split."""

import numpy as np
import pytest
import torch
from raising import raises

from lmkit.core.batches import RandomTokens, TokenBatches, evaluation_windows
from lmkit.data.packing import PackedBatches, ShuffledBatches
from lmkit.data.token_files import check_divisible, check_length
from lmkit.errors import UsageError

CONTEXT = 7


@pytest.fixture
def tokens():
    # Position = value: a window then tells where it was cut.
    return np.arange(1000, dtype=np.uint16)


SETTINGS = {"batch_size": 24, "context_length": CONTEXT, "seed": 3}


def token_batches(tokens, **changes):
    return TokenBatches(tokens, **SETTINGS | changes)


def random_tokens(tokens, **changes):
    return RandomTokens(500, **SETTINGS | changes)


def shuffled_batches(tokens, **changes):
    return ShuffledBatches(tokens, **SETTINGS | changes)


def packed_batches(tokens, **changes):
    ends = np.cumsum(1 + np.arange(300) * 37 % 59)
    bounds = np.concatenate([[0], ends[ends < len(tokens)], [len(tokens)]])
    return PackedBatches(tokens, **SETTINGS | changes, document_starts=bounds)


SOURCES = [token_batches, random_tokens, shuffled_batches, packed_batches]
every_source = pytest.mark.parametrize("source", SOURCES)


@every_source
def test_a_batch_depends_on_seed_and_step_alone(tokens, source):
    one, other = source(tokens), source(tokens)
    for step in (50, 0, 50, 3):  # any order, asked twice; 50 is in a later epoch
        assert torch.equal(one.batch(step)[0], other.batch(step)[0])
    assert not torch.equal(one.batch(1)[0], one.batch(2)[0])
    assert not torch.equal(one.batch(1)[0], source(tokens, seed=4).batch(1)[0])


@every_source
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (2, 1), (4, 3), (8, 3), (3, 2)])
def test_ranks_and_slices_partition_the_same_global_batch(tokens, source, world_size, accumulation):
    whole = torch.stack(source(tokens).batch(11)).reshape(2, 24, CONTEXT)
    parts = []
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "accumulation": accumulation}
        part = torch.stack(source(tokens, **options).batch(11))
        assert part.shape == (2, accumulation, 24 // world_size // accumulation, CONTEXT)
        parts.append(part.reshape(2, -1, CONTEXT))
    assert torch.equal(torch.cat(parts, dim=1), whole)


@every_source
def test_rows_are_read_by_their_numbers(tokens, source):
    stream = source(tokens)
    whole = [torch.cat([stream.batch(step)[side][0] for step in range(4)]) for side in (0, 1)]
    numbers = np.array([95, 0, 24, 23, 95, 60])
    for side, found in zip(whole, source(tokens).rows(numbers), strict=True):
        assert found.dtype == torch.int64
        assert torch.equal(found, side[numbers])


def test_the_stream_never_changes(tokens):
    # Frozen values: a resumed run must meet the batches of the run it continues, in any later version.
    starts = token_batches(tokens, batch_size=6).batch(2)[0][0, :, 0].tolist()
    assert starts == [852, 179, 726, 352, 447, 352]
    ids = random_tokens(tokens, batch_size=2).batch(2)[0][0].tolist()
    assert ids == [[320, 205, 298, 391, 270, 269, 405], [262, 487, 178, 154, 488, 353, 125]]


@pytest.mark.parametrize("source", [token_batches, shuffled_batches, packed_batches])
def test_targets_that_do_not_count_are_below_zero(tokens, source):
    counts = np.random.default_rng(3).random(1000) < 0.5
    masks = ({}, {"mask": np.packbits(counts)})
    (inputs, targets), (same, hidden) = (source(tokens, **mask).batch(1) for mask in masks)
    assert torch.equal(inputs, same)
    assert torch.equal(hidden, torch.where(torch.tensor(counts)[targets], targets, -1))


def test_every_document_can_be_drawn(tokens):
    batches = token_batches(tokens, batch_size=300, document_starts=np.array([5, 50, 500]))
    starts = batches.batch(0)[0][..., 0].flatten().tolist()
    assert min(starts.count(start) for start in (5, 50, 500)) > 60  # uniform: expected 100 each, sd 8


def test_windows_start_at_documents(tokens):
    starts = np.array([0, 10, 500, 992, 993, 999])
    batches = token_batches(tokens, document_starts=starts)
    drawn = {start for step in range(5) for start in batches.batch(step)[0][..., 0].flatten().tolist()}
    assert drawn == {0, 10, 500, 992}  # 993 has only CONTEXT tokens behind it
    with pytest.raises(ValueError, match="no document"):
        token_batches(tokens, document_starts=np.array([995]))


def test_reads_memory_mapped_uint32_beyond_uint16(tmp_path):
    path = tmp_path / "train.npy"
    np.save(path, np.arange(70_000, 70_100, dtype=np.uint32))
    inputs, targets = token_batches(np.load(path, mmap_mode="r")).batch(0)
    assert inputs.min() >= 70_000
    assert torch.equal(targets, inputs + 1)


def test_a_file_shorter_than_the_context_is_refused_by_name(tmp_path):
    path = tmp_path / "short.npy"
    np.save(path, np.arange(CONTEXT, dtype=np.uint16))
    short = np.load(path, mmap_mode="r")
    with raises(UsageError, "tokens.too_short", "short.npy", "7 tokens", "context_length"):
        check_length(short, CONTEXT)
    with pytest.raises(ValueError, match="7 tokens"):
        next(evaluation_windows(short, CONTEXT, 2))
    for source in (token_batches, shuffled_batches):
        with pytest.raises(ValueError, match="7 tokens"):
            source(short)
    assert token_batches(np.arange(CONTEXT + 1, dtype=np.uint16)).batch(0)[1].max() == CONTEXT


def test_an_indivisible_batch_is_refused(tokens):
    for source, split in (
        (token_batches, {"world_size": 5}),
        (random_tokens, {"world_size": 8, "accumulation": 2}),
        (token_batches, {"world_size": 4, "accumulation": 4}),
    ):
        ranks, accumulation = split["world_size"], split.get("accumulation", 1)
        with pytest.raises(ValueError, match=f"24 is not divisible by {ranks}"):
            source(tokens, **split)
        with raises(UsageError, "batches.indivisible", "train.batch_size", "24", ranks):
            check_divisible(24, ranks, accumulation)


def test_random_tokens_cover_the_vocabulary():
    ids, targets = RandomTokens(11, batch_size=64, context_length=32, seed=0).batch(0)
    assert set(ids.flatten().tolist()) == set(range(11))
    assert torch.equal(ids[..., 1:], targets[..., :-1])


@pytest.mark.parametrize("length", [8, 9, 14, 15, 16, 28, 29, 30, 100])
def test_evaluation_covers_every_target_once(length):
    tokens = np.arange(length, dtype=np.uint16)
    seen = []
    for inputs, targets in evaluation_windows(tokens, CONTEXT, 2):
        assert torch.equal(targets, inputs + 1)
        assert inputs.shape[0] <= 2
        assert inputs.shape[1] == CONTEXT or inputs.shape[0] == 1
        assert targets.numel() > 0  # the mean loss of nothing is nan
        seen += targets.flatten().tolist()
    assert seen == list(range(1, length))


def test_evaluation_stops_after_max_batches(tokens):
    batches = list(evaluation_windows(tokens, CONTEXT, 2, max_batches=3))
    assert len(batches) == 3
    assert batches[2][1].max() == 6 * CONTEXT
    assert list(evaluation_windows(tokens, CONTEXT, 2, max_batches=0)) == []
    short_row = np.arange(4 * CONTEXT + 3)  # two batches and two tokens
    assert len(list(evaluation_windows(short_row, CONTEXT, 2, max_batches=2))) == 2
    assert len(list(evaluation_windows(short_row, CONTEXT, 2, max_batches=3))) == 3


def test_the_input_before_a_document_is_its_complement(tokens):
    borders = np.array([1, 8, 9, 500, 999])
    batches = [*evaluation_windows(tokens, CONTEXT, 50, borders=borders)]
    assert sum((inputs < 0).sum().item() for inputs, _ in batches) == 5
    for inputs, targets in [token_batches(tokens, batch_size=240, borders=borders).batch(0), *batches]:
        ids = torch.maximum(inputs, ~inputs)
        assert torch.equal(targets, ids + 1)
        assert torch.equal(inputs < 0, torch.isin(targets, torch.from_numpy(borders)))
