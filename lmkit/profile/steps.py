"""The workload of all three profilers: a few training steps of a recipe's model on random tokens.

`python -m lmkit.profile.steps WORKLOAD` (JSON of a `Workload`) runs them in a process of their own, for nsys.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch

from lmkit.core.ranges import range_
from lmkit.measure.ranges import enable_ranges_from_environment
from lmkit.parallel.ranks import Ranks, local_device
from lmkit.recipe.load import required
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import ModelConfig, TrainConfig
from lmkit.tokenizer.vocabulary import required_model
from lmkit.training.precision import with_precision
from lmkit.training.process import numerics
from lmkit.training.setup import TrainingStep, check_device

Mode = Literal["forward", "fwd+bwd", "step"]


@dataclass(frozen=True)
class Workload:
    """Steps of a recipe on one device, on random tokens.

    Attributes:
        mode: "step", or a pass alone: "forward" (without gradients) or "fwd+bwd" (gradients are dropped).
        steps, warmup: recorded steps (or passes), and unrecorded ones before them.
    """

    recipe: Recipe
    mode: Mode = "step"
    steps: int = 5
    warmup: int = 3

    @cached_property
    def model(self) -> ModelConfig:
        """[model] with its vocabulary."""
        return required_model(self.recipe, command="profile")

    @property
    def train(self) -> TrainConfig:
        required(self.recipe.train, "train", self.recipe, command="profile")
        return cast(TrainConfig, with_precision(self.recipe, self.ranks.device).train)

    def numerics(self) -> AbstractContextManager[None]:
        """Set the recipe's threads and determinism while the block runs."""
        return numerics(self.recipe.run, self.ranks)

    @property
    def ranks(self) -> Ranks:
        return Ranks(device=local_device(self.recipe.run.device, local_rank=0))

    def as_json(self) -> str:
        """Return the argument of `main`."""
        recipe = self.recipe.model_dump(mode="json", exclude_none=True)  # TOML has no null
        return json.dumps({"recipe": recipe, "mode": self.mode, "steps": self.steps, "warmup": self.warmup})

    def __str__(self) -> str:
        model, train = self.model, self.train
        name = model.preset or f"{model.num_layers} layers, d_model {model.d_model}"
        return (
            f"{name}, {self.mode}, context {model.context_length}, "
            f"batch {train.accumulation} x {train.batch_size // train.accumulation}, "
            f"{train.precision}, attention {model.attention}, compile {model.compile}"
        )


def workload_from_json(text: str) -> Workload:
    """Return the workload that `Workload.as_json` wrote."""
    fields: dict[str, Any] = json.loads(text)
    recipe = Recipe.model_validate_json(json.dumps(fields.pop("recipe")))
    return Workload(recipe, **fields)


def make_training(work: Workload) -> TrainingStep:
    """Return the model with its optimizer and endless random tokens.

    Raises:
        UsageError: as `required_model`, or as `lmkit train`: something does not run on the device, or the optimizer
            refuses an option.
    """
    train = work.train.changed(cuda_graph="off")  # of a graph a profile would not show the phases
    recipe = work.recipe.changed(model=work.model, train=train)
    check_device(recipe, work.ranks.device)
    return TrainingStep(recipe, work.ranks)


def call_of(step: TrainingStep, mode: Mode) -> Callable[[], object]:
    """Return a call that runs one step or pass and waits for it.

    A pass gets a range of its own, "pass", that waits for the device; the range around a forward pass alone ends when
    the device has its work.
    """
    if mode == "step":
        return partial(step.run, wait=True)
    run = step.forward if mode == "forward" else step.forward_backward

    def one_pass() -> None:
        with range_("pass"):
            run().item()

    return one_pass


def main(arguments: Sequence[str]) -> None:
    """Run the workload that the JSON argument describes, with the ranges that LMKIT_RANGES asks for."""
    (text,) = arguments
    work = workload_from_json(text)
    with work.numerics():
        call = call_of(make_training(work), work.mode)
        for _ in range(work.warmup):
            call()
        enable_ranges_from_environment()
        for _ in range(work.steps):
            call()
        if work.ranks.device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
