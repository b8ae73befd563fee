"""The core stands alone: it imports nothing else of lmkit, also when it runs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "lmkit" / "core"
FILES = sorted(path.stem for path in CORE.glob("*.py") if path.stem != "__init__")
MAY_IMPORT = {"torch", "numpy", "regex", "lmkit"} | sys.stdlib_module_names


def imported(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("name", FILES)
def test_files_import_only_the_core_and_three_packages(name):
    for module in imported(ast.parse((CORE / f"{name}.py").read_text("utf-8"))):
        assert module.split(".")[0] in MAY_IMPORT
        assert not module.startswith("lmkit") or module.startswith("lmkit.core")


def test_the_core_runs_without_the_rest():
    script = "import sys\n" + "".join(f"import lmkit.core.{name}\n" for name in FILES)
    script += "print(*(name for name in sys.modules if name.split('.')[0] == 'lmkit'))"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert set(done.stdout.split()) == {"lmkit", "lmkit.core", *(f"lmkit.core.{name}" for name in FILES)}
