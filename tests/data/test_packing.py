"""Packed documents: every token once an epoch, no place left empty, and a pure function of (seed, step)."""

import numpy as np
import pytest
import torch

from lmkit.data import packing
from lmkit.data.packing import PackedBatches

END = 999


def packed(lengths, *, context=16, ends=True, **changes):
    """Batches of documents of these lengths; token i of the file is i % 500, the last of a document END."""
    bounds = np.cumsum(lengths)
    tokens = (np.arange(bounds[-1]) % 500).astype(np.uint16)
    tokens[bounds[: len(bounds) if ends else -1] - 1] = END
    starts = np.concatenate([[0], bounds])  # as they are found: the last begins where the file ends
    settings = {"batch_size": 6, "context_length": context, "seed": 1}
    return PackedBatches(tokens, **settings | changes, document_starts=starts)


def random_lengths(count, longest, seed=0):
    return np.random.default_rng(seed).integers(1, longest, count)


LENGTHS = {
    "short": random_lengths(700, 14),
    "all longer than a row": 16 + random_lengths(50, 90),
    "mixed": 1 + np.arange(300) * 37 % 59,
    "one": np.array([133]),
    "equal": np.full(200, 5),
    "empty documents": np.where(np.arange(400) % 3, 1, 9),
    "fewer tokens than a row": np.array([3, 4]),
}


@pytest.mark.parametrize("block", [packing.BLOCK, 7])
@pytest.mark.parametrize("name", LENGTHS)
def test_an_epoch_has_every_token_once(name, block, monkeypatch):
    monkeypatch.setattr(packing, "BLOCK", block)
    batches = packed(LENGTHS[name])
    total, context = len(batches.tokens), batches.context_length
    places: list[int] = []
    while len(places) < 3 * total:
        pieces = batches.pieces(len(places) // context)
        assert sum(end - start for start, end in pieces) == context
        for number, (start, end) in enumerate(pieces):
            # Only the first of a row may lack its beginning: documents are told apart by END.
            assert number == 0 or start == 0 or batches.tokens[start - 1] == END
            places += range(start, end)
    for epoch in range(3):
        assert sorted(places[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_targets_follow_their_inputs_within_a_document():
    batches = packed(LENGTHS["mixed"])
    inputs, targets = batches.batch(3)
    assert inputs.shape == targets.shape == (1, 6, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    for row, (ids, wanted) in enumerate(zip(inputs[0].tolist(), targets[0].tolist(), strict=True)):
        at = 0
        for start, end in batches.pieces(3 * 6 + row):
            whole = [END, *batches.tokens.tolist()][start : end + 1]
            assert ids[at : at + end - start] == [~whole[0], *whole[1:-1]]
            assert wanted[at : at + end - start] == whole[1:]
            at += end - start


def test_few_documents_are_cut():
    cut, longest = 0, 400
    batches = packed(np.random.default_rng(0).integers(80, longest, 6000), context=1024)
    rows = len(batches.tokens) // 1024
    for row in range(rows):
        start, _ = batches.pieces(row)[0]
        cut += start > 0 and batches.tokens[start - 1] != END
    # Rows of consecutive documents would cut almost as many as there are rows.
    assert cut < 0.05 * rows


def test_a_long_document_takes_few_rows():
    batches = packed(np.full(40, 50))  # 16, 16, 16 and 2
    pieces = sum(len(batches.pieces(row)) for row in range(len(batches.tokens) // 16))
    assert pieces <= 40 * 5  # 4 from the beginning of a row, 5 from within


def test_epochs_are_shuffled_anew():
    batches = packed(LENGTHS["equal"], context=10)
    first, second = ([batches.pieces(row) for row in range(at, at + 100)] for at in (0, 100))
    assert first != second


def test_the_stream_never_changes():
    # Frozen values: a resumed run must meet the batches of the run it continues, in any later version.
    batches = packed(LENGTHS["mixed"], context=100)
    assert batches.pieces(5) == [(6811, 6870), (4222, 4263)]
    assert batches.pieces(300) == [(419, 444), (7499, 7524), (3959, 3984), (2189, 2214)]


def test_seen_context_is_that_of_the_documents():
    batches = packed(LENGTHS["equal"], context=10)
    assert batches.seen_context == 5
    seen = [i + 1 for row in range(100) for start, end in batches.pieces(row) for i in range(end - start)]
    assert np.mean(seen) == (batches.seen_context + 1) / 2
