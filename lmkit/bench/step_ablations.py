"""lmkit's training step with one idea taken out, to measure what it brings: variants of `lmkit bench step`.

* `no_graph` uses no CUDA graph; the variants below use none either, so compare them with `no_graph`;
* `plain` runs all operations around the matrix products with PyTorch, `plain_norm` and so on one of them;
* `sdpa` runs PyTorch's attention kernels;
* `waits` lets the host wait for every step;
* `autocast` keeps float32 weights and casts them in every pass;
* `none` is all of these at once.

Those with float32 weights take turns training one model, the others another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lmkit.bench.failures import wrong_result
from lmkit.bench.step_rivals import RivalStep
from lmkit.bench.training_gate import Budget, after_timing, computing_with
from lmkit.model.operations import PLAIN, Operations

if TYPE_CHECKING:
    import torch

    from lmkit.training.setup import TrainingStep

METHODS = {
    "lmkit:plain_embedding": "embedding",
    "lmkit:plain_norm": "add_rms_norm",
    "lmkit:plain_rope": "rotated",
    "lmkit:plain_swiglu": "swiglu",
    "lmkit:plain_loss": "linear_cross_entropy",
}
"""Variant -> the method of `Operations` that PyTorch's form replaces."""


class Ablated:
    """A training without one idea, on weights that it shares with others."""

    def __init__(self, variant: str, training: TrainingStep) -> None:
        self.model, self.optimizer = training.model, training.optimizer
        self._variant = variant
        self._training = training
        self._operations = operations_of(variant, training.model.operations)

    def run(self) -> torch.Tensor:
        """Make one step; return its loss."""
        with self.taken_out() as training:
            return training.run(wait=self._variant in ("lmkit:waits", "lmkit:none"))

    @contextmanager
    def taken_out(self) -> Iterator[TrainingStep]:
        """Yield the training; inside the block it computes without the idea."""
        attention = "sdpa" if self._variant in ("lmkit:sdpa", "lmkit:none") else None
        with computing_with(self.model, self._operations, attention):
            yield self._training


def operations_of(variant: str, full: Operations) -> Operations:
    """Return the operations of a variant, given those of the whole step."""
    if variant in ("lmkit:plain", "lmkit:none"):
        return PLAIN
    if (method := METHODS.get(variant)) is None:
        return full
    found: Operations = type("Ablated", (type(full),), {method: getattr(Operations, method)})()
    found.name = full.name
    return found


def wrong_by_now(training: TrainingStep | Ablated | RivalStep, budget: Budget) -> dict[str, Any]:
    """Return status and detail of a variant that was timed and is wrong by now, else {}."""
    if isinstance(training, RivalStep):
        finite = math.isfinite(training.run().item())
        return {} if finite else wrong_result("after timing: the loss is not finite")
    if isinstance(training, Ablated):
        with training.taken_out() as whole:
            return after_timing(whole, budget)
    return after_timing(training, budget)
