"""What end-to-end tests share.

Commands in sessions of their own, by which their processes are found again; tiny token files to train on; the losses
of a run.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from lmkit.data.token_files import TokenFileWriter

# Only to end a test that hangs: far above what a slow machine needs, far below the ranks' timeout of 600 s.
PATIENCE_S = 240.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def write_tokens(folder: Path) -> None:
    """Write train.npy and valid.npy."""
    ids = np.random.default_rng(3).integers(0, 64, 4000)
    for name, part in (("train", ids[:3000]), ("valid", ids[3000:])):
        with TokenFileWriter(folder / f"{name}.npy", vocab_size=64, tokenizer_sha256="a" * 64) as writer:
            writer.append(part)
            writer.finish(num_bytes=3 * len(part), source_sha256="b" * 64)


def records(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run folder."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """Return the training losses of a run folder, in the order of its metrics."""
    return [record["loss"] for record in records(run) if record["kind"] == "train"]


def start(*command: str, cwd: Path) -> subprocess.Popen[str]:
    """Start `python COMMAND` in a session of its own; return at its first progress line."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *command]
    process = subprocess.Popen(words, cwd=cwd, env=environment, start_new_session=True, **pipes)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            return process
    raise AssertionError(f"ended before its first step: {process.wait()}")


def members(session: int) -> dict[str, int]:
    """Living processes of a session by name: `launcher`, `rank 0`, `rank 1`, and their helpers by number."""
    spawned: list[tuple[int, int]] = []  # time of start, process
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except OSError:  # ended meanwhile
            continue
        if fields[0] == "Z" or int(fields[3]) != session:
            continue
        pid = int(entry.name)
        if pid == session:
            found["launcher"] = pid
        elif b"spawn_main" in command:
            spawned.append((int(fields[19]), pid))
        else:
            found[entry.name] = pid
    return found | {f"rank {number}": pid for number, (_, pid) in enumerate(sorted(spawned))}


def wait_for_all(session: int) -> None:
    """Wait until no process of a session is left: multiprocessing's resource tracker ends after everybody else."""
    deadline = time.monotonic() + PATIENCE_S
    while left := members(session):
        assert time.monotonic() < deadline, f"outlived its run: {left}"
        time.sleep(0.05)
