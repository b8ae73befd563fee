"""`[wandb]`: Weights & Biases logging, beside metrics.jsonl; needs the extra `lmkit[wandb]`."""

from __future__ import annotations

from typing import Literal

from lmkit.recipe.table import Table


class WandbConfig(Table):
    enabled: bool = False
    project: str = "lmkit"
    mode: Literal["online", "offline"] = "online"
