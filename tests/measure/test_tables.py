import csv
import io
import json
import sys

import pytest

from lmkit.measure.tables import (
    Column,
    csv_text,
    enumeration,
    json_lines,
    markdown_table,
    size_of,
    terminal_table,
)

ROWS = [
    {"kernel": "flash_triton", "ms": 1.23456, "tokens": 16384, "status": "ok", "samples_ms": [1.2, 1.3]},
    {
        "kernel": "vectorized, compiled",
        "ms": None,
        "tokens": 131072,
        "status": "out of memory",
        "samples_ms": [],
    },
]
COLUMNS = [
    Column("kernel", "kernel"),
    Column("ms", "ms", ".3f"),
    Column("tokens", "tokens", ",d"),
    Column("status", "status"),
]


def test_markdown():
    assert markdown_table(ROWS, COLUMNS).splitlines() == [
        "| kernel | ms | tokens | status |",
        "|:-|-:|-:|:-|",
        "| flash_triton | 1.235 | 16,384 | ok |",
        "| vectorized, compiled | - | 131,072 | out of memory |",
    ]
    assert "a\\|b" in markdown_table([{"x": "a|b"}], [Column("x", "x")])


def test_terminal():
    assert terminal_table(ROWS, COLUMNS).splitlines() == [
        "kernel                   ms   tokens  status",
        "--------------------  -----  -------  -------------",
        "flash_triton          1.235   16,384  ok",
        "vectorized, compiled      -  131,072  out of memory",
    ]
    assert terminal_table([], COLUMNS).splitlines()[0] == "kernel  ms  tokens  status"


def test_csv_keeps_full_precision_and_drops_samples():
    table = list(csv.DictReader(io.StringIO(csv_text(ROWS))))
    assert table[0] == {"kernel": "flash_triton", "ms": "1.23456", "tokens": "16384", "status": "ok"}
    assert (table[1]["kernel"], table[1]["ms"]) == ("vectorized, compiled", "")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_not_shown(value):
    row = {"ms": value, "status": "wrong result"}
    assert Column("ms", "ms", ".2f").text(row) == "-"
    assert Column("ms", "ms", ".2f", instead="status").text(row) == "wrong result"
    assert csv_text([row]) == "ms,status\n,wrong result\n"


def test_json_lines_are_strict():
    text = json_lines([{"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": float("-inf")}}])
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


@pytest.mark.parametrize("is_terminal", [True, False])
def test_tables_are_cut_on_a_terminal_only(is_terminal, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    table = terminal_table(
        [{"name": "n" * 300, "ms": 1.5}], [Column("name", "name"), Column("ms", "ms", ".1f")]
    )
    assert ("n" * 300 in table) != is_terminal
    assert (max(map(len, table.splitlines())) == 100) == is_terminal


def test_sizes_have_the_unit_that_suits_them():
    sizes = (300, 99_999, 100_000, 999_900_000, 1_000_000_000, 2_226_845_268)
    assert list(map(size_of, sizes)) == ["0.3 kB", "100.0 kB", "0.1 MB", "999.9 MB", "1.00 GB", "2.23 GB"]


def test_an_enumeration_fits_a_terminal():
    items = [f"token_{number}" for number in range(20)]
    lines = enumeration("longest tokens", items).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 100
    assert " ".join(line.strip() for line in lines) == f"longest tokens: {', '.join(items)}"
