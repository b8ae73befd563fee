"""TOML file -> overrides -> validated, frozen `Recipe`; and back to TOML.

Everything wrong with a recipe is reported at once, each mistake with its dotted path, before torch is imported.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from lmkit.errors import UsageError, did_you_mean, reason
from lmkit.recipe.recipe import TABLES, Recipe, conflicts, table_type
from lmkit.recipe.run_folder import RECIPE, placed_in, run_folder_of
from lmkit.recipe.tables import PRESETS, SIZES, Table, from_depth
from lmkit.recipe.values import Paths
from lmkit.registry import BENCHES
from lmkit.storage.inputs import open_input

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
_MOST_BYTES = 1 << 20


def load_recipe(
    source: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    flags: Mapping[str, Any] | None = None,
    benches: bool = False,
) -> Recipe:
    """Read, override and validate a recipe. Precedence, lowest first: defaults, file, overrides, flags.

    An override of `model.preset` or `model.depth` replaces the sizes of the file; that of `optimizer.name` or
    `parallel.strategy` drops the options of another one, that of `train.steps` drops `train.epochs`, that of
    `train.tokens_per_parameter` drops `train.steps`, and that of `data.train` or `data.sources` drops the other. The
    recipe in a run folder is that folder's, wherever it is now.

    Args:
        source: a file, the name of a shipped recipe, or None for nothing but defaults and overrides.
        overrides: `table.key=value` strings; the value is read as TOML, a bare word is a string, and so is all that
            a key gets which takes text.
        flags: command-line flags, dotted key -> value; None where a flag was left out.
        benches: as of `validate`.

    Raises:
        UsageError: unreadable file, bad TOML, or mistakes in the content (all of them in one message).
    """
    raw: dict[str, Any] = {}
    if source is not None:
        path = find_recipe(source)
        raw = with_our_names(read_toml(path))
        if (folder := run_folder_of(path)) is not None:
            raw = placed_in(folder, raw)
    is_changed = False
    for given in (map(_parse_override, overrides), (flags or {}).items()):
        tables: dict[str, Any] = {}
        for dotted, value in given:
            if value is not None:
                for key in reversed(dotted.split(".")):
                    value = {key: value}
                _merge(tables, with_our_names(value))
        _drop_replaced(raw, tables)
        _merge(raw, tables)
        is_changed |= bool(tables)
    origin = [str(source)] if source is not None else []
    origin += ["the command line"] if is_changed else []
    recipe = validate(raw, origin=" and ".join(origin) or "recipe", benches=benches)
    if source is not None:
        recipe._source = str(source)
    return recipe


def _drop_replaced(raw: Mapping[str, Any], typed: Mapping[str, Any]) -> None:
    """Drop keys of a recipe whose place keys of the command line take."""
    model, train = typed.get("model", {}), typed.get("train", {})
    before = raw.get("model")
    has_depth = "depth" in model or (isinstance(before, dict) and "depth" in before)
    replaced = []
    if model.keys() & {"preset", "depth"}:
        replaced += [("model", size) for size in SIZES]
    if "tokens_per_parameter" in train and has_depth:
        replaced.append(("train", "steps"))
    if "steps" in train:
        replaced.append(("train", "epochs"))
    if len(given := typed.get("data", {}).keys() & {"train", "sources"}) == 1:
        replaced += [("data", key) for key in {"train", "sources"} - given]
    for name, chooser in (("optimizer", "name"), ("parallel", "strategy")):
        chosen, before = typed.get(name, {}).get(chooser), raw.get(name)
        if chosen is not None and isinstance(before, dict) and chosen != before.get(chooser):
            replaced.append((name, "options"))
    for name, key in replaced:
        if isinstance(table := raw.get(name), dict):
            table.pop(key, None)


def required(table: T | None, name: str, recipe: Recipe, *, command: str) -> T:
    """Return the table `name` of a recipe."""
    if table is None:
        message = f"{recipe.origin}: has no [{name}] table, which `lmkit {command}` needs"
        hint = f"add [{name}], or use a shipped recipe that has it: {', '.join(shipped_with(name))}"
        raise UsageError("recipe.missing_table", message, hint=hint)
    return table


# Files


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes of the wheel, or of `recipes/` in a source tree: name -> file, sorted by name."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "shipped_recipes"
    folder = installed if installed.is_dir() else package.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def shipped_with(table: str) -> list[str]:
    """Return the names of the shipped recipes that have a table such as `bench.ddp`."""
    header = re.compile(rf"^\[{re.escape(table)}\]", re.MULTILINE)
    return [name for name, path in shipped_recipes().items() if header.search(path.read_text("utf-8"))]


def find_recipe(source: str | Path) -> Path:
    """Return the file of a recipe: a path as it is, else the shipped recipe of that name."""
    path, shipped = Path(source), shipped_recipes()
    if os.path.lexists(path) and not path.is_dir():  # the reader says what is wrong with a link
        return path
    if str(source) in shipped:
        return shipped[str(source)]
    wrong = "is a folder" if path.is_dir() else f"no such recipe{did_you_mean(path.stem, shipped)}"
    hint = "shipped recipes: " + ", ".join(shipped)
    if (path / RECIPE).is_file():
        hint = f"the recipe of that run is {path / RECIPE}"
    raise UsageError("recipe.not_found", f"{path}: {wrong}", hint=hint)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    code, hint = "unreadable", "check the path and its permissions"
    try:
        with open_input(path) as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise OSError(errno.EFBIG, "larger than 1 MiB, the most that a recipe may have")
        return tomllib.loads(data.decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        wrong, hint = f"not UTF-8 at byte {error.start}", "save the recipe as UTF-8 text"
    except OSError as error:
        wrong = reason(error)
    except (ValueError, RecursionError) as error:  # ValueError: thousands of digits, too
        code, wrong = "syntax", str(error) if isinstance(error, ValueError) else "nested too deeply"
        hint = "a recipe has tables of keys: [train], then steps = 100; strings need quotes"
    raise UsageError(f"recipe.{code}", f"{path}: {wrong}", hint=hint)


def recipe_to_toml(recipe: Recipe) -> str:
    """Return the resolved recipe as TOML. Loading it gives an equal recipe.

    Keys whose value is None are left out (TOML has no null); None is their default.
    """
    import tomli_w

    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def save_recipe(recipe: Recipe) -> None:
    """Write the resolved recipe into its run folder; a file that says the same stays, with its comments."""
    path, text = recipe.run.path / RECIPE, recipe_to_toml(recipe)
    with suppress(UsageError):  # it is damaged
        if path.exists() and read_toml(path) == tomllib.loads(text):
            return
    from lmkit.storage.atomic import write_atomic  # not to load a recipe

    write_atomic(path, text)


# Overrides and other names


def _parse_override(override: str) -> tuple[str, Any]:
    """Return the dotted key and the value of `table.key=value`."""
    dotted, equals, text = override.partition("=")
    dotted, text = dotted.strip(), text.strip()
    table, _, key = dotted.rpartition(".")
    if not equals or not all(dotted.split(".")) or not table:
        message = f"--set {override}: expected table.key=value"
        raise UsageError("recipe.wrong_override", message, hint="for example --set train.steps=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return dotted, text  # a bare word
    owner = table_type(table)
    field = owner.model_fields.get(key) if owner else None
    # A shell takes the quotes away from run.name="42".
    takes_text = field is not None and field.annotation in (str, Path, str | None, Path | None, Paths | None)
    return dotted, text if takes_text and not isinstance(value, (str, list, dict)) else value


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Put the values of nested tables into others, in place."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


KEY_ALIASES = (("checkpoint", "checkpointing_interval", "interval"), ("optimizer", "learning_rate", "lr"))
"""Table, key of similar projects, our key. The registry has the aliases of kernels and strategies."""


def with_our_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the tables with our keys for their aliases.

    A key that is given under both names stays: validation then refuses the alias.
    """
    tables = copy.deepcopy(dict(raw))
    for name, theirs, ours in KEY_ALIASES:
        table = tables.get(name)
        if isinstance(table, dict) and theirs in table and ours not in table:
            table[ours] = table.pop(theirs)
    model = tables.get("model")
    if isinstance(model, dict) and isinstance(model.get("use_flash"), bool) and "attention" not in model:
        model["attention"] = "flash_triton" if model.pop("use_flash") else "vectorized"
    return tables


