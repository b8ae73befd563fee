"""`none`: communicate nothing. Every rank trains its own copy; the strategy of a single process, too."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lmkit.parallel.protocol import Strategy, trainable_parameters
from lmkit.registry import STRATEGIES


@STRATEGIES.register("none", order=1, aliases=("Local No DDP",))
class NoSync(Strategy):
    """Leave gradients as they are. Parameters are not broadcast from rank 0 either."""

    def attach(self, model: nn.Module, *, fingerprint: str = "") -> nn.Module:
        self.parameters = trainable_parameters(model)
        return model

    def take_first_ranks(self, values: Iterable[torch.Tensor]) -> None:
        """Do nothing, as `attach`."""

    def finish(self, *, wait: bool = True) -> None:
        """Do nothing: gradients stay this rank's own."""
