"""What `test_plan.py` runs on every rank."""

from collections.abc import Sequence

import torch

from lmkit.measure.environment import card_here
from lmkit.measure.memory import claim_workspaces, memory_in_use, release_memory
from lmkit.recipe.load import load_recipe
from lmkit.recipe.recipe import Recipe
from lmkit.training.plan import Measured, Plan, measure_among, plan
from lmkit.training.process import ranks_of

# A recipe, keys that it changes, a strategy.
Setting = tuple[str, tuple[str, ...], str]


def in_one_group(settings: Sequence[Setting]) -> list[tuple[Plan, Measured]]:
    """Plan and measure one setting after the other."""
    found = []
    recipes = [recipe_of(setting) for setting in settings]
    with ranks_of(recipes[0]) as ranks:
        for recipe in recipes:
            made = plan(recipe, card_here(), ranks=ranks.world_size)
            release_memory(ranks.device)
            found.append((made, measure_among(ranks, recipe)))
            torch.compiler.reset()
            release_memory(ranks.device)
    return found


def recipe_of(setting: Setting) -> Recipe:
    name, keys, strategy = setting
    return load_recipe(name, [*keys, f"parallel.strategy={strategy}", "parallel.timeout_s=120"])


def at_edge(setting: Setting, factor: float) -> None:
    """Make steps where the allocator may take as much as planned with its gaps, or only so much of the tensors.

    Raises:
        LmkitError: "memory.exhausted".
    """
    recipe = recipe_of(setting)
    with ranks_of(recipe) as ranks:
        made = plan(recipe, card_here(), ranks=ranks.world_size)
        claim_workspaces(ranks.device)
        release_memory(ranks.device)
        limit = memory_in_use(ranks.device)
        limit += made.memory.most if factor > 1 else int(factor * made.memory.peak)
        torch.cuda.set_per_process_memory_fraction(limit / made.card.memory, ranks.device)
        measure_among(ranks, recipe)
