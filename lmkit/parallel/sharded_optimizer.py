"""The optimizer of `zero1`: any element-wise optimizer, made over this rank's shards, stepped in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lmkit.optim.adamw import AdamW
from lmkit.parallel.sharded_bucket import ShardedBucket, start_gather
from lmkit.parallel.strategies import MakeOptimizer
from lmkit.parallel.weight_gather import WeightGather
from lmkit.parallel.zero1_layout import ShardLayout, StateDict, consolidate, take_shards

STEP_PARTS = 4
"""The step is made in so many parts, so that gathering one part's weights overlaps the next part's arithmetic."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps this rank's shards of all buckets, then starts gathering the weights.

    `param_groups` are the given groups, one to one, with the shards in place of the parameters: a schedule sets
    "lr" there as usual. The optimizer must treat elements independently of one another (AdamW, SGD, Adam,
    RMSprop do; LAMB and Muon, which look at whole matrices, do not), and skip what has no gradient. Our AdamW also
    saves the passes around it: it reads gradients in the dtype in which they travelled, and writes weights beside
    their masters.

    Args:
        make: makes the optimizer from parameter groups.
        groups: the caller's groups; their "params" are replaced by the shards of the buckets.
        buckets: in the order in which the next forward pass needs them.
        gather: how the buckets' shards come together; None if this rank is alone.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        groups: Sequence[dict[str, Any]],
        buckets: Sequence[ShardedBucket],
        layout: ShardLayout,
        rank: int,
        gather: WeightGather | None,
    ) -> None:
        self.inner = make(
            [
                {**group, "params": [bucket.master for bucket in buckets if bucket.layout.group == number]}
                for number, group in enumerate(groups)
            ]
        )
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.state = self.inner.state
        self.layout = layout
        self._rank = rank
        self._gather_shards = gather
        self._writes_shards = isinstance(self.inner, AdamW)
        if isinstance(self.inner, AdamW):
            self.inner.copies = {bucket.master: bucket.shard for bucket in buckets if bucket.has_own_master}
            for bucket in buckets:
                bucket.leave_casts()
        self._in_layout_order = sorted(buckets, key=lambda bucket: layout.buckets.index(bucket.layout))
        self._parts = _split_evenly(buckets, STEP_PARTS)
        self.keep: list[tuple[ShardedBucket, slice]] = []
        """Elements that this step must leave alone: parameters that no rank used."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every shard and start gathering. Weights are whole again where the next forward pass reads them."""
        if closure is not None:
            raise ValueError("a sharded optimizer takes no closure: gradients are reduced once per step")
        kept = [
            (tensor, tensor.clone()) for bucket, where in self.keep for tensor in self._slices(bucket, where)
        ]
        known = {bucket: set(self.inner.state.get(bucket.master, ())) for bucket, _ in self.keep}
        arrived = {bucket: bucket.master.grad for bucket in self._in_layout_order}
        for bucket in arrived:
            bucket.master.grad = None
        # What the forward pass reads last was reduced first: stepping it covers the reduction of what came last.
        *earlier, last = self._parts
        for part in (last, *earlier):
            for bucket in part:
                bucket.master.grad = arrived[bucket]
                bucket.wait_reduced()
            self.inner.step()
            for bucket in part:
                bucket.master.grad = None
            if part is not last and not kept:
                self._gather(part, is_written=self._writes_shards)
        for tensor, before in kept:
            tensor.copy_(before)
        for bucket, where in self.keep:
            for key, value in self.inner.state[bucket.master].items():
                if key not in known[bucket] and _is_per_element(value):
                    value[where] = 0  # as state begins; decay may have moved it without a gradient
        for part in self._parts if kept else [last]:
            self._gather(part, is_written=self._writes_shards and not kept)
        self.keep = []

    def _gather(self, buckets: Sequence[ShardedBucket], *, is_written: bool) -> None:
        if not is_written:
            for bucket in buckets:
                bucket.write_shard()
        start_gather(buckets, self._gather_shards)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Release all gradients, of shards and of parameters."""
        self.inner.zero_grad()
        for bucket in self._in_layout_order:
            bucket.drop_reduced()
            for parameter in bucket.parameters:
                parameter.grad = None

    def state_dict(self) -> StateDict:
        """This rank's state: {"rank", "layout", "param_groups", "state": {bucket: {name: tensor}}}.

        Everything but the tensors is JSON. "master" is among the states where weights are bf16.
        """
        state: dict[str, dict[str, torch.Tensor]] = {}
        for index, bucket in enumerate(self._in_layout_order):
            state[str(index)] = dict(self.inner.state.get(bucket.master, {}))
            if bucket.has_own_master:
                state[str(index)]["master"] = bucket.master
        return {
            "rank": self._rank,
            "layout": self.layout.as_json(),
            "param_groups": [_without_params(group) for group in self.param_groups],
            "state": state,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take this rank's own state back. Load the model's weights before, not after.

        Raises:
            ValueError: it was saved by another rank or under another layout (see `load_resharded`).
        """
        if state_dict["rank"] != self._rank or ShardLayout.from_json(state_dict["layout"]) != self.layout:
            raise ValueError("the state has another layout or rank; load_resharded takes all ranks' states")
        self._load(state_dict["state"], state_dict["param_groups"])

    @torch.no_grad()
    def load_masters(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take the fp32 masters of bf16 weights from whole weights, by name: the model's own have been rounded.
        Load the model's weights before; state with masters in it may follow."""
        shards = take_shards(
            {name: {"master": weight} for name, weight in weights.items()}, self.layout, self._rank
        )
        for index, bucket in enumerate(self._in_layout_order):
            if bucket.has_own_master:
                bucket.master.copy_(shards[str(index)]["master"])

    @torch.no_grad()
    def load_resharded(self, states: Sequence[StateDict]) -> None:
        """Take what all ranks of a run with another world size or bucket size saved, cut for this run.

        Raises:
            ValueError: a rank's state is missing, or a parameter has none.
        """
        shards = take_shards(consolidate(states), self.layout, self._rank)
        self._load(shards, states[0]["param_groups"])

    def _load(self, state: dict[str, dict[str, torch.Tensor]], groups: Sequence[dict[str, Any]]) -> None:
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups, the optimizer {len(self.param_groups)}"
            )
        for index, bucket in enumerate(self._in_layout_order):
            saved = dict(state.get(str(index), {}))
            master = saved.pop("master", None)
            if master is not None:
                bucket.master.copy_(master)
                bucket.write_shard()
                start_gather([bucket], self._gather_shards)
                bucket.wait_gathered()
            if saved:
                self.inner.state[bucket.master] = {
                    key: value.clone() if value.ndim == 0 else value.to(bucket.master.device, copy=True)
                    for key, value in saved.items()
                }
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)

    def _slices(self, bucket: ShardedBucket, where: slice) -> list[torch.Tensor]:
        """The weights and states of some elements, as views."""
        states = self.inner.state.get(bucket.master, {}).values()
        return [tensor[where] for tensor in (bucket.master, *filter(_is_per_element, states))]


def _is_per_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 1


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _split_evenly(buckets: Sequence[ShardedBucket], parts: int) -> list[list[ShardedBucket]]:
    """Consecutive runs of about equal numbers of elements."""
    total = sum(bucket.layout.shard_size for bucket in buckets)
    runs: list[list[ShardedBucket]] = [[] for _ in range(parts)]
    before = 0
    for bucket in buckets:
        runs[min(parts - 1, before * parts // total)].append(bucket)
        before += bucket.layout.shard_size
    return [run for run in runs if run]
