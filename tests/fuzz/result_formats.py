"""What benches and profilers write, as `lmkit report`, `lmkit compare` and benches that go on read it."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import mutations
from format import Files, Format

from lmkit.bench.journal import Journal
from lmkit.commands import compare, report
from lmkit.profile.kineto import read_chrome_trace
from lmkit.profile.nsys import read_nsys_database
from lmkit.profile.summary import summarize
from lmkit.profile.trace import Trace

if sys.version_info >= (3, 11):
    pass
else:
    pass


class Results(Format):
    name = "bench results"
    damages = (
        ("after.jsonl", mutations.damage_json_lines),
        ("after.jsonl", mutations.damage_json_lines),
        ("after.jsonl", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        rows = [
            {"bench": "attention", "kernel": kernel, "length": length, "median_ms": 1.5, "samples_ms": [1.0, 2.0]}
            for kernel in ("sdpa", "vectorized")
            for length in (128, 256)
        ]  # fmt: skip
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        return {"before.jsonl": data, "after.jsonl": data}

    def read(self, folder: Path, random: Random) -> None:
        compared = compare.run(folder / "before.jsonl", folder / "after.jsonl", threshold=0.05)
        assert len(compared.rows) >= 4
        str(compared)


ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts" / "h200"


class ReportedRows(Format):
    """Rows as `lmkit report`, `lmkit compare` and a bench that goes on read them; the first file is damaged."""

    most_rows = 14
    most_samples = 6

    def __init__(self, folder: Path, *, name: str, files: tuple[str, ...]) -> None:
        self.name, self.files = name, files
        super().__init__(folder)

    def make(self, folder: Path) -> Files:
        victim = self.files[0]
        structure = mutations.damage_json_lines if victim.endswith(".jsonl") else mutations.damage_json
        self.damages = (
            (victim, structure),
            (victim, structure),
            (victim, structure),
            (victim, mutations.damage),
        )
        return {name: self._shortened(ARTIFACTS / name) for name in self.files}

    def _shortened(self, path: Path) -> bytes:
        if path.suffix != ".jsonl":
            return path.read_bytes()
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[: self.most_rows]]
        for row in rows:
            if "samples_ms" in row:
                row["samples_ms"] = row["samples_ms"][: self.most_samples]
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    def read(self, folder: Path, random: Random) -> None:
        victim = folder / self.files[0]
        reader = random.choice(("report", "report", "compare", "journal"))
        if reader == "report" or victim.suffix != ".jsonl":
            report.run(folder, None)
            report.run(folder, None, check=True)
            if b'"inf"' not in victim.read_bytes():
                for written in (folder / "reports").iterdir():
                    assert not re.search(r"\b(nan|inf)\b", written.read_text("utf-8")), written
        elif reader == "compare":
            compared = compare.run(victim, victim, threshold=0.05)
            str(compared).encode()
            assert compared.worse == 0
        else:
            assert Journal(victim).rows() == [json.loads(line) for line in victim.read_bytes().splitlines()]


ROWS = {
    "attention rows": ("attention/acceptance.jsonl",),
    "lm-matrix rows": ("lm_matrix_x2/lm_matrix_results.jsonl",),
    "model rows": ("model/model_results.jsonl",),
    "ddp rows": ("ddp/reading7.jsonl", "ddp/reading6.jsonl"),
    "all-reduce rows": ("all_reduce/all_reduce_results.jsonl",),
    "optimizer rows": ("optimizer/optimizer_results.jsonl",),
    "memory rows": tuple(f"memory/2.7b_step_{length}/memory_peaks.jsonl" for length in (128, 2048)),
    "profile_summary.json": tuple(
        f"profile/medium_{mode}/profile_summary.json" for mode in ("step", "forward")
    ),
    "environment.json": ("ddp_162M/environment.json", "ddp_162M/ddp_results.jsonl"),
}


class ChromeTrace(Format):
    """A recording of torch.profiler, as `lmkit profile nsys FILE` reads it."""

    name = "chrome trace"
    damages = (
        ("trace.json", mutations.damage_json),
        ("trace.json", mutations.damage_json),
        ("trace.json", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        def event(category: str, name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
            plain = {
                "ph": "X",
                "cat": category,
                "name": name,
                "ts": start,
                "dur": duration,
                "pid": 10,
                "tid": 1,
            }
            return plain | more

        events = [{"ph": "M", "name": "process_name", "pid": 10}]
        for start in (0.0, 1000.5):
            events += [
                event("user_annotation", "step", start, 1000),
                event("user_annotation", "forward", start + 100, 200.25),
                event("cpu_op", "aten::linear", start + 100, 100),
                event("cpu_op", "aten::mm", start + 120, 60),
                event(
                    "cuda_runtime", "cudaLaunchKernel", start + 130, 10, args={"correlation": int(start) + 1}
                ),
                event(
                    "kernel",
                    "gemm",
                    start + 150,
                    100,
                    pid=0,
                    args={"correlation": int(start) + 1, "device": 0},
                ),
                event("gpu_memset", "Memset", start + 950, 50, pid=0, args={"correlation": 9, "device": 0}),
            ]
        return {"trace.json": json.dumps({"traceEvents": events}).encode()}

    def read(self, folder: Path, random: Random) -> None:
        trace = read_chrome_trace(folder / "trace.json")
        events = json.loads((folder / "trace.json").read_bytes())["traceEvents"]
        complete = [event for event in events if event.get("ph") == "X"]
        kinds = ("kernel", "gpu_memcpy", "gpu_memset")
        assert len(trace.work or ()) == sum(event.get("cat") in kinds for event in complete)
        assert sum(calls for calls, _ in trace.ops.values()) == sum(
            event.get("cat") == "cpu_op" for event in complete
        )
        assert_sound(trace)


def assert_sound(trace: Trace) -> None:
    for entry in (*trace.ranges, *(trace.calls or ()), *(trace.work or ())):
        assert isinstance(entry.name, str)
        assert type(entry.start) is type(entry.end) is int
        assert entry.start <= entry.end
    summary = summarize(trace)
    json.dumps(summary.as_dict(), allow_nan=False)
    summary.markdown().encode()
    summary.text()


class NsysDatabase(Format):
    """A recording of Nsight Systems. SQLite keeps any type in any column."""

    name = "nsys database"
    damages = (
        ("report.sqlite", mutations.damage_sqlite),
        ("report.sqlite", mutations.damage_sqlite),
        ("report.sqlite", mutations.damage),
    )

    def make(self, folder: Path) -> Files:
        path, thread = folder / "report.sqlite", 77 << 24 | 1
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.executescript(
                "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);"
                "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER,"
                " globalTid INTEGER);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,"
                " correlationId INTEGER, nameId INTEGER);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,"
                " correlationId INTEGER, globalPid INTEGER, shortName INTEGER, graphNodeId INTEGER);"
                "INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel'), (2, 'gemm'), (3, 'step');"
            )
            for start in (0, 1000):
                database.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, 3, ?)", (start, start + 900, thread)
                )
                database.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, 'forward', NULL, ?)",
                    (start + 10, start + 90, thread),
                )
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 1)",
                    (start + 20, start + 30, thread, start + 1),
                )
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, ?, ?, 2, NULL)",
                    (start + 40, start + 200, start + 1, 77 << 24),
                )
            database.commit()
        return {"report.sqlite": path.read_bytes()}

    def read(self, folder: Path, random: Random) -> None:
        assert_sound(read_nsys_database(folder / "report.sqlite"))


RESULT_FORMATS: dict[str, Callable[[Path], Format]] = {
    **{form.name: form for form in (Results, ChromeTrace, NsysDatabase)},
    **{name: partial(ReportedRows, name=name, files=files) for name, files in ROWS.items()},
}
