"""A row with a field of another type is one line that names file, line and field, whoever reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmkit.bench.journal import Journal
from lmkit.bench.rows import read_rows
from lmkit.commands import compare, report
from lmkit.errors import LmkitError

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts" / "h200"
ATTENTION = "attention/acceptance.jsonl"
MATRIX = "lm_matrix_x2/lm_matrix_results.jsonl"
LADDER = "ddp_162M/ddp_results.jsonl"
MODEL = "model/model_results.jsonl"
MEMORY = "memory/2.7b_step_128/memory_peaks.jsonl"
PROFILE = "profile/medium_step/profile_summary.json"


def rows_of(name: str, number: int = 4) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ARTIFACTS / name).read_text().splitlines()[:number]]


def store(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_report(file: Path) -> None:
    report.run(file.parent, None)


def read_compare(file: Path) -> None:
    compare.run(file, file, threshold=0.05)


def read_journal(file: Path) -> None:
    Journal(file).rows()


READERS = (read_report, read_compare, read_journal)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        (ATTENTION, "num_keys", "128", "num_keys: input should be a valid integer"),
        (ATTENTION, "num_keys", True, "num_keys: input should be a valid integer"),
        (ATTENTION, "tflops", [1.0], "tflops: input should be a valid number"),
        (ATTENTION, "tflops", -1, "tflops: input should be greater than or equal to 0"),
        (ATTENTION, "tflops", float("nan"), "tflops: input should be a finite number"),
        (ATTENTION, "kernel", None, "kernel: input should be a valid string"),
        (ATTENTION, "kernel", "a\x1b[31m", "kernel: input should be one line of printable text"),
        (ATTENTION, "samples_ms", [0.0], "samples_ms.0: input should be greater than 0"),
        (MATRIX, "losses", [2.0, None], "losses.1: input should be a valid number"),
        (LADDER, "peak_bytes", 10**400, "peak_bytes: input should be"),
        (LADDER, "calls_per_step", 1.5, "calls_per_step: input should be a valid integer"),
        (MODEL, "length", 0, "length: input should be greater than 0"),
    ],
)
def test_every_reader_names_line_and_field(
    read: Callable[[Path], None], name: str, field: str, value: Any, says: str, tmp_path: Path
) -> None:
    rows, file = rows_of(name), tmp_path / "rows.jsonl"
    store(file, rows)
    read(file)
    rows[2][field] = value
    store(file, rows)
    with pytest.raises(LmkitError) as caught:
        read(file)
    assert caught.value.message.startswith(f"{file}: line 3: {says}")
    assert caught.value.hint == "run the command that wrote it again"


@pytest.mark.parametrize("read", READERS)
def test_halves_of_characters_in_any_field(read: Callable[[Path], None], tmp_path: Path) -> None:
    rows, file = rows_of(ATTENTION), tmp_path / "rows.jsonl"
    rows[1]["unused"] = ["\ud800"]
    store(file, rows)
    with pytest.raises(
        LmkitError, match=r"rows\.jsonl: line 2 is not a JSON object \(.*surrogates not allowed"
    ):
        read(file)


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        (ATTENTION, "status", ..., "status: field required"),
        (MATRIX, "status", ..., "status: field required"),
        (MATRIX, "losses", [2.0], "losses: 1 numbers, and"),
        (MATRIX, "samples_ms", None, "samples_ms: missing or null, though the rest needs it"),
        (LADDER, "p10_ms", None, "p10_ms: missing or null, though the rest needs it"),
        (LADDER, "calls_per_step", ..., "calls_per_step: missing or null, though the rest needs it"),
        (MODEL, "warmup", ..., "warmup: missing or null, though the rest needs it"),
        (MEMORY, "gradients_gib", ..., "gradients_gib: field required"),
        (MEMORY, "pass", None, "pass: missing or null, though the rest needs it"),
    ],
)
def test_what_is_missing_is_an_error_of_write_ups_but_not_of_comparisons(
    name: str, field: str, value: Any, says: str, tmp_path: Path
) -> None:
    rows, file = rows_of(name), tmp_path / "rows.jsonl"
    rows[2] = {key: old for key, old in rows[2].items() if key != field}
    rows[2] |= {} if value is ... else {field: value}
    store(file, rows)
    with pytest.raises(LmkitError) as caught:
        read_rows(file)
    assert caught.value.message.startswith(f"{file}: line 3: {says}")
    assert read_rows(file, complete=False) == rows  # as an older version might have written them


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"warnings": [1]}, "warnings.0: input should be a valid string"),
        ({"ranges": [{"name": "step", "instances": 1, "gpu_ms": "1"}]}, "ranges.0.gpu_ms: input should be"),
        ({"undisturbed_ms": None}, "undisturbed_ms: missing or null"),
        ({"window": 5}, "window: input should be a valid string"),
    ],
)
def test_summaries_of_profiles(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    file = tmp_path / "profile_summary.json"
    file.write_text(json.dumps(json.loads((ARTIFACTS / PROFILE).read_text()) | changes))
    with pytest.raises(LmkitError) as caught:
        read_report(file)
    assert caught.value.message.startswith(f"{file}: {says}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": [7]}, "gpus.0: input should be"),
        ({"gpus": [{"name": 7}]}, "gpus.0.name: input should be a valid string"),
        ({"cpu": None}, "cpu: input should be"),
        ({"packages": {"torch": 2.5}}, "packages.torch: input should be a valid string"),
        ({"time_utc": 5}, "time_utc: input should be a valid string"),
    ],
)
def test_environments(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    store(tmp_path / "rows.jsonl", rows_of(ATTENTION))
    environment = json.loads((ARTIFACTS / ATTENTION).with_name("environment.json").read_text())
    (tmp_path / "environment.json").write_text(json.dumps(environment | changes))
    with pytest.raises(LmkitError) as caught:
        read_report(tmp_path / "rows.jsonl")
    assert caught.value.message.startswith(f"{tmp_path / 'environment.json'}: {says}")


def test_a_study_of_warm_up_alone_has_a_report(tmp_path: Path) -> None:
    rows = [row for row in rows_of(MODEL, 1000) if row["part"] == "warm-up"]
    store(tmp_path / "rows.jsonl", rows)
    report.run(tmp_path, None)
    assert "### Warm-up" in (tmp_path / "reports" / "profiling.md").read_text()
