"""ZeRO-1 optimizers: any element-wise optimizer, made over this rank's shards and stepped in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lmkit.core.buckets import MIB
from lmkit.optim.adamw import AdamW
from lmkit.parallel.collectives import Averager, Traffic
from lmkit.parallel.gather import WeightGather
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.strategy import MakeOptimizer
from lmkit.parallel.zero1_shards import (
    ShardedBucket,
    ShardLayout,
    StateDict,
    consolidate,
    plan_shards,
    start_gather,
    state_for,
    take_shards,
)

STEP_PARTS = 2
"""Parts of a step: gathering the weights of one part overlaps the arithmetic of the next. Each part costs the GPU
several small kernels."""


class Zero1Optimizer(torch.optim.Optimizer):
    """Update this rank's shards of all buckets, then start gathering the weights (Rajbhandari et al. 2020, P_os).

    `param_groups` are the given groups, one to one, with shards in place of the parameters: a schedule sets "lr"
    there as usual. The optimizer must update every element from its own gradient and state alone (AdamW, SGD, Adam
    and RMSprop do; LAMB, which looks at whole matrices, does not) or take `shards` as our Muon does, and skip
    parameters without a gradient. Our AdamW reads gradients in the dtype in which they were reduced, and writes
    weights and master weights together.

    Args:
        make: makes the optimizer from parameter groups.
        groups: the caller's groups; their "params" are replaced by the shards of the buckets.
        buckets: in the order in which their gradients are reduced.
        gather: collects the shards; None if this rank is alone.

    Attributes:
        shard_layout: which elements of which parameters this rank and the others hold.
        inner: the optimizer of the shards.
        keep: elements that the next step must not change: those of parameters that no rank used.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        groups: Sequence[dict[str, Any]],
        buckets: Sequence[ShardedBucket],
        ranks: Ranks,
        gather: WeightGather | None,
    ) -> None:
        self.inner = make(
            [
                {
                    **_without_parts(group),
                    "params": [b.master for b in buckets[::-1] if b.layout.group == index],
                }
                for index, group in enumerate(groups)
            ]
        )
        parts = parts_of_maps(groups)
        if parts:
            self.inner.shards = [b.matrices(parts) for b in buckets if b.parameters[0] in parts]  # type: ignore[attr-defined]
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.state = self.inner.state
        self.keep: list[tuple[ShardedBucket, slice]] = []
        self._ranks = ranks
        self._gather_shards = gather
        self._buckets: list[ShardedBucket] = []
        self._own(buckets)

    def _own(self, buckets: Sequence[ShardedBucket]) -> None:
        """Add buckets to those that this optimizer steps."""
        self._buckets += buckets
        self.shard_layout = ShardLayout(self._ranks.world_size, tuple(b.layout for b in self._buckets))
        self._parts = _split_evenly(self._buckets[::-1], STEP_PARTS)  # in the order of the next forward pass
        if isinstance(self.inner, AdamW) and self.inner.writes_copies:
            self.inner.copies = {b.master: b.shard for b in self._buckets if b.has_own_master}
            for bucket in buckets:
                bucket.keep_reduce_dtype()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every shard and start gathering the weights. `LazyWeights` waits before a layer reads them."""
        if closure is not None:
            raise ValueError("a sharded optimizer takes no closure: gradients are reduced once per step")
        self._step_shards()

    def _step_shards(self) -> None:
        known = {bucket: self.inner.state.get(bucket.master, {}).copy() for bucket, _ in self.keep}
        kept = [
            (tensor[where], tensor[where].clone())
            for bucket, where in self.keep
            for tensor in (bucket.master, *filter(_is_per_element, known[bucket].values()))
        ]
        arrived = {bucket: bucket.master.grad for bucket in self._buckets}
        for bucket in arrived:
            bucket.master.grad = None
        for part in self._parts:
            for bucket in part:
                bucket.master.grad = arrived[bucket]
                bucket.wait_reduced()
            self.inner.step()
            for bucket in part:
                bucket.master.grad = None
            if not self.keep:
                self._gather(part)
        for tensor, before in kept:
            tensor.copy_(before)
        for bucket, where in self.keep:
            for key, value in self.inner.state[bucket.master].items():
                if key not in known[bucket] and _is_per_element(value):
                    value[where] = 0  # initial state; decay may have changed it without a gradient
        for part in self._parts if self.keep else ():
            self._gather(part)
        self.keep = []

    def _gather(self, buckets: Sequence[ShardedBucket]) -> None:
        if self.keep or not getattr(self.inner, "writes_copies", False):  # our AdamW has written the shards
            for bucket in buckets:
                bucket.write_shard()
        start_gather(buckets, self._gather_shards)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Release all gradients, of shards and of parameters."""
        self.inner.zero_grad()
        for bucket in self._buckets:
            bucket.drop_reduced()
            for parameter in bucket.parameters:
                parameter.grad = None

    def state_dict(self) -> StateDict:
        """Return this rank's state: {"rank", "layout", "param_groups", "state": {bucket: {name: tensor}}}.

        Everything but the tensors is JSON. "master" is among the states where weights are bf16.
        """
        state: dict[str, dict[str, torch.Tensor]] = {}
        for index, bucket in enumerate(self._buckets):
            state[str(index)] = dict(self.inner.state.get(bucket.master, {}))
            if bucket.has_own_master:
                state[str(index)]["master"] = bucket.master
        return {
            "rank": self._ranks.rank,
            "layout": self.shard_layout.as_json(),
            "param_groups": [_without_params(group) for group in self.param_groups],
            "state": state,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load this rank's own state. Load the model's weights before, not after.

        Raises:
            ValueError: it was saved by another rank or under another layout (see `load_resharded`).
        """
        self.shard_layout.require_own(state_dict, self._ranks.rank)
        self._load(state_dict["state"], state_dict["param_groups"])

    @torch.no_grad()
    def load_masters(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load the fp32 masters of bf16 weights from whole weights by name. Load the model's weights before."""
        shards = take_shards(
            {name: {"master": weight} for name, weight in weights.items()},
            self.shard_layout,
            self._ranks.rank,
        )
        for index, bucket in enumerate(self._buckets):
            if bucket.has_own_master:
                bucket.master.copy_(shards[str(index)]["master"])

    @torch.no_grad()
    def load_resharded(self, states: Sequence[StateDict]) -> None:
        """Load the state that all ranks of a run saved, whatever its world size and bucket size.

        Raises:
            ValueError: a rank's state is missing, or a parameter has none.
        """
        shards = take_shards(consolidate(states), self.shard_layout, self._ranks.rank)
        self._load(shards, states[0]["param_groups"])

    def _load(self, state: dict[str, dict[str, torch.Tensor]], groups: Sequence[dict[str, Any]]) -> None:
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups, the optimizer {len(self.param_groups)}"
            )
        for index, bucket in enumerate(self._buckets):
            saved = dict(state.get(str(index), {}))
            master = saved.pop("master", None)
            if master is not None:
                bucket.master.copy_(master)
                bucket.write_shard()
                start_gather([bucket], self._gather_shards)
                bucket.wait_gathered()
            if saved:
                self.inner.state[bucket.master] = {
                    key: state_for(bucket.master, value) for key, value in saved.items()
                }
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)


