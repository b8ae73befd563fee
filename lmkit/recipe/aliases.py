"""Older spellings, turned into today's when a recipe is loaded; everything after that sees one name."""

from __future__ import annotations

from typing import Any

KEYS: dict[tuple[str, str], str] = {
    ("checkpoint", "checkpointing_interval"): "interval",
    ("optimizer", "learning_rate"): "lr",
}

ATTENTION = {
    "scaled_dot_prod_attention": "reference",
    "vectorized_torch": "vectorized",
    "flash_attention_triton": "flash_triton",
}

STRATEGIES = {
    "Local No DDP": "none",
    "Naive DDP": "naive",
    "naive bucketed": "flat",
    "individual": "overlap",
    "flashddp": "bucketed",
    "Bucketed Overlapping DDP": "bucketed",
    "pytorch": "torch_ddp",
    "Pytorch DDP": "torch_ddp",
    "sharded_optimizer": "zero1",
}

VALUES: dict[tuple[str, str], dict[str, str]] = {
    ("model", "attention"): ATTENTION,
    ("parallel", "strategy"): STRATEGIES,
}


def canonical(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe with old keys and values replaced. A key given under both names is left alone:
    validation then refuses the old one."""
    tables = {name: dict(table) if isinstance(table, dict) else table for name, table in raw.items()}
    for (table_name, old), new in KEYS.items():
        table = tables.get(table_name)
        if isinstance(table, dict) and old in table and new not in table:
            table[new] = table.pop(old)
    model = tables.get("model")
    if isinstance(model, dict) and isinstance(model.get("use_flash"), bool) and "attention" not in model:
        model["attention"] = "flash_triton" if model.pop("use_flash") else "vectorized"
    for (table_name, key), names in VALUES.items():
        table = tables.get(table_name)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = names.get(table[key], table[key])
    return tables
