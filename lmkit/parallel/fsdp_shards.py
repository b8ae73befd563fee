"""The memory of `fsdp`: every rank has its shards, and gathers whole weights for as long as they are needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lmkit.core.model import pieces
from lmkit.parallel.collectives import Averager
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import FlatShards, Piece


class FreedShards(FlatShards):
    """Parameters whose whole weights are gathered for a layer's passes, and freed.

    While the weights are not gathered, every parameter is one NaN, expanded to the parameter's shape without taking
    memory. Gathered weights always lie in the same storage, which is emptied and filled again. So tensors and views
    that autograd saved in the forward pass read the weights that are gathered for the backward pass.

    Args:
        parameters: they all require gradients, or none does.
        compute_dtype: dtype of gathered weights.
        state_dtype: dtype of the shard, its gradient and so of the optimizer's state.
        replicas: collectives among the ranks that keep the same shard of other copies; None if there is one copy.
        kept: keep the weights gathered, because they are read without a layer's call.
        names, ranks, links: see `FlatShards`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        ranks: Ranks,
        *,
        compute_dtype: torch.dtype,
        state_dtype: torch.dtype,
        replicas: Averager | None,
        kept: bool,
        **links: Any,
    ) -> None:
        super().__init__(parameters, names, ranks, **links)
        first = parameters[0]
        self.trains = first.requires_grad
        self.kept = kept
        self._replicas = replicas
        self._given_dtype = first.dtype
        self._state_dtype = state_dtype
        self._weights = torch.empty(self.size, dtype=compute_dtype, device=first.device)
        self._bytes = self._weights.nbytes
        self._views = self._parts(self._weights)
        self._weights.untyped_storage().resize_(0)
        self._absent = [absent(parameter.shape, compute_dtype, first.device) for parameter in parameters]
        self._is_gathered = self._is_open = False
        self._is_replicating = False
        self._lent: torch.Tensor | None = None

    def make_shard(self) -> None:
        """Allocate the shard, as zeros. Call it after all flat tensors were made: each is whole for a moment."""
        self.shard = torch.zeros(self.shard_size, dtype=self._state_dtype, device=self._weights.device)
        for position, (parameter, name) in enumerate(zip(self.parameters, self.names, strict=True)):
            in_shard, own = self.own_part(position)
            if self.trains:
                part = nn.Parameter(self.shard[in_shard])
                self.pieces.append(Piece([parameter], [name], part, in_shard, own))

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

    @torch.no_grad()
    def lend(self, whole: torch.Tensor | None = None) -> None:
        """Make the parameters views of a writable flat tensor until `take_back`.

        Args:
            whole: the result of `gather_state`; None: the parameters' present values.
        """
        if whole is None:
            whole = torch.zeros(self.size, dtype=self._given_dtype, device=self.shard.device)
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
        self.shard.copy_(self.own_of(self._lent))
        self._lent = None
        self._show(self._absent)

    @torch.no_grad()
    def take_rows(self, rows: torch.Tensor, begin: int) -> None:
        """Copy this rank's elements of rank 0's `rows` of the only parameter, which begin at its element `begin`.
        Collective."""
        if self._gathers is not None or self._replicas is not None:
            dist.broadcast(rows.view(torch.uint8), src=0)
        flat = rows.flatten()
        in_shard, own = self.own_range(begin, begin + len(flat))
        self.shard[in_shard] = flat[own]

    # Gradients

    def reduce(self) -> None:
        super().reduce()
        self._is_replicating = False

    @torch.no_grad()
    def replicate(self) -> None:
        """Start averaging the mean in flight over the replicas, if there are any. Collective."""
        if self._pending is not None and self._replicas is not None and not self._is_replicating:
            self._is_replicating = True
            self._pending = self._replicas.all_reduce(self._pending.wait())

    def wait_reduced(self) -> None:
        self.replicate()
        super().wait_reduced()

    def notice_released(self) -> None:
        """Forget the gradient where the `grad` of a piece was set to None."""
        for piece in self.held() if self.gradient is not None else ():
            if piece.part.grad is None:
                self.gradient[piece.in_shard] = 0  # type: ignore[index]


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


def draw_into(layer: nn.Module, flats: Sequence[FreedShards]) -> None:
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
