"""The examples in public docstrings run, and packages export what they promise."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import pytest
import torch

EXAMPLES = [
    "attention.dispatch",
    "attention.flash_torch",
    "generation.sampling",
    "model.accounting",
    "model.layers",
    "model.loss",
    "model.rope",
    "model.transformer",
    "optim.adamw",
    "optim.clipping",
    "optim.schedules",
]
PACKAGES = ["attention", "generation", "model", "optim"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"lmkit.{name}")
    torch.manual_seed(0)
    done = doctest.testmod(module, extraglobs={"torch": torch})
    assert done.attempted, "no example left"
    assert not done.failed


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_there_whatever_was_imported_before(name: str) -> None:
    package = importlib.import_module(f"lmkit.{name}")
    # A file may have the name of the function that it defines: importing it must not hide the function.
    for public in package.__all__:
        if public in ("flash_triton", "FlashAttentionTriton"):
            pytest.importorskip("triton")
        found = getattr(package, public)
        if callable(found) and found.__module__.startswith(f"lmkit.{name}"):
            importlib.import_module(found.__module__)
        assert getattr(package, public) is found
        assert type(found).__name__ != "module"
    with pytest.raises(AttributeError):
        package.nonesuch  # noqa: B018


def test_importing_a_package_does_not_import_torch() -> None:
    code = (
        "import sys, " + ", ".join(f"lmkit.{name}" for name in PACKAGES) + "; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
