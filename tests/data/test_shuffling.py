"""Shuffled windows: every token once an epoch, and a pure function of (seed, step)."""

import numpy as np
import pytest
import torch

from lmkit.data.packing import ShuffledBatches

CONTEXT = 7


def shuffled(length=1000, **changes):
    """Batches of a file in which a token tells its position."""
    settings = {"batch_size": 24, "context_length": CONTEXT, "seed": 3}
    return ShuffledBatches(np.arange(length, dtype=np.uint16), **settings | changes)


@pytest.mark.parametrize("length", [CONTEXT + 1, 2 * CONTEXT, 2 * CONTEXT + 1, 100, 1000])
def test_an_epoch_has_every_target_once(length):
    batches = shuffled(length)
    ends = set()
    for epoch in range(60):
        rows = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
        targets = sorted(batches.start(row) + 1 + i for row in rows for i in range(CONTEXT))
        assert targets == list(range(targets[0], targets[-1] + 1))
        assert targets[0] >= 1
        assert targets[-1] <= length - 1
        assert length - 1 - len(targets) < 2 * CONTEXT
        ends |= {targets[0], targets[-1]}
    assert {1, length - 1} <= ends  # no token is left out in every epoch


def test_epochs_have_orders_of_their_own():
    batches = shuffled()
    orders = [[batches.start(n * batches.per_epoch + row) // CONTEXT for row in range(100)] for n in range(3)]
    assert all(order != sorted(order) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_batches_are_the_rows_of_the_stream_one_after_the_other():
    batches = shuffled()
    inputs, targets = batches.batch(11)  # of the second epoch: one has 141 rows
    assert inputs.shape == targets.shape == (1, 24, CONTEXT)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs[0, :, 0].tolist() == [batches.start(11 * 24 + row) for row in range(24)]
    assert torch.equal(inputs, inputs[..., :1] + torch.arange(CONTEXT))
    assert torch.equal(targets, inputs + 1)


def test_the_stream_never_changes():
    # Frozen values: a resumed run must meet the batches of the run it continues, in any later version.
    assert shuffled(batch_size=6).batch(2)[0][0, :, 0].tolist() == [603, 344, 1, 365, 827, 428]
