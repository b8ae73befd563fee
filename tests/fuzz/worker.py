"""Reads damaged files of some formats, one after the other, and prints one JSON line per format.

    python tests/fuzz/worker.py FOLDER FIRST_CASE CASES FORMAT...

A case is a number: `worker.py FOLDER 123 1 recipe` repeats one, and FOLDER/case then holds its files. A clean error
is an `LmkitError` of one line, short enough for people; a load must be right, which each format checks; everything
else is a failure.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

import formats
from guard import Forbidden, Guard, peak_bytes

from lmkit.errors import LONGEST, LmkitError

MOST_FAILURES = 20


def run_case(
    form: formats.Format, number: int, folder: Path, guard: Guard, progress: Path
) -> tuple[str, str]:
    """Damage, write, read: ("error" or "load" or "failure", details)."""
    random = Random(f"{form.name} {number}")
    if folder.exists():
        shutil.rmtree(folder)
    for name, data in form.damaged(random).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    with open(progress, "w") as report:
        report.write(f"{form.name} {number}\n")
        report.flush()
        try:
            with guard.case(report):
                form.read(folder, random)
        except LmkitError as error:
            if len(error.message) > 2 * LONGEST or "\n" in error.message + error.hint:
                return "failure", f"not one line: {len(error.message)} characters, {error.message[:300]!r}"
            return "error", error.message
        except (Exception, Forbidden):  # noqa: BLE001 (whatever else escapes is what we look for)
            return "failure", traceback.format_exc()
    return "load", ""


def run(name: str, first: int, cases: int, folder: Path, guard: Guard) -> dict[str, Any]:
    """All cases of one format, counted."""
    form = formats.FORMATS[name](folder / f"good-{name}")
    counts = {"error": 0, "load": 0, "failure": 0}
    failures: list[dict[str, Any]] = []
    slowest = 0.0
    for number in range(first, first + cases):
        started = time.perf_counter()
        outcome, details = run_case(form, number, folder / "case", guard, folder / "progress")
        slowest = max(slowest, time.perf_counter() - started)
        counts[outcome] += 1
        if outcome == "failure" and len(failures) < MOST_FAILURES:
            failures.append({"case": number, "details": details[-2500:]})
    form.close()
    return {
        "format": name,
        "first_case": first,
        "cases": cases,
        "clean_errors": counts["error"],
        "loads": counts["load"],
        "failures": counts["failure"],
        "slowest_s": round(slowest, 3),
        "peak_mb": round(peak_bytes() / 1e6),
        "examples": failures,
    }


def main(folder: Path, first: int, cases: int, names: list[str]) -> None:
    guard = Guard(folder / "case")
    for name in names:  # what is imported and compiled at first use belongs to no case
        formats.FORMATS[name](folder / f"good-{name}").try_undamaged(folder / "case")
    guard.limit_memory()
    for name in names:
        print(json.dumps(run(name, first, cases, folder, guard)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
