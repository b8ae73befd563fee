"""The core stands alone: it imports nothing else of lmkit, also when it runs, and it stays short."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "lmkit" / "core"
FILES = sorted(path.stem for path in CORE.glob("*.py") if path.stem != "__init__")
MAY_IMPORT = {"torch", "numpy", "regex", "lmkit"} | sys.stdlib_module_names
MOST_LINES = 2200
SILENT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}


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


def test_the_core_is_read_in_an_afternoon():
    """Lines that are neither blank nor comment nor docstring."""
    assert sum(code_lines(path.read_text("utf-8")) for path in CORE.glob("*.py")) <= MOST_LINES


def code_lines(source: str) -> int:
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            lines -= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def test_code_lines_are_counted():
    source = (
        '"""Doc."""\n\nx = 1  # why\n# only a comment\n\n\ndef f():\n    """Doc\n    on."""\n    return x\n'
    )
    assert code_lines(source) == 3
