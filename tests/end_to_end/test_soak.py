"""The soak: two ranks train for minutes while their processes are killed 50 times.

Run by `nox -s soak` (it is marked slow). Kills come while the processes start, while they train, and while a
checkpoint is half written; they hit one rank, the launcher, or everything at once. At the end the run must be the one
that was never disturbed, bit for bit, and nothing may lie around that does not belong there.
"""

from __future__ import annotations

import getpass
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lmkit.data.token_files import TokenFileWriter
from lmkit.measure.environment import describe_environment
from lmkit.training.checkpoint import newest_valid

KILLS = 50
STEPS = 5000
STEPS_PER_LIFE = 8
PATIENCE_S = 240

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


class Kill(NamedTuple):
    """What is killed, and when."""

    moment: str
    """`starting`: before the first step of this life. `training`: at any time behind it. `saving`: while a
    checkpoint is half written."""
    victims: str
    """`launcher`, `rank 0`, `rank 1` or `all`."""


def plan(kills: int, generator: random.Random) -> list[Kill]:
    """Every moment with every victim, again and again, in random order."""
    kinds = itertools.product(("starting", "training", "saving"), ("launcher", "rank 0", "rank 1", "all"))
    chosen = list(itertools.islice(itertools.cycle([Kill(*kind) for kind in kinds]), kills))
    generator.shuffle(chosen)
    return chosen


def write_inputs(folder: Path) -> Path:
    ids = np.random.default_rng(3).integers(0, 64, 4000)
    for name, part in (("train", ids[:3000]), ("valid", ids[3000:])):
        path = folder / f"{name}.npy"
        with TokenFileWriter(path, vocab_size=64, tokenizer_sha256="a" * 64) as writer:
            writer.append(part)
            writer.finish(num_documents=1, num_bytes=3 * len(part), source_sha256="b" * 64)
    (folder / "temporary").mkdir()
    recipe = folder / "soak.toml"
    recipe.write_text(RECIPE)
    return recipe


def start(recipe: Path, name: str, log: Path) -> subprocess.Popen[bytes]:
    """`lmkit train --nproc 2` in a session of its own, by which its ranks are found again."""
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "lmkit", "train", str(recipe), "--name", name, "--nproc", "2"],
            cwd=recipe.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(recipe.parent / "temporary")},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


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


def newest_step(run: Path) -> int:
    names = [path.name for path in (run / "checkpoints").glob("step-????????")]
    return max((int(name[5:]) for name in names), default=0)


def half_written(run: Path) -> bool:
    return next((run / "checkpoints").glob("step-*.partial"), None) is not None


def patiently(process: subprocess.Popen[bytes], log: Path) -> Iterator[None]:
    """Look again and again while the command lives."""
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        assert time.monotonic() < deadline, log.read_text()
        yield
        time.sleep(0.0005)


