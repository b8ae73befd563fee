"""Rows from disk in words: what is read, what a damaged file says, and the write-ups made of small rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lmkit.bench.report import find_results, kind_of, read_rows, write_reports
from lmkit.errors import LmkitError, UsageError
from lmkit.profile.summary import SUMMARIES

ROOT = Path(__file__).resolve().parents[2]
# A row of each kind.
ROWS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "rows.json").read_text("utf-8"))
ATTENTION, DDP, MODEL, MATRIX, COLLECTIVE, MEMORY, TRACE = ROWS.values()
SHARDED = DDP | {"variant": "zero1", "state_bytes": 500, "state_share": 0.5, "peak_bytes": 8e8}
PLAIN = DDP | {"state_bytes": 1000, "state_share": 1.0, "peak_bytes": 1e9}
FILES: dict[str, list[dict[str, Any]]] = {
    "attention/attention_sweep_results.jsonl": [
        ATTENTION | {"versus_sdpa": 1.3, "best_sdpa": "sdpa:cudnn"},
        ATTENTION | {"num_queries": 256, "num_keys": 256, "tier": "256", "versus_sdpa": 1.1},
        ATTENTION | {"kernel": "vectorized", "status": "out of memory", "tflops": None, "median_ms": None},
    ],
    "ddp/ddp_results.jsonl": [DDP, DDP | {"variant": "zero1", "peak_bytes": 1e9}],
    "models/deep/model_results.jsonl": [MODEL],
    "matrix/lm_matrix_results.jsonl": [MATRIX, MATRIX | {"strategy": "naive", "median_ms": 3.0}],
    "links/all_reduce_results.jsonl": [COLLECTIVE],
    "sharding/optimizer_results.jsonl": [PLAIN, SHARDED],
    "memory/a/memory_peaks.jsonl": [MEMORY],
    "memory/b/memory_peaks.jsonl": [MEMORY | {"context_length": 256, "peak_gib": 6.0}],
    "trace/profile_summary.json": [TRACE],
    "trace2/profile_summary.json": [TRACE | {"launches_per_step": 400.0}],
    "runs/metrics.jsonl": [{"step": 1, "loss": 2.0}],
}


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    for name, rows in FILES.items():
        path = tmp_path / "artifacts" / name
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = {"gpus": [{"name": "NVIDIA H200"}], "packages": {"torch": "2.11"}, "time_utc": "2026-11-20T1"}
    (tmp_path / "artifacts/attention/environment.json").write_text(json.dumps(facts))
    (tmp_path / "artifacts/attention/attention_sweep_forward.png").touch()
    return tmp_path / "artifacts"


def report(folder: Path | None, output: Path | None = None, **options: Any) -> Any:
    return write_reports(folder, output, profiles=SUMMARIES, **options)


def test_four_write_ups_say_what_rows_at_any_depth_say(artifacts):
    written = report(artifacts)
    assert [Path(name).name for name in written.written] == [
        *("attention.md", "data_parallelism.md", "optimizer_sharding.md", "profiling.md")
    ]
    assert written.without_results == ()
    assert "runs/metrics.jsonl" not in written.sources
    texts = {path.name: path.read_text() for path in (artifacts / "reports").glob("*.md")}
    for name, said in (
        ("attention.md", "1 x NVIDIA H200, torch 2.11, 2026-11-20"),
        ("attention.md", "1.10 to 1.30 times as fast as the best PyTorch"),
        ("attention.md", "out of memory (128 64 forward vectorized)"),
        ("data_parallelism.md", "Lowest ms/step: 10.00, bucketed"),
        ("data_parallelism.md", "Highest bus GB/s: 20, all_reduce"),
        *(("optimizer_sharding.md", "| 50.0% |"), ("profiling.md", "small 256")),
        *(("profiling.md", "sdpa flat"), ("profiling.md", "300 kernel launches per step")),
    ):
        assert said in texts[name], said


def test_fault_138_only_write_ups_are_replaced(artifacts, tmp_path):
    mine = tmp_path / "docs" / "profiling.md"
    mine.parent.mkdir()
    mine.write_text("# Profiling of mine\n")
    with raises(UsageError, "output.exists"):
        report(artifacts, mine.parent)
    assert [path.read_text() for path in mine.parent.iterdir()] == ["# Profiling of mine\n"]
    for force in (True, False):  # the second time, it is a write-up
        report(artifacts, mine.parent, force=force)
    assert mine.read_text().startswith("# Profiling\n")


def test_by_default_the_rows_that_benches_and_profiles_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises(UsageError, "report.no_folder"):
        report(None)
    for folder in ("benches/mine/model", "h200/model"):
        (tmp_path / "artifacts" / folder).mkdir(parents=True)
        (tmp_path / "artifacts" / folder / "model_results.jsonl").write_text(json.dumps(MODEL) + "\n")
    written = report(None)
    assert written.sources == ("benches/mine/model/model_results.jsonl",)
    assert written.written == ("artifacts/benches/reports/profiling.md",)
    assert len(written.without_results) == 3


def test_the_committed_rows_have_all_four_write_ups(tmp_path, terminal):
    """Also rows of older versions, whose variants were called contenders."""
    terminal("report", ROOT / "artifacts/h200", "--output", tmp_path)
    assert len(list(tmp_path.glob("*.md"))) == 4
    printed = " ".join(path.read_text() for path in tmp_path.glob("*.md"))
    assert "nan" not in printed.split()
    results = ROOT / "artifacts/h200/ddp_162M"
    terminal("compare", results, results)


@pytest.mark.parametrize("kind", sorted({str(kind_of(rows[0])) for rows in FILES.values()} - {"None"}))
def test_rows_without_a_key_or_of_another_type_are_one_error(kind, tmp_path):
    """Whatever is missing: a write-up, or one line with the file and a code."""
    (name, rows) = next((name, rows) for name, rows in FILES.items() if kind_of(rows[0]) == kind)
    for key in rows[0]:
        for change in ({}, {key: None}, {key: "x"}, {key: [1]}):
            row = {other: value for other, value in rows[0].items() if other != key} | change
            path = tmp_path / Path(name).name
            path.write_text(json.dumps(row) + "\n")
            try:
                report(tmp_path, tmp_path / "out")
            except LmkitError as error:
                assert error.code in ("rows.damaged", "report.no_results"), (key, change)
                assert str(tmp_path) in error.message
                assert error.hint


@pytest.mark.parametrize(
    "line", ["", "{", "[1]", "1", '"x"', '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000], ids=repr
)
def test_a_damaged_line_is_named(line, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n' + line + "\n")
    with raises(LmkitError, "rows.damaged", f"{path}: line 2"):
        read_rows(path)
    path.write_bytes(b"\xff\n")
    with raises(LmkitError, "rows.damaged"):
        read_rows(path)


def test_a_folder_without_results_is_refused(tmp_path):
    for folder, code in ((tmp_path, "report.no_results"), (tmp_path / "none", "report.no_folder")):
        with raises(UsageError, code, folder):
            find_results(folder)
