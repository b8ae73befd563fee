"""Read what a recipe's keys mean: the docstring below each key, from the source. Nothing heavy is loaded here."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path


def of_class(definition: ast.ClassDef) -> dict[str, str]:
    """Return key -> docstring below it, in one line."""
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = inspect.cleandoc(str(text.value.value)).replace("\n", " ")
    return found


@functools.cache
def of_table(name: str) -> dict[str, str]:
    """Return key -> docstring of a table in `lmkit.recipe.tables`, such as "generate"."""
    source = Path(__file__).with_name("tables.py").read_text("utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    (table,) = (node for node in classes if (ast.get_docstring(node) or "").startswith(f"`[{name}]`"))
    return of_class(table)
