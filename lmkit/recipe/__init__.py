"""Recipes: TOML in, validated frozen tables out.

Importing this package is cheap. pydantic (59 ms) loads with the tables: commands import `lmkit.recipe.load` late.
"""

import lmkit.lazy

# Facts about every vocabulary.
END_OF_TEXT = "<|endoftext|>"
"""The special token that ends a text, in tokenizers that lmkit trains."""
NUM_BYTES = 256
"""The first tokens of every vocabulary: one per byte."""
MAX_TOKEN_BYTES = 256
"""Default of `tokenizer.max_token_bytes`."""
MAX_VOCABULARY = (1 << 20) - 1
"""The merge search packs an id into 20 bits and needs one value for "no token"."""

_NAMES = "Run Corpus Tokenizer Data Model Optimizer Train Parallel Checkpoint Generate Wandb"
_TABLES = [f"{name}Config" for name in _NAMES.split()]
__getattr__, __dir__, __all__ = lmkit.lazy.exports(
    __name__, {"load": ("load_recipe", "recipe_to_toml"), "recipe": ("Recipe",), "tables": _TABLES}
)
