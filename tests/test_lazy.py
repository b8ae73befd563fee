"""Packages export what they promise, without importing it."""

import importlib
import subprocess
import sys

import pytest

PACKAGES = ["attention", "data", "generation", "model", "optim", "tokenizer"]


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_there(name):
    package = importlib.import_module(f"lmkit.{name}")
    for public in package.__all__:
        if public in ("flash_triton", "FlashAttentionTriton"):
            pytest.importorskip("triton")
        assert type(getattr(package, public)).__name__ != "module"
    assert dir(package) == sorted(package.__all__)
    with pytest.raises(AttributeError):
        package.nonesuch  # noqa: B018


@pytest.mark.parametrize("module_first", [False, True])
def test_a_function_wins_over_its_module_of_the_same_name(tmp_path, monkeypatch, module_first):
    (tmp_path / "lazy_house").mkdir()
    (tmp_path / "lazy_house" / "__init__.py").write_text(
        "from lmkit.lazy import exports\n"
        '__getattr__, __dir__, __all__ = exports(__name__, {"door": ("door", "WIDTH")})\n'
    )
    (tmp_path / "lazy_house" / "door.py").write_text("WIDTH = 3\n\ndef door():\n    return WIDTH\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lazy_house", "lazy_house.door"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    package = importlib.import_module("lazy_house")
    if module_first:
        importlib.import_module("lazy_house.door")
    assert package.door() == package.WIDTH == 3


def test_importing_a_package_imports_nothing_heavy():
    code = f"import sys, {', '.join(f'lmkit.{name}' for name in PACKAGES)}"
    code += "; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_tokenizer_and_its_training_need_no_torch():
    code = "import sys, lmkit.tokenizer as t; [getattr(t, n) for n in t.__all__]; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
