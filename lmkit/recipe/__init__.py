"""Recipes: TOML in, validated frozen tables out.

Importing this package is cheap. pydantic (59 ms) loads with the tables: commands import `lmkit.recipe.load` late.
"""

import lmkit.lazy

__getattr__, __dir__, __all__ = lmkit.lazy.exports(
    __name__,
    {
        "load_recipe": "load",
        "recipe_to_toml": "load",
        "Recipe": "schema",
        "RunConfig": "tables",
        "CorpusConfig": "tables",
        "TokenizerConfig": "tables",
        "DataConfig": "tables",
        "ModelConfig": "tables",
        "OptimizerConfig": "tables",
        "TrainConfig": "tables",
        "ParallelConfig": "tables",
        "CheckpointConfig": "tables",
        "GenerateConfig": "tables",
        "WandbConfig": "tables",
    },
)
