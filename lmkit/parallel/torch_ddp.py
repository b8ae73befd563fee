"""`torch_ddp`: PyTorch's DistributedDataParallel behind the same Protocol, as the rival."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lmkit.errors import UsageError
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.replicas import check_same_model
from lmkit.parallel.replicated import ReplicatedSync
from lmkit.parallel.strategies import SyncOptions
from lmkit.registry import STRATEGIES

# torch 2.13 renamed the option and warns about the old name. Our models' buffers are constants.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_TRAFFIC: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


@STRATEGIES.register(
    "torch_ddp", order=6, aliases=("pytorch", "Pytorch DDP"), uses=("bucket_mb", "wire_dtype"), rival=True
)
class TorchDDP(ReplicatedSync):
    """Heeds `bucket_mb` and `wire_dtype`.

    Args:
        view_gradients: DDP's gradient_as_bucket_view; static_graph and find_unused: DDP's options of that name.
    """

    def __init__(
        self,
        ranks: Ranks,
        options: SyncOptions,
        *,
        view_gradients: bool = True,
        static_graph: bool = False,
        find_unused: bool = False,
    ) -> None:
        super().__init__(ranks, options)
        self._view_gradients, self._static_graph, self._find_unused = (
            view_gradients,
            static_graph,
            find_unused,
        )
        self._ddp: DistributedDataParallel | None = None

    def attach(self, model: nn.Module, *, fingerprint: str = "") -> nn.Module:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.ranks.world_size == 1:
            return model
        check_same_model(model, self.ranks, fingerprint)
        if self.options.wire_dtype == "bf16" and "nccl" not in str(dist.get_backend_config()):
            raise UsageError(
                'parallel.wire_dtype: torch_ddp sends "bf16" through NCCL alone',
                hint='take "fp32", or the strategy bucketed',
            )
        # Blocks compiled one by one are smaller than a bucket: cutting their graphs at buckets gains nothing.
        torch._dynamo.config.optimize_ddp = False
        self._ddp = DistributedDataParallel(
            _Dispatch(model),
            device_ids=[self.ranks.device.index] if self.ranks.device.type == "cuda" else None,
            bucket_cap_mb=self.options.bucket_mb,
            **_NO_BUFFER_TRAFFIC,
            gradient_as_bucket_view=self._view_gradients,
            static_graph=self._static_graph,
            find_unused_parameters=self._find_unused,
        )
        if self.options.wire_dtype == "bf16":
            self._ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return _Synchronised(self._ddp)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync() if self._ddp is not None else nullcontext()

    def finish(self, *, wait: bool = True) -> None:
        """DDP has finished at the end of the backward pass; only count what its reducer did."""
        if self._ddp is None:
            return
        log = self._ddp._get_ddp_logging_data()
        sizes = log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes") or ""
        wire = 2 if self.options.wire_dtype == "bf16" else 4
        in_bytes = [int(size) * wire // 4 for size in str(sizes).split(",") if size.strip()]
        self.traffic.count_all_reduce(sum(in_bytes), self.ranks.world_size, calls=len(in_bytes))


class _Dispatch(nn.Module):
    """Lets DDP's forward reach any method of the model: only what runs inside it is synchronised."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, method)(*args, **kwargs)


class _Synchronised(nn.Module):
    """The model as the training step calls it: `model(ids)` and `model.loss(ids, targets)`."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__()
        self.ddp = ddp

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.ddp("__call__", *args, **kwargs)

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        return self.ddp("loss", *args, **kwargs)
