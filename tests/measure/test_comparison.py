import random

from lmkit.bench.compare import COLUMNS, compare_rows
from lmkit.measure.tables import terminal_table


def row(kernel, milliseconds, *, length=128, status="ok", seed=0):
    rng = random.Random(seed)
    samples = [milliseconds * rng.lognormvariate(0, 0.02) for _ in range(20)] if milliseconds else []
    times = {"median_ms": sorted(samples)[10], "samples_ms": samples} if samples else {}
    return {"kernel": kernel, "length": length, "dtype": "bf16", "status": status, "repeats": 20, **times}


def test_every_verdict():
    before = [
        row("a", 10),
        row("b", 10),
        row("c", 10),
        row("d", 10),
        row("e", None),
        row("f", None),
        row("g", 10),
    ]
    after = [
        row("a", 10.2, seed=1),  # within what two runs differ by
        row("b", 8, seed=1),
        row("c", 12, seed=1),
        row("d", None, status="out of memory"),
        row("e", 5),
        row("f", None),
        row("h", 5),
    ]
    comparison = compare_rows(before, after)
    assert {entry["what"]: entry["verdict"] for entry in comparison.rows} == {
        "a": "no difference",
        "b": "faster",
        "c": "slower",
        "d": "stopped working",
        "e": "works now",
        "f": "not measured",
        "g": "missing",
        "h": "new",
    }
    assert comparison.worse == 3
    assert max(map(len, terminal_table(comparison.rows, COLUMNS).splitlines())) <= 100


def test_rows_are_matched_by_what_was_measured_in_any_order():
    before = [row("a", 10, length=128), row("a", 20, length=256)]
    after = [row("a", 20, length=256, seed=3), row("a", 10, length=128, seed=3)]
    comparison = compare_rows(before, after)
    assert [(entry["what"], entry["verdict"]) for entry in comparison.rows] == [
        ("128", "no difference"),
        ("256", "no difference"),
    ]
    assert comparison.worse == 0


def test_samples_in_seconds_are_compared_in_milliseconds():
    before = {"contender": "ours", "samples_s": [0.5] * 6}
    (row,) = compare_rows([before], [before | {"samples_s": [0.25] * 6}]).rows
    assert (row["before_ms"], row["after_ms"], row["verdict"]) == (500, 250, "faster")


def test_the_same_file_twice():
    rows = [row("a", 10)]
    assert [entry["verdict"] for entry in compare_rows(rows, rows).rows] == ["no difference"]
    assert compare_rows(rows, rows).rows[0]["what"] == "all"
