"""Optimizers of shards: any element-wise optimizer, made over this rank's pieces of flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import (
    BucketLayout,
    FlatShards,
    Piece,
    ShardLayout,
    StateDict,
    consolidate,
    cut_state,
    state_for,
)
from lmkit.parallel.strategy import MakeOptimizer


class ShardedState(torch.optim.Optimizer):
    """An optimizer of which every rank keeps and updates a part.

    `param_groups` are the given groups, one to one, with pieces of shards in place of the parameters: a schedule sets
    "lr" there as usual. The optimizer must update every element from its own gradient and state alone (AdamW, SGD,
    Adam and RMSprop do; LAMB, which looks at whole matrices, does not) or take `shards` as our Muon does, and skip
    parameters without a gradient.

    Args:
        make: makes the optimizer from parameter groups.
        groups: the caller's groups.
        spread: called when shards have changed; lets all ranks see them. Collective.

    Attributes:
        shard_layout: which elements of which parameters the ranks hold; every piece is a bucket.
        inner: the optimizer of the pieces.
    """

    def __init__(
        self,
        make: MakeOptimizer,
        groups: Iterable[dict[str, Any]],
        flats: Sequence[FlatShards],
        ranks: Ranks,
        spread: Callable[[], None],
    ) -> None:
        self._ranks = ranks
        self._spread = spread
        self._flats: list[FlatShards] = []
        self._pieces: list[Piece] = []
        self._buckets: tuple[BucketLayout, ...] = ()
        given = [{**group, "params": list(group["params"])} for group in groups]
        matrices = _matrices(given)
        group_of = {parameter: index for index, group in enumerate(given) for parameter in group["params"]}
        parts: list[list[torch.Tensor]] = [[] for _ in given]
        for piece in (piece for flat in flats for piece in flat.held()):
            if piece.parameters[0] in group_of:
                parts[group_of[piece.parameters[0]]].append(piece.part)
        kind = {"is_matrix": False} if matrices else {}  # `shards` name the matrices: a part holds several
        self.inner = make(
            [{**_settings(group), **kind, "params": held} for group, held in zip(given, parts, strict=True)]
        )
        if matrices:
            reached = [flat for flat in flats if flat.pieces and not matrices.isdisjoint(flat.parameters)]
            self.inner.shards = [flat.matrices(matrices) for flat in reached]  # type: ignore[attr-defined]
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.state = self.inner.state
        self._own(flats, group_of)

    def _own(self, flats: Sequence[FlatShards], group_of: Mapping[nn.Parameter, int]) -> None:
        """Add flat tensors to those that this optimizer steps."""
        pieces = [(flat, piece) for flat in flats for piece in flat.pieces]
        self._flats += flats
        self._pieces += [piece for _, piece in pieces]
        self._buckets += tuple(
            BucketLayout(
                group_of.get(piece.parameters[0], 0),
                tuple(piece.names),
                tuple(parameter.numel() for parameter in piece.parameters),
                flat.shard_size,
            )
            for flat, piece in pieces
        )
        self.shard_layout = ShardLayout(self._ranks.world_size, self._buckets)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update this rank's shards; other ranks see the result in their weights."""
        if closure is not None:
            raise ValueError("a sharded optimizer takes no closure: gradients are reduced once per step")
        self._step()

    def _step(self) -> None:
        self.inner.step()
        self._spread()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Release all gradients, of shards and of parameters."""
        self.inner.zero_grad()
        for flat in self._flats:
            flat.drop_reduced()
            for parameter in flat.parameters:
                parameter.grad = None

    def state_dict(self) -> StateDict:
        """Return this rank's state: {"rank", "layout", "param_groups", "state": {bucket: {name: tensor}}}.

        Everything but the tensors is JSON. "master" is among the states where weights are bf16. Buckets of which this
        rank has no element, or no state, are left out.
        """
        state: dict[str, dict[str, torch.Tensor]] = {}
        for flat in self._flats:
            for piece in flat.pieces:
                held = dict(self.inner.state.get(piece.part, {})) if piece.part.numel() else {}
                if flat.saves_masters:
                    held["master"] = piece.part
                state[str(len(state))] = held
        return {
            "rank": self._ranks.rank,
            "layout": self.shard_layout.as_json(),
            "param_groups": [_settings(group) for group in self.param_groups],
            "state": {number: held for number, held in state.items() if held},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load this rank's own state. Load the model's weights before, not after. Collective.

        Raises:
            ValueError: it was saved by another rank or under another layout (see `load_resharded`).
        """
        self.shard_layout.require_own(state_dict, self._ranks.rank)
        states = [state_dict["state"].get(str(number), {}) for number in range(len(self._pieces))]
        self._load(states, state_dict["param_groups"])

    @torch.no_grad()
    def load_resharded(self, states: Sequence[StateDict]) -> None:
        """Load the state that all ranks of a run saved, whatever its strategy, ranks and buckets. Collective.

        Raises:
            ValueError: a rank's state is missing, or a parameter, or a part of one, has none.
        """
        whole = consolidate(states)
        cut = [cut_state(whole, tuple(piece.names), piece.own) for piece in self._pieces]
        self._load(cut, states[0]["param_groups"])

    @torch.no_grad()
    def load_masters(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load the exact shards of rounded weights from whole weights by name. Load the model's weights before."""
        for flat in self._flats:
            flat.take_own(weights)
        self._spread()

    def _load(self, states: Sequence[Mapping[str, torch.Tensor]], groups: Sequence[dict[str, Any]]) -> None:
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups, the optimizer {len(self.param_groups)}"
            )
        for number, (piece, given) in enumerate(zip(self._pieces, states, strict=True)):
            saved = dict(given) if piece.part.numel() else {}
            for key, value in saved.items():
                if value.ndim and value.numel() != piece.part.numel():
                    raise ValueError(f"{key} of bucket {number} has not {piece.part.numel()} elements")
            if (master := saved.pop("master", None)) is not None:
                piece.part.copy_(master)
            if saved:
                self.inner.state[piece.part] = {
                    key: state_for(piece.part, value) for key, value in saved.items()
                }
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        if any("master" in state for state in states):
            self._spread()


def _matrices(groups: Sequence[dict[str, Any]]) -> set[nn.Parameter]:
    return {p for group in groups if group.get("is_matrix") for p in group["params"]}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "is_matrix")}
