"""Processes that are killed or told twice to stop: what they leave, and how fast they leave."""

import os
import random
import re
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from processes import PATIENCE_S, ends
from run_folders import assert_same_tensors, losses, newest, saved

from lmkit.training.checkpoint import newest_valid, open_checkpoint


@pytest.mark.full
def test_fault_46_killed_at_random_20_times_and_still_the_same_run(fleet, tiny, settings):
    steps = ("train.steps=100", "train.eval_interval=0", "checkpoint.interval=1")
    whole, battered = settings(*steps, "run.name=whole"), settings(*steps, "run.name=battered")
    fleet.train(whole)
    recipe = tiny(*steps, "run.name=battered")
    generator = random.Random(46)
    reached = 0
    for _ in range(20):
        (process,) = fleet.start(battered, fault="at most four steps")
        deadline = time.monotonic() + PATIENCE_S
        while process.is_alive() and max(saved(recipe), default=0) < reached + 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.join(generator.uniform(0, 0.03))  # it saves all the time: this is somewhere in a save
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        choice = newest_valid(recipe.run.path / "checkpoints")  # one loads, whatever lies around
        assert choice.skipped == ()  # nothing half written ever has a final name
        assert open_checkpoint(choice.path).state.step >= reached
        reached = open_checkpoint(choice.path).state.step
    fleet.train(battered)
    assert_same_tensors(newest(tiny(*steps, "run.name=whole")), newest(recipe))
    assert losses(recipe) == losses(tiny(*steps, "run.name=whole"))
    assert not list(recipe.run.path.rglob("*.lmkit-partial"))
    assert len(saved(recipe)) == 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="sees in /proc that a signal was taken")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_leaves_at_once_where_python_has_no_say(number, fleet, tiny, settings):
    fleet.train(settings(), stop_at_step=1)
    (process,) = fleet.start(settings(), fault="wait in C++ in step 3")
    fleet.wait_until_said("hanging")
    for _ in range(2):
        assert process.is_alive()
        os.kill(process.pid or 0, number)
        wait_until_taken(process)
    assert ends([process]) == [128 + number]
    assert saved(tiny()) == [1]


def wait_until_taken(process: BaseProcess) -> None:
    """No signal waits any more: a second one would be the same to the system."""
    deadline = time.monotonic() + PATIENCE_S
    while process.is_alive():
        status = Path(f"/proc/{process.pid}/status").read_text()
        if not any(
            int(mask, 16) for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)$", status, re.MULTILINE)
        ):
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)
