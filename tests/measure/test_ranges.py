import pytest
import torch

from lmkit.errors import UsageError
from lmkit.measure import ranges
from lmkit.measure.ranges import (
    disable_ranges,
    enable_ranges,
    enable_ranges_from_environment,
    observe_ranges,
    range_,
)


@pytest.fixture(autouse=True)
def _ranges_off_afterwards():
    yield
    disable_ranges()


def double(x: torch.Tensor) -> torch.Tensor:
    with range_("double"):
        return x * 2


def test_off_by_default_and_transparent(ranges_are_on):
    assert not ranges_are_on()
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(KeyError), range_("an exception passes"):
        raise KeyError


def test_kineto_sees_the_ranges_only_when_on():
    def names() -> list[str]:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        ) as profiler:
            double(torch.ones(2))
        return [event.key for event in profiler.key_averages()]

    assert "double" not in names()
    enable_ranges("kineto")
    assert "double" in names()


def test_torch_compile_sees_no_graph_break_on_or_off():
    for switch in (disable_ranges, lambda: enable_ranges("kineto")):
        switch()
        compiled = torch.compile(double, fullgraph=True, backend="eager", dynamic=False)
        assert compiled(torch.ones(3)).tolist() == [2.0] * 3
        torch.compiler.reset()


def test_an_observer_hears_ranges_open_and_close_also_by_an_exception():
    heard = []
    observe_ranges(lambda name, opens: heard.append((name, opens)))
    with range_("outer"), pytest.raises(KeyError), range_("inner"):
        raise KeyError
    assert heard == [("outer", True), ("inner", True), ("inner", False), ("outer", False)]


def test_nvtx_pushes_and_pops_in_order(monkeypatch):
    """On a CPU build torch.cuda.nvtx raises, so the calls are recorded by a stand-in."""
    log = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: log.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("pop"))
    enable_ranges("nvtx")
    with range_("outer"), pytest.raises(KeyError), range_("inner"):
        raise KeyError
    assert log == ["push outer", "push inner", "pop", "pop"]


def test_nvtx_without_cuda_and_without_the_package_is_refused(monkeypatch, ranges_are_on):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(ranges.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="NVTX") as caught:
        enable_ranges("nvtx")
    assert "kineto" in caught.value.hint
    assert not ranges_are_on()


def test_the_environment_switches(monkeypatch, ranges_are_on):
    monkeypatch.delenv("LMKIT_RANGES", raising=False)
    enable_ranges_from_environment()
    assert not ranges_are_on()
    monkeypatch.setenv("LMKIT_RANGES", "kineto")
    enable_ranges_from_environment()
    assert ranges_are_on()
    monkeypatch.setenv("LMKIT_RANGES", "vtune")
    with pytest.raises(UsageError, match="vtune"):
        enable_ranges_from_environment()
