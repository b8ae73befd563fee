"""Read the keys of a recipe's tables from their source: types and docstrings, without importing pydantic.

The keys are declared in `tables.py`. Options of commands, such as `--lr` of `lmkit train`, are made from keys that a
command names (`keys=` in `lmkit/cli`), options of a bench from its table.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple


class FlagNames(NamedTuple):
    """Metadata of a bench's key: other names of its flag."""

    names: tuple[str, ...]


class Shortcut(NamedTuple):
    """Metadata of a bench's key: a flag without a value that stands for one value of the key."""

    name: str
    value: Any
    help: str


class Empties(NamedTuple):
    """Metadata of a bench's key: its flag empties these arrays of the recipe, unless a flag or `--set` gives one of
    them."""

    keys: tuple[str, ...]


class Key(NamedTuple):
    """The annotation of a key, in which validators are `UNKNOWN`, and the docstring below it in one line."""

    annotation: Any
    text: str


class _Unknown:
    """Stands for what help does not need: a validator, a constraint, a class."""

    def __call__(self, *_: Any, **__: Any) -> _Unknown:
        return self

    __getitem__ = __or__ = __ror__ = __call__


UNKNOWN = _Unknown()
_LIGHT = vars(builtins) | {kind.__name__: kind for kind in (Path, FlagNames, Shortcut, Empties)}
_LIGHT |= {"Annotated": Annotated, "Any": Any, "Literal": Literal}


# Statements of a module that begin in the first column; these patterns are compiled once.
_ASSIGNMENT = re.compile(r"^(\w+) = (.+(?:\n[ \])].*)*)", re.MULTILINE)
_CLASS = re.compile(r"^class (\w+)\b.*(?:\n(?: .*)?)*", re.MULTILINE)
_IMPORT = re.compile(r"^from (lmkit\.(?:recipe|bench)\.\S+) import (\([^)]*|.*)", re.MULTILINE)


class _Names(dict[str, Any]):
    """The names that a module's annotations use, evaluated from its source when they are looked up."""

    def __init__(self, module: str) -> None:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text("utf-8")
        self.assigned = dict(_ASSIGNMENT.findall(text))
        self.classes = {found[1]: found[0] for found in _CLASS.finditer(text)}
        imports = _IMPORT.findall(text)
        self.homes = {name: home for home, names in imports for name in re.findall(r"\w+", names)}

    def __missing__(self, name: str) -> Any:
        if name in _LIGHT:
            return _LIGHT[name]
        self[name] = UNKNOWN
        if name in self.assigned:
            self[name] = self.evaluated(self.assigned[name])
        elif name in self.homes:
            self[name] = _names(self.homes[name])[name]
        return self[name]

    def evaluated(self, annotation: str) -> Any:
        return eval(annotation, {"__builtins__": {}}, self)


_names = cache(_Names)


@cache
def of_class(module: str, name: str) -> dict[str, Key]:
    """Return the keys of a table and of the tables that it extends, in their order."""
    names = _names(module)
    if name not in names.classes:
        return of_class(names.homes[name], name) if name in names.homes else {}
    (definition,) = ast.parse(names.classes[name]).body
    assert isinstance(definition, ast.ClassDef)
    keys: dict[str, Key] = {}
    for base in definition.bases:
        keys |= of_class(module, ast.unparse(base))
    for field, text in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and not (key := ast.unparse(field.target)).startswith("_"):
            meaning = ast.literal_eval(text.value) if isinstance(text, ast.Expr) else ""
            keys[key] = Key(names.evaluated(ast.unparse(field.annotation)), " ".join(meaning.split()))
    return keys


def of_table(name: str) -> dict[str, Key]:
    """Return the keys of a table in `lmkit.recipe.tables`, such as "generate"."""
    module = "lmkit.recipe.tables"
    (kind,) = [kind for kind, source in _names(module).classes.items() if f'\n    """`[{name}]`' in source]
    return of_class(module, kind)
