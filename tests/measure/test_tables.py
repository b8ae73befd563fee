import csv
import io
import json

import pytest

from lmkit.measure.tables import Column, csv_text, json_lines

ROWS = [
    {"kernel": "flash_triton", "ms": 1.23456, "tokens": 16384, "status": "ok", "samples_ms": [1.2, 1.3]},
    {"kernel": "vectorized, compiled", "ms": None, "tokens": 131072, "status": "out of memory"},
]


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
