"""What `test_plan.py` runs on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lmkit.measure.limits import card_here
from lmkit.measure.memory import claim_workspaces, memory_in_use, release_memory
from lmkit.parallel.ranks import process_group
from lmkit.recipe.load import load_recipe
from lmkit.training.plan import Plan, plan
from lmkit.training.plan_check import Measured, measure_among

Setting = tuple[str, tuple[str, ...], str]
"""A recipe, keys that it changes, a strategy."""


def in_one_group(settings: Sequence[Setting]) -> list[tuple[Plan, Measured]]:
    """Plan and measure one setting after the other."""
    return list(each(settings))


def each(settings: Sequence[Setting]) -> Iterator[tuple[Plan, Measured]]:
    """Yield what was planned and measured as soon as it was."""
    with process_group("cuda", timeout_s=120) as ranks:
        for name, keys, strategy in settings:
            recipe = load_recipe(name, [*keys, f"parallel.strategy={strategy}"])
            found = measure_among(ranks, recipe)
            torch.compiler.reset()
            release_memory(ranks.device)
            yield plan(recipe, card_here(), ranks=ranks.world_size), found


def at_edge(setting: Setting, factor: float) -> None:
    """Make steps where the allocator may take only so much of what was planned.

    Raises:
        LmkitError: "memory.exhausted".
    """
    name, keys, strategy = setting
    recipe = load_recipe(name, [*keys, f"parallel.strategy={strategy}"])
    with process_group("cuda", timeout_s=120) as ranks:
        made = plan(recipe, card_here(), ranks=ranks.world_size)
        claim_workspaces(ranks.device)
        release_memory(ranks.device)
        limit = memory_in_use(ranks.device) + factor * made.memory.peak
        torch.cuda.set_per_process_memory_fraction(limit / made.card.memory, ranks.device)
        measure_among(ranks, recipe)
