"""Trainings that take turns on a GPU that has no room for two of them: those that wait lie in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lmkit.measure.allocator import expand_segments
from lmkit.measure.memory import release_memory

if TYPE_CHECKING:
    from lmkit.training.setup import TrainingStep

SMALLEST = 4096
"""Bytes of a storage that is moved; smaller ones stay."""


class Parking:
    """Move what optimizers update and keep: parameters or their shards, and state.

    A training whose turn it is may be on the device beside the one before it, without activations. So host memory
    needs room for one training less than there are.

    Args:
        is_used: if false, all trainings stay on the device.
    """

    def __init__(self, device: torch.device, *, is_used: bool) -> None:
        self._device, self._is_used = device, is_used
        if is_used and device.type == "cuda":
            expand_segments()
        self._here: tuple[str, TrainingStep] | None = None
        self._away: dict[str, list[tuple[torch.UntypedStorage, torch.Tensor]]] = {}

    def park(self) -> None:
        """Move the training that is on the device to host memory."""
        if self._here is None:
            return
        name, training = self._here
        training.step.sync.end_step()  # collectives in flight write to what is moved
        moved = [(storage, self._in_host_memory(storage)) for storage in _storages(training)]
        self._wait()
        for storage, _ in moved:
            storage.resize_(0)
        self._away[name], self._here = moved, None

    def take(self, name: str, training: TrainingStep) -> None:
        """Let a training be the one on the device; nothing happens where it is already."""
        if not self._is_used or self._here == (name, training):
            return
        release_memory(self._device)
        for storage, copy in self._away.pop(name, ()):
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        self._wait()
        self.park()
        release_memory(self._device)
        self._here = name, training

    def _in_host_memory(self, storage: torch.UntypedStorage) -> torch.Tensor:
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return copy.copy_(_bytes_of(storage), non_blocking=True)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(training: TrainingStep) -> list[torch.UntypedStorage]:
    optimizer = training.optimizer
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    stay: set[int] = set()
    if training.step.sync.gather == "reads peers":  # other GPUs read the weights where they are
        stay = {parameter.untyped_storage().data_ptr() for parameter in training.model.parameters()}
    return list(
        {
            storage.data_ptr(): storage
            for storage in storages
            if storage.nbytes() >= SMALLEST and storage.data_ptr() not in stay
        }.values()
    )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
