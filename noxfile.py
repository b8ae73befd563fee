"""Everything that checks lmkit. Plain `nox` runs what a change must pass; the rest is asked for by name.

Sessions run in the environment that nox itself lives in (`pip install -e '.[dev]'`): torch is installed once.
"""

from __future__ import annotations

import os
import sys

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "tests", "interpreter"]


# Two processes; the tests of a file share its fixtures.
_PARALLEL = ("-n", "2", "--dist", "loadfile")

INTERPRETED = (
    "tests/attention",
    "tests/bench/test_attention_ablations.py",
    "tests/generation",
    "tests/kernels",
)
"""Where the tests of the interpreter are: to collect the others would take longer than these run."""


def _python(session: nox.Session, *arguments: str, **environment: str) -> None:
    session.run(sys.executable, "-m", *arguments, external=True, env={**os.environ, **environment})


def _interpret(session: nox.Session, marked: str) -> None:
    chosen = session.posargs or INTERPRETED
    _python(session, "pytest", *_PARALLEL, "-m", marked, *chosen, TRITON_INTERPRET="1")


@nox.session
def lint(session: nox.Session) -> None:
    """Style and obvious mistakes."""
    _python(session, "ruff", "check", ".")
    _python(session, "ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Types of the package."""
    _python(session, "mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The fast CPU suite; with arguments, the part of it that they name."""
    _python(
        session, "pytest", *_PARALLEL, "-m", "not slow and not full and not interpreter", *session.posargs
    )


@nox.session
def full(session: nox.Session) -> None:
    """The rest that needs no GPU: process faults, fuzzing, long ranks, all interpreted kernels."""
    _python(session, "pytest", *_PARALLEL, "-m", "full and not interpreter", *session.posargs)
    _interpret(session, "full and interpreter")


@nox.session
def interpreter(session: nox.Session) -> None:
    """A few Triton kernels on the CPU. The variable must be set before triton is imported: a process of its own."""
    _interpret(session, "interpreter and not full")


@nox.session
def gpu(session: nox.Session) -> None:
    """What needs a CUDA device; fails where there is none (`LMKIT_REQUIRE_GPU` turns skips into failures)."""
    _python(session, "pytest", "-m", "gpu", "tests/gpu", *session.posargs, LMKIT_REQUIRE_GPU="1")


@nox.session
def acceptance(session: nox.Session) -> None:
    """The targets of attention and AdamW on a GPU, and of loaders; prints tables of measured figures."""
    _python(session, "pytest", "tests/acceptance", "-s", *session.posargs)


@nox.session
def quickstart(session: nox.Session) -> None:
    """The README's first command, timed and judged against its targets."""
    _python(session, "pytest", "-m", "slow", "tests/end_to_end/test_quickstart.py", "-s", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Minutes of training on two ranks while processes are killed at random."""
    _python(session, "pytest", "-m", "slow", "tests/end_to_end/test_soak.py", "-s", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """10,000 damaged files of every format that lmkit reads; keeps the figures."""
    settings = {"LMKIT_FUZZ_CASES": "10000", "LMKIT_FUZZ_RECORD": "artifacts/cpu/fuzz/summary.jsonl"}
    _python(session, "pytest", "tests/fuzz/test_fuzz.py", "-s", *session.posargs, **settings)


@nox.session
def saving(session: nox.Session) -> None:
    """How long training stands still for a checkpoint of 162 million parameters, against a plain torch.save."""
    _python(session, "pytest", "-m", "slow", "tests/end_to_end/test_saving.py", "-s", *session.posargs)
