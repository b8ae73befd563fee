"""What the strategies with a whole optimizer on every rank have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lmkit.optim.clipping import clip_for, gradient_norm
from lmkit.parallel.accumulation import Accumulates
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.reduction import Averager
from lmkit.parallel.replicas import broadcast_model, check_same_model, trainable_parameters
from lmkit.parallel.strategies import MakeOptimizer, SyncOptions
from lmkit.parallel.traffic import Traffic


class ReplicatedSync(Accumulates):
    """Base: start-up, accumulation, parameters without a gradient, clipping. Subclasses reduce.

    A parameter that was not used on this rank takes part with zeros; if it was used on no rank at all its
    `grad` is None again afterwards, as PyTorch's DDP leaves it.
    """

    def __init__(self, ranks: Ranks, options: SyncOptions) -> None:
        self.ranks = ranks
        self.options = options
        self.traffic = Traffic()
        self.parameters: list[nn.Parameter] = []
        self._optimizer: torch.optim.Optimizer | None = None

    def attach(self, model: nn.Module, *, fingerprint: str = "") -> nn.Module:
        self.parameters = trainable_parameters(model)
        if self.ranks.world_size > 1:
            check_same_model(model, self.ranks, fingerprint)
            broadcast_model(model)
            self._averager = Averager(self.ranks, self.traffic)
            self._install()
        return model

    def build_optimizer(self, make: MakeOptimizer, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        self._optimizer = make(list(groups))
        return self._optimizer

    @torch.no_grad()
    def finish(self, *, wait: bool = True) -> None:
        if self.ranks.world_size == 1:
            return
        unused = self._without_gradient()
        for index in unused:
            self.parameters[index].grad = torch.zeros_like(self.parameters[index])
        for index in self._reduce(unused, wait=wait):
            self.parameters[index].grad = None

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        norm = self._gradient_norm()
        clip_for(self._optimizer, present_gradients(self.parameters), norm, max_norm)
        return norm

    def _gradient_norm(self) -> torch.Tensor:
        return gradient_norm(present_gradients(self.parameters))

    def wait_for_weights(self) -> None:
        """Every rank steps all weights itself."""

    def reset(self) -> None:
        """Strategies without state between backward and `finish` have nothing to forget."""

    def _install(self) -> None:
        """Hook into the model, where a strategy needs to."""

    def _without_gradient(self) -> list[int]:
        """The numbers of the parameters that this rank has no gradient for."""
        return [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        """Make every parameter's `grad` (all present here) the mean over the ranks.

        Args:
            unused: the numbers of the parameters that this rank has only zeros for.
            wait: whether all of it must be done; otherwise what it leaves must be waited for in `clip_gradients` and
                in the optimizer's step.

        Returns:
            Those that no rank had a gradient for.
        """
        raise NotImplementedError


def present_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients that are there."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
