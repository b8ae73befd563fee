import os
import subprocess
import sys

import pytest
import torch
from raising import raises

from lmkit.core.ranges import range_
from lmkit.errors import UsageError
from lmkit.measure import ranges
from lmkit.measure.ranges import (
    disable_ranges,
    enable_ranges,
    enable_ranges_from_environment,
    observe_ranges,
    quietly,
)

MARK = "USDT:2026-01-01 12:00:00 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\n"


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
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            double(torch.ones(2))
        return [event.key for event in profiler.key_averages()]

    assert "double" not in names()
    enable_ranges("kineto")
    assert "double" in names()


def test_torch_compile_sees_no_graph_break_on_or_off():
    for switch in (disable_ranges, lambda: enable_ranges("kineto"), lambda: observe_ranges(lambda *_: None)):
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
    enable_ranges("nvtx")
    with range_("outer"), pytest.raises(KeyError), range_("inner"):
        raise KeyError
    assert log == ["push outer", "push inner", "pop", "pop"]


def test_nvtx_without_cuda_and_without_the_package_is_refused(monkeypatch, ranges_are_on):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(ranges.importlib.util, "find_spec", lambda name: None)
    with raises(UsageError, "profile.no_nvtx", hint="kineto"):
        enable_ranges("nvtx")
    assert not ranges_are_on()


def test_the_environment_switches(monkeypatch, ranges_are_on):
    monkeypatch.delenv("LMKIT_RANGES", raising=False)
    enable_ranges_from_environment()
    assert not ranges_are_on()
    monkeypatch.setenv("LMKIT_RANGES", "kineto")
    enable_ranges_from_environment()
    assert ranges_are_on()
    monkeypatch.setenv("LMKIT_RANGES", "vtune")
    with raises(UsageError, "profile.unknown_ranges", "vtune"):
        enable_ranges_from_environment()


class Profiler:
    """Says at its start and end what torch.profiler says, on the descriptor as C++ does."""

    def __init__(self, said: str) -> None:
        self._said = said

    def __enter__(self) -> None:
        os.write(2, self._said.encode())

    def __exit__(self, *_: object) -> None:
        os.write(2, self._said.encode())


def test_what_a_profiler_says_is_passed_on_without_the_marks(capfd):
    with quietly(Profiler(f"before\n{MARK}ERROR: no USDT: no room\n")):
        print("in the middle", file=sys.stderr)
        os.write(2, MARK.encode())  # the work's own affair
    passed_on = "before\nERROR: no USDT: no room\n"
    assert capfd.readouterr().err == f"{passed_on}in the middle\n{MARK}{passed_on}"


def test_work_that_fails_ends_the_profiler_and_leaves_stderr_as_it_was(capfd):
    with pytest.raises(ZeroDivisionError), quietly(Profiler("said\n")):
        raise ZeroDivisionError
    os.write(2, b"still heard\n")
    assert capfd.readouterr().err == "said\nsaid\nstill heard\n"


@pytest.mark.full
def test_a_closed_stderr_is_no_obstacle(tmp_path):
    script = "import os\nos.close(2)\nimport torch\nfrom lmkit.measure.ranges import quietly\n"
    (tmp_path / "closed.py").write_text(
        f"{script}with quietly(torch.profiler.profile()):\n    print('done')\n"
    )
    done = subprocess.run([sys.executable, "closed.py"], cwd=tmp_path, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (0, b"done\n")
