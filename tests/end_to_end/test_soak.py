"""The soak: two ranks train for minutes while processes are killed at random moments, 50 times.

Run by `nox -s soak` (it is marked slow). At the end the run must be the one that was never disturbed, bit for bit,
and nothing may lie around that does not belong there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lmkit.data.token_files import TokenFileWriter
from lmkit.training.checkpoint_folder import newest_valid

KILLS = 50
STEPS = 600
STEPS_PER_LIFE = 8
PATIENCE_S = 120

RECIPE = f"""
[run]
folder = "runs"
device = "cpu"
threads = 1
[data]
train = "train.npy"
valid = "valid.npy"
[model]
d_model = 32
d_ff = 64
num_layers = 2
num_heads = 2
context_length = 16
[train]
steps = {STEPS}
batch_size = 8
accumulation = 2
log_interval = 1
eval_interval = 50
eval_batches = 2
[parallel]
strategy = "zero1"
timeout_s = 60
[checkpoint]
interval = 2
"""


def write_inputs(folder: Path) -> Path:
    ids = np.random.default_rng(3).integers(0, 64, 4000)
    for name, part in (("train", ids[:3000]), ("valid", ids[3000:])):
        path = folder / f"{name}.npy"
        with TokenFileWriter(path, vocab_size=64, tokenizer_sha256="a" * 64) as writer:
            writer.append(part)
            writer.finish(num_documents=1, num_bytes=3 * len(part), source_sha256="b" * 64)
    recipe = folder / "soak.toml"
    recipe.write_text(RECIPE)
    return recipe


def start(recipe: Path, name: str, log: Path) -> subprocess.Popen[bytes]:
    """`lmkit train --nproc 2` in a session of its own, by which its ranks are found again."""
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "lmkit", "train", str(recipe), "--name", name, "--nproc", "2"],
            cwd=recipe.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def members(session: int) -> list[int]:
    """Living processes of a session: the command, its ranks, their helpers."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(entry.name))
    return found


def newest_step(run: Path) -> int:
    names = [path.name for path in (run / "checkpoints").glob("step-????????")]
    return max((int(name[5:]) for name in names), default=0)


def end_of_all(process: subprocess.Popen[bytes]) -> None:
    """Whoever was killed, the others must end by themselves."""
    process.wait(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while members(process.pid):
        assert time.monotonic() < deadline, "a process outlived its run"
        time.sleep(0.05)


def one_life(recipe: Path, run: Path, log: Path, generator: random.Random) -> None:
    """Start, let it take some steps, kill one or all of its processes at a random moment."""
    before = newest_step(run)
    process = start(recipe, run.name, log)
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and newest_step(run) < before + STEPS_PER_LIFE:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    time.sleep(generator.uniform(0, 0.2))
    victims = members(process.pid)
    if victims and generator.random() < 0.5:
        victims = [generator.choice(victims)]
    for victim in victims:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue
    end_of_all(process)


def losses(run: Path) -> list[tuple[str, int, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = ("train", "valid", "final")
    return [(record["kind"], record["step"], record["loss"]) for record in records if record["kind"] in kinds]


def soak(folder: Path, kills: int) -> None:
    recipe, log = write_inputs(folder), folder / "log.txt"
    calm, battered = folder / "runs" / "calm", folder / "runs" / "battered"
    assert start(recipe, "calm", log).wait(PATIENCE_S * 4) == 0, log.read_text()
    generator = random.Random(50)
    for _ in range(kills):
        one_life(recipe, battered, log, generator)
        assert newest_valid(battered / "checkpoints").path is not None
    assert start(recipe, "battered", log).wait(PATIENCE_S * 4) == 0, log.read_text()

    assert losses(battered) == losses(calm)
    last = [newest_valid(run / "checkpoints").path for run in (calm, battered)]
    assert last[0] is not None
    assert last[1] is not None
    for path in last[0].glob("*.safetensors"):
        assert path.read_bytes() == (last[1] / path.name).read_bytes(), path.name
    for run in (calm, battered):
        names = {path.name for path in run.iterdir()}
        assert names == {
            ".lock", "recipe.toml", "environment.json", "metrics.jsonl", "checkpoints", "loss.png",
        }  # fmt: skip
        assert len(list((run / "checkpoints").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_50_times_it_is_still_the_same_run(tmp_path: Path) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("finds processes through /proc")
    soak(tmp_path, KILLS)
