"""`[optimizer]`: AdamW (Loshchilov and Hutter 2019) and its learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lmkit.recipe.table import Count, NonNegativeFloat, Table

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Table):
    lr: Annotated[float, Field(gt=0, le=1e6)] = 1e-3
    """The highest learning rate, reached at the end of the warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the running means of gradient and squared gradient, per step."""
    eps: Annotated[float, Field(gt=0, le=1e6)] = 1e-8
    """Added to the root of the mean square."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.1
    """Applied to matrices only, not to norm gains."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls after the warm-up."""
    warmup_steps: Count = 0
    """Steps in which the rate rises linearly from 0."""
    min_lr: NonNegativeFloat = 0.0
    """Where the schedule ends, at `train.steps`."""

    @model_validator(mode="after")
    def _ends_below_its_top(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is larger than lr {self.lr}")
        return self
