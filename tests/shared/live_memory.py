"""Count the bytes of tensors that are alive, whoever holds them: what a CUDA allocator would count, on a CPU."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Within the block, count storages with memory that operations make. What lies inside an operation is not seen.

    Attributes:
        peak: the most that was alive after any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = function(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in given and storage._cdata not in self._storages:
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    @property
    def live(self) -> int:
        """Bytes that are alive now."""
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        return sum(size for _, size in self._storages.values())


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]
