"""Stochastic gradient descent with momentum: PyTorch's, for recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lmkit.errors import UsageError
from lmkit.registry import OPTIMIZERS

if TYPE_CHECKING:
    from lmkit.recipe.tables import OptimizerConfig


@OPTIMIZERS.register("sgd", order=3, moments=1, options={"momentum": 0.9, "nesterov": False})
def make_sgd(groups: list[dict[str, Any]], options: OptimizerConfig) -> torch.optim.SGD:
    """Make `torch.optim.SGD`, which adds the weight decay to the gradient, from the recipe's tables `[optimizer]` and
    `[optimizer.options]`."""
    own: dict[str, Any] = {**OPTIMIZERS.facts("sgd").options, **options.options}
    lowest = "above 0 with nesterov" if own["nesterov"] else "0 or more"
    if not 0 <= own["momentum"] < 1 or (own["nesterov"] and own["momentum"] == 0):
        message = f"optimizer.options.momentum: {own['momentum']} is not {lowest} and below 1"
        raise UsageError("optimizer.momentum", message, hint="the default is 0.9")
    return torch.optim.SGD(groups, lr=options.lr, **own)
