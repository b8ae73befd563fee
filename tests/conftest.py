"""What every test may use."""

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from lmkit.cli.app import run_command_line
from lmkit.core.ranges import range_
from lmkit.measure.plots import own_settings
from lmkit.plugins import PLUGINS
from lmkit.registry import ATTENTION, BENCHES, DATASETS, OPERATIONS, OPTIMIZERS, SCHEDULES, STRATEGIES

# Before torch is imported: on the tiny tensors of tests, several threads mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REGISTRIES = (ATTENTION, BENCHES, DATASETS, OPERATIONS, OPTIMIZERS, SCHEDULES, STRATEGIES)
Lmkit = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure() -> None:
    # A job that a shell starts in the background ignores SIGINT, and so would every process that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton reads the variable when it is imported. Its interpreter computes on masked lanes, too, and NumPy says
    so."""
    mark = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 (nox -s interpreter)")
    if os.environ.get("TRITON_INTERPRET") == "1":
        said = "ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"
        mark = pytest.mark.filterwarnings(said)
    for item in items:
        if item.get_closest_marker("interpreter"):
            item.add_marker(mark)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """A test may have asked for more."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """What a test registers and the plugins that it loads are forgotten behind it."""
    before = [registry.names for registry in REGISTRIES]
    yield
    for registry, names in zip(REGISTRIES, before, strict=True):
        for name in {*registry.names} - {*names}:
            registry.unregister(name)
    if bench := sys.modules.get("lmkit.cli.bench"):
        bench.app.name_all()
    for path in PLUGINS:
        sys.modules.pop(f"lmkit_plugin_{path.stem}", None)
    PLUGINS.clear()


@dataclass(frozen=True)
class Refusal:
    """The two lines of an error."""

    code: str
    error: str
    hint: str


class Terminal:
    """The command line in this process, in an empty folder."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""
        """What the last command wrote to stderr."""

    def __call__(self, *words: str | Path, exit_code: int = 0) -> str:
        """Run `lmkit WORDS` (one string is split at blanks); return what it printed on stdout."""
        self._capsys.readouterr()
        ended = self._run(words)
        out, self.err = self._capsys.readouterr()
        assert ended == exit_code, self.err
        return out

    def refuses(
        self,
        *words: str | Path,
        code: str | None,
        exit_code: int = 2,
        says: Sequence[str] = (),
        hint: object = "",
    ) -> Refusal:
        """Run `lmkit WORDS`, which must end with this error: one line with its code (None: any) and all words of
        `says`, one line of hint that has `hint`, nothing on stdout."""
        self._capsys.readouterr()
        ended = self._run(words)
        out, err = self._capsys.readouterr()
        self.err = err
        *before, error, last = err.splitlines()
        assert (ended, out) == (exit_code, ""), err
        assert re.match(r"error\[[a-z0-9_.]+\]: ", error), err
        assert re.match("hint: .", last), err
        assert str(hint) in last, err
        assert not any(line.startswith(("error", "Traceback")) for line in before), err
        refusal = Refusal(error[len("error[") : error.index("]")], error.partition("]: ")[2], last)
        assert code in (None, refusal.code), err
        for word in says:
            assert word in refusal.error, err
        return refusal

    @staticmethod
    def _run(words: Sequence[str | Path]) -> int:
        first, *others = map(str, words)
        return run_command_line([*first.split(), *others] if not others else [first, *others])


@pytest.fixture
def terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Terminal]:
    monkeypatch.chdir(tmp_path)
    log = logging.getLogger("lmkit")
    before = log.handlers, log.level, log.propagate
    yield Terminal(capsys)
    log.handlers, log.level, log.propagate = before


@pytest.fixture
def lmkit(tmp_path: Path) -> Lmkit:
    """Run the real command in a subprocess, in an empty folder: `lmkit("train", "recipe.toml")`."""

    from programs import run_program

    return partial(run_program, sys.executable, "-m", "lmkit", cwd=tmp_path)


@pytest.fixture
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """`tiny.toml`, which holds the `RECIPE` of the test's module."""
    path = tmp_path / "tiny.toml"
    path.write_text(request.module.RECIPE)
    return path


@pytest.fixture
def synced_and_named(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was done to which file, by its inode: no test can cut the power, but the order can be watched."""
    events: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        events.append(("synced", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        events.append(("named", source.stat().st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    return events


@pytest.fixture
def drawing() -> Iterator[None]:
    """For tests that call functions of `measure.plots` themselves."""
    with own_settings():
        yield


@pytest.fixture
def ranges_are_on() -> Callable[[], bool]:
    """Whether `range_` records anything now."""
    return lambda: not isinstance(range_("probe"), nullcontext)
