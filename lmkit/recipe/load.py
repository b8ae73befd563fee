"""TOML file -> overrides -> validated, frozen `Recipe`; and back to TOML.

Everything wrong with a recipe is reported at once, each mistake with its dotted path, before torch is imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lmkit.errors import UsageError, did_you_mean, reason
from lmkit.recipe.aliases import canonical
from lmkit.recipe.model import fill_preset, forget_sizes
from lmkit.recipe.schema import CHECKS, CHECKS_BEFORE_TOKENS, TABLES, Recipe, table_type
from lmkit.recipe.shipped import shipped_recipes, shipped_with
from lmkit.recipe.table import Table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# pydantic's kinds of mistakes -> what is wanted, where its own words are not TOML's
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "an array",
    "model_type": "a table",
}
_FORM = "a recipe has tables of keys: [train], then steps = 100"
_MOST_BYTES = 1 << 20
# tomllib takes time that grows with the square of a dotted key's length: minutes for a key of 100 kB.
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_MOST_PARTS = 50
_LONG_KEY = re.compile(rf"""(?<![\w"'-])(?:{_PART}[ \t]*\.[ \t]*){{{_MOST_PARTS}}}""")


def load_recipe(
    source: str | Path | None, overrides: Sequence[str] = (), *, flags: Mapping[str, Any] | None = None
) -> Recipe:
    """Read, override and validate a recipe. Order: defaults < file < overrides < flags.

    An override of `model.preset` replaces the sizes that the file gives.

    Args:
        source: a file, the name of a shipped recipe, or None for nothing but defaults and overrides.
        overrides: `table.key=value` strings; the value is read as TOML, a bare word is a string.
        flags: explicit command-line flags, dotted key -> value.

    Raises:
        UsageError: unreadable file, bad TOML, or mistakes in the content (all of them in one message).
    """
    path = None if source is None else find_recipe(source)
    raw = {} if path is None else canonical(read_toml(path))
    if isinstance(raw.get("model"), dict) and any(_names(override, "model.preset") for override in overrides):
        forget_sizes(raw["model"])
    for override in overrides:
        _apply(raw, override)
    for dotted, value in (flags or {}).items():
        _put(raw, dotted.split("."), value, origin=f"--{dotted}")
    options = "your options" if overrides or flags else ""
    return validate(raw, origin=" with ".join(filter(None, (str(source or ""), options))) or "recipe")


def find_recipe(source: str | Path) -> Path:
    """Return the recipe's file: a path as it is, else a shipped recipe of that name."""
    path = Path(source)
    if path.exists() and not path.is_dir():
        return path
    shipped = shipped_recipes()
    if str(source) in shipped:
        return shipped[str(source)]
    if path.is_dir():
        raise UsageError(f"{path}: is a folder, not a recipe", hint="name a .toml file, or a shipped recipe")
    near = did_you_mean(path.stem, shipped)
    raise UsageError(f"{path}: no such recipe{near}", hint="shipped recipes: " + ", ".join(shipped))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UsageError: not readable, not UTF-8, or not TOML (with line and column).
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise UsageError(
                f"{path}: larger than a recipe can be ({_MOST_BYTES >> 20} MiB)", hint="is it another file?"
            )
        text = data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: not UTF-8 at byte {error.start}", hint="save the recipe as UTF-8 text"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}", hint="check the path and its permissions") from None
    if long_key := _LONG_KEY.search(text):
        line = text.count("\n", 0, long_key.start()) + 1
        raise UsageError(
            f"{path}: a key of more than {_MOST_PARTS} parts (at line {line})",
            hint="a key of a recipe has two or three: bench.ddp.rows",
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}", hint=_toml_hint(str(error))) from None
    except ValueError:  # Python refuses to read a number of thousands of digits
        raise UsageError(f"{path}: a number is too long", hint="no key takes so many digits") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply", hint=_FORM) from None


def _toml_hint(message: str) -> str:
    """What to do about what tomllib says."""
    if "Invalid value" in message:
        return 'strings need quotes: name = "story"'
    if re.search("overwrite|twice|Duplicate", message):
        return "a key, and the [table] it is in, is given once"
    return _FORM


def _names(override: str, dotted: str) -> bool:
    return override.partition("=")[0].strip() == dotted


def _apply(raw: dict[str, Any], override: str) -> None:
    """Set one `table.key=value` in `raw`."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise UsageError(
            f"--set {override}: expected table.key=value", hint="for example --set train.steps=100"
        )
    check_path(keys, flag=f"--set {override}")
    keys, value = _today(keys, _toml_value(text.strip()))
    _put(raw, keys, value, origin=f"--set {override}")


def _today(keys: Sequence[str], value: Any) -> tuple[list[str], Any]:
    """The dotted path and its value under today's names."""
    nested = value
    for key in reversed(keys):
        nested = {key: nested}
    nested = canonical(nested)
    path: list[str] = []
    while len(path) < len(keys):
        ((key, nested),) = nested.items()
        path.append(key)
    return path, nested


def _put(raw: dict[str, Any], keys: Sequence[str], value: Any, *, origin: str) -> None:
    """Store a value under its dotted path."""
    table = raw
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise UsageError(f"{origin}: {key} is not a table", hint="lmkit recipe show prints them")
    table[keys[-1]] = value


