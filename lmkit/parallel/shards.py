"""Flat shards, for `zero1` and `fsdp`: parameters in flat tensors, of which every rank keeps one part.

A flat tensor holds its parameters one after the other, padded to a multiple of the world size. Rank r keeps gradients
and optimizer state of the elements [r * shard_size, (r + 1) * shard_size). A shard may begin inside a parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._utils import _unflatten_dense_tensors

from lmkit.core.adamw import AdamW
from lmkit.core.buckets import PendingMean, Work
from lmkit.optim.muon import MatrixShard
from lmkit.parallel.gather import Links
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.strategy import MakeOptimizer

SHARD_ALIGNMENT = 128
"""Elements. Every rank's part starts at a multiple, as vectorised kernels and NCCL prefer."""

StateDict = dict[str, Any]
ParameterStates = dict[str, dict[str, torch.Tensor]]
"""parameter name -> name of the state ("exp_avg", "master", ...) -> flat tensor of the whole parameter, or scalar."""


# Layout: which elements lie where. It is JSON: {"world_size", "buckets": [{"names", "sizes", "shard_size"}, ...]}.


def shard_size_of(num_elements: int, world_size: int) -> int:
    """Return the elements per rank: an equal share, rounded up to `SHARD_ALIGNMENT`."""
    unit = world_size * SHARD_ALIGNMENT
    return -(-num_elements // unit) * SHARD_ALIGNMENT


def consolidate(states: Sequence[StateDict]) -> ParameterStates:
    """Join the state dicts of all ranks, in order, into whole tensors per parameter. Raise a ValueError if one is
    missing, doubled, or of another layout."""
    layout = states[0]["layout"]
    found = [state["rank"] for state in states]
    if found != list(range(layout["world_size"])):
        raise ValueError(f"need the state of ranks 0 to {layout['world_size'] - 1} in order, got {found}")
    if any(state["layout"] != layout for state in states):
        raise ValueError("the ranks' states have different layouts: they are not of one checkpoint")
    whole: ParameterStates = {name: {} for bucket in layout["buckets"] for name in bucket["names"]}
    for index, bucket in enumerate(layout["buckets"]):
        held = [state["state"].get(str(index), {}) for state in states]
        for key in dict.fromkeys(key for state in held for key in state):
            values = [state[key] for state in held if key in state]
            if values[0].ndim == 0:  # a step counter: equal for all elements of the bucket
                parts: Sequence[torch.Tensor] = [values[0]] * len(bucket["names"])
            else:
                parts = torch.cat(values)[: sum(bucket["sizes"])].split(bucket["sizes"])
            for name, part in zip(bucket["names"], parts, strict=True):
                whole[name][key] = part
    return whole


# Memory: the parameters of one flat tensor, this rank's shard of them, and its collectives.


class Piece(NamedTuple):
    """This rank's elements of a parameter: one parameter of the optimizer, and one bucket of checkpoints.

    Attributes:
        name: as `parameter_names` returns it.
        part: this rank's elements, flat; it may have none.
        in_shard: their place in this rank's shard.
        own: their place in the flattened parameter.
    """

    parameter: nn.Parameter
    name: str
    part: nn.Parameter
    in_shard: slice
    own: slice


class FlatShards:
    """Parameters of one dtype and device that share a flat tensor. Subclasses say what becomes of whole weights.

    Args:
        names: every parameter's name in checkpoints.
        links: how this rank communicates with those that share its copy of the model.
        weight_dtype: of whole weights; None: the parameters'.
        state_dtype: of the shard, its gradient and so of the optimizer's state; None: the parameters'.
        reduce_dtype: in which gradients are reduced; None: `weight_dtype`.

    Attributes:
        shard: this rank's elements as the optimizer updates them, (shard_size,).
        pieces: the parts of `shard`, one for each parameter.
        offsets: where each parameter begins in the flat tensor, and where the last one ends.
        gradient: mean gradient of the shard over the ranks, (shard_size,), or None.
        gives_empty: whether pieces without elements get gradients, too.
        saves_masters: whether `shard` is a part of the optimizer's state, because the weights are its rounding.
        size: elements of the flat tensor, world_size * shard_size.
    """

    shard: torch.Tensor
    saves_masters = False
    gives_empty = False
    _copies_mean = True  # so that the flat tensor of all ranks' gradients is released

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Mapping[nn.Parameter, str],
        links: Links,
        *,
        weight_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.names = [names[parameter] for parameter in parameters]
        self.links = links
        self.pieces: list[Piece] = []
        self.gradient: torch.Tensor | None = None
        self._given_dtype, self._device = parameters[0].dtype, parameters[0].device
        self._weight_dtype = weight_dtype or self._given_dtype
        self._reduce_dtype = reduce_dtype or self._weight_dtype
        self.gradient_dtype = state_dtype or self._given_dtype
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self.offsets = list(itertools.accumulate(self._sizes, initial=0))
        self.shard_size = shard_size_of(sum(self._sizes), links.ranks.world_size)
        self.size = self.shard_size * links.ranks.world_size
        self._arriving: Work | None = None
        self._pending: PendingMean | None = None
        self._is_given = False  # whether the pieces have their gradients

    def cut_shard(self) -> None:
        """Make a piece of every parameter."""
        begin = self.links.ranks.rank * self.shard_size
        spans = itertools.pairwise(self.offsets)
        for parameter, name, (start, stop) in zip(self.parameters, self.names, spans, strict=True):
            first = min(max(begin, start), stop)
            last = max(min(begin + self.shard_size, stop), first)
            in_shard, own = slice(first - begin, last - begin), slice(first - start, last - start)
            part = nn.Parameter(self.shard[in_shard], requires_grad=parameter.requires_grad)
            self.pieces.append(Piece(parameter, name, part, in_shard, own))

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' places in a flat tensor, in their shapes."""
        parts = flat[: self.offsets[-1]].split(self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _show(self, tensors: Iterable[torch.Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def wait_gathered(self) -> None:
        """Wait for weights that are being gathered (on GPUs: the current stream waits)."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def spread(self) -> None:
        """Let all ranks see a shard that has changed. Collective."""

    def matrices(self, among: Set[nn.Parameter]) -> MatrixShard:
        """Return this rank's part of the parameters that are `among` an optimizer's matrices."""
        places = zip(self.parameters, self.offsets[:-1], strict=True)
        return MatrixShard(
            self.shard,
            [(piece.part, piece.in_shard) for piece in self.held() if piece.parameter in among],
            [(start, *parameter.shape) for parameter, start in places if parameter in among],
            self.links.ranks.rank * self.shard_size,
            self.gather_state,
            lambda: self._is_given,
        )

    # The exact weights, in the dtype of the state

    @torch.no_grad()
    def gather_state(self, part: torch.Tensor | None = None) -> torch.Tensor:
        """Return all shards, or a `part` (shard_size,) of each rank, in one new tensor, (size,). Collective."""
        part = self.shard if part is None else part
        if self.links.gathers is None:
            return part.clone()
        whole = part.new_empty(self.size)
        self.links.gathers.collect(whole, part).wait()
        return whole

    def named(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of a flat tensor by the names of checkpoints."""
        return dict(zip(self.names, self._parts(whole), strict=True))

    # Gradients

    def reduce(self) -> None:
        """Start averaging the parameters' gradients, and release them. Collective."""
        self.wait_reduced()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        flat = pack(gradients, self.size, self._reduce_dtype)
        if self.links.reductions is None:
            self._pending = PendingMean([], [flat])
        else:
            self._pending = self.links.reductions.reduce_scatter(flat)

    def wait_reduced(self) -> None:
        """Add the mean gradient in flight, if any, to `gradient` (on GPUs: on the current stream)."""
        if self._pending is None:
            return
        (mean,) = self._pending.wait()
        self._pending = None
        if self.gradient is None:
            self.gradient = mean.to(self.gradient_dtype, copy=self._copies_mean)
        else:
            self.gradient += mean

    def give_gradients(self, unused: Set[nn.Parameter]) -> None:
        """Set the `grad` of the pieces to their parts of the gradient, but not of `unused` parameters."""
        self._is_given = self.gradient is not None
        pieces = self.pieces if self.gives_empty else self.held()
        for piece in pieces if self.gradient is not None else ():
            if piece.parameter not in unused:
                piece.part.grad = self.gradient[piece.in_shard]  # type: ignore[index]

    def held(self) -> list[Piece]:
        """Return the pieces of which this rank has elements."""
        return [piece for piece in self.pieces if piece.part.numel()]

    def drop_reduced(self) -> None:
        """Forget the mean gradient, even if it is still being reduced."""
        if self._pending is not None:
            self._pending.wait_for_works()
            self._pending = None
        self.gradient = None
        self.withhold_gradients()

    def withhold_gradients(self) -> None:
        """Take back what `give_gradients` gave."""
        self._is_given = False
        for piece in self.pieces:
            piece.part.grad = None


def forget_capture(flats: Sequence[FlatShards], device: torch.device) -> None:
    """Forget what is in flight: events of a capture that failed cannot be waited for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        for flat in flats:
            flat._arriving = flat._pending = None


def pack(gradients: list[torch.Tensor], size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return all gradients in one flat tensor (size,), padded with zeros; a single one without a copy if it fits."""
    first = gradients[0]
    if first.numel() == size and first.dtype == dtype and first.is_contiguous():
        return first.view(-1)
    flat = torch.empty(size, dtype=dtype, device=first.device)
    filled = sum(gradient.numel() for gradient in gradients)
    flat[filled:].zero_()  # the allocator's leftovers must not be reduced
    if first.dtype == dtype:  # faster than `_foreach_copy_`
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=flat[:filled])
    else:
        torch._foreach_copy_(_unflatten_dense_tensors(flat, gradients), gradients)
    return flat


class ShardedState(torch.optim.Optimizer):
    """An optimizer of which every rank keeps and updates a part.

    `param_groups` are the given groups, one to one, with pieces of shards in place of the parameters. The optimizer
    must update every element from its own gradient and state alone (AdamW and SGD do; LAMB, which looks at whole
    matrices, does not) or take `shards` as our Muon does, and skip parameters without a gradient.

    Args:
        make: makes the optimizer from parameter groups.

    Attributes:
        shard_layout: which elements of which parameters the ranks hold; every piece is a bucket.
        inner: the optimizer of the pieces.
    """

    def __init__(
        self, make: MakeOptimizer, groups: Iterable[dict[str, Any]], flats: Sequence[FlatShards], ranks: Ranks
    ) -> None:
        self._rank = ranks.rank
        self._flats: list[FlatShards] = []
        self._pieces: list[Piece] = []
        self.shard_layout: dict[str, Any] = {"world_size": ranks.world_size, "buckets": []}
        given = [{**group, "params": list(group["params"])} for group in groups]
        matrices = {p for group in given if group.get("is_matrix") for p in group["params"]}
        group_of = {parameter: index for index, group in enumerate(given) for parameter in group["params"]}
        parts: list[list[torch.Tensor]] = [[] for _ in given]
        for piece in (piece for flat in flats for piece in flat.held()):
            if piece.parameter in group_of:
                parts[group_of[piece.parameter]].append(piece.part)
        kind = {"is_matrix": False} if matrices else {}  # `shards` name the matrices: a part holds several
        self.inner = make(
            [{**_settings(group), **kind, "params": held} for group, held in zip(given, parts, strict=True)]
        )
        if matrices:
            reached = [flat for flat in flats if not matrices.isdisjoint(flat.parameters)]
            self.inner.shards = [flat.matrices(matrices) for flat in reached]  # type: ignore[attr-defined]
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.state = self.inner.state
        self._own(flats)

    def _own(self, flats: Sequence[FlatShards]) -> None:
        """Add flat tensors to those that this optimizer steps."""
        self._flats += flats
        for flat in flats:
            self._pieces += flat.pieces
            for piece, start in zip(flat.pieces, flat.offsets[:-1], strict=True):
                place = {"start": start, "shard_size": flat.shard_size}
                bucket = {"names": [piece.name], "sizes": [piece.parameter.numel()], **place}
                self.shard_layout["buckets"].append(bucket)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update this rank's shards; other ranks see the result in their weights."""
        if closure is not None:
            raise ValueError("a sharded optimizer takes no closure: gradients are reduced once per step")
        self._step()

    def _step(self) -> None:
        self.inner.step()
        self._spread()

    def _spread(self) -> None:
        for flat in self._flats:
            flat.spread()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Release all gradients, of shards and of parameters."""
        self.inner.zero_grad()
        for flat in self._flats:
            flat.drop_reduced()
            for parameter in flat.parameters:
                parameter.grad = None

    def state_dict(self) -> StateDict:
        """Return this rank's state, JSON but for the tensors: {"rank", "layout", "param_groups", "state": {bucket:
        {name: tensor}}}. "master" is among the states where weights are bf16."""
        state: dict[str, dict[str, torch.Tensor]] = {}
        for flat in self._flats:
            for piece in flat.pieces:
                held = dict(self.inner.state.get(piece.part, {}))
                if flat.saves_masters and piece.part.numel():
                    held["master"] = piece.part
                state[str(len(state))] = held
        return {
            "rank": self._rank,
            "layout": self.shard_layout,
            "param_groups": [_settings(group) for group in self.param_groups],
            "state": {number: held for number, held in state.items() if held},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load this rank's own state, of the same layout. Load the model's weights before. Collective."""
        if state_dict["rank"] != self._rank or state_dict["layout"] != self.shard_layout:
            raise ValueError(
                "the state has another layout or rank; use load_whole(consolidate(states of all ranks))"
            )
        states = [state_dict["state"].get(str(number), {}) for number in range(len(self._pieces))]
        self._load(states, state_dict["param_groups"], casts=isinstance(self.inner, AdamW))

    @torch.no_grad()
    def load_whole(self, whole: ParameterStates) -> None:
        """Load the state of whole parameters, which `consolidate` makes of any layout. Hyperparameters stay.
        Collective."""
        states = []
        for piece in self._pieces:
            state = dict(whole.get(piece.name, {}))
            for key, value in state.items():
                found, wanted = value.numel(), piece.parameter.numel()
                if value.ndim and found != wanted:
                    raise ValueError(f"{piece.name}.{key} has {found} elements, the parameter {wanted}")
                state[key] = value.reshape(-1)[piece.own] if value.ndim else value
            states.append(state)
        self._load(states, [{}] * len(self.param_groups), casts=True)

    @torch.no_grad()
    def load_masters(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load the exact shards of rounded weights from whole weights by name; the model's weights before."""
        for flat in self._flats:
            for piece in flat.held():
                piece.part.copy_(weights[piece.name].reshape(-1)[piece.own])
        self._spread()

    def _load(
        self, states: Sequence[Mapping[str, torch.Tensor]], groups: Sequence[dict[str, Any]], *, casts: bool
    ) -> None:
        if len(groups) != len(self.param_groups):
            ours = len(self.param_groups)
            raise ValueError(f"the state has {len(groups)} parameter groups, the optimizer {ours}")
        for number, (piece, given) in enumerate(zip(self._pieces, states, strict=True)):
            part, saved = piece.part, dict(given) if piece.part.numel() else {}
            for key, value in saved.items():
                if value.ndim and value.numel() != part.numel():
                    raise ValueError(f"{key} of bucket {number} has not {part.numel()} elements")
            if (master := saved.pop("master", None)) is not None:
                part.copy_(master)
            if saved:  # where the exact weights are, in their dtype; scalars stay
                self.inner.state[part] = {
                    key: value.to(
                        device=part.device if value.ndim else None,
                        dtype=part.dtype if value.ndim and casts and value.is_floating_point() else None,
                        copy=True,
                    )
                    for key, value in saved.items()
                }
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        self._spread()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "is_matrix")}
