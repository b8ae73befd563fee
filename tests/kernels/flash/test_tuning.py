"""Choosing tile sizes: the candidates are few, the choice is made once, kept on disk, and survives a damaged file."""

import itertools
import json
from dataclasses import asdict

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from triton.runtime.errors import OutOfResources

from lmkit.kernels.flash import tuning

CASE = tuning.Case("forward", 64, True, torch.bfloat16, "ieee", 2048, aligned=False)
FAST, SLOW = tuning.Tiling(64, 64, 4, 2), tuning.Tiling(128, 64, 8, 2)


@pytest.fixture
def measured(monkeypatch):
    """The tilings that were timed, in order; SLOW takes 2 ms, FAST 1 ms."""
    calls = []

    def milliseconds(launch, tiling):
        calls.append(tiling)
        launch(tiling)
        return {FAST: 1.0, SLOW: 2.0}[tiling]

    monkeypatch.setattr(tuning, "milliseconds", milliseconds)
    return calls


def test_fastest_candidate_is_kept_on_disk(measured, tmp_path):
    path = tmp_path / "cache" / "tilings.json"
    launched = []
    assert tuning.measure(CASE, (SLOW, FAST), path, launched.append) == FAST
    assert launched == measured == [SLOW, FAST]
    # Another process: nothing is timed again.
    assert tuning.measure(CASE, (SLOW, FAST), path, launched.append) == FAST
    assert len(measured) == 2
    other = CASE._replace(kernel="dq")  # does not replace the first
    tuning.measure(other, (SLOW,), path, launched.append)
    assert set(tuning.read_entries(path)) == {CASE.name(), other.name()}
    assert [entry.name for entry in path.parent.iterdir()] == ["tilings.json"]


@pytest.mark.parametrize(
    "content",
    [b'{"forward', b"[1]", json.dumps({CASE.name(): asdict(tuning.Tiling(1 << 20, 64, 4, 2))}).encode()],
    ids=["cut", "list", "no candidate"],
)
def test_damaged_file_is_measured_again(measured, tmp_path, content):
    path = tmp_path / "tilings.json"
    path.write_bytes(content)
    assert tuning.measure(CASE, (FAST,), path, lambda tiling: None) == FAST
    assert measured == [FAST]
    assert tuning.read_entries(path)[CASE.name()] == asdict(FAST)


def test_tilings_that_do_not_fit_are_passed_over(monkeypatch, tmp_path):
    def milliseconds(launch, tiling):
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(tuning, "milliseconds", milliseconds)
    chosen = tuning.measure(CASE, (FAST, SLOW), tmp_path / "tilings.json", lambda tiling: None)
    assert chosen == tuning.LAST_RESORT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", tuning.KERNELS)
def test_every_case_has_one_to_six_distinct_candidates(kernel, dtype):
    for capability, precision, head_dim in itertools.product(
        [(8, 0), (9, 0)], ("bf16x6", "ieee", "tf32"), range(1, 257)
    ):
        case = tuning.Case(kernel, head_dim, True, dtype, precision, 2048, aligned=dtype == torch.bfloat16)
        candidates = tuning.candidate_tilings(case, capability)
        assert 1 <= len(candidates) == len(set(candidates)) <= 6
        if capability < (9, 0) or dtype == torch.float32:
            assert not any(tiling.descriptors for tiling in candidates)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("kernel", tuning.KERNELS)
def test_usual_heads_ship_one_of_their_candidates(kernel, head_dim, causal):
    for dtype, precision in ((torch.float16, "ieee"), (torch.bfloat16, "ieee"), (torch.float32, "bf16x6")):
        case = tuning.Case(kernel, head_dim, causal, dtype, precision, 512, aligned=dtype != torch.float32)
        assert tuning.shipped_tiling(case, (9, 0)) in tuning.candidate_tilings(case, (9, 0))
        assert tuning.shipped_tiling(case, (8, 0)) is None
    assert tuning.shipped_tiling(case._replace(precision="tf32"), (9, 0)) is None
    assert tuning.shipped_tiling(case._replace(dtype=torch.bfloat16), (9, 0)) is None  # not aligned


def test_parts_of_a_head_cover_it():
    for head_dim in range(1, 257):
        for split in (False, True):
            main, rest = tuning.head_parts(head_dim, split)
            assert main + rest >= head_dim
            assert all(part == 0 or (part >= 16 and part & (part - 1) == 0) for part in (main, rest))
        assert sum(tuning.head_parts(head_dim, True)) <= sum(tuning.head_parts(head_dim, False))
