"""Mixtures: exact shares in every block, each source in its own order, the same rows for every split."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from lmkit.core.batches import TokenBatches
from lmkit.data.mixing import BLOCK, MixedBatches
from lmkit.data.packing import PackedBatches, ShuffledBatches

SETTINGS = {"batch_size": 24, "context_length": 7, "seed": 3}
STARTS = np.arange(0, 1000, 9)


def sources(**changes):
    """One of each kind; the ids of source i are between 1000 i and 1000 (i + 1)."""
    how = SETTINGS | changes
    tokens = [
        np.arange(1000 * number, 1000 * number + length) for number, length in enumerate((1000, 700, 900))
    ]
    return [
        TokenBatches(tokens[0], **how),
        ShuffledBatches(tokens[1], **how),
        PackedBatches(tokens[2], document_starts=STARTS, **how),
    ]


def mixed(weights=(5, 2.5, 0.3), **changes):
    return MixedBatches(sources=sources(**changes), weights=weights, **SETTINGS | changes)


@pytest.mark.parametrize(
    "weights", [(5, 2.5, 0.3), (1, 1, 1), (1e-9, 1, 1e-9), (0.1, 0.2, 0.7), (1, 3, 1e6)], ids=str
)
def test_every_block_has_the_shares_to_one_row(weights):
    mixture = mixed(weights)
    heaviest = int(np.argmax(weights))
    counted = np.zeros(3, np.int64)
    for block in (*range(40), 10_000):
        owners, numbers = mixture.places(np.arange(block * BLOCK, (block + 1) * BLOCK))
        if block < 40:  # each source's rows are its next ones
            for source in range(3):
                own = numbers[owners == source]
                assert own.tolist() == list(range(counted[source], counted[source] + len(own)))
                counted[source] += len(own)
            assert counted.tolist() == mixture.rows_before(block + 1).tolist()
        for source in range(3):
            wanted = mixture.shares[source] * BLOCK
            most = 1 + (source == heaviest)  # the heaviest takes what rounding leaves of the others
            assert abs(int((owners == source).sum()) - wanted) <= most
            total = mixture.shares[source] * BLOCK * (block + 1)
            assert abs(int(mixture.rows_before(block + 1)[source]) - total) <= most / 2


def test_the_heaviest_of_32_sources_has_rows_in_every_block():
    one = sources()[0]
    mixture = MixedBatches(sources=[one] * 32, weights=[1 + i / 1e6 for i in range(32)], **SETTINGS)
    before = np.stack([mixture.rows_before(block) for block in range(200)])
    assert np.diff(before, axis=0).min() >= 1
    assert (before.sum(axis=1) == BLOCK * np.arange(200)).all()


def test_the_order_of_each_source_is_that_of_the_source_alone():
    mixture, alone = mixed(), sources()
    numbers = np.arange(3 * BLOCK)
    inputs, targets = mixture.rows(numbers)
    owners = mixture.places(numbers)[0]
    for number, source in enumerate(alone):
        mine = torch.from_numpy(np.flatnonzero(owners == number))
        expected = source.rows(np.arange(len(mine)))
        torch.testing.assert_close((inputs[mine], targets[mine]), expected, rtol=0, atol=0)
    ids = torch.maximum(inputs, ~inputs)
    assert (ids // 1000 == torch.from_numpy(owners)[:, None]).all()


def test_rows_of_a_block_are_in_random_order():
    mixture = mixed((1, 1, 1))
    first, second = (mixture.places(np.arange(at, at + BLOCK))[0].tolist() for at in (0, BLOCK))
    assert first != sorted(first)
    assert first != second
    assert first != mixed((1, 1, 1), seed=4).places(np.arange(BLOCK))[0].tolist()
    # Of 1,024 neighbours, 341 are expected to be of one source, with a standard deviation of 15.
    assert abs(sum(a == b for a, b in pairwise(first)) - 341) < 75


def test_the_order_never_changes():
    # Frozen values: a resumed run must meet the batches of the run it continues, in any later version.
    owners, numbers = mixed().places(np.array([0, 1, 2, 1023, 1024, 5000, 123_456_789]))
    assert owners.tolist() == [0, 2, 0, 0, 0, 0, 0]
    assert numbers.tolist() == [0, 0, 1, 656, 657, 3205, 79138965]


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (2, 1), (4, 1), (4, 3), (2, 6)])
def test_ranks_and_slices_partition_the_same_global_batch(world_size, accumulation):
    for step in (0, 42, 43):  # rows 1,008 to 1,032 are of two blocks
        whole = torch.stack(mixed().batch(step)).reshape(2, 24, 7)
        parts = [
            torch.stack(mixed(rank=rank, world_size=world_size, accumulation=accumulation).batch(step))
            for rank in range(world_size)
        ]
        assert torch.equal(torch.cat([part.reshape(2, -1, 7) for part in parts], dim=1), whole)


def test_the_seen_context_is_the_mean_of_the_sources():
    mixture = mixed((1, 1, 2))
    assert mixture.seen_context == (7 + 7 + 2 * mixture.sources[2].seen_context) / 4