def validate(raw: Mapping[str, Any], *, origin: str, resolved: bool = False, benches: bool = False) -> Recipe:
    """Turn a plain dictionary into a `Recipe`; `origin` names the file in errors.

    Args:
        resolved: a checkpoint keeps the recipe: its `model.vocab_size` is what the tokenizer reached, which is less
            than was asked for if the corpus had no more pairs to merge.
        benches: validate the tables of benches, too, and fill in their defaults; imports these benches.
    """
    raw = with_our_names(raw)
    model = raw.get("model")
    if isinstance(model, dict) and isinstance(model.get("preset"), str):  # it gives what the table leaves out
        raw["model"] = PRESETS.get(model["preset"], {}) | model
    for name, values in from_depth(raw).items():
        raw[name] = values | raw.get(name, {})
    mistakes: list[tuple[str, str]] = []  # kind, text
    tables: dict[str, Table] = {}
    of_benches = raw.pop("bench", {})
    if not isinstance(of_benches, dict):
        mistakes.append(("wrong_value", f"bench: must be a table, got {_shown(of_benches)}"))
        of_benches = {}
    given = {**raw}
    known = list(TABLES)
    if of_benches:
        known += [f"bench.{name}" for name in BENCHES.names]
        given |= {f"bench.{name}": table for name, table in of_benches.items()}
    for name, content in given.items():
        if name not in known:
            mistakes.append(("unknown_key", f"unknown table [{name}]{did_you_mean(name, known)}"))
            continue
        if name.startswith("bench.") and not benches and isinstance(content, dict):
            continue
        kind = table_type(name) or Table
        try:
            # JSON mode: arrays become tuples and strings paths, while `true` and "12" stay refused for integers.
            tables[name] = kind.model_validate_json(json.dumps(content, default=_refuse_dates))
        except ValidationError as error:
            mistakes += [_describe(name, kind, detail) for detail in error.errors(include_url=False)]
        except (ValueError, RecursionError) as error:
            wrong = str(error) if isinstance(error, ValueError) else "nested too deeply"
            mistakes.append(("wrong_value", f"{name}: {wrong}"))
    # The checks see the defaults of a table that the recipe leaves out, and no table that has mistakes.
    candidates = tables | {name: Recipe.model_fields[name].default for name in TABLES if name not in raw}
    for complaint in conflicts(candidates, resolved=resolved):
        mistakes.append(("conflict", complaint))
    if mistakes:
        bench = re.search(r"\bbench\.(\w+)", mistakes[0][1])
        examples = shipped_with(f"bench.{bench[1]}") if bench else []
        code = mistakes[0][0] if len({kind for kind, _ in mistakes}) == 1 else "mistakes"
        hint = f"to see every key and its values: lmkit recipe show {[*examples, 'quickstart'][0]}"
        raise UsageError(f"recipe.{code}", f"{origin}: " + "; ".join(text for _, text in mistakes), hint=hint)
    for name in of_benches if benches else ():
        of_benches[name] = tables.pop(f"bench.{name}").model_dump(mode="json", exclude_none=True)
    found: dict[str, Any] = tables | ({"bench": of_benches} if of_benches else {})
    recipe = Recipe(**found)
    recipe._origin = origin
    return recipe


