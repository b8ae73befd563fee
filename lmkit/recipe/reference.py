"""Write a recipe out for people: every key with its value, its meaning and its possible values.

The meaning of a key is the docstring below it in the schema, read from the source on demand.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from lmkit.recipe import keys
from lmkit.recipe.recipe import TABLES, Recipe
from lmkit.recipe.tables import Table
from lmkit.recipe.values import RegisteredName
from lmkit.registry import BENCHES

_WIDTH = 100
_COLUMN = 34
"""Column of the comments; a longer assignment has its comment on the next lines."""


def annotated_toml(recipe: Recipe) -> str:
    """Return the recipe as TOML with a comment for each key.

    Keys without a value and missing tables are comments. Loading the text gives an equal recipe. Lines fit a
    terminal unless they hold long strings.
    """
    lines: list[str] = []
    absent: list[str] = []
    tables = {name: getattr(recipe, name) for name in TABLES}
    for bench in BENCHES.names:
        tables[f"bench.{bench}"] = recipe.bench_table(bench) if bench in recipe.bench else None
    for name, table in tables.items():
        if table is None:
            absent.append(f"[{name}]")
        else:
            lines += [f"[{name}]", *_keys(table), ""]
    if absent:
        text = "Tables that this recipe does not have: " + ", ".join(absent)
        lines += textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    return "\n".join(lines).rstrip() + "\n"


def _keys(table: Table) -> Iterator[str]:
    values = table.model_dump(mode="json")
    known = keys.of_class(type(table).__module__, type(table).__name__)
    for key, field in type(table).model_fields.items():
        choices = _choices(Annotated[(field.annotation, *field.metadata, "")])
        remarks = [
            "not set" if values[key] is None else "",
            f"{', '.join(choices[:-1])} or {choices[-1]}" if choices else "",
            known[key].text.rstrip("."),
        ]
        assignment = f"# {key} =" if values[key] is None else _assignment(key, values[key])
        comment = textwrap.wrap(". ".join(filter(None, remarks)), _WIDTH - _COLUMN - 2)
        if comment and "\n" not in assignment and len(assignment) <= _COLUMN - 2:
            assignment = f"{assignment:<{_COLUMN}}# {comment.pop(0)}"
        yield assignment
        for line in comment:
            yield f"{'':{_COLUMN}}# {line}"


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the words that a key, or an item of its array, may have; () if any value goes."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    validator = getattr(annotation, "func", None)
    if isinstance(validator, RegisteredName) and not validator.with_variant:
        return validator.names
    return next((found for part in get_args(annotation) if (found := _choices(part))), ())


def _assignment(key: str, value: Any) -> str:
    """Return `key = value`, an array in one line if it fits, and tables of plain values inline."""
    import tomli_w

    if isinstance(value, list):
        items = [_assignment("", item).removeprefix(" = ") for item in value]
        line = f"{key} = [{', '.join(items)}]"
        if len(line) <= _WIDTH:
            return line
        return f"{key} = [\n" + "".join(f"    {item},\n" for item in items) + "]"
    if isinstance(value, dict):
        items = [_assignment(name, item) for name, item in value.items() if item is not None]
        return f"{key} = {{ {', '.join(items)} }}" if items else f"{key} = {{}}"
    return f"{key} = " + tomli_w.dumps({"item": value}).removeprefix("item = ").rstrip("\n")
