import pickle

import pytest
import torch

from lmkit.measure.memory import GIB
from lmkit.model.accounting import count_parameters
from lmkit.profile import memory
from lmkit.profile.memory import run_profile
from lmkit.profile.steps import Workload
from lmkit.profile.write_up import MEMORY, peak_row
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import ModelConfig, RunConfig, TrainConfig

MODEL = ModelConfig(vocab_size=128, context_length=32, d_model=64, d_ff=128, num_layers=2, num_heads=4)
WORK = Workload(
    Recipe(run=RunConfig(device="cpu"), model=MODEL, train=TrainConfig(batch_size=2)), steps=1, warmup=1
)


@pytest.fixture(scope="module")
def begins():
    """Filled with what the picture says of where phases begin."""
    return {}


@pytest.fixture(scope="module")
def result(begins):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        draw = memory.stacked_areas
        patch.setattr(memory, "stacked_areas", lambda *a, **k: begins.update(k["begins"]) or draw(*a, **k))
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


def test_files(result, begins):
    assert set(result.files) == {
        "memory_peaks.jsonl",
        "memory_peaks.csv",
        "memory_timeline.png",
        "memory_snapshot.pickle",
        "memory_report.md",
        "environment.json",
    }
    (events,) = pickle.loads(result.files["memory_snapshot.pickle"])["device_traces"]
    assert {event["action"] for event in events} == {"alloc", "free_completed"}
    assert result.files["memory_timeline.png"][:4] == b"\x89PNG"
    assert max(map(len, result.text.splitlines())) <= 100
    assert all(column.header in result.files["memory_report.md"] for column in MEMORY)
    assert "![memory_timeline.png](memory_timeline.png)" in result.files["memory_report.md"]
    assert begins["build"] == 0 < begins["warm-up 1"] < begins["step 1"]


@pytest.mark.parametrize(
    ("peaks", "phase"),
    [
        ({"step": 4.0, "forward": 4.0, "loss": 4.0, "backward": 3.0, "whole run": 4.0}, "loss"),
        ({"pass": 2.0, "whole run": 4.0}, "whole run"),
    ],
)
def test_the_peak_belongs_to_the_innermost_phase(peaks, phase):
    assert peak_row([{"phase": name, "peak_gib": peak} for name, peak in peaks.items()])["phase"] == phase
