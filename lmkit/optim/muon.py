"""Muon: momentum, orthogonalised, for the matrices of a model's blocks; AdamW for everything else (Jordan 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmkit.measure.limits import has_bf16
from lmkit.optim.adamw import MASTER, SWEEP_ELEMENTS, AdamW, settings_of, sweeps
from lmkit.registry import OPTIMIZERS

if TYPE_CHECKING:
    from lmkit.recipe.tables import OptimizerConfig

MOMENTUM = "momentum_buffer"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the odd polynomial a x + b x^3 + c x^5. Five iterations of it take singular values from 0.002 to 1 to
about 1; its slope at 0 is as steep as that allows (Jordan 2024)."""


def orthogonalize(matrices: Tensor, *, iterations: int = 5) -> Tensor:
    """Bring all singular values of each matrix near 1, by Newton-Schulz iterations of degree 5.

    With G = U S V^T, the result is U p(S / |G|) V^T, where p is the iterated polynomial of `COEFFICIENTS`. Singular
    values of at least 0.002 |G| (the Frobenius norm) end between 0.68 and 1.21 after five iterations.

    Args:
        matrices: (..., rows, columns)

    Returns:
        A tensor of the same shape and dtype. GPUs and CPUs that have instructions for it compute it in bfloat16;
        CPUs not if the matrices are float64.
    """
    a, b, c = COEFFICIENTS
    rows, columns = matrices.shape[-2:]
    x = matrices.reshape(-1, rows, columns).to(_dtype_of_products(matrices))
    x = x.mT.contiguous() if rows > columns else x  # the Gram matrix has the shorter side
    # Zeros stay zeros. Elements below 1e-22 have squares of 0 in float32: their norm would be too small.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-15)
    for _ in range(iterations):
        gram = x @ x.mT  # (batch, short, short)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if rows > columns else x).reshape(matrices.shape).to(matrices.dtype)


def _dtype_of_products(matrices: Tensor) -> torch.dtype:
    if has_bf16(matrices.device) and (matrices.is_cuda or matrices.dtype == torch.float32):
        return torch.bfloat16
    return matrices.dtype


def _dtype_of_directions(part: Tensor) -> torch.dtype:
    """Return the dtype in which ranks exchange directions: on GPUs the dtype of the products."""
    if part.is_cuda and has_bf16(part.device):
        return torch.bfloat16
    return torch.promote_types(torch.float32, part.dtype)


