"""Write the texts of a recipe's table [generate] with a model that is still being trained."""

from __future__ import annotations

from lmkit.generation.generate import generate, weight_dtype
from lmkit.model.transformer import TransformerLM
from lmkit.recipe.run_folder import TOKENIZER
from lmkit.recipe.schema import Recipe
from lmkit.tokenizer import Tokenizer


def write_samples(model: TransformerLM, recipe: Recipe) -> list[str]:
    """Return a text for each prompt of the table [generate], prompt included.

    Casts the model to the table's precision.

    Raises:
        LmkitError: the logits are not finite, or memory does not suffice.
    """
    table = recipe.generate.changed(weights="same")  # fp8 needs the kernels
    named = recipe.tokenizer.path if recipe.tokenizer is not None else None
    own = recipe.run.path / TOKENIZER
    tokenizer = Tokenizer.load(own if named is None or own.exists() else named)
    model.to(weight_dtype(table, model.lm_head.weight.device))
    # Without kernels: no CUDA graph beside that of the training step.
    made = generate(model, tokenizer, table.prompts, table, kernels=False)
    return [text.prompt + text.text for text in made]
