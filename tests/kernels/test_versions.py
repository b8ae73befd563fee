"""With a minor of Triton that the Hopper kernels do not know, the portable kernels run, and the reason is said."""

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from lmkit.kernels.versions import INSTALLED_MINOR, SUPPORTED_MINORS

UNKNOWN_MINOR = """
import importlib, sys
from types import SimpleNamespace
import torch, triton
triton.__version__ = "3.99.0"
from lmkit.errors import UsageError
from lmkit.kernels import launch

flash_triton = importlib.import_module("lmkit.attention.flash_triton")
flash_triton.capability_of = lambda device: (9, 0)
q = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
assert flash_triton.implementation_for(q, q, q) == "portable"
assert flash_triton.resolve("auto", q, q, q) == "portable"
try:
    flash_triton.resolve("hopper", q, q, q)
except UsageError as error:
    print(error.code, error)
assert not launch.PREPARES
assert "lmkit.kernels.hopper.forward" not in sys.modules
"""


@pytest.mark.full
def test_an_unknown_minor_takes_the_portable_kernels_and_says_why():
    run = subprocess.run([sys.executable, "-c", UNKNOWN_MINOR], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "attention.unsupported" in run.stdout
    for version in ("3.99", *(f"{major}.{minor}" for major, minor in SUPPORTED_MINORS)):
        assert version in run.stdout


def test_the_installed_minor_is_supported():
    """pyproject.toml allows the minors that the kernels support, and no others."""
    assert INSTALLED_MINOR in SUPPORTED_MINORS
