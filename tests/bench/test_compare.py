"""Comparing two results: every verdict, and what cannot be compared."""

import json
import math
import random
from pathlib import Path

import pytest
from raising import raises

from lmkit.bench.compare import compare_files, compare_rows
from lmkit.errors import UsageError


def row(kernel, milliseconds, *, length=128, status="ok", seed=0):
    rng = random.Random(seed)
    samples = [milliseconds * rng.lognormvariate(0, 0.02) for _ in range(20)] if milliseconds else []
    times = {"median_ms": sorted(samples)[10], "samples_ms": samples} if samples else {}
    return {"kernel": kernel, "length": length, "dtype": "bf16", "status": status, "repeats": 20, **times}


def test_every_verdict():
    before = [row(kernel, 10) for kernel in "abcd"] + [row("e", None), row("f", None), row("g", 10)]
    after = [
        row("a", 10.2, seed=1),  # within what two runs differ by, but the interval exceeds the threshold
        *(row("b", 8, seed=1), row("c", 12, seed=1), row("d", None, status="out of memory"), row("e", 5)),
        *(row("f", None), row("h", 5)),
    ]
    compared = compare_rows(before, after)
    verdicts = {"a": "unclear", "b": "faster", "c": "slower", "d": "stopped working", "e": "works now"}
    verdicts |= {"f": "not measured", "g": "missing", "h": "new"}
    assert {entry["what"]: entry["verdict"] for entry in compared.rows} == verdicts
    assert (compared.worse, compared.compared, compared.unclear, compared.is_fine) == (3, 3, 1, False)
    assert "unclear: between -" in str(compared)
    assert compare_rows(before[::-1], after[1:] + after[:1]).worse == 3  # in any order


