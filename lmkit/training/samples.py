"""Texts that a model writes while it is trained (`train.sample_interval`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lmkit.model.transformer import TransformerLM
from lmkit.recipe.schema import Recipe
from lmkit.training.run_data import resolved_tables
from lmkit.training.step import Step
from lmkit.training.weights import filled_model, model_weights

WriteSamples = Callable[[TransformerLM, Recipe], Sequence[str]]
"""Returns a text for each prompt of the table [generate], prompt included: `lmkit.generation.write_samples`. It is an
argument because training does not import generation. It may change the model."""


def sample_records(
    step: Step, recipe: Recipe, write_samples: WriteSamples, *, number: int
) -> list[dict[str, Any]]:
    """Return a record of kind `sample` for each text; [] on ranks other than the first.

    Every rank calls it. A copy of the model writes; torch's random generators are left as they were.

    Args:
        number: of the step.

    Raises:
        LmkitError: on the first rank: the model's predictions are not finite, or memory does not suffice.
    """
    # A collective if the weights are sharded, which makes them whole on the first rank.
    weights = model_weights(step.model)
    if not step.ranks.is_first:
        return []
    device = step.ranks.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # new weights are drawn at first
        config = resolved_tables(recipe)[0]
        model = filled_model(config, weights, device=device, origin=recipe.run.path)
        texts = write_samples(model, recipe)
    return [
        {"kind": "sample", "step": number, "number": index, "text": text} for index, text in enumerate(texts)
    ]
