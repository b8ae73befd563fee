import os

import pytest
import torch
from raising import raises

from lmkit.core.ranges import range_
from lmkit.errors import UsageError
from lmkit.measure import ranges


@pytest.fixture(autouse=True)
def _ranges_off_afterwards():
    yield
    ranges.disable_ranges()


def double(x: torch.Tensor) -> torch.Tensor:
    with range_("double"):
        return x * 2


def test_off_by_default_and_transparent(ranges_are_on):
    assert not ranges_are_on()
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(KeyError), range_("an exception passes"):
        raise KeyError


def test_torch_compile_sees_no_graph_break_on_or_off():
    for switch in (
        ranges.disable_ranges,
        lambda: ranges.enable_ranges("kineto"),
        lambda: ranges.observe_ranges(lambda *_: None),
    ):
        switch()
        compiled = torch.compile(double, fullgraph=True, backend="eager", dynamic=False)
        assert compiled(torch.ones(3)).tolist() == [2.0] * 3
        torch.compiler.reset()


def test_nvtx_pushes_and_pops_in_order_also_by_an_exception(monkeypatch):
    """On a CPU build torch.cuda.nvtx raises, so the calls are recorded by a stand-in."""
    log = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: log.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("pop"))
    ranges.enable_ranges("nvtx")
    with range_("outer"), pytest.raises(KeyError), range_("inner"):
        raise KeyError
    assert log == ["push outer", "push inner", "pop", "pop"]


def test_nvtx_without_cuda_and_without_the_package_is_refused(monkeypatch, ranges_are_on):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(ranges.importlib.util, "find_spec", lambda name: None)
    with raises(UsageError, "profile.no_nvtx", hint="kineto"):
        ranges.enable_ranges("nvtx")
    assert not ranges_are_on()


def test_the_environment_switches(monkeypatch, ranges_are_on):
    monkeypatch.delenv("LMKIT_RANGES", raising=False)
    ranges.enable_ranges_from_environment()
    assert not ranges_are_on()
    monkeypatch.setenv("LMKIT_RANGES", "kineto")
    ranges.enable_ranges_from_environment()
    assert ranges_are_on()
    monkeypatch.setenv("LMKIT_RANGES", "vtune")
    with raises(UsageError, "profile.unknown_ranges", "vtune"):
        ranges.enable_ranges_from_environment()


class Profiler:
    """Says at its start and end what torch.profiler says, on the descriptor as C++ does."""

    def __init__(self, said: str) -> None:
        self._said = said

    def __enter__(self) -> None:
        os.write(2, self._said.encode())

    def __exit__(self, *_: object) -> None:
        os.write(2, self._said.encode())


def test_what_a_profiler_says_is_dropped_also_if_the_work_fails(capfd):
    def fail():
        os.write(2, b"heard\n")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), ranges.quietly(Profiler("USDT: start\n")):
        fail()
    os.write(2, b"still heard\n")
    assert capfd.readouterr().err == "heard\nstill heard\n"
