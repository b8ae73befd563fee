"""Strategies without overlap: `none`, `naive`, `flat`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lmkit.core.buckets import fill_buckets
from lmkit.parallel.collectives import average_bucket, reduce_dtype_for, unused_everywhere
from lmkit.parallel.strategy import Strategy, trainable_parameters
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


@STRATEGIES.register("naive", order=2, aliases=("Naive DDP",))
class NaiveSync(Strategy):
    """After the backward pass, all-reduce every parameter's gradient, one after the other.

    It pays the latency of a collective once per parameter.
    """

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        for parameter in self.parameters:
            assert parameter.grad is not None
            self._averager.all_reduce([parameter.grad]).wait()
        return unused_everywhere(unused, len(self.parameters), self.ranks, self.traffic)


@STRATEGIES.register("flat", order=3, aliases=("naive bucketed",), uses=("reduce_dtype",), packs="all")
class FlatSync(Strategy):
    """After the backward pass, copy all gradients of a device and dtype into one tensor and all-reduce that.

    This needs memory for a second copy of the gradients.
    """

    def _reduce(self, unused: Sequence[int], *, wait: bool) -> Sequence[int]:
        pending = [
            average_bucket(
                bucket,
                self._averager,
                reduce_dtype_for(bucket[0].dtype, self.config.reduce_dtype),
                pack=True,
            )
            for bucket in fill_buckets(self.parameters, capacity=sys.maxsize)
        ]
        for mean in pending:
            mean.wait()
        return unused_everywhere(unused, len(self.parameters), self.ranks, self.traffic)
