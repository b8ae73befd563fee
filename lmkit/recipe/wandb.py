"""`[wandb]`: Weights & Biases logging, beside metrics.jsonl; needs the extra `lmkit[wandb]`."""

from __future__ import annotations

from typing import Literal

from lmkit.recipe.table import Table


class WandbConfig(Table):
    enabled: bool = False
    """Log there too; metrics.jsonl is always written."""
    project: str = "lmkit"
    """Where the run appears."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files for `wandb sync`."""
