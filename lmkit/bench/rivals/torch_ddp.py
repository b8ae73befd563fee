"""`torch_ddp`: PyTorch's DistributedDataParallel with the interface of our strategies, for comparison."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lmkit.errors import UsageError
from lmkit.parallel.strategy import Strategy, check_same_model, trainable_parameters
from lmkit.registry import STRATEGIES

# torch 2.13 renamed the option and warns about the old name. The buffers of our models are constants.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_TRAFFIC: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


@STRATEGIES.register(
    "torch_ddp",
    order=6,
    aliases=("pytorch", "Pytorch DDP"),
    uses=("bucket_mb", "reduce_dtype"),
    options={"gradient_as_bucket_view": True, "static_graph": False, "find_unused_parameters": False},
    packs="all",
    rival=True,
)
class TorchDDP(Strategy):
    """Average gradients with DistributedDataParallel; the strategy's options are its options of the same names."""

    _ddp: DistributedDataParallel | None = None

    def attach(self, model: nn.Module, *, fingerprint: str = "") -> nn.Module:
        self.parameters = trainable_parameters(model)
        if self.ranks.world_size == 1:
            return model
        check_same_model(model, self.ranks, fingerprint)
        if self.config.reduce_dtype == "bf16" and "nccl" not in str(dist.get_backend_config()):
            message = 'parallel.reduce_dtype: torch_ddp reduces in "bf16" with NCCL only'
            hint = 'use "fp32", or the strategy bucketed'
            raise UsageError("parallel.reduce_dtype_needs_nccl", message, hint=hint)
        # A compiled block is smaller than a bucket, so splitting its graph at buckets gains nothing.
        torch._dynamo.config.optimize_ddp = False
        self._ddp = _Synchronised(
            _Dispatch(model),
            device_ids=[self.ranks.device.index] if self.ranks.device.type == "cuda" else None,
            bucket_cap_mb=self.config.bucket_mb,
            **_NO_BUFFER_TRAFFIC,
            **{**STRATEGIES.facts("torch_ddp").options, **self.config.options},  # type: ignore[arg-type]
        )
        # Otherwise the reducer may be the last owner of the group. Its destructor would join gloo's threads while it
        # holds the interpreter's lock, and such a thread may wait for that lock to drop a tensor.
        for holder in (self._ddp.reducer, self._ddp.logger):
            weakref.finalize(holder, lambda group: None, dist.group.WORLD).atexit = False
        if self.config.reduce_dtype == "bf16":
            self._ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return self._ddp

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync(), nullcontext() if self._ddp is None else self._ddp.no_sync():
            yield

    def finish(self, *, wait: bool = True) -> None:
        """Count what DDP's reducer communicated: it has finished at the end of the backward pass."""
        if self._ddp is None:
            return
        log = self._ddp._get_ddp_logging_data()
        sizes = log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes") or ""
        itemsize = 2 if self.config.reduce_dtype == "bf16" else 4
        in_bytes = [int(size) * itemsize // 4 for size in str(sizes).split(",") if size.strip()]
        self.traffic.count(sum(in_bytes), self.ranks.world_size, passes=2, calls=len(in_bytes))


class _Dispatch(nn.Module):
    """Call any method of the model inside DDP's forward: DDP synchronises only what runs there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
        return getattr(self.model, method)(*args, **kwargs)


class _Synchronised(DistributedDataParallel):
    """The model as the training step calls it: `model(ids)` and `model.loss(ids, targets)`."""

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, method="loss", **kwargs)
