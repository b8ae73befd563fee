"""A recipe written out for people: every key with its value, what it means, and what it could be.

The meaning of a key is the docstring below it in the schema, read from the source only when somebody asks.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from lmkit.recipe.schema import Recipe, table_type
from lmkit.recipe.table import RegisteredName, Table

_WIDTH = 100
_COLUMN = 34
"""Where comments begin; what is longer than that has them on the next line."""


def annotated_toml(recipe: Recipe) -> str:
    """The recipe as TOML, each key with a comment; keys without a value and tables it does not have as comments.

    Loading it gives an equal recipe. No line is longer than a terminal is wide, but for long strings.
    """
    lines: list[str] = []
    absent: list[str] = []
    for name, table in _tables(recipe, ""):
        if table is None:
            absent.append(f"[{name}]")
        else:
            lines += [f"[{name}]", *_keys(table), ""]
    if absent:
        lines += textwrap.wrap(
            "Tables that it does not have: " + ", ".join(absent),
            _WIDTH,
            initial_indent="# ",
            subsequent_indent="# ",
        )
    return "\n".join(lines).rstrip() + "\n"


def meanings(table: type[Table]) -> dict[str, str]:
    """Key -> the docstring below it, of this class and those it extends."""
    found: dict[str, str] = {}
    for owner in reversed(table.__mro__):
        if not issubclass(owner, Table) or owner is Table:
            continue
        definition = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[field.target.id] = inspect.cleandoc(str(text.value.value)).replace("\n", " ")
    return found


def _tables(parent: Table, prefix: str) -> Iterator[tuple[str, Table | None]]:
    """Dotted names and tables in the order of the schema; a table of tables, as [bench] is, by its parts."""
    for name in type(parent).model_fields:
        if table_type(type(parent), name) is not None:
            table = getattr(parent, name)
            parts = [] if table is None else list(_tables(table, f"{prefix}{name}."))
            yield from parts or [(f"{prefix}{name}", table)]


def _keys(table: Table) -> Iterator[str]:
    """The lines of one table."""
    values = table.model_dump(mode="json")
    texts = meanings(type(table))
    for key, field in type(table).model_fields.items():
        choices = _choices(Annotated[(field.annotation, *field.metadata, "")])
        remarks = [
            "not set" if values[key] is None else "",
            f"{', '.join(choices[:-1])} or {choices[-1]}" if choices else "",
            texts.get(key, "").rstrip("."),
        ]
        assignment = f"# {key} =" if values[key] is None else _assignment(key, values[key])
        yield from _with_comment(assignment, ". ".join(filter(None, remarks)))


def _choices(annotation: Any) -> tuple[str, ...]:
    """The words among which a key chooses, also as items of an array; () where it does not."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    validator = getattr(annotation, "func", None)
    if isinstance(validator, RegisteredName):
        return validator.registry.names
    return next((found for part in get_args(annotation) if (found := _choices(part))), ())


def _assignment(key: str, value: Any) -> str:
    """`key = value`, an array in one line where it fits."""
    import tomli_w

    text = tomli_w.dumps({key: value}).rstrip("\n")
    if isinstance(value, list):
        items = (tomli_w.dumps({"item": item}).removeprefix("item = ").rstrip("\n") for item in value)
        line = f"{key} = [{', '.join(items)}]"
        text = line if len(line) <= _WIDTH else text
    return text


def _with_comment(assignment: str, comment: str) -> Iterator[str]:
    head, lines = assignment.ljust(_COLUMN - 2), textwrap.wrap(comment, _WIDTH - _COLUMN - 2)
    if lines and "\n" not in assignment and len(assignment) <= _COLUMN - 2:
        yield f"{head}  # {lines.pop(0)}"
    else:
        yield assignment
    for line in lines:
        yield f"{'':{_COLUMN}}# {line}"