class ShardedOptimizer(Zero1Optimizer):
    """Shard the state of any element-wise optimizer over the ranks of the existing process group.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        loss.backward()        # the gradients must be averaged: with `DataParallel`, or PyTorch's DDP
        optimizer.step()       # afterwards every rank has all updated parameters

    The parameters move into flat buckets (`parameter.data` becomes a view), so create it after the model is on its
    device. Each rank updates 1/W of all elements and gathers the others. Frozen parameters, and parameters without a
    gradient, keep their values. A bucket's parameters share one step counter, so the bias correction of a parameter
    also counts steps that did not use it.

    Args:
        params: parameters or parameter groups.
        optimizer_class: a class of `torch.optim`, or `lmkit.optim.AdamW`.
        options: its keyword arguments.

    Raises:
        ValueError: a parameter is in two groups, or the optimizer looks at whole matrices.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        if (name := getattr(optimizer_class, "__name__", "")) in _NOT_ELEMENTWISE:
            raise ValueError(f"{name} does not update every element by itself: it cannot step shards")
        self._ranks = Ranks.current()
        self._given: list[dict[str, Any]] = []
        self._is_built = False
        alone = self._ranks.world_size == 1
        gather = None if alone else WeightGather(Averager(self._ranks, Traffic()))
        listed = list(params)
        is_one_group = not listed or isinstance(listed[0], torch.Tensor)
        groups: list[dict[str, Any]] = [{"params": listed}] if is_one_group else listed
        buckets = [bucket for group in groups for bucket in self._shard(group, gather)]
        super().__init__(
            lambda shards: optimizer_class(shards, **options), self._given, buckets, self._ranks, gather
        )
        self.param_groups = [
            {**inner, "params": given["params"]}
            for inner, given in zip(self.inner.param_groups, self._given, strict=True)
        ]
        self._is_built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard the parameters of another group, too."""
        if not self._is_built:  # torch.optim.Optimizer's constructor calls it
            super().add_param_group(param_group)
            return
        buckets = self._shard(param_group, self._gather_shards)
        self.inner.add_param_group({**param_group, "params": [bucket.master for bucket in buckets]})
        self.param_groups.append({**self.inner.param_groups[-1], "params": self._given[-1]["params"]})
        self._own(buckets)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, on all ranks. Gradients must be equal on all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for mine, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_without_params(mine))  # a schedule may have set "lr"
        for bucket in self._buckets:
            missing = [index for index, p in enumerate(bucket.parameters) if p.grad is None]
            if len(missing) < len(bucket.parameters):
                bucket.take_own_gradients()
                self.keep += [(bucket, bucket.shard_slice(index)) for index in missing]
        self._step_shards()
        for bucket in self._buckets:
            bucket.wait_gathered()
        return loss

    @torch.no_grad()
    def _shard(self, group: dict[str, Any], gather: WeightGather | None) -> list[ShardedBucket]:
        """Move a group's parameters into buckets; remember the group."""
        given = group["params"]
        parameters = [given] if isinstance(given, nn.Parameter) else list(dict.fromkeys(given))
        known = {parameter for other in self._given for parameter in other["params"]}
        if known & set(parameters):
            raise ValueError("a parameter is in more than one parameter group")
        number = len(self._given)
        self._given.append({**group, "params": parameters})
        names = {p: {f"{number}.{index}": p.shape} for index, p in enumerate(parameters)}
        planned = plan_shards(
            [parameters], names, capacity=_BUCKET_BYTES, weights="fp32", world_size=self._ranks.world_size
        )
        return [
            ShardedBucket(
                parameters,
                replace(layout, group=number),
                self._ranks,
                None,
                gather,
                weight_dtype=parameters[0].dtype,
                reduce_dtype=parameters[0].dtype,
            )
            for parameters, layout in planned
        ]


_BUCKET_BYTES = 50 * MIB
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


def _is_per_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 1


def parts_of_maps(groups: Sequence[dict[str, Any]]) -> dict[nn.Parameter, Sequence[int]]:
    """Return parameter -> rows of its linear maps, from the key "parts" of the groups."""
    pairs = (zip(group["params"], group.get("parts", ()), strict=False) for group in groups)
    return {parameter: rows for pair in pairs for parameter, rows in pair if rows}


def _without_parts(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "parts"}


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _split_evenly(buckets: Sequence[ShardedBucket], parts: int) -> list[list[ShardedBucket]]:
    """Split into consecutive runs with about equal numbers of elements."""
    total = sum(bucket.layout.shard_size for bucket in buckets)
    runs: list[list[ShardedBucket]] = [[] for _ in range(parts)]
    before = 0
    for bucket in buckets:
        runs[min(parts - 1, before * parts // total)].append(bucket)
        before += bucket.layout.shard_size
    return [run for run in runs if run]
