"""What every test may use."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from lmkit.measure.ranges import range_

# For attention_oracle.py, which the tests in kernels/ and gpu/ use too.
sys.path.insert(0, str(Path(__file__).parent / "attention"))

Lmkit = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_configure() -> None:
    # A job that a shell starts in the background ignores SIGINT, and so would every process that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def as_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], io.StringIO]:
    """Makes stderr a terminal, 100 columns wide. To be called: what a fixture sets it to, pytest sets back."""

    def begin() -> io.StringIO:
        terminal = io.StringIO()
        terminal.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stderr", terminal)
        for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("NO_COLOR", raising=False)
        return terminal

    return begin


@pytest.fixture
def lmkit(tmp_path: Path) -> Lmkit:
    """Run the real command in a subprocess, in an empty folder: `lmkit("train", "recipe.toml")`."""

    def run(
        *arguments: str | Path, cwd: Path | None = None, stdin: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lmkit", *map(str, arguments)],
            cwd=cwd or tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


@pytest.fixture
def ranges_are_on() -> Callable[[], bool]:
    """Whether `range_` records anything now."""
    return lambda: not isinstance(range_("probe"), nullcontext)
