"""Tokens that batches hand out in a second, by a process on the CPU that does nothing else.

    pytest tests/acceptance/test_loaders.py -s

prints the figure of each way to sample from memory-mapped shards, and its target.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lmkit.core.batches import Sampler, TokenBatches
from lmkit.data.mixing import MixedBatches
from lmkit.data.packing import PackedBatches, ShuffledBatches
from lmkit.data.shards import open_tokens
from lmkit.data.token_files import TokenFile
from lmkit.measure.tables import Column, terminal_table

SHARDS, TOKENS = 4, 25_000_000
SIZES = {"batch_size": 64, "context_length": 1024, "seed": 0}
SAMPLINGS: dict[str, Callable[[TokenFile], Sampler]] = {
    "windows": lambda file: TokenBatches(file.tokens, **SIZES),
    "documents": lambda file: TokenBatches(
        file.tokens, document_starts=file.documents, borders=file.documents, **SIZES
    ),
    "shuffled": lambda file: ShuffledBatches(file.tokens, borders=file.documents, **SIZES),
    "packed": lambda file: PackedBatches(file.tokens, document_starts=file.documents, **SIZES),
}
COLUMNS = (
    *(Column("sampling", "sampling"), Column("speed", "million tokens/s", ".1f")),
    *(Column("target", "target", "d"), Column("first_ms", "first batch, ms", ".1f")),
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[Path]:
    folder, draw = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    paths = [folder / f"train_{number}.bin" for number in range(SHARDS)]
    for path in paths:
        ids = draw.integers(0, 50_256, TOKENS).astype("<u2")
        places = np.cumsum(draw.integers(2, 60, TOKENS))  # of short documents, so that there are millions
        ids[0], ids[places[places < TOKENS]] = 50_256, 50_256
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, TOKENS
        path.write_bytes(header.tobytes() + ids.tobytes())
    return paths


@pytest.mark.slow
def test_loaders_are_no_bottleneck(shards, capsys):
    whole, parts = open_tokens(shards), [open_tokens(path) for path in shards]
    assert len(whole.documents) > 3_000_000
    rows = []
    for name, make in SAMPLINGS.items():
        mixture = MixedBatches(sources=[make(part) for part in parts], weights=[5, 2, 1, 0.5], **SIZES)
        target = 2 if name == "shuffled" else 5
        rows += [_measured(name, make(whole), target), _measured(f"mixture of {name}", mixture, 2)]
    with capsys.disabled():
        print("\n" + terminal_table(rows, COLUMNS))
    assert [row for row in rows if row["speed"] < row["target"]] == []


def _measured(name: str, batches: Sampler, target: int) -> dict[str, object]:
    times = []
    while sum(times) < 3:
        start = time.perf_counter()
        batches.batch(len(times))
        times.append(time.perf_counter() - start)
    # Of parts, because the packing of a block falls on one batch in many.
    speeds = [
        SIZES["batch_size"] * SIZES["context_length"] / np.mean(part) for part in np.array_split(times[1:], 5)
    ]
    speed = statistics.median(speeds) / 1e6
    return {"sampling": name, "speed": speed, "target": target, "first_ms": times[0] * 1e3}
