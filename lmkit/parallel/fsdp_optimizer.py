"""The optimizer of `fsdp`: any element-wise optimizer, made over this rank's elements of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lmkit.parallel.fsdp_shards import FlatParameters
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.strategy import MakeOptimizer
from lmkit.parallel.zero1_optimizer import parts_of_maps
from lmkit.parallel.zero1_shards import ShardLayout, StateDict, consolidate, state_for


class FsdpOptimizer(torch.optim.Optimizer):
    """Update this rank's elements of the parameters; gathered weights are stale afterwards.

    `param_groups` are the given groups, one to one, with slices in place of the parameters. The optimizer must update
    every element from its own gradient and state alone (AdamW and SGD do) or take `shards` as our Muon does, and skip
    parameters without a gradient.

    Args:
        make: makes the optimizer from parameter groups.
        groups: the caller's groups.
        after_change: called when the slices have changed.

    Attributes:
        shard_layout: which elements each rank holds; every parameter is a bucket of its own.
        inner: the optimizer of the slices.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        groups: Sequence[dict[str, Any]],
        flats: Sequence[FlatParameters],
        ranks: Ranks,
        after_change: Callable[[], None],
    ) -> None:
        self._ranks = ranks
        self._flats = flats
        self._after_change = after_change
        slices = {p: part for flat in flats for p, part in flat.slices.items()}
        given = [{**group, "params": list(group["params"])} for group in groups]
        parts = parts_of_maps(given)
        for group in given:
            group.pop("parts", None)
        self.inner = make(
            [{**group, "params": [slices[p] for p in group["params"] if p in slices]} for group in given]
        )
        if parts:
            reached = [flat for flat in flats if flat.trains and any(p in parts for p in flat.parameters)]
            self.inner.shards = [flat.matrices(parts) for flat in reached]  # type: ignore[attr-defined]
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.state = self.inner.state
        group_of = {p: index for index, group in enumerate(given) for p in group["params"]}
        layouts = {p: layout for flat in flats if flat.trains for p, layout in flat.layouts(group_of).items()}
        self.shard_layout = ShardLayout(ranks.world_size, tuple(layouts.values()))
        self._slices: list[nn.Parameter | None] = [slices.get(parameter) for parameter in layouts]
        self._parts = {
            parameter: flat.own_part(position)[1]
            for flat in flats
            for position, parameter in enumerate(flat.parameters)
        }
        self._wholes = list(layouts)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update this rank's elements."""
        if closure is not None:
            raise ValueError("a sharded optimizer takes no closure: gradients are reduced once per step")
        self.inner.step()
        self._after_change()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Release all gradients, of slices and of parameters."""
        self.inner.zero_grad()
        for flat in self._flats:
            flat.drop_gradients()

    def state_dict(self) -> StateDict:
        """Return this rank's state: {"rank", "layout", "param_groups", "state": {parameter: {name: tensor}}}.

        Parameters are numbered as in the layout. Parameters without an element on this rank are left out. Everything
        but the tensors is JSON.
        """
        return {
            "rank": self._ranks.rank,
            "layout": self.shard_layout.as_json(),
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
            "state": {
                str(number): dict(self.inner.state[part])
                for number, part in enumerate(self._slices)
                if part is not None and part in self.inner.state
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load this rank's own state. Load the model's weights before, not after.

        Raises:
            ValueError: it was saved by another rank or under another layout (see `load_resharded`).
        """
        self.shard_layout.require_own(state_dict, self._ranks.rank)
        for number, part in enumerate(self._slices):
            saved = state_dict["state"].get(str(number), {})
            if part is None or not saved:
                continue
            wrong = [key for key, value in saved.items() if value.ndim and value.numel() != part.numel()]
            if wrong:
                raise ValueError(f"{wrong[0]} of bucket {number} has not {part.numel()} elements")
            self.inner.state[part] = {key: state_for(part, value) for key, value in saved.items()}
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(loaded)

    @torch.no_grad()
    def load_masters(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's elements from whole weights by name. Load the model's (rounded) weights before."""
        for flat in self._flats:
            flat.take_own(weights)
        self._after_change()

    @torch.no_grad()
    def load_resharded(self, states: Sequence[StateDict]) -> None:
        """Load the state that all ranks of a run saved, whatever its strategy and world size.

        Raises:
            ValueError: a rank's state is missing, or a part of a parameter has none.
        """
        whole = consolidate(states)
        for number, layout in enumerate(self.shard_layout.buckets):
            part, where = self._slices[number], self._parts[self._wholes[number]]
            saved = [whole.get(name, {}) for name in layout.names]
            if any(state.keys() != saved[0].keys() for state in saved):
                raise ValueError(f"no optimizer state for a part of {', '.join(layout.names)}")
            if part is None or not saved[0]:
                continue
            joined = {
                key: value
                if value.ndim == 0
                else torch.cat([state[key].reshape(-1) for state in saved])[where]
                for key, value in saved[0].items()
            }
            if (master := joined.pop("master", None)) is not None:
                part.copy_(master)
            self.inner.state[part] = {key: state_for(part, value) for key, value in joined.items()}
        for group, loaded in zip(self.param_groups, states[0]["param_groups"], strict=True):
            group.update(loaded)
        self._after_change()