def one_run(rng, *, busy=False, offset=0.0):
    """18 rows of 40 samples, every third of PyTorch's kernel. What differs between runs: a drift that all share, and
    an offset of each row with heavy tails. Within runs: noise, interrupted samples; of 9 rows one has two modes and
    one has samples of any length. `busy`: most samples lose the core for a while.
    `offset`: how far rows of two runs differ beyond the usual."""
    rows, drift = [], rng.gauss(0.0, 0.03)
    for number in range(18):
        heavy_tail = rng.gauss(0.0, 1.0) / math.sqrt(rng.gammavariate(2.0, 0.5))
        typical = (1 + number) * math.exp(drift + 0.004 * heavy_tail + rng.gauss(0.0, offset))
        slow_share = 0.7 if busy else 0.4 if number % 9 == 7 else 0.0
        spread = 1.2 if number % 9 == 8 else 0.1 if busy else 0.015
        samples = []
        for _ in range(40):
            interrupted = 1.0 + rng.expovariate(2.0) if rng.random() < 0.15 else 1.0
            slow = rng.choice((1.5, 2.0, 3.0)) if rng.random() < slow_share else 1.0
            samples.append(typical * rng.lognormvariate(0.0, spread) * interrupted * slow)
        kernel = ("vectorized", "flash_torch", "sdpa")[number % 3]
        rows.append({"kernel": kernel, "length": number // 3, "status": "ok", "samples_ms": samples})
    return rows


def slowed(rows, numbers, factor):
    """The rows, those of these numbers slower by a factor."""
    times = [factor if number in numbers else 1.0 for number in range(len(rows))]
    return [
        row | {"samples_ms": [sample * time for sample in row["samples_ms"]]}
        for row, time in zip(rows, times, strict=True)
    ]


@pytest.mark.parametrize("machine", [{}, {"busy": True}, {"offset": 0.03}])
def test_fault_98_equal_runs_have_no_firm_verdicts(machine):
    rng = random.Random(7)
    pairs = [(one_run(rng, **machine), one_run(rng, **machine)) for _ in range(40)]
    verdicts = [row["verdict"] for pair in pairs for row in compare_rows(*pair).rows]
    assert len(verdicts) == 40 * 18
    assert sum(verdict in ("faster", "slower") for verdict in verdicts) <= 0.02 * len(verdicts)


@pytest.mark.parametrize("changed", [(4,), tuple(number for number in range(18) if number % 3 < 2)])
def test_fault_98_a_slow_down_of_5_percent_is_found(changed):
    """In steady rows: in one, and in all of ours."""
    steady = [number for number in changed if number % 9 < 7]
    found = []
    for seed in range(60 // len(steady) + 20):
        rng = random.Random(seed)
        before, after = one_run(rng), slowed(one_run(rng), changed, 1.05)
        rows = compare_rows(before, after).rows
        found += [rows[number]["verdict"] for number in steady]
    assert found.count("slower") >= 0.8 * len(found)
    assert found.count("faster") == 0


def test_fault_98_code_of_others_tells_the_machine_from_ours():
    before = [row("a", 10, length=length) for length in range(8)]
    after = [row("a", 12, length=length, seed=1) for length in range(8)]
    others = [row("sdpa", 10, length=length) for length in range(3)]
    for factor, verdict in ((10, "slower"), (12, "unclear")):  # did the code of others change as well?
        later = [row("sdpa", factor, length=length, seed=1) for length in range(3)]
        compared = compare_rows(before + others, after + later)
        assert {entry["verdict"] for entry in compared.rows[:8]} == {verdict}
        assert {entry["verdict"] for entry in compared.rows[8:]} == {"unclear"}


def test_samples_in_seconds_are_compared_in_milliseconds():
    before = {"variant": "ours", "samples_s": [0.5] * 6}
    (found,) = compare_rows([before], [before | {"samples_s": [0.25] * 6}]).rows
    assert (found["before_ms"], found["after_ms"], found["verdict"]) == (500, 250, "faster")


def store(path: Path, samples: list[float], *, key: str = "kernel", status: str = "ok") -> Path:
    path.write_text(json.dumps({key: "k", "status": status, "samples_ms": samples}) + "\n")
    return path


def test_nothing_compared_is_not_nothing_worse(tmp_path):
    """Out of memory twice, or too few samples to tell: a regression would not have been seen."""
    failed = store(tmp_path / "failed.jsonl", [], status="out of memory")
    few = store(tmp_path / "few.jsonl", [1.0] * 5)
    enough = store(tmp_path / "enough.jsonl", [1.0] * 6)
    for path in (failed, few):
        result = compare_files(path, path, threshold=0.05)
        assert (result.compared, result.worse, result.is_fine) == (0, 0, False)
    result = compare_files(enough, enough, threshold=0.05)
    assert (result.compared, result.is_fine) == (1, True)
    assert "1 of 1 compared" in str(result)


@pytest.mark.parametrize("status", ["wrong result", "impossible rate"])
def test_a_variant_that_became_wrong_is_worse_and_one_that_was_wrong_before_is_not(tmp_path, status):
    before = store(tmp_path / "before.jsonl", [1.0] * 6)
    after = store(tmp_path / "after.jsonl", [], status=status)
    for old, verdict, worse in ((before, status, 1), (after, "wrong in both", 0)):
        result = compare_files(old, after, threshold=0.05)
        assert ([entry["verdict"] for entry in result.rows], result.worse) == ([verdict], worse)
        assert not result.is_fine  # nothing was compared


def test_what_cannot_be_compared_is_refused(tmp_path):
    before = store(tmp_path / "before.jsonl", [1.0] * 6)
    other = store(tmp_path / "other.jsonl", [1.0] * 6, key="strategy")
    (tmp_path / "empty.jsonl").touch()
    for path, threshold, code, named in (
        (other, 0.05, "compare.nothing_in_common", "other.jsonl"),
        (before, math.nan, "compare.threshold", "--threshold"),
        (before, math.inf, "compare.threshold", "--threshold"),
        (tmp_path, 0.05, "compare.which_file", "empty.jsonl"),
        (tmp_path / "empty.jsonl", 0.05, "compare.no_rows", "empty.jsonl"),
        (tmp_path / "none.jsonl", 0.05, "rows.unreadable", "none.jsonl"),
    ):
        with raises(UsageError, code, named):
            compare_files(before, path, threshold=threshold)
