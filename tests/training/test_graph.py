"""When a step is captured in a CUDA graph. `tests/gpu/test_step.py` captures some."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_folders import CONFIG

from lmkit.parallel.ranks import Ranks
from lmkit.training.setup import build_step
from lmkit.training.step import MEASURED, WARM_UPS, Step, StepGraph


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(64, (2, 1, 4, 8), generator=torch.Generator().manual_seed(1))
    return ids[0], ids[1]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let graphs be captured on CPUs: the number of steps made until then is noted."""
    captured: list[int] = []

    def capture(self: StepGraph, *batch: Any) -> None:
        captured.append(self._steps)
        self._graph, self._state = object(), self._first_state()  # type: ignore[assignment]
        self._inputs = batch[0]

    def replay(self: StepGraph, *batch: Any) -> torch.Tensor:
        return torch.tensor([0, 0, 0, 1, 5, 5], dtype=torch.int32)

    monkeypatch.setattr(StepGraph, "_refusal", lambda self: "")
    monkeypatch.setattr(StepGraph, "_has_room", lambda self, device: device == torch.device("cpu"))
    monkeypatch.setattr(StepGraph, "_capture", capture)
    monkeypatch.setattr(StepGraph, "replay", replay)
    return captured


def measure(monkeypatch: pytest.MonkeyPatch, host_s: list[float], total_s: list[float]) -> None:
    def measured(self: StepGraph, make: Any) -> Any:
        self._host_s.append(host_s.pop(0))
        self._total_s.append(total_s.pop(0))
        return make()

    monkeypatch.setattr(StepGraph, "_measured", measured)


def steps(step: Step, number: int) -> list[bool]:
    """Make steps; return which were replayed."""
    return [step(*batch(), lr=1e-3).losses.view(torch.int32).item() == 5 for _ in range(number)]


def make_step(*, always: bool) -> Step:
    step = build_step(CONFIG, Ranks())
    step.graph = StepGraph(step, always=always)
    return step


@pytest.mark.parametrize(
    ("host_s", "total_s", "note"),
    [([9.0, 8.0], [10.0, 20.0], "on, 80%"), ([9.0, 6.9], [10.0, 10.0], "off, 69%")],
)
def test_a_step_whose_host_sets_the_pace_is_captured_once(pretend, monkeypatch, host_s, total_s, note):
    """The shortest time of each counts."""
    measure(monkeypatch, host_s, total_s)
    step, (state, share) = make_step(always=False), note.split(", ")
    captures = state == "on"
    assert steps(step, 7) == [False] * (WARM_UPS + MEASURED) + [captures] * 3
    assert pretend == [WARM_UPS + MEASURED] * captures
    assert step.graph.note.startswith(f"CUDA graph: {state}")
    assert share in step.graph.note


@pytest.mark.parametrize("always", [True, False])
def test_a_step_is_not_captured_where_its_graph_might_not_fit(always, pretend, monkeypatch):
    measure(monkeypatch, [9.0, 8.0], [10.0, 20.0])
    monkeypatch.setattr(StepGraph, "_has_room", lambda self, device: False)
    step = make_step(always=always)
    assert steps(step, 7) == [False] * 7
    assert "might not fit" in step.graph.note


@pytest.mark.parametrize(
    ("free", "fraction", "fits"), [(8.0, 1.0, True), (3.0, 1.0, False), (8.0, 0.5, False)]
)
def test_a_graph_fits_if_memory_is_left_for_what_a_step_gives_back(monkeypatch, free, fraction, fits):
    """A step gives back 3 of 5 GB, so its graph needs 3.95; of 10 GB, others leave 3, or the allocator may take 5."""
    of_cuda = {
        "memory_allocated": 2e9,
        "memory_reserved": 2.5e9,
        "max_memory_allocated": 5e9,
        "mem_get_info": (free * 1e9 - 0.5e9, 10e9),
        "get_per_process_memory_fraction": fraction,
        "get_device_properties": SimpleNamespace(total_memory=10e9),
    }
    for name, value in of_cuda.items():  # some of these questions of PyTorch demand the index of the device
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: {0: value}[device.index])
    graph = StepGraph(build_step(CONFIG, Ranks()), always=False)
    assert graph._has_room(torch.device("cuda", 0)) == fits


@pytest.mark.parametrize("other_is_busy", [True, False])
def test_the_ranks_decide_together(other_is_busy, pretend, monkeypatch):
    measure(monkeypatch, [9.0, 6.9], [10.0, 10.0])
    asked = []
    monkeypatch.setattr(
        "lmkit.training.step.agree",
        lambda ranks, *, stop: asked.append(stop) or (other_is_busy and len(asked) == 1),
    )
    step = make_step(always=False)
    assert steps(step, 5)[-1] == other_is_busy
    assert asked == [False] * (1 + other_is_busy)  # whether to capture, and whether room is lacking
    assert ("another rank" in step.graph.note) == other_is_busy


def test_other_shapes_are_made_without_the_graph_and_other_state_needs_another(pretend):
    step = make_step(always=True)
    assert steps(step, 4) == [False] * WARM_UPS + [True] * 2
    inputs, targets = batch()
    assert step(inputs[:, :2], targets[:, :2], lr=1e-3).losses.view(torch.int32).item() != 5
    assert steps(step, 1) == [True]
    step.optimizer.load_state_dict(step.optimizer.state_dict())
    assert steps(step, 4) == [False] * WARM_UPS + [True] * 2
    assert pretend == [WARM_UPS] * 2


def test_a_replay_waits_for_what_the_step_before_has_left_in_flight(pretend, monkeypatch):
    step, order = make_step(always=True), []
    steps(step, WARM_UPS)
    replay, update = step.graph.replay, step.update
    monkeypatch.setattr(step.sync, "end_step", lambda: order.append("waits"))
    monkeypatch.setattr(step.graph, "replay", lambda *batch: order.append("replays") or replay(*batch))
    monkeypatch.setattr(step, "update", lambda *loss, **how: order.append("updates") or update(*loss, **how))
    inputs, targets = batch()
    step(inputs[:, :2], targets[:, :2], lr=1e-3)
    assert steps(step, 1) == [True]
    assert order == ["updates", "waits", "replays"]


def test_a_step_that_cannot_be_captured_says_why():
    assert build_step(CONFIG, Ranks(), cuda_graph="auto").graph is None  # on a CPU
    step = build_step(CONFIG, Ranks(), cuda_graph="on")
    assert "no GPU" in step.graph.note
    assert steps(step, 4) == [False] * 4
