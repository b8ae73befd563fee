"""`none`: every rank trains its own copy. What a step costs without communication; also the single process."""

from __future__ import annotations

from torch import nn

from lmkit.parallel.replicas import trainable_parameters
from lmkit.parallel.replicated import ReplicatedSync
from lmkit.registry import STRATEGIES


@STRATEGIES.register("none", order=1, aliases=("Local No DDP",))
class NoSync(ReplicatedSync):
    """Communicates nothing, not even rank 0's parameters. Heeds no options."""

    def attach(self, model: nn.Module, *, fingerprint: str = "") -> nn.Module:
        self.parameters = trainable_parameters(model)
        return model

    def finish(self, *, wait: bool = True) -> None:
        """Gradients stay this rank's own."""
