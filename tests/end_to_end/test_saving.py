"""What saving costs: how long the training loop stands still for a checkpoint, against a plain `torch.save`.

Run by `nox -s saving` (it is marked slow). A model of 162 million parameters trains on random tokens and saves every
few steps; the loop's own count of the time that it waited is in `metrics.jsonl`. Then `torch.save` writes the same
state.
"""

import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lmkit.training.checkpoint import newest_valid, open_checkpoint
from lmkit.training.weights import weights_of

SAVES = 4
STEPS_BETWEEN = 6

RECIPE = """
[run]
folder = "runs"
device = "cpu"
[data]
source = "random"
[model]
preset = "small"
vocab_size = 32000
context_length = 64
[train]
steps = 1000
batch_size = 2
log_interval = 1
[checkpoint]
interval = {interval}
keep_last = 1
"""


def stalls(folder: Path) -> list[float]:
    """Train with the real command until one save after the last that counts; return what each save cost, in seconds.

    Each record holds the waiting so far: in the call that saves, and before an update while tensors were copied.
    """
    recipe = folder / "saving.toml"
    recipe.write_text(RECIPE.format(interval=STEPS_BETWEEN))
    last = str((SAVES + 1) * STEPS_BETWEEN)
    command = [sys.executable, "-m", "lmkit", "train", str(recipe), "--stop-at-step", last]
    subprocess.run(command, cwd=folder, check=True)
    records = map(json.loads, (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines())
    waited = [record["stall_seconds"] for record in records if record["kind"] == "checkpoint"]
    return [after - before for before, after in itertools.pairwise(waited)]


def torch_save_seconds(folder: Path) -> list[float]:
    """Plain `torch.save` of the checkpoint's weights and optimizer state, without fsync, five times."""
    checkpoint = newest_valid(folder / "runs" / "run" / "checkpoints").path
    assert checkpoint is not None
    opened = open_checkpoint(checkpoint)
    state = {"model": dict(weights_of(opened)), "optimizer": opened.optimizer_tensors()}
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        torch.save(state, folder / "plain.pt")
        seconds.append(time.perf_counter() - began)
    return seconds


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_loop_stands_still_for_a_tenth_of_a_plain_save_at_most(tmp_path):
    per_save, plain = stalls(tmp_path), torch_save_seconds(tmp_path)
    print(f"stalls {per_save} s, torch.save {plain} s")
    assert len(per_save) == SAVES
    assert max(per_save) < 0.10 * statistics.median(plain)
