"""`[train]`: how long, how much at a time, in what precision."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from lmkit.recipe.table import Count, NonNegativeFloat, PositiveFloat, PositiveInt, Table


class TrainConfig(Table):
    steps: PositiveInt = 1000
    """Optimizer steps; the learning-rate schedule spans them."""
    max_minutes: PositiveFloat | None = None
    """End after this much wall-clock; the schedule then follows the fraction of time used."""
    batch_size: PositiveInt = 32
    """Sequences per optimizer step over all ranks; accumulation and ranks divide it."""
    accumulation: PositiveInt = 1
    """Micro-batches per optimizer step."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the matrix products (autocast); weights and optimizer state stay in fp32."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    log_interval: PositiveInt = 10
    """Every so many steps one is logged; the first and the last always are."""
    eval_interval: Count = 200
    """Steps between evaluations on held-out data; 0: only at the end."""
    eval_batches: Count = 20
    """Batches per evaluation; 0: all of the held-out data. The last evaluation always takes all."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """On a loss or gradient that is not finite: stop before the optimizer step, or skip this step."""
    max_skips: PositiveInt = 10
    """With `nonfinite = "skip"`: consecutive skipped steps after which the run stops."""

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainConfig:
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by accumulation {self.accumulation}"
            )
        return self
