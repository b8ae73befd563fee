"""Weights that are still being gathered are waited for where they are read, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lmkit.parallel.sharded_bucket import ShardedBucket


class LazyWeights:
    """Waits for a bucket in front of the first layer that reads it, so that gathering overlaps the forward pass.

    What does not go through a layer's call is covered too: the model's own parameters, and those of a layer that
    the last forward pass did not call (its weight read directly, by a fused loss, say), are waited for right after
    the step, with all that shares a bucket with them; without gradients
    (evaluation, generation), in `state_dict` and in `load_state_dict` everything is waited for.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[ShardedBucket]) -> None:
        self._buckets = buckets
        bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._needs: dict[nn.Module, list[ShardedBucket]] = {}
        in_layers: set[nn.Parameter] = set()
        for unit in forward_units(model):
            in_layers.update(unit.parameters())
            needed = {id(bucket_of[p]): bucket_of[p] for p in unit.parameters() if p in bucket_of}
            if needed:
                self._needs[unit] = list(needed.values())
                unit.register_forward_pre_hook(self._before_call)
        self._outside_layers = {id(bucket) for p, bucket in bucket_of.items() if p not in in_layers}
        self._called: set[nn.Module] = set()
        model.register_state_dict_pre_hook(lambda *_: self.wait_all())
        # Before loading, or what arrives later would overwrite what was loaded.
        model.register_load_state_dict_pre_hook(lambda *_: self.wait_all())
        model.register_load_state_dict_post_hook(lambda *_: self._take_loaded())

    def after_step(self) -> None:
        """Right after gathering was started: wait for what no layer's call will wait for."""
        now = set(self._outside_layers)
        for unit, needed in self._needs.items():
            if unit not in self._called:
                now.update(id(bucket) for bucket in needed)
        for bucket in self._buckets:
            if id(bucket) in now:
                bucket.wait_gathered()
        self._called.clear()

    def wait_all(self) -> None:
        """All weights are whole on return (on GPUs: for the current stream)."""
        for bucket in self._buckets:
            bucket.wait_gathered()

    @torch.compiler.disable  # a compiled layer runs this in front of its graph, not in it
    def _before_call(self, unit: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            self.wait_all()
            return
        self._called.add(unit)
        for bucket in self._needs[unit]:
            bucket.wait_gathered()

    @torch.no_grad()
    def _take_loaded(self) -> None:
        for bucket in self._buckets:
            bucket.take_weights()


def forward_units(model: nn.Module) -> Iterator[nn.Module]:
    """The layers in the order of registration: the model's children, and what its lists of layers hold."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from forward_units(child)
        else:
            yield child
