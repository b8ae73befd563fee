import pickle
import re

import pytest
import torch

from lmkit.measure.memory import GIB
from lmkit.model.accounting import count_parameters
from lmkit.profile.allocations import MemoryProfile, PhasePeak, memory_finding
from lmkit.profile.memory import _begins, run_profile
from lmkit.profile.steps import Workload
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import ModelConfig, RunConfig, TrainConfig

MODEL = ModelConfig(vocab_size=128, context_length=32, d_model=64, d_ff=128, num_layers=2, num_heads=4)
WORK = Workload(
    Recipe(run=RunConfig(device="cpu"), model=MODEL, train=TrainConfig(batch_size=2)), steps=1, warmup=1
)


@pytest.fixture(scope="module")
def result():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run_profile(WORK)
    torch.set_num_threads(before)


def test_categories_have_the_sizes_that_arithmetic_gives(result, ranges_are_on):
    weights = count_parameters(MODEL).total * 4 / GIB
    rows = {row["phase"]: row for row in result.rows}
    work = {"data", "forward", "attention", "loss", "backward", "clip", "optimizer"}
    assert set(rows) - {"sync"} == work | {"build", "step", "whole run"}
    # Allocations are rounded up to 64 bytes or so, and RoPE's tables are not parameters.
    assert rows["step"]["parameters_gib"] == pytest.approx(weights, rel=0.02)
    assert rows["clip"]["gradients_gib"] == pytest.approx(weights, rel=0.02)
    assert rows["data"]["optimizer_state_gib"] == pytest.approx(2 * weights, rel=0.02)
    assert rows["build"]["gradients_gib"] == 0
    assert rows["forward"]["activations_gib"] > 0
    assert rows["data"]["activations_gib"] == 0
    assert rows["whole run"]["peak_gib"] == max(row["peak_gib"] for row in result.rows)
    assert not ranges_are_on()


def test_files(result):
    assert set(result.files) == {
        "memory_peaks.jsonl",
        "memory_peaks.csv",
        "memory_timeline.png",
        "memory_snapshot.pickle",
        "memory_report.md",
    }
    (events,) = pickle.loads(result.files["memory_snapshot.pickle"])["device_traces"]
    assert {event["action"] for event in events} == {"alloc", "free_completed"}
    assert result.files["memory_timeline.png"][:4] == b"\x89PNG"
    assert max(map(len, result.table().splitlines())) <= 100
    assert re.search(
        r"^The peak, 0\.\d\d GiB \(2\^30 bytes\), is reached in \w+; the largest part of it is [\w ]+: \d+%\.$",
        result.files["memory_report.md"],
        re.MULTILINE,
    )


def test_the_peak_is_said_of_the_innermost_phase():
    def row(phase, peak, **parts):
        sizes = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations", "temporary"), 0.0)
        return {
            "phase": phase,
            "peak_gib": peak,
            **{f"{name}_gib": gib for name, gib in (sizes | parts).items()},
        }

    rows = [row("step", 4.0), row("update", 4.0, optimizer_state=3.0, gradients=1.0), row("whole run", 4.0)]
    begin = "The peak, 4.00 GiB (2^30 bytes), is reached"
    assert memory_finding(rows) == f"{begin} in update; the largest part of it is optimizer state: 75%."
    rows = [row("pass", 2.0), row("whole run", 4.0, temporary=4.0)]
    assert memory_finding(rows) == f"{begin} between phases; the largest part of it is temporary: 100%."
    assert memory_finding([row("whole run", 0.0)]) == "Nothing was allocated."


def test_the_picture_says_where_steps_begin():
    phases = [("build", 0), ("step", 5), ("forward", 6), ("step", 9), ("forward", 10)]
    profile = MemoryProfile([], {}, phases, [], PhasePeak("whole run", 0, {}))
    assert _begins(profile, WORK) == {"build": 0, "warm-up 1": 5, "step 1": 9}
