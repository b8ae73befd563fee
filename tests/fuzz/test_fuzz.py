"""Damaged files end in a clean error or a right load, for every format that lmkit reads.

Here with 60 cases a format; `nox -s fuzz` takes 10,000 and keeps the figures.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

from lmkit.measure.environment import git_state

CASES = int(os.environ.get("LMKIT_FUZZ_CASES", "60"))
RECORD = os.environ.get("LMKIT_FUZZ_RECORD")
# How much a process may grow above its imports: a file with 5,000 damaged values of 100 kB takes 100 MB.
MOST_MB = 400

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures memory through /proc"),
]


@pytest.mark.timeout(0 if CASES > 1000 else 300)
def test_damaged_files_end_in_a_clean_error_or_a_right_load(tmp_path):
    git = git_state()  # of the code that runs, before the record itself changes the checkout
    words = (sys.executable, Path(__file__).with_name("worker.py"), tmp_path, "0", str(CASES))
    done = run_program(*words, cwd=Path.cwd(), timeout=None, no_proxy="127.0.0.1")
    hung = tmp_path / "progress"
    assert done.returncode == 0, f"{hung.read_text() if hung.exists() else ''}\n{done.stderr[-5000:]}"
    summaries: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    if RECORD:
        Path(RECORD).parent.mkdir(parents=True, exist_ok=True)
        Path(RECORD).write_text("".join(json.dumps({**summary, "git": git}) + "\n" for summary in summaries))
    assert len(summaries) >= 13
    for summary in summaries:
        name = summary["format"]
        assert summary["failures"] == 0, f"{name}: {json.dumps(summary['examples'], indent=1)}"
        assert summary["clean_errors"] + summary["loads"] == CASES
        passed_over = name in ("metrics.jsonl", "stages.json")  # these skip damaged entries
        assert summary["clean_errors"] > CASES // 20 or passed_over, f"{name}: damage is hardly ever noticed"
        assert summary["grown_mb"] < MOST_MB, name
