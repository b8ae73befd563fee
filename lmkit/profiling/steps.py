"""The workload of all three profilers: a few training steps of a model on random tokens.

`python -m lmkit.profiling.steps OPTIONS` (JSON of `StepsOptions`) runs them in a process of their own, for nsys.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmkit.benches.training_step import TrainingStep
from lmkit.data.batches import RandomTokens
from lmkit.errors import UsageError
from lmkit.measure.ranges import enable_ranges_from_environment
from lmkit.parallel.process_group import Ranks
from lmkit.recipe.model import ModelConfig


@dataclass(frozen=True)
class StepsOptions:
    """What is profiled.

    Attributes:
        model: with `vocab_size` set.
        steps, warmup: recorded steps, and unrecorded ones before them (compilation, allocator).
    """

    model: ModelConfig
    device: str = "cpu"
    precision: str = "fp32"
    batch_size: int = 4
    steps: int = 5
    warmup: int = 3
    seed: int = 0

    def as_json(self) -> str:
        return json.dumps({**self.__dict__, "model": self.model.model_dump(mode="json")})


def options_from_json(text: str) -> StepsOptions:
    fields: dict[str, Any] = json.loads(text)
    return StepsOptions(**{**fields, "model": ModelConfig(**fields["model"])})


def describe_steps(options: StepsOptions) -> str:
    """One line for titles."""
    model = options.model
    name = model.preset or f"{model.num_layers} layers, d_model {model.d_model}"
    return (
        f"{name}, context {model.context_length}, batch {options.batch_size}, {options.precision}, "
        f"attention {model.attention}, compile {model.compile}"
    )


def build_step(options: StepsOptions) -> TrainingStep:
    """The model with its optimizer and endless random tokens.

    Raises:
        UsageError: the model has no vocabulary size.
    """
    if options.model.vocab_size is None:
        raise UsageError(
            "model.vocab_size: profiling uses random tokens; say how many there are", hint="set it"
        )
    batches = RandomTokens(
        options.model.vocab_size,
        batch_size=options.batch_size,
        context_length=options.model.context_length,
        seed=options.seed,
    )
    return TrainingStep(
        options.model, Ranks(device=torch.device(options.device)), batches, precision=options.precision
    )


def main(arguments: Sequence[str]) -> None:
    """Run the steps that the JSON argument describes, marked with the ranges that LMKIT_RANGES asks for."""
    (text,) = arguments
    options = options_from_json(text)
    step = build_step(options)
    for _ in range(options.warmup):
        step.run()
    enable_ranges_from_environment()
    for _ in range(options.steps):
        step.run()
    if options.device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
