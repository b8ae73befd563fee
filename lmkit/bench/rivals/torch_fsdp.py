"""`torch_fsdp`: PyTorch's FSDP2 with the interface of our strategies, for comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lmkit.core.step import clip_for, gradient_norm
from lmkit.errors import UsageError
from lmkit.model.transformer import TransformerLM
from lmkit.parallel import strategy
from lmkit.parallel.fsdp import draw, leave_meta
from lmkit.registry import STRATEGIES


@STRATEGIES.register(
    "torch_fsdp",
    order=9,
    uses=("weights",),
    shards=("parameters", "gradients", "optimizer"),
    options={"reshard_after_forward": True, "state_dtype": "fp32"},
    rival=True,
)
class TorchFsdp(strategy.Strategy):
    """Shard each layer with `fully_shard`; the strategy's options mean what those of `fsdp` do.

    The optimizer updates the local parts of its DTensors. Checkpoints are not supported. Traffic is not counted.
    """

    def attach(self, model: nn.Module, *, fingerprint: str = "") -> nn.Module:
        if self.ranks.world_size == 1:
            self.parameters = strategy.trainable_parameters(model)
            return model
        strategy.check_same_model(model, self.ranks, fingerprint)
        if any(parameter.is_meta for parameter in model.parameters()):
            leave_meta(model, self.ranks.device)
            for parameter in model.parameters():
                parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
            draw(model)
        if self.config.options.get("state_dtype") == "bf16":
            for parameter in model.parameters():
                parameter.data = parameter.detach().bfloat16()
        strategy.broadcast_tensors((*model.named_parameters(), *model.named_buffers()))
        keys: dict[str, Any] = {
            "mesh": init_device_mesh(self.ranks.device.type, (self.ranks.world_size,)),
            "reshard_after_forward": self.config.options.get("reshard_after_forward", True),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16 if self.config.weights == "bf16" else None),
        }
        layers = list(strategy.forward_units(model))
        owners = Counter(parameter for layer in layers for parameter in layer.parameters())
        for layer in layers:
            # The model's own group holds weights that layers share, and norms, which are too small for a group.
            of_layer = list(layer.parameters())
            if all(owners[p] == 1 for p in of_layer) and any(p.dim() >= 2 for p in of_layer):
                fully_shard(layer, **keys)
        if isinstance(model, TransformerLM):
            model.layers.sums = True  # the inputs of a sharded layer are views, which may not be written to
        fully_shard(model, **keys)
        if hasattr(model, "loss"):
            register_fsdp_forward_method(model, "loss")
        model.register_state_dict_post_hook(_refuse)
        self.parameters = strategy.trainable_parameters(model)
        return model

    def build_optimizer(
        self, make: strategy.MakeOptimizer, groups: Iterable[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        if self.ranks.world_size == 1:
            return super().build_optimizer(make, groups)
        self._local = {
            parameter: cast(DTensor, parameter).to_local().detach() for parameter in self.parameters
        }
        local = [{**group, "params": [self._local[p] for p in group["params"]]} for group in groups]
        return super().build_optimizer(make, local)

    @torch.no_grad()
    def finish(self, *, wait: bool = True) -> None:
        """Hand the averaged gradients to the optimizer."""
        for parameter in self.parameters if self.ranks.world_size > 1 else ():
            if parameter.grad is not None:
                self._local[parameter].grad = cast(DTensor, parameter.grad).to_local()
                parameter.grad = None

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        if self.ranks.world_size == 1:
            return super().clip_gradients(max_norm)
        gradients = strategy.present_gradients(self._local.values())
        square = gradient_norm(gradients).to(self.ranks.device).square()
        dist.all_reduce(square)
        norm = square.sqrt()
        clip_for(self._optimizer, gradients, norm, max_norm)
        return norm


def _refuse(*_: object) -> None:
    message = 'parallel.strategy: "torch_fsdp" is for benches, and saves no checkpoints'
    raise UsageError("parallel.rival_saves_nothing", message, hint='use "fsdp"')
