"""Packages export what they promise, without importing it."""

import importlib
import subprocess
import sys

import pytest

PACKAGES = ["attention", "data", "generation", "model", "optim", "tokenizer"]


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_there(name):
    package = importlib.import_module(f"lmkit.{name}")
    for public in (*package.__all__, *package.__all__):  # the second time, its module is loaded
        if public in ("flash_triton", "FlashAttentionTriton"):
            pytest.importorskip("triton")
        assert type(getattr(package, public)).__name__ != "module"
    assert dir(package) == sorted(package.__all__)
    with pytest.raises(AttributeError):
        package.nonesuch  # noqa: B018


def test_importing_a_package_imports_nothing_heavy():
    code = f"import sys, {', '.join(f'lmkit.{name}' for name in PACKAGES)}"
    code += "; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_tokenizer_and_its_training_need_no_torch():
    code = "import sys, lmkit.tokenizer as t; [getattr(t, n) for n in t.__all__]; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
