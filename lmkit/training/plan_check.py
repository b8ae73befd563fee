"""Make a few steps of a recipe on this machine, on random tokens, to compare them with its plan."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from lmkit.errors import LmkitError, UsageError, limit_reached
from lmkit.measure.limits import card_here
from lmkit.measure.memory import claim_workspaces, memory_in_use, track_peak
from lmkit.parallel.collectives import largest_of_ranks
from lmkit.parallel.launch import spawn_ranks
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.schema import Recipe
from lmkit.training.graph import MEASURED, WARM_UPS
from lmkit.training.plan import plan
from lmkit.training.process import numerics, ranks_of
from lmkit.training.setup import TrainingStep

FEW = 10
SHORT_S = 1.0
"""So many steps shorter than this are timed together: one alone would show what the host does before it."""
SAMPLED_S = 2.0
"""How long such samples are taken. The median counts, because a host is sometimes slower for a second."""


@dataclass(frozen=True)
class Measured:
    """The largest peak memory (without a CUDA graph) and step time among the ranks; None: memory ran out."""

    peak_bytes: int | None
    seconds: float | None


def check(recipe: Recipe, *, ranks: int = 1) -> Measured:
    """Make a few steps of a recipe on this machine's GPUs.

    Raises:
        UsageError: as `plan`, or there is no GPU, or there are fewer than ranks.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "plan.no_gpu", "--check: this machine shows no GPU to measure on", hint="leave out --check"
        )
    try:
        return spawn_ranks(ranks, measure, (recipe,))  # in processes whose memory holds nothing else
    except LmkitError as error:
        if error.code != "memory.exhausted":
            raise
        return Measured(None, None)


def measure(recipe: Recipe) -> Measured:
    """Make a few steps as one of the ranks; return what one took on the rank that took most."""
    with ranks_of(recipe) as ranks:
        return measure_among(ranks, recipe)


def measure_among(ranks: Ranks, recipe: Recipe) -> Measured:
    """Do as `measure` in a process group that exists. Collective."""
    with numerics(recipe.run, ranks):
        made = plan(recipe, card_here(), ranks=ranks.world_size)
        claim_workspaces(ranks.device)
        before = memory_in_use(ranks.device)
        try:
            training = TrainingStep(recipe.changed(model=made.config, train=made.train), ranks)
            training.run(wait=True)
            with track_peak(ranks.device) as peak:
                seconds = _seconds(training)
            graph = training.step.graph
            if graph is not None and graph.may_capture:
                for _ in range(WARM_UPS + MEASURED - 2):
                    training.run(wait=True)
            if largest_of_ranks([seconds], ranks)[0] < SHORT_S:
                seconds = _median_seconds(ranks, training)
        except RuntimeError as error:
            raise limit_reached(error) or error from error
        peak_bytes, seconds = largest_of_ranks([peak.peak_bytes - before, seconds], ranks)
        return Measured(int(peak_bytes), seconds)


def _median_seconds(ranks: Ranks, training: TrainingStep) -> float:
    """Return how long a step takes, in the median sample. Collective."""
    samples = [_seconds(training, FEW)]
    more = int(SAMPLED_S / (FEW * largest_of_ranks(samples, ranks)[0]))
    return median([*samples, *(_seconds(training, FEW) for _ in range(more))])


def _seconds(training: TrainingStep, steps: int = 1) -> float:
    """Return how long a step takes."""
    started = time.perf_counter()
    for _ in range(steps - 1):
        training.run()
    training.run(wait=True)
    return (time.perf_counter() - started) / steps
