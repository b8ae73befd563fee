"""How ranks that own a shard each get their part of the others' gradients, and the weights that the others stepped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lmkit.parallel.reduction import Averager


class PendingShard(Protocol):
    """A mean under way."""

    def wait(self) -> list[torch.Tensor]:
        """On return (on GPUs: for the current stream) the one result is there, (n,): this rank's part of the mean."""

    def abandon(self) -> None:
        """Let it end; its result is not wanted."""


class Arrival(Protocol):
    def wait(self) -> object:
        """On return (on GPUs: for the current stream) the tensor is whole."""


class ShardExchange(Protocol):
    """Every rank calls every method for the same tensors, in the same order. All tensors are flat, of
    (world_size * n,) elements: equal parts, one a rank."""

    def weights(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed tensor that can be gathered."""

    def gradients(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """A zeroed tensor that is to hold a bucket's gradients in every step; None: any new one will do."""

    def start_mean(self, flat: torch.Tensor) -> PendingShard:
        """Start averaging this rank's part of `flat` over the ranks."""

    def start_gather(self, flats: Sequence[torch.Tensor]) -> list[Arrival]:
        """Start collecting the other ranks' parts of tensors made by `weights`, when this rank has written its own
        (on GPUs: launched that on the current stream)."""


class CollectiveExchange:
    """The backend's collectives: a reduce-scatter a bucket, an all-gather a tensor."""

    def __init__(self, averager: Averager) -> None:
        self._averager = averager

    def weights(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def gradients(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        return None

    def start_mean(self, flat: torch.Tensor) -> PendingShard:
        return self._averager.reduce_scatter(flat)

    def start_gather(self, flats: Sequence[torch.Tensor]) -> list[Arrival]:
        return [self._averager.all_gather(flat) for flat in flats]