def end_of_all(process: subprocess.Popen[bytes]) -> None:
    """Whoever was killed, the others must end by themselves."""
    process.wait(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while members(process.pid):
        assert time.monotonic() < deadline, f"outlived its run: {members(process.pid)}"
        time.sleep(0.05)


def one_life(
    recipe: Path, run: Path, log: Path, kill: Kill, startup_s: float, generator: random.Random
) -> dict[str, Any]:
    """Start, kill at the wanted moment, wait for the end of all; say what was hit."""
    before = newest_step(run)
    started = time.monotonic()
    first_checkpoint_s = None
    process = start(recipe, run.name, log)
    if kill.moment == "starting":
        moment = started + generator.uniform(0.2, 1.0) * startup_s
        for _ in patiently(process, log):
            there = kill.victims == "all" or kill.victims in members(process.pid)
            if newest_step(run) > before or (time.monotonic() >= moment and there):
                break
    else:
        for _ in patiently(process, log):
            step = newest_step(run)
            if first_checkpoint_s is None and step > before:
                first_checkpoint_s = round(time.monotonic() - started, 2)
            if step >= before + STEPS_PER_LIFE:
                break
        time.sleep(generator.uniform(0, 0.2))
        if kill.moment == "saving":
            for _ in patiently(process, log):
                if half_written(run):
                    break
    alive = members(process.pid)
    saving, step = half_written(run), newest_step(run)
    hit = []
    for name, pid in alive.items():
        if kill.victims in (name, "all"):
            os.kill(pid, signal.SIGKILL)
            hit.append(name)
    end_of_all(process)
    assert hit, f"nothing was left to kill; give the run more steps\n{log.read_text()}"
    return {
        "moment": kill.moment,
        "killed": sorted(hit),
        "newest_checkpoint_before": before,
        "at_the_kill": step,
        "half_written": saving,
        "exit_code": process.returncode,
        "first_checkpoint_s": first_checkpoint_s,
        "seconds": round(time.monotonic() - started, 1),
    }


def losses(run: Path) -> list[tuple[str, int, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = ("train", "valid", "final")
    return [(record["kind"], record["step"], record["loss"]) for record in records if record["kind"] in kinds]


def check_log(log: Path) -> None:
    """A killed run is explained in lines for people, not in tracebacks."""
    text = log.read_text()
    for sign in ("Traceback", "terminate called", "SIGABRT", "core dumped"):
        assert sign not in text, text


def soak(folder: Path, kills: int) -> dict[str, Any]:
    """Let one run go undisturbed and kill another one; compare them. Returns the record."""
    began = time.monotonic()
    recipe = write_inputs(folder)
    calm, battered = folder / "runs" / "calm", folder / "runs" / "battered"
    log = folder / "calm.log"
    process = start(recipe, "calm", log)
    for _ in patiently(process, log):
        if newest_step(calm):
            break
    startup_s = time.monotonic() - began
    assert process.wait(PATIENCE_S * 4) == 0, log.read_text()
    check_log(log)

    generator = random.Random(50)
    lives = []
    for number, kill in enumerate(plan(kills, generator)):
        log = folder / f"life-{number}.log"
        life = one_life(recipe, battered, log, kill, startup_s, generator)
        check_log(log)
        good = newest_valid(battered / "checkpoints")
        life["newest_good"] = 0 if good.path is None else int(good.path.name[5:])
        life["damaged"] = len(good.skipped)
        if life["first_checkpoint_s"] is not None:  # a start takes so long now, beside other work
            startup_s = life["first_checkpoint_s"]
        assert life["newest_good"] >= life["at_the_kill"], life  # what had its name is whole
        lives.append(life)
        print(number + 1, json.dumps(life), flush=True)
    log = folder / "last.log"
    assert start(recipe, "battered", log).wait(PATIENCE_S * 4) == 0, log.read_text()
    check_log(log)

    assert losses(battered) == losses(calm)
    last = [newest_valid(run / "checkpoints").path for run in (calm, battered)]
    assert last[0] is not None
    assert last[1] is not None
    files = sorted(path.name for path in last[0].glob("*.safetensors"))
    assert len(files) == 3  # the model, two shards of the optimizer
    for name in files:
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
    for run in (calm, battered):
        names = {path.name for path in run.iterdir()}
        assert names == {
            ".lock", "recipe.toml", "environment.json", "metrics.jsonl", "checkpoints", "loss.png",
        }  # fmt: skip
        assert len(list((run / "checkpoints").iterdir())) == 2
    left = {path.name for path in (folder / "temporary").iterdir()}
    assert left <= {f"torchinductor_{getpass.getuser()}"}, left  # torch's cache
    return {
        "kills": len(lives),
        "kills_before_the_first_new_checkpoint": sum(
            life["at_the_kill"] == life["newest_checkpoint_before"] for life in lives
        ),
        "moments": Counter(life["moment"] for life in lives),
        "victims": Counter(life["killed"][0] if len(life["killed"]) == 1 else "all" for life in lives),
        "checkpoint_half_written": sum(life["half_written"] for life in lives),
        "checkpoints_damaged": sum(life["damaged"] for life in lives),
        "steps": STEPS,
        "losses_compared": len(losses(calm)),
        "losses_equal": True,
        "files_equal": files,
        "wall_s": round(time.monotonic() - began),
        "lives": lives,
        "environment": describe_environment(),
    }


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_50_times_it_is_still_the_same_run(tmp_path: Path) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("finds processes through /proc")
    record = soak(tmp_path, int(os.environ.get("LMKIT_SOAK_KILLS", KILLS)))
    target = os.environ.get("LMKIT_SOAK_RECORD")
    if target:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(json.dumps(record, indent=1) + "\n")
