"""Which sinks a run reports to."""

from __future__ import annotations

from lmkit.parallel.process_group import Ranks
from lmkit.recipe.schema import Recipe
from lmkit.training.console import console
from lmkit.training.metrics import Fanout, MetricsFile, Sink
from lmkit.training.run_folder import METRICS
from lmkit.training.wandb_sink import WandbSink


def open_sink(recipe: Recipe, ranks: Ranks, *, after_step: int) -> Fanout:
    """metrics.jsonl, stderr and, where the recipe says so, W&B; nothing on ranks other than the first.

    Args:
        after_step: the step that the session goes on from.
    """
    if not ranks.is_first:
        return Fanout([])
    assert recipe.train is not None
    folder = recipe.run.path
    sinks: list[Sink] = [
        MetricsFile(folder / METRICS, after_step=after_step),
        console(recipe.train.steps, first_step=after_step),
    ]
    if recipe.wandb.enabled:
        sinks.append(WandbSink(recipe, folder))
    return Fanout(sinks)
