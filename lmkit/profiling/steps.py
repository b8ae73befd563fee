"""The workload of all three profilers: a few training steps of a model on random tokens.

`python -m lmkit.profiling.steps OPTIONS` (JSON of `StepsOptions`) runs them in a process of their own, for nsys.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lmkit.data.batches import RandomTokens
from lmkit.errors import UsageError
from lmkit.measure.ranges import enable_ranges_from_environment, range_
from lmkit.parallel.process_group import Ranks
from lmkit.recipe.tables import ModelConfig, RunConfig
from lmkit.training.process import numerics
from lmkit.training.setup import TrainingStep

Mode = Literal["forward", "fwd+bwd", "step"]


@dataclass(frozen=True)
class StepsOptions:
    """What is profiled.

    Attributes:
        model: with `vocab_size` set.
        mode: "step", or a pass alone: "forward" (without gradients) or "fwd+bwd" (gradients are dropped).
        threads, deterministic: as in `[run]` of a recipe.
        steps, warmup: recorded steps (or passes), and unrecorded ones before them (compilation, allocator).
    """

    model: ModelConfig
    device: str = "cpu"
    precision: str = "fp32"
    batch_size: int = 4
    mode: Mode = "step"
    steps: int = 5
    warmup: int = 3
    seed: int = 0
    threads: int = 0
    deterministic: bool = False

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
        f"{name}, {options.mode}, context {model.context_length}, batch {options.batch_size}, {options.precision}, "
        f"attention {model.attention}, compile {model.compile}"
    )


def build_step(options: StepsOptions) -> TrainingStep:
    """The model with its optimizer and endless random tokens.

    Raises:
        UsageError: the model has no vocabulary size.
    """
    if options.model.vocab_size is None:
        raise UsageError(
            "model.vocab_size: profiling uses random tokens; say how many there are",
            hint="for example --set model.vocab_size=10000",
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


def as_the_recipe_says(options: StepsOptions) -> AbstractContextManager[None]:
    """Threads and determinism of the recipe while the block runs."""
    run = RunConfig(seed=options.seed, threads=options.threads, deterministic=options.deterministic)
    return numerics(run, Ranks(device=torch.device(options.device)))


def build_work(options: StepsOptions) -> Callable[[], object]:
    """A call that runs one step or pass and waits for it.

    A step waits by itself (the ranks agree before the weights move). A pass is put into a range of its own, "pass",
    that waits for the device: the range around a forward pass alone ends when the device has been told what to do.
    """
    return work_of(build_step(options), options)


def work_of(step: TrainingStep, options: StepsOptions) -> Callable[[], object]:
    """`build_work` on a step that is there already."""
    if options.mode == "step":
        return step.run
    run = step.forward if options.mode == "forward" else step.forward_backward

    def one_pass() -> None:
        with range_("pass"):
            run().item()

    return one_pass


def main(arguments: Sequence[str]) -> None:
    """Run the steps that the JSON argument describes, marked with the ranges that LMKIT_RANGES asks for."""
    (text,) = arguments
    options = options_from_json(text)
    with as_the_recipe_says(options):
        work = build_work(options)
        for _ in range(options.warmup):
            work()
        enable_ranges_from_environment()
        for _ in range(options.steps):
            work()
        if options.device.startswith("cuda"):
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
