"""What differs between two recipes, key by key."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lmkit.recipe.schema import Recipe


def differences(old: Recipe, new: Recipe, *, ignore: Collection[str] = ()) -> tuple[str, ...]:
    """Lines like `train.steps: 100 -> 200`, in the order of the schema.

    Args:
        ignore: tables (`generate`) and keys (`checkpoint.resume`) that may differ.
    """
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    return tuple(
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in {**before, **after}
        if before.get(key) != after.get(key) and key not in ignore and key.split(".")[0] not in ignore
    )


def _flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(_flat(value, f"{path}."))
        else:
            flat[path] = value
    return flat
