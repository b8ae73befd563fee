"""Comparing two results: every verdict, and what cannot be compared."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from lmkit.bench.compare import COLUMNS, compare_files, compare_rows
from lmkit.errors import UsageError
from lmkit.measure.tables import terminal_table


def row(kernel, milliseconds, *, length=128, status="ok", seed=0):
    rng = random.Random(seed)
    samples = [milliseconds * rng.lognormvariate(0, 0.02) for _ in range(20)] if milliseconds else []
    times = {"median_ms": sorted(samples)[10], "samples_ms": samples} if samples else {}
    return {"kernel": kernel, "length": length, "dtype": "bf16", "status": status, "repeats": 20, **times}


def test_every_verdict():
    before = [row(kernel, 10) for kernel in "abcd"] + [row("e", None), row("f", None), row("g", 10)]
    after = [
        row("a", 10.2, seed=1),  # within what two runs differ by
        row("b", 8, seed=1),
        row("c", 12, seed=1),
        row("d", None, status="out of memory"),
        row("e", 5),
        row("f", None),
        row("h", 5),
    ]
    compared = compare_rows(before, after)
    assert {entry["what"]: entry["verdict"] for entry in compared.rows} == {
        "a": "no difference",
        "b": "faster",
        "c": "slower",
        "d": "stopped working",
        "e": "works now",
        "f": "not measured",
        "g": "missing",
        "h": "new",
    }
    assert (compared.worse, compared.compared, compared.is_fine) == (3, 3, False)
    assert max(map(len, terminal_table(compared.rows, COLUMNS, width=100).splitlines())) <= 100


def test_rows_are_matched_by_what_was_measured_in_any_order():
    before = [row("a", 10, length=128), row("a", 20, length=256)]
    after = [row("a", 20, length=256, seed=3), row("a", 10, length=128, seed=3)]
    compared = compare_rows(before, after)
    found = [(entry["what"], entry["verdict"]) for entry in compared.rows]
    assert found == [("128", "no difference"), ("256", "no difference")]
    assert compared.is_fine
    assert compare_rows(before[:1], before[:1]).rows[0]["what"] == "all"


def test_samples_in_seconds_are_compared_in_milliseconds():
    before = {"variant": "ours", "samples_s": [0.5] * 6}
    (found,) = compare_rows([before], [before | {"samples_s": [0.25] * 6}]).rows
    assert (found["before_ms"], found["after_ms"], found["verdict"]) == (500, 250, "faster")


def store(path: Path, samples: list[float], *, key: str = "kernel", status: str = "ok") -> Path:
    path.write_text(json.dumps({key: "k", "status": status, "samples_ms": samples}) + "\n")
    return path


def test_rows_of_older_versions_are_matched(tmp_path):
    before = store(tmp_path / "before.jsonl", [1.0] * 6, key="contender")
    after = store(tmp_path / "after.jsonl", [1.0] * 6, key="variant")
    assert compare_files(before, after, threshold=0.05).is_fine


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
        with pytest.raises(UsageError) as refused:
            compare_files(before, path, threshold=threshold)
        assert refused.value.code == code
        assert named in refused.value.message
        assert refused.value.hint
