"""Begin a training with the weights of another one, and with a fresh optimizer (`train.init_from`)."""

from __future__ import annotations

import shlex

from lmkit.errors import UsageError
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import ModelConfig
from lmkit.training.checkpoint import load_tokenizer
from lmkit.training.given_weights import GivenWeights, open_weights
from lmkit.training.model_state import load_masters, load_weights
from lmkit.training.run_data import Data
from lmkit.training.step import Step

FREE = (
    *("preset", "depth", "context_length", "attention", "operations", "compile"),
    *("activation_checkpointing", "activation_gb"),
    "zero_init",  # of weights that are loaded
    "separate_documents",  # a single document is computed the same with and without it
)
"""Keys of [model] that may differ: weights of one model compute the same under all their values."""


def open_given(recipe: Recipe, data: Data) -> GivenWeights | None:
    """Open the weights that a resolved recipe names in `train.init_from`; None if it names none.

    Raises:
        UsageError: they are those of another model, all its differences named, or of another tokenizer.
        LmkitError: a file is damaged.
    """
    assert recipe.model is not None
    assert recipe.train is not None
    path = recipe.train.init_from
    if path is None:
        return None
    given = open_weights(path)
    if data.train is not None and given.tokenizer is not None:
        theirs = load_tokenizer(given.tokenizer, given.tokenizer_sha256).sha256
        ours = data.train.meta.tokenizer_sha256
        if theirs != ours:
            raise UsageError(
                "train.other_tokenizer",
                f"train.init_from: {path} was trained with tokenizer {theirs[:12]}, "
                f"the token file was made with {ours[:12]}",
                hint=f"encode the text with its tokenizer: --set tokenizer.path={shlex.quote(str(given.tokenizer))}",
            )
    differing = _differences(recipe.model, given.config)
    if differing:
        told = "; ".join(f"model.{key}: {mine}, the weights have {other}" for key, mine, other in differing)
        raise UsageError(
            "train.other_model",
            f"train.init_from: {path} is another model: {told}",
            hint="take over its values in [model] of the recipe",
        )
    return given


def begin_with(given: GivenWeights, step: Step) -> None:
    """Load the weights into the model of a step, and into the masters of its optimizer."""
    weights = {name: given.read(name) for name in given.specs}
    load_weights(step.model, weights, origin=given.path)
    load_masters(step.optimizer, step.model, weights)


def _differences(ours: ModelConfig, theirs: ModelConfig) -> list[tuple[str, object, object]]:
    """Return (key, value of the recipe, value of the weights) for every key that changes the model."""
    resolved = [config.changed(num_kv_heads=config.kv_heads) for config in (ours, theirs)]
    pairs = {
        key: [getattr(config, key) for config in resolved]
        for key in ModelConfig.model_fields
        if key not in FREE
    }
    return [(key, mine, other) for key, (mine, other) in pairs.items() if mine != other]
