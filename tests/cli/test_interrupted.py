"""Ctrl-C in the middle of a bench: a real signal to a real process."""

import json
import signal
import subprocess
import sys
import time

import pytest

KEPT = "results/rows.jsonl.partial"
# Only to end a test that hangs.
PATIENCE_S = 240


@pytest.mark.full
def test_fault_16_ctrl_c_in_a_bench_is_130_and_one_line_that_says_where_its_rows_are(tmp_path):
    kept = tmp_path / KEPT
    words = ["-m", "lmkit", "bench", "attention", "bench_attention_cpu", "--output", "results"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, **pipes) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not kept.exists() or kept.stat().st_size == 0:  # the file is there before its first row is
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    last = err.splitlines()[-1]  # a slow machine reports progress before it
    assert last.startswith("interrupted: ")
    assert KEPT in last
    assert "Traceback" not in err
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert {row["status"] for row in rows} == {"ok"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_work_ends_the_process_without_a_traceback(number):
    code = (
        "import atexit, os, sys\nfrom lmkit.__main__ import main\n"
        f"atexit.register(os.kill, os.getpid(), {number:d})\n"
        "sys.argv = ['lmkit', '--version']\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("lmkit ")
    assert (done.returncode, done.stderr) == (-number, "")
