"""What is said about ranks that died or hang."""

import subprocess
import sys

import pytest
import torch.distributed as dist
from raising import raises

from lmkit.parallel import launch
from lmkit.parallel.ranks import ROLL_CALL_S, RankLost, Ranks, losses_named


def test_fault_72_the_waits_after_a_death_are_far_below_the_30_seconds_that_are_promised():
    """The roll call of the survivors, their time to report, and to end after SIGTERM."""
    assert ROLL_CALL_S + 2 * launch.GRACE_S < 15


@pytest.mark.parametrize(
    ("error", "what"),
    [
        ("[gloo/transport/tcp/pair.cc:534] Connection closed by peer", "connection"),
        ("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 7000ms", "7 s"),
        ("Application timeout caused pair closure", "7 s"),
    ],
)
@pytest.mark.parametrize(
    ("survivors", "who"), [((), "rank 1, 2"), ((2,), "rank 1 "), ((1, 2), "all ranks"), (None, "store")]
)
def test_fault_72_and_73_survivors_say_what_they_know(monkeypatch, error, what, survivors, who):
    """And not that a silent rank is lost: it may not have noticed yet."""
    monkeypatch.setattr("lmkit.parallel.ranks.ROLL_CALL_S", 0.1)
    store = GoneStore() if survivors is None else dist.HashStore()
    for rank in survivors or ():
        store.set(f"survivor/{rank}", "yes")
    ranks = Ranks(rank=0, world_size=3, timeout_s=7.0, store=store)
    with raises(RankLost, "parallel.rank_lost", "rank 0, step 5", what, who), losses_named(ranks, "step 5"):
        raise RuntimeError(error)


class GoneStore:
    def set(self, key, value):
        raise dist.DistNetworkError("Broken pipe")


HANGING = """
import threading, torch
from lmkit.parallel.ranks import StepWatch
from lmkit.parallel.ranks import Ranks

with StepWatch(Ranks(rank=3, world_size=4, device=torch.device("cuda", 3), timeout_s=1)) as watch:
    for step in range(3):
        with watch.step(step):
            pass
    threading.Event().wait(1.5)  # between steps nothing is awaited
    print("idle", flush=True)
    with watch.step(7):
        threading.Event().wait()
"""


def test_fault_73_on_gpus_a_clock_ends_a_rank_whose_step_hangs():
    """No exception reaches a thread that waits for a GPU; the clock needs none to be tested."""
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "idle\n")
    assert done.stderr.startswith("error[parallel.step_hangs]: rank 3, step 7: ")
    assert done.stderr.count("\n") == 1


def test_other_errors_stay_as_they_are():
    text = "mat1 and mat2 shapes cannot be multiplied"
    with pytest.raises(RuntimeError, match=text), losses_named(Ranks(world_size=2), "step 5"):
        raise RuntimeError(text)
