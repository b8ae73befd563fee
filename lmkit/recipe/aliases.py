"""Spellings of similar projects (courses in which a language model is built), for users who come from there.

They are turned into lmkit's own when a recipe is loaded; everything after that sees one name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmkit.registry import ATTENTION, STRATEGIES, Registry

KEYS: dict[tuple[str, str], str] = {
    ("checkpoint", "checkpointing_interval"): "interval",
    ("optimizer", "learning_rate"): "lr",
}

RENAMED: tuple[tuple[tuple[str, ...], Registry[Any]], ...] = (
    # Names with a variant behind them, `flash_attention_triton+compile`, which no registry checks.
    (("bench", "attention", "kernels"), ATTENTION),
    (("bench", "attention", "grid_kernels"), ATTENTION),
    (("bench", "attention", "baseline"), ATTENTION),
    (("bench", "ddp", "contenders"), STRATEGIES),
)


def canonical(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with lmkit's keys and values for those of others. A key given under both names is left alone:
    validation then refuses the other's."""
    tables = {name: dict(table) if isinstance(table, dict) else table for name, table in raw.items()}
    for (table_name, theirs), ours in KEYS.items():
        table = tables.get(table_name)
        if isinstance(table, dict) and theirs in table and ours not in table:
            table[ours] = table.pop(theirs)
    model = tables.get("model")
    if isinstance(model, dict) and isinstance(model.get("use_flash"), bool) and "attention" not in model:
        model["attention"] = "flash_triton" if model.pop("use_flash") else "vectorized"
    for path, registry in RENAMED:
        _rename(tables, path, registry.aliases)
    return tables


def _rename(table: dict[str, Any], path: Sequence[str], names: dict[str, str]) -> None:
    """Replace others' names in the value at `path`, in place; tables on the way to it are copied."""
    key = path[0]
    value = table.get(key)
    if len(path) > 1:
        if isinstance(value, dict):
            table[key] = dict(value)
            _rename(table[key], path[1:], names)
    elif isinstance(value, list):
        table[key] = [_renamed(item, names) for item in value]
    elif key in table:
        table[key] = _renamed(value, names)


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """lmkit's name, with the `+compile` that may follow it; what is nobody else's name as it is."""
    if not isinstance(value, str):
        return value
    name, plus, variant = value.partition("+")
    return names.get(name, name) + plus + variant