def _refuse_dates(value: object) -> Any:
    raise ValueError(f"{value} is a date or time, which no key takes")


# pydantic's kinds of errors -> what TOML calls the wanted type
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "an array",
    "model_type": "a table",
}
_BOUNDS = {"greater_than_equal": "at least", "less_than_equal": "at most"}


def _describe(table: str, kind_of_table: type[Table], detail: Any) -> tuple[str, str]:
    """Return the kind and the text, `table.key: what is wrong`, of one pydantic error."""
    keys = [table, *(str(part) for part in detail["loc"])]
    path, kind, value = ".".join(keys), detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return "unknown_key", f"unknown key {path}{did_you_mean(keys[-1], kind_of_table.model_fields)}"
    if kind == "json_invalid":  # `validate` writes the JSON itself: only lone surrogates can spoil it
        wrong = "holds text that is not UTF-8"
    elif kind == "value_error":
        wrong = str(detail["ctx"]["error"])
    elif kind == "literal_error":
        names = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
        wrong = f"{_shown(value)} is not one of {', '.join(names)}{did_you_mean(str(value), names)}"
    elif kind == "string_pattern_mismatch":
        wrong = f"{_shown(value)} does not match the pattern {detail['ctx']['pattern']}"
    elif kind == "missing" and isinstance(detail["loc"][-1], str):
        wrong = "missing"
    elif kind in ("missing", "too_long"):  # an array with a fixed number of items
        path = f"{table}.{detail['loc'][0]}"
        wrong = f"has too {'few' if kind == 'missing' else 'many'} items: {_shown(value)}"
    elif kind in _BOUNDS:
        (bound,) = detail["ctx"].values()
        wrong = f"must be {_BOUNDS[kind]} {_shown(bound)}, got {_shown(value)}"
    else:
        wanted = _WANTED.get(kind, detail["msg"].removeprefix("Input should be "))
        wanted += f", as in [{_shown(value)}]" if kind == "tuple_type" and isinstance(value, str) else ""
        wrong = f"must be {wanted}, got {_shown(value)}"
    return "wrong_value", f"{path}: {wrong}"


def _shown(value: object) -> str:
    """Return a value as the user wrote it, cut to a readable length."""
    text = str(value) if isinstance(value, float) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