class MatrixShard(NamedTuple):
    """This rank's elements of matrices, which lie in a flat tensor that is cut into one part per rank.

    Attributes:
        part: this rank's part, flat; on some ranks it may be padding alone.
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


class Muon(AdamW):
    """Muon for matrices in blocks, AdamW for embedding, head and gains (Jordan 2024, "Muon").

        m = momentum m + (1 - momentum) g        u = momentum m + (1 - momentum) g
        w = (1 - r decay) w - r sqrt(max(1, rows / columns)) orthogonalize(u)

    with r the matrices' own learning rate, which follows the schedule of `lr`: r = lr matrix_lr / (the recipe's lr).

    The matrices are the parameters of groups with the key "is_matrix" set. All matrices of one shape are
    orthogonalised in one batched product.

    Args:
        params: groups, as in `AdamW`, with "is_matrix"; see `lmkit.training.setup.matrices_of`.
        lr, betas, eps, weight_decay: as in `AdamW`; the decay of a group applies to its matrices, too.
        matrix_lr: learning rate of matrices while `group["lr"]` is `lr`.
        momentum: decay of the running mean of their gradients.
        iterations: of `orthogonalize`.

    Attributes:
        shards: set by a strategy that shards the optimizer. Momentum, weights and their updates stay on the rank that
            holds them. Directions are gathered, and a rank orthogonalises every matrix that has elements in its part.

    Raises:
        ValueError: a setting is out of range.

    State of a matrix: `momentum_buffer` (its shape; the dtype of `master` if that is there), `master` as in AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        matrix_lr: float = 0.02,
        momentum: float = 0.95,
        iterations: int = 5,
        **adamw: Any,
    ) -> None:
        if not matrix_lr >= 0:
            raise ValueError(f"matrix_lr must be 0 or more, got {matrix_lr}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if not iterations >= 1:
            raise ValueError(f"iterations must be 1 or more, got {iterations}")
        super().__init__(params, lr=lr, **adamw)
        self.momentum = momentum
        self.iterations = iterations
        self.lr_ratio = matrix_lr / lr if lr else 0.0
        self.shards: list[MatrixShard] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.decision is not None and not self.decision.is_cuda:  # costs nothing to read
            if not self.decision:
                return loss
            self.decision = None
        for group in self.param_groups:
            for sweep in sweeps(_matrices(group), Tensor.numel, SWEEP_ELEMENTS["cuda"]):
                self._update_matrices(sweep, group)
        reached = [shard for shard in self.shards if shard.has_gradient()]
        for shards in sweeps(reached, _elements_of, SWEEP_ELEMENTS["cuda"]):
            self._update_shards(shards)
        super().step()
        return loss

    def _updates(self, params: list[Tensor]) -> Any:
        matrices = {param for group in self.param_groups for param in _matrices(group)}
        matrices.update(param for shard in self.shards for param, _ in shard.pieces)
        return super()._updates([param for param in params if param not in matrices])

    def _momentum(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor to update (the parameter or its master) and the running mean of its gradient."""
        state = self.state[param]
        exact = state.get(MASTER, param)
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(exact)
        return exact, state[MOMENTUM]

    def _directions(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Add the gradients to their running means; return u of each parameter, a new tensor.

        If `decision` skips the step, means stay as they are, whatever the gradients hold.
        """
        exacts, means = zip(*map(self._momentum, params), strict=True)
        gradients = [param.grad.to(exact.dtype) for param, exact in zip(params, exacts, strict=True)]  # type: ignore[union-attr]
        factor = self.gradient_factor
        if self.decision is not None:
            made = self.decision != 0
            factor = torch.where(made, factor, 1.0) if factor is not None else None
            pairs = zip(gradients, means, strict=True)
            gradients = [torch.where(made, gradient, mean) for gradient, mean in pairs]
        if factor is not None:
            gradients = list(torch._foreach_mul(gradients, factor.to(gradients[0].device)))
        torch._foreach_lerp_(means, gradients, 1 - self.momentum)
        return list(torch._foreach_lerp(gradients, means, self.momentum))

    def _rates(self, group: dict[str, Any]) -> tuple[float | Tensor, float | Tensor]:
        """Return the learning rate of matrices and what share of them decays; both 0 if `decision` skips the step.

        They are equal bits whether the group's `lr` is a number or, in a CUDA graph, a float64 scalar on the device.
        """
        rate = group["lr"] * self.lr_ratio
        if self.decision is not None:
            rate = (rate * (self.decision != 0).to(torch.float32)).float()
        return rate, rate * group["weight_decay"]

    def _update_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for param, direction in zip(params, self._directions(params), strict=True):
            exact = self.state[param].get(MASTER, param)
            by_shape.setdefault(param.shape, []).append((exact, direction))
        rate, decay = self._rates(group)
        for shape, alike in by_shape.items():
            weights, directions = zip(*alike, strict=True)
            kind = _dtype_of_products(directions[0])
            joined = directions[0].new_empty((len(alike), *shape), dtype=kind)
            torch._foreach_copy_(joined.unbind(), directions)
            changes = orthogonalize(joined, iterations=self.iterations)
            scaled = rate * _scale(*shape)
            for weight, change in zip(weights, changes, strict=True):
                _move(weight, change, scaled, decay, group)
        rounded = [param for param in params if MASTER in self.state[param]]
        if rounded:
            torch._foreach_copy_(rounded, [self.state[param][MASTER] for param in rounded])

    def _update_shards(self, shards: list[MatrixShard]) -> None:
        updated = [[(p, where) for p, where in shard.pieces if p.grad is not None] for shard in shards]
        sent = [torch.zeros_like(shard.part, dtype=_dtype_of_directions(shard.part)) for shard in shards]
        params = [param for pieces in updated for param, _ in pieces]
        if params:
            places = [part[where] for part, pieces in zip(sent, updated, strict=True) for _, where in pieces]
            torch._foreach_copy_(places, self._directions(params))
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
            changes = orthogonalize(torch.stack([matrix for matrix, *_ in alike]), iterations=self.iterations)
            rate, decay = rates[which]
            scaled = rate * _scale(rows, columns)
            for (_, param, own, in_matrix), change in zip(alike, changes, strict=True):
                weight = self.state[param].get(MASTER, param)[own]
                _move(weight, change.flatten()[in_matrix], scaled, decay, group_of[param])
        copied = [param for param in params if param in self.copies]
        if copied:
            exacts = [self.state[param].get(MASTER, param) for param in copied]
            torch._foreach_copy_([self.copies[param] for param in copied], exacts)


def _matrices(group: dict[str, Any]) -> list[Tensor]:
    """Return the group's matrices that have a gradient."""
    return [param for param in group["params"] if group.get("is_matrix") and param.grad is not None]


def _elements_of(shard: MatrixShard) -> int:
    return sum(rows * columns for _, rows, columns in shard.matrices)


def _scale(rows: int, columns: int) -> float:
    """Return the factor of the learning rate of a matrix."""
    return max(1.0, rows / columns) ** 0.5


def _move(
    weight: Tensor, direction: Tensor, rate: float | Tensor, decay: float | Tensor, group: dict[str, Any]
) -> None:
    """Subtract `decay` times a weight from it, and `rate` times an orthogonalised direction."""
    if group["weight_decay"]:
        _subtract(weight, weight, decay)
    _subtract(weight, direction, rate)


def _subtract(weight: Tensor, change: Tensor, factor: float | Tensor) -> None:
    """Subtract factor * change, multiplied in the weight's dtype; on a GPU in one pass over memory."""
    if isinstance(factor, Tensor) and factor.is_cuda:
        weight.addcmul_(change, factor, value=-1)
    else:
        weight.sub_(change.to(weight.dtype) * factor)


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
    return Muon(groups, **settings_of(options), **own)
