"""The memory of `fsdp`: flat tensors of parameters. Every rank keeps one part and gathers the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lmkit.core.buckets import PendingMean, Work
from lmkit.model.layers import pieces
from lmkit.optim.muon import MatrixShard, maps_of
from lmkit.parallel.collectives import Averager
from lmkit.parallel.fsdp_gather import ShardGather
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.zero1_shards import BucketLayout, pack, shard_size_of


class FlatParameters:
    """Parameters of one dtype, one after the other in one flat tensor, padded to a multiple of the world size.

    Rank r keeps the elements [r * shard_size, (r + 1) * shard_size); a shard may begin inside a parameter. While the
    weights are not gathered, every parameter is one NaN, expanded to the parameter's shape without taking memory.

    Gathered weights always lie in the same storage, which is emptied and filled again. So tensors and views that
    autograd saved in the forward pass read the weights that are gathered for the backward pass.

    Args:
        parameters: of one dtype and device; they all require gradients, or none does.
        shapes: names and shapes under which checkpoints save each parameter, see `parameter_names`.
        compute_dtype: dtype of gathered weights.
        state_dtype: dtype of the shard, its gradient and so of the optimizer's state.
        reduce_dtype: dtype in which gradients are reduced.
        ranks: this rank's place among the ranks that share one copy of the model.
        gathers, reductions: collectives among the ranks of one copy; None if this rank is alone.
        replicas: collectives among the ranks that keep the same shard of other copies; None if there is one copy.
        kept: keep the weights gathered, because they are read without a layer's call.

    Attributes:
        shard: this rank's elements, (shard_size,), in `state_dtype`.
        gradient: mean gradient of the shard over the ranks, (shard_size,), or None.
        slices: parameter -> its elements in the shard, a view; parameters without any are left out.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shapes: Sequence[Mapping[str, torch.Size]],
        ranks: Ranks,
        *,
        compute_dtype: torch.dtype,
        state_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        gathers: ShardGather | None,
        reductions: Averager | None,
        replicas: Averager | None,
        kept: bool,
    ) -> None:
        first = parameters[0]
        self.parameters = list(parameters)
        self.shapes = list(shapes)
        self.trains = first.requires_grad
        self.kept = kept
        self.gradient: torch.Tensor | None = None
        self._ranks = ranks
        self._gathers = gathers
        self._reductions = reductions
        self._replicas = replicas
        self._reduce_dtype = reduce_dtype
        self._sizes = [parameter.numel() for parameter in parameters]
        self._offsets = [sum(self._sizes[:index]) for index in range(len(parameters))]
        self.shard_size = shard_size_of(sum(self._sizes), ranks.world_size)
        self._given_dtype = first.dtype
        self._state_dtype = state_dtype
        self._weights = torch.empty(
            self.shard_size * ranks.world_size, dtype=compute_dtype, device=first.device
        )
        self._bytes = self._weights.nbytes
        self._views = self._parts(self._weights)
        self._weights.untyped_storage().resize_(0)
        self._absent = [absent(parameter.shape, compute_dtype, first.device) for parameter in parameters]
        self._is_gathered = self._is_open = False
        self._arriving: Work | None = None
        self._pending: PendingMean | None = None
        self._is_replicating = False
        self._lent: torch.Tensor | None = None

    def make_shard(self) -> None:
        """Allocate the shard, as zeros. Call it after all flat tensors were made: each is whole for a moment."""
        self.shard = torch.zeros(self.shard_size, dtype=self._state_dtype, device=self._weights.device)
        self.slices: dict[nn.Parameter, nn.Parameter] = {}
        self._where: dict[nn.Parameter, slice] = {}  # in the shard
        for position, parameter in enumerate(self.parameters):
            in_shard, _ = self.own_part(position)
            if self.trains and in_shard.start < in_shard.stop:
                self.slices[parameter] = nn.Parameter(self.shard[in_shard])
                self._where[parameter] = in_shard

    def own_part(self, position: int) -> tuple[slice, slice]:
        """Return this rank's part of the `position`-th parameter as two slices, which may be empty: of the shard, and
        of the flattened parameter."""
        before, size = self._offsets[position], self._sizes[position]
        begin = self._ranks.rank * self.shard_size
        start = min(max(begin, before), before + size)
        stop = max(min(begin + self.shard_size, before + size), start)
        return slice(start - begin, stop - begin), slice(start - before, stop - before)

    def layouts(self, group_of: Mapping[nn.Parameter, int]) -> dict[nn.Parameter, BucketLayout]:
        """Return the layout of every parameter that trains, as checkpoints describe it: a bucket of its own."""
        return {
            parameter: BucketLayout(
                group_of.get(parameter, 0),
                tuple(shapes),
                tuple(shape.numel() for shape in shapes.values()),
                self.shard_size,
            )
            for parameter, shapes in zip(self.parameters, self.shapes, strict=True)
        }

    def matrices(self, parts: Mapping[nn.Parameter, Sequence[int]]) -> MatrixShard:
        """Return this rank's part of the linear maps. `parts`: parameter -> the rows of its maps."""
        held = [(index, p) for index, p in enumerate(self.parameters) if p in parts]
        return MatrixShard(
            self.shard,
            [(self.slices[p], self.own_part(index)[0]) for index, p in held if p in self.slices],
            [
                linear_map
                for index, p in held
                for linear_map in maps_of(parts[p], p.shape[1], self._offsets[index])
            ],
            self._ranks.rank * self.shard_size,
            self.gather_state,
            lambda: self.gradient is not None,
        )

    # Weights

    @property
    def sent_bytes(self) -> int:
        """Bytes of the shard in the dtype in which it is gathered."""
        return self.shard_size * self._weights.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes that the gathered weights take now."""
        return self._weights.untyped_storage().nbytes()

    @torch.no_grad()
    def start(self) -> None:
        """Start gathering the weights, unless they are gathered or in flight. Collective."""
        if self._is_gathered:
            return
        self._is_gathered = True
        self._weights.untyped_storage().resize_(self._bytes)
        if self._gathers is None:
            self._weights.copy_(self.shard)
        else:
            self._arriving = self._gathers.start(self._weights, self.shard)

    def open(self) -> None:
        """Wait for the gathered weights (on GPUs the current stream waits) and point the parameters at them."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        if not self._is_open:
            self._show(self._views)
            self._is_open = True

    def hide(self) -> None:
        """Free the gathered weights."""
        if not self._is_gathered:
            return
        self.open()
        self._show(self._absent)
        self._is_gathered = self._is_open = False
        self._weights.untyped_storage().resize_(0)

    def _show(self, tensors: Iterable[torch.Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' places in a flat tensor, in their shapes."""
        parts = flat[: sum(self._sizes)].split(self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    # The exact weights, in the dtype of the state

    @torch.no_grad()
    def gather_state(self, part: torch.Tensor | None = None) -> torch.Tensor:
        """Return all shards, or a `part` (shard_size,) of each rank, in one new tensor, (world_size * shard_size,).
        Collective."""
        part = self.shard if part is None else part
        if self._gathers is None:
            return part.clone()
        whole = part.new_empty(self.shard_size * self._ranks.world_size)
        self._gathers.collect(whole, part).wait()
        return whole

    @torch.no_grad()
    def named(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of a flat tensor by the names of checkpoints."""
        shapes = {name: shape for of_parameter in self.shapes for name, shape in of_parameter.items()}
        parts = whole[: sum(self._sizes)].split([shape.numel() for shape in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    @torch.no_grad()
    def lend(self, whole: torch.Tensor | None = None) -> None:
        """Make the parameters views of a writable flat tensor until `take_back`.

        Args:
            whole: the result of `gather_state`; None: the parameters' present values.
        """
        if whole is None:
            size = self.shard_size * self._ranks.world_size
            whole = torch.zeros(size, dtype=self._given_dtype, device=self.shard.device)
            for parameter, part in zip(self.parameters, self._parts(whole), strict=True):
                part.copy_(parameter.detach())
        self.hide()
        self._show(self._parts(whole))
        self._lent = whole

    @torch.no_grad()
    def take_back(self, *, of_first: bool) -> None:
        """Copy this rank's shard out of the tensor that `lend` made.

        Args:
            of_first: take rank 0's values. Collective.
        """
        assert self._lent is not None
        if of_first and (self._gathers is not None or self._replicas is not None):
            dist.broadcast(self._lent.view(torch.uint8), src=0)  # backends do not know every dtype
        self.shard.copy_(self._lent.chunk(self._ranks.world_size)[self._ranks.rank])
        self._lent = None
        self._show(self._absent)

    @torch.no_grad()
    def take_rows(self, rows: torch.Tensor, begin: int) -> None:
        """Copy this rank's elements of rank 0's `rows` of the only parameter, which begin at its element `begin`.
        Collective."""
        if self._gathers is not None or self._replicas is not None:
            dist.broadcast(rows.view(torch.uint8), src=0)
        own, flat = self._ranks.rank * self.shard_size, rows.flatten()
        start, stop = max(begin, own), min(begin + len(flat), own + self.shard_size)
        if start < stop:
            self.shard[start - own : stop - own] = flat[start - begin : stop - begin]

    @torch.no_grad()
    def take_own(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's elements from whole weights by name."""
        for position, shapes in enumerate(self.shapes):
            in_shard, in_parameter = self.own_part(position)
            if in_shard.start < in_shard.stop:
                whole = torch.cat([weights[name].reshape(-1) for name in shapes])
                self.shard[in_shard] = whole[in_parameter].to(self.shard.device)

    # Gradients

    @torch.no_grad()
    def reduce(self) -> None:
        """Start averaging the parameters' gradients, and release them. Collective."""
        self.wait_reduced()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        flat = pack(gradients, self.shard_size * self._ranks.world_size, self._reduce_dtype)
        if self._reductions is None:
            self._pending = PendingMean([], [flat])
        else:
            self._pending = self._reductions.reduce_scatter(flat)
        self._is_replicating = False

    @torch.no_grad()
    def replicate(self) -> None:
        """Start averaging the mean in flight over the replicas, if there are any. Collective."""
        if self._pending is not None and self._replicas is not None and not self._is_replicating:
            self._is_replicating = True
            self._pending = self._replicas.all_reduce(self._pending.wait())

    @torch.no_grad()
    def wait_reduced(self) -> None:
        """Add the mean gradient in flight, if any, to `gradient` (on GPUs: on the current stream)."""
        if self._pending is None:
            return
        self.replicate()
        (mean,) = self._pending.wait()
        self._pending = None
        if self.gradient is None:
            self.gradient = mean.to(self.shard.dtype, copy=True)  # the flat tensor is released
        else:
            self.gradient += mean

    def give_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the `grad` of these parameters' slices to their parts of the gradient."""
        if self.gradient is None:
            return
        for parameter, where in self._where.items():
            if parameter in parameters:
                self.slices[parameter].grad = self.gradient[where]

    def notice_released(self) -> None:
        """Forget the gradient if the slices' `grad` was set to None."""
        if self.gradient is None:
            return
        for parameter, where in self._where.items():
            if self.slices[parameter].grad is None:
                self.gradient[where] = 0

    def forget_in_flight(self) -> None:
        """Wait no more. Call it when all collectives have ended."""
        self._arriving = self._pending = None

    def drop_gradients(self) -> None:
        """Forget all gradients, even those still being reduced."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None
        self.gradient = None
        for tensor in (*self.parameters, *self.slices.values()):
            tensor.grad = None


def absent(shape: torch.Size, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return a NaN in the given shape. It takes the memory of one element and cannot be written to."""
    return torch.full((), math.nan, dtype=dtype, device=device).expand(shape)


def leave_meta(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers from "meta" to `device`, without memory or values; ties stay."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(lambda tensor: absent(tensor.shape, tensor.dtype, device))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def draw_into(layer: nn.Module, flats: Sequence[FlatParameters]) -> None:
    """Draw initial values of a layer on "meta" into its shards, with rank 0's values. Collective.

    A layer of one large matrix, as an embedding is, is drawn some rows at a time. Others are whole for a moment.
    """
    matrices, draw_rows = list(layer.parameters()), getattr(layer, "draw_rows", None)
    if draw_rows is not None and len(matrices) == 1:
        begin = 0
        for piece in pieces(matrices[0]):
            rows = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
            draw_rows(rows)
            flats[0].take_rows(rows, begin)
            begin += rows.numel()
        return
    for flat in flats:
        flat.lend()
    draw(layer)
    for flat in flats:
        flat.take_back(of_first=True)


def draw(module: nn.Module) -> None:
    """Draw initial values of a module's parameters, in the order of its constructor.

    Raises:
        ValueError: a parameter is drawn by no `reset_parameters`.
    """
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
    for name, parameter in module.named_parameters():
        if parameter.detach().sum().isnan():  # without a mask as long as the parameter
            owner = type(module).__name__
            raise ValueError(f'{name} of {owner} is on "meta", and no reset_parameters draws it')
