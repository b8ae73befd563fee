"""Muon for training: `lmkit.core.muon` with masters, decisions on the device, and shards of matrices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmkit.core import muon as core
from lmkit.core.adamw import loss_of
from lmkit.core.muon import MOMENTUM, directions_of, move, move_matrices, orthogonalize, scale_of
from lmkit.measure.environment import has_bf16
from lmkit.optim.adamw import MASTER, SWEEP_ELEMENTS, AdamW, sweeps
from lmkit.registry import OPTIMIZERS

if TYPE_CHECKING:
    from lmkit.recipe.tables import OptimizerConfig


@functools.cache
def _dtype_of_products(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if has_bf16(device) and (device.type == "cuda" or dtype == torch.float32) else dtype


def _dtype_of_directions(part: Tensor) -> torch.dtype:
    """Return the dtype in which ranks exchange directions: on GPUs the dtype of the products."""
    if part.is_cuda and has_bf16(part.device):
        return torch.bfloat16
    return torch.promote_types(torch.float32, part.dtype)


class MatrixShard(NamedTuple):
    """This rank's elements of matrices, which lie in a flat tensor that is cut into one part per rank.

    Attributes:
        part: this rank's part, flat; perhaps padding alone.
        pieces: parameters of the optimizer (flat), each with its place in this rank's part.
        matrices: start in the flat tensor, rows and columns of every matrix, also of those on other ranks.
        begin: of this rank's part.
        gather: (n,), like `part` -> (ranks * n,), the parts of all ranks. Collective.
        has_gradient: whether this step updates the matrices; equal on all ranks.
    """

    part: Tensor
    pieces: list[tuple[Tensor, slice]]
    matrices: list[tuple[int, int, int]]
    begin: int
    gather: Callable[[Tensor], Tensor]
    has_gradient: Callable[[], bool]


class Muon(AdamW, core.Muon):
    """`lmkit.core.muon.Muon`, whose arguments it has, and what fast training needs of it; see `AdamW`.

    Matrices are orthogonalised in bfloat16 where the device has instructions for it; on CPUs not if they are float64.

    Attributes:
        shards: set by a strategy that shards the optimizer. Momentum, weights and their updates stay on the rank that
            holds them. Directions are gathered, and a rank orthogonalises every matrix that has elements in its part.

    State of a matrix: `momentum_buffer` (its shape; the dtype of `master` if that is there), `master` as in AdamW.
    """

    shards: Sequence[MatrixShard] = ()
    __signature__ = inspect.signature(core.Muon)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returns."""
        loss = None if closure is None else loss_of(closure)
        if self.decision is not None and not self.decision.is_cuda:  # costs nothing to read
            if not self.decision:
                return loss
            self.decision = None
        limit = SWEEP_ELEMENTS["cuda"]
        for group in self.param_groups:
            if group.get("is_matrix"):
                has_gradient = map(torch.is_tensor, map(attrgetter("grad"), group["params"]))
                matrices = list(compress(group["params"], has_gradient))
                for sweep in sweeps(matrices, map(Tensor.numel, matrices), limit):
                    exacts, directions = self._directions(sweep, group["momentum"])
                    rate, decay = self._rates(group)
                    dtype = _dtype_of_products(directions[0].device, directions[0].dtype)
                    how: dict[str, Any] = {"iterations": group["iterations"], "dtype": dtype}
                    move_matrices(exacts, directions, rate=rate, decay=decay, **how)
                    if any(map(is_not, sweep, exacts)):  # masters were updated
                        torch._foreach_copy_(sweep, exacts)
        if self.shards:
            reached = [shard for shard in self.shards if shard.has_gradient()]
            sizes = [sum(rows * columns for _, rows, columns in shard.matrices) for shard in reached]
            for shards in sweeps(reached, sizes, limit):
                self._update_shards(shards)
        super().step()
        return loss

    def _updates(self, group: dict[str, Any]) -> Any:
        if group.get("is_matrix"):
            return {}
        if self.shards:
            pieces = {param for shard in self.shards for param, _ in shard.pieces}
            group = {"params": [param for param in group["params"] if param not in pieces]}
        return super()._updates(group)

    def _directions(self, params: Sequence[Tensor], momentum: float) -> tuple[list[Tensor], list[Tensor]]:
        """Add the gradients to their running means, unless `decision` skips the step.

        Returns:
            The tensor to update of each parameter (it or its master), and its u, a new tensor.
        """
        exacts, means, gradients = [], [], []
        for param in params:
            state = self.state[param]
            exact = state.get(MASTER, param)
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(exact)
            exacts.append(exact)
            means.append(state[MOMENTUM])
            gradients.append(param.grad.to(exact.dtype))  # type: ignore[union-attr]
        factor = self.gradient_factor
        if self.decision is not None:
            made = self.decision != 0
            factor = torch.where(made, factor, 1.0) if factor is not None else None
            pairs = zip(gradients, means, strict=True)
            gradients = [torch.where(made, gradient, mean) for gradient, mean in pairs]
        if factor is not None:
            gradients = list(torch._foreach_mul(gradients, factor.to(gradients[0].device)))
        return exacts, directions_of(gradients, means, momentum)

    def _rates(self, group: dict[str, Any]) -> tuple[float | Tensor, float | Tensor]:
        """Return the learning rate of matrices and what share of them decays; both 0 if `decision` skips the step.
        Without weight decay, the share is the number 0.
        The bits do not depend on whether the group's `lr` is a number or a float64 scalar on the device."""
        rate = group["lr"] * group["lr_ratio"]
        if self.decision is not None:
            rate = (rate * (self.decision != 0).to(torch.float32)).float()
        decay = rate * group["weight_decay"] if group["weight_decay"] else 0.0
        return rate, decay

    def _update_shards(self, shards: list[MatrixShard]) -> None:
        updated = [[(p, where) for p, where in shard.pieces if p.grad is not None] for shard in shards]
        sent = [torch.zeros_like(shard.part, dtype=_dtype_of_directions(shard.part)) for shard in shards]
        params = [param for pieces in updated for param, _ in pieces]
        # A strategy makes all groups with one momentum and number of iterations.
        common = self.param_groups[0]
        if params:
            places = [part[where] for part, pieces in zip(sent, updated, strict=True) for _, where in pieces]
            torch._foreach_copy_(places, self._directions(params, common["momentum"])[1])
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        rates = {id(group): self._rates(group) for group in map(group_of.__getitem__, params)}
        by_kind: dict[tuple[int, int, int], list[tuple[Tensor, Tensor, slice, slice]]] = {}
        for shard, direction, pieces in zip(shards, sent, updated, strict=True):
            whole = shard.gather(direction)
            for start, rows, columns in shard.matrices:
                matrix = whole[start : start + rows * columns].view(rows, columns)
                for param, where in pieces:
                    before = shard.begin + where.start
                    first = max(start, before)
                    stop = min(start + rows * columns, shard.begin + where.stop)
                    if first < stop:
                        own = slice(first - before, stop - before)
                        in_matrix = slice(first - start, stop - start)
                        kind = rows, columns, id(group_of[param])
                        by_kind.setdefault(kind, []).append((matrix, param, own, in_matrix))
        for (rows, columns, which), alike in by_kind.items():
            joined = torch.stack([matrix for matrix, *_ in alike])
            dtype = _dtype_of_products(joined.device, joined.dtype)
            changes = orthogonalize(joined, iterations=common["iterations"], dtype=dtype)
            rate, decay = rates[which]
            scaled = rate * scale_of(rows, columns)
            for (_, param, own, in_matrix), change in zip(alike, changes, strict=True):
                weight = self.state[param].get(MASTER, param)[own]
                move(weight, change.flatten()[in_matrix], scaled, decay)
        copied = [param for param in params if param in self.copies]
        if copied:
            exacts = [self.state[param].get(MASTER, param) for param in copied]
            torch._foreach_copy_([self.copies[param] for param in copied], exacts)


@OPTIMIZERS.register(
    "muon",
    order=2,
    elementwise=False,
    takes_shards=True,
    moments=1,
    keeps_masters=True,
    options={"matrix_lr": 0.02, "momentum": 0.95, "iterations": 5},
)
def make_muon(groups: list[dict[str, Any]], options: OptimizerConfig) -> Muon:
    """Make the optimizer of the recipe's tables `[optimizer]` and `[optimizer.options]`."""
    own: dict[str, Any] = {**OPTIMIZERS.facts("muon").options, **options.options}
    return Muon(groups, lr=options.lr, betas=options.betas, eps=options.eps, **own)