def check_path(keys: Sequence[str], *, flag: str) -> None:
    """Refuse a dotted path that no recipe can have."""
    owner: type[Table] | None = Recipe
    for depth, key in enumerate(keys):
        known = list(owner.model_fields) if owner else []
        if key not in known and ".".join(keys) not in _alias_paths():
            inside = f" in [{'.'.join(keys[:depth])}]" if depth else ""
            raise UsageError(
                f"{flag}: unknown key {key!r}{inside}{did_you_mean(key, known)}",
                hint="known: " + ", ".join(known),
            )
        owner = table_type(owner, key) if owner else None


def _alias_paths() -> set[str]:
    from lmkit.recipe.aliases import KEYS

    return {f"{table}.{theirs}" for table, theirs in KEYS} | {"model.use_flash"}


def _toml_value(text: str) -> Any:
    """Read the right side of `--set`: TOML, or a bare word as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def validate(raw: dict[str, Any], *, origin: str, resolved: bool = False) -> Recipe:
    """Turn a plain dictionary into a `Recipe`.

    Args:
        origin: names the file in errors.
        resolved: as a checkpoint keeps it: `model.vocab_size` is then what the tokenizer reached, which is less
            than was asked for where the corpus had no more pairs to merge.

    Raises:
        UsageError: naming every mistake.
    """
    raw = canonical(raw)
    if isinstance(raw.get("model"), dict):
        raw["model"] = fill_preset(raw["model"])
    mistakes: list[str] = []
    tables: dict[str, Table] = {}
    for name, content in raw.items():
        if name not in TABLES:
            mistakes.append(f"unknown table [{name}]{did_you_mean(name, TABLES)}")
            continue
        try:
            # JSON mode: arrays become tuples and strings paths, while `true` and "12" stay refused for integers.
            text = json.dumps(content, default=_refuse_dates)
            tables[name] = TABLES[name].model_validate_json(text)
        except ValidationError as error:
            mistakes.extend(_describe(name, detail) for detail in error.errors(include_url=False))
        except UsageError as error:
            mistakes.append(f"{name}: {error.message}")
        except RecursionError:
            mistakes.append(f"{name}: nested too deeply")
    # A table that the recipe leaves out counts with its defaults, but not one that has mistakes.
    candidates = {
        name: tables.get(name, Recipe.model_fields[name].default)
        for name in TABLES
        if name in tables or name not in raw
    }
    checks = CHECKS if resolved else (*CHECKS_BEFORE_TOKENS, *CHECKS)
    mistakes.extend(complaint for check in checks if (complaint := check(candidates)))
    if mistakes:
        raise UsageError(
            f"{origin}: " + "; ".join(mistakes),
            hint=f"every key and what it takes: lmkit recipe show {_example_with(mistakes[0])}",
        )
    return Recipe(**tables)  # type: ignore[arg-type]


def _example_with(mistake: str) -> str:
    """A shipped recipe that shows the keys of the table that the mistake is in."""
    bench = re.search(r"\bbench\.(\w+)", mistake)
    if bench is None:
        return "quickstart"
    return next(iter(shipped_with(f"bench.{bench[1]}")), "quickstart")


def _refuse_dates(value: object) -> Any:
    raise UsageError(f"{value} is a date or time, which no key takes")


def _describe(table: str, detail: Any) -> str:
    """One pydantic error as `table.key: what is wrong`."""
    keys = [table, *(str(part) for part in detail["loc"])]
    path = ".".join(keys)
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        owner = _owner(keys)
        return f"unknown key {path}{did_you_mean(keys[-1], owner.model_fields if owner else ())}"
    if kind == "json_invalid":  # `validate` writes the JSON itself: only lone surrogates can spoil it
        return f"{path}: holds text that is not UTF-8"
    if kind == "value_error":
        return f"{path}: {detail['ctx']['error']}"
    if kind == "literal_error":
        expected = detail["ctx"]["expected"]
        names = [part.strip("' ") for part in expected.replace(" or ", ", ").split(", ")]
        return f"{path}: {_shown(value)} is not one of {', '.join(names)}{did_you_mean(str(value), names)}"
    if kind in ("missing", "too_long"):  # of an array with a fixed number of items
        return f"{table}.{detail['loc'][0]}: has too {'few' if kind == 'missing' else 'many'} items: {_shown(value)}"
    wanted = _WANTED.get(kind, detail["msg"].removeprefix("Input should be "))
    if kind == "tuple_type" and isinstance(value, str):
        wanted += f", as in [{_shown(value)}]"
    return f"{path}: must be {wanted}, got {_shown(value)}"


def _owner(keys: Sequence[str]) -> type[Table] | None:
    table: type[Table] | None = Recipe
    for key in keys[:-1]:
        table = table_type(table, key) if table else None
    return table


def _shown(value: object) -> str:
    """A value as the user wrote it, cut to a readable length."""
    if isinstance(value, bool):
        text = str(value).lower()
    else:
        text = str(value) if isinstance(value, float) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def recipe_to_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML: loading it again gives an equal recipe.

    Keys whose value is None are left out (TOML has no null); their default is None.
    """
    import tomli_w

    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))
