"""The soak: two ranks train for minutes while their processes are killed 50 times.

Run by `nox -s soak` (it is marked slow). Kills come while the processes start, while they train, and while a
checkpoint is half written; they hit one rank, the launcher, or everything at once. At the end the run must be the one
that was never disturbed, bit for bit, and nothing may lie around that does not belong there.
"""

import getpass
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sessions import PATIENCE_S, members, records, wait_for_all, write_tokens
from tiny import tiny_recipe

from lmkit.training.checkpoint import newest_valid

KILLS = 50
STEPS = 5000
STEPS_PER_LIFE = 8
# Before the first step of this life, at any time behind it, while a checkpoint is half written.
MOMENTS = ("starting", "training", "saving")
VICTIMS = ("launcher", "rank 0", "rank 1", "all")

RECIPE = tiny_recipe(
    *('data.train="train.npy"', 'data.valid="valid.npy"'),
    *("model.d_model=32", "model.d_ff=64", "model.num_layers=2", "model.context_length=16"),
    *(f"train.steps={STEPS}", "train.batch_size=8", "train.accumulation=2", "train.log_interval=1"),
    *("train.eval_interval=50", "train.eval_batches=2"),
    *('parallel.strategy="zero1"', "parallel.timeout_s=60", "checkpoint.interval=2"),
)


def start(folder: Path, name: str, log: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, *f"-m lmkit train soak.toml --name {name} --nproc 2".split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary")}
    options = {"cwd": folder, "env": environment, "start_new_session": True}
    with open(log, "ab") as file:
        return subprocess.Popen(words, stdout=file, stderr=file, **options)


def newest_step(run: Path) -> int:
    names = [path.name for path in (run / "checkpoints").glob("step-????????")]
    return max((int(name[5:]) for name in names), default=0)


def half_written(run: Path) -> bool:
    return next((run / "checkpoints").glob("step-*.lmkit-partial"), None) is not None


def patiently(process: subprocess.Popen[bytes], log: Path) -> Iterator[None]:
    """Look again and again while the command lives."""
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        assert time.monotonic() < deadline, log.read_text()
        yield
        time.sleep(0.0005)


def one_life(
    run: Path, log: Path, moment: str, victims: str, startup_s: float, generator: random.Random
) -> int:
    """Start, kill at the wanted moment, wait for the end of all; return the newest step at the kill."""
    before = newest_step(run)
    process = start(run.parent.parent, run.name, log)
    if moment == "starting":
        when = time.monotonic() + generator.uniform(0.2, 1.0) * startup_s
        for _ in patiently(process, log):
            there = victims == "all" or victims in members(process.pid)
            if newest_step(run) > before or (time.monotonic() >= when and there):
                break
    else:
        for _ in patiently(process, log):
            if newest_step(run) >= before + STEPS_PER_LIFE:
                break
        time.sleep(generator.uniform(0, 0.2))
        for _ in patiently(process, log) if moment == "saving" else ():
            if half_written(run):
                break
    at_the_kill = newest_step(run)
    hit = {name: pid for name, pid in members(process.pid).items() if victims in (name, "all")}
    for pid in hit.values():
        os.kill(pid, signal.SIGKILL)
    process.wait(PATIENCE_S)
    wait_for_all(process.pid)  # whoever was killed, the others must end by themselves
    assert hit, f"nothing was left to kill; give the run more steps\n{log.read_text()}"
    return at_the_kill


def losses(run: Path) -> list[tuple[str, int, float]]:
    kinds = ("train", "valid", "final")
    return [(each["kind"], each["step"], each["loss"]) for each in records(run) if each["kind"] in kinds]


def check_log(log: Path) -> None:
    """A killed run is explained in lines for people, not in tracebacks."""
    text = log.read_text()
    for sign in ("Traceback", "terminate called", "SIGABRT", "core dumped"):
        assert sign not in text, text


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")
def test_killed_50_times_it_is_still_the_same_run(tmp_path):
    write_tokens(tmp_path)
    (tmp_path / "soak.toml").write_text(RECIPE)
    (tmp_path / "temporary").mkdir()
    calm, battered = tmp_path / "runs" / "calm", tmp_path / "runs" / "battered"
    log, began = tmp_path / "calm.log", time.monotonic()
    process = start(tmp_path, "calm", log)
    for _ in patiently(process, log):
        if newest_step(calm):
            break
    startup_s = time.monotonic() - began
    assert process.wait(PATIENCE_S * 4) == 0, log.read_text()
    check_log(log)

    generator = random.Random(50)
    kinds = itertools.cycle(itertools.product(MOMENTS, VICTIMS))
    kills = list(itertools.islice(kinds, int(os.environ.get("LMKIT_SOAK_KILLS", KILLS))))
    generator.shuffle(kills)
    for number, (moment, victims) in enumerate(kills):
        log = tmp_path / f"life-{number}.log"
        at_the_kill = one_life(battered, log, moment, victims, startup_s, generator)
        check_log(log)
        good = newest_valid(battered / "checkpoints")
        newest = 0 if good.path is None else int(good.path.name[5:])
        print(number + 1, moment, victims, at_the_kill, newest, flush=True)
        assert newest >= at_the_kill  # what had its name is whole
    log = tmp_path / "last.log"
    assert start(tmp_path, "battered", log).wait(PATIENCE_S * 4) == 0, log.read_text()
    check_log(log)

    assert losses(battered) == losses(calm)
    left, right = (newest_valid(run / "checkpoints").path for run in (calm, battered))
    assert left is not None
    assert right is not None
    files = sorted(path.name for path in left.glob("*.safetensors"))
    assert len(files) == 3  # the model, two shards of the optimizer
    for name in files:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    for run in (calm, battered):
        assert {path.name for path in run.iterdir()} == {
            ".lock", "stages.json", "recipe.toml", "environment.json", "metrics.jsonl", "checkpoints", "loss.png",
        }  # fmt: skip
        assert len(list((run / "checkpoints").iterdir())) == 2
    temporary = {path.name for path in (tmp_path / "temporary").iterdir()}
    assert temporary <= {f"torchinductor_{getpass.getuser()}"}, temporary  # torch's cache
