"""Read the keys of a recipe's tables from their source: types and docstrings, without importing pydantic."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


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
    """The annotation of a key, in which validators are `Unknown`, and the docstring below it in one line."""

    annotation: Any
    text: str


class Unknown:
    """Stands for what help does not need: a validator, a constraint, a class."""


# Their names are imported; others are read from the source of lmkit.
_LIGHT = ("typing", "pathlib", __name__)


class _Module(dict[str, Any]):
    """The names that a module's annotations use, evaluated when they are looked up."""

    def __init__(self, name: str) -> None:
        super().__init__(vars(builtins))
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        self.body = ast.parse(Path(spec.origin).read_text("utf-8")).body

    def __missing__(self, name: str) -> Any:
        self[name] = Unknown
        for node in self.body:
            match node:
                case ast.ImportFrom(module=str(module)):
                    for alias in node.names:
                        if (alias.asname or alias.name) == name:
                            self[name] = _imported(module, alias.name)
                case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                    self[name] = self.evaluated(node.value)
        return self[name]

    def evaluated(self, node: ast.expr) -> Any:
        """Return what an annotation means; `Unknown` where it calls a constraint."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self[name]
            case ast.Tuple(elts=items):
                return tuple(map(self.evaluated, items))
            case ast.List(elts=items):
                return list(map(self.evaluated, items))
            case ast.Subscript(value=kind, slice=inside):
                return self.evaluated(kind)[self.evaluated(inside)]
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.evaluated(left) | self.evaluated(right)
            case ast.Call(func=ast.Name(id=name), args=values) if self[name] in (
                FlagNames,
                Shortcut,
                Empties,
            ):
                return self[name](*map(self.evaluated, values))
        return Unknown

    def class_(self, name: str) -> tuple[_Module, ast.ClassDef | None]:
        """Return the definition of a class, and the module that has it."""
        for node in self.body:
            match node:
                case ast.ClassDef() if node.name == name:
                    return self, node
                case ast.ImportFrom(module=str(module)) if module.startswith("lmkit."):
                    if any(alias.name == name for alias in node.names):
                        return _module(module).class_(name)
        return self, None


_module = cache(_Module)


def _imported(module: str, name: str) -> Any:
    if module in _LIGHT:
        return getattr(importlib.import_module(module), name)
    return _module(module)[name] if module.startswith("lmkit.") else Unknown


@cache
def of_class(module: str, name: str) -> dict[str, Key]:
    """Return the keys of a table and of the tables that it extends, in their order."""
    owner, definition = _module(module).class_(name)
    keys: dict[str, Key] = {}
    if definition is None:
        return keys
    for base in definition.bases:
        keys |= of_class(module, ast.unparse(base)) if owner is _module(module) else {}
    for field, text in zip(definition.body, [*definition.body[1:], None], strict=True):
        match field:
            case ast.AnnAssign(target=ast.Name(id=key)) if not key.startswith("_"):
                match text:
                    case ast.Expr(value=ast.Constant(value=str(meaning))):
                        meaning = inspect.cleandoc(meaning).replace("\n", " ")
                    case _:
                        meaning = ""
                keys[key] = Key(owner.evaluated(field.annotation), meaning)
    return keys


@cache
def of_table(name: str) -> dict[str, Key]:
    """Return the keys of a table in `lmkit.recipe.tables`, such as "generate"."""
    tables = (node for node in _module("lmkit.recipe.tables").body if isinstance(node, ast.ClassDef))
    (table,) = (node for node in tables if (ast.get_docstring(node) or "").startswith(f"`[{name}]`"))
    return of_class("lmkit.recipe.tables", table.name)
