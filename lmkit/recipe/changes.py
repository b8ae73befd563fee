"""Compare recipes, and say which keys may change while a run goes on: one rule for `lmkit run` and `lmkit train`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lmkit.registry import OPTIMIZERS

if TYPE_CHECKING:
    from lmkit.recipe.schema import Recipe

MUST_AGREE = ("run.seed", "model", "data.source", "data.sampling", "train.batch_size", "train.precision")
"""Keys that a resumed run may not change: the weights would not fit, or the steps would not continue the run.
Everything else may change (learning rate, steps, intervals, ranks) and is reported. The other keys of [data] say
where files lie; files are compared by content."""

MAY_CHANGE_WITHIN = (
    *("model.preset", "model.attention", "model.operations", "model.compile"),
    *("model.activation_checkpointing", "model.activation_gb"),
)
"""Exceptions to `MUST_AGREE`: other ways to compute the same function."""

NEED_STEPS = ("optimizer", "train.grad_clip", "train.accumulation")
"""Keys that may change, but have an effect on further steps only."""


def differences(
    old: Recipe | Mapping[str, Any], new: Recipe | Mapping[str, Any], *, ignore: Collection[str] = ()
) -> tuple[str, ...]:
    """Return lines such as `train.steps: 100 -> 200`, in the order of the schema.

    Args:
        old, new: recipes, or what `read_toml` returned.
        ignore: tables (`generate`) and keys (`checkpoint.resume`) that may differ.
    """
    before, after = (
        flat(tables if isinstance(tables, Mapping) else tables.model_dump(mode="json"))
        for tables in (old, new)
    )
    return tuple(
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in {**before, **after}
        if before.get(key) != after.get(key) and key not in ignore and key.split(".")[0] not in ignore
    )


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted keys with their values."""
    keys: dict[str, Any] = {}
    for key, value in tables.items():
        keys |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return keys


def refused(changes: Iterable[str]) -> list[str]:
    """Return the lines of `differences` with which the run cannot go on."""
    return [line for line in changes if is_under(line, MUST_AGREE) and not is_under(line, MAY_CHANGE_WITHIN)]


def without_effect(changes: Iterable[str], *, step: int, steps: float) -> list[str]:
    """Return the lines of `differences` that have no effect, because the training has reached its end."""
    return [line for line in changes if step >= steps and is_under(line, NEED_STEPS)]


def keeps_state(before: str, now: str) -> bool:
    """Return whether the optimizer `now` goes on with the state of the optimizer `before`."""
    owners = {OPTIMIZERS.facts(name).state_of or name for name in (before, now)}
    return len(owners) == 1


def is_under(line: str, keys: tuple[str, ...]) -> bool:
    """Return whether a difference (`model.d_model: 64 -> 128`) is about one of these tables or keys."""
    name = line.partition(":")[0]
    return any(name == key or name.startswith(f"{key}.") for key in keys)
