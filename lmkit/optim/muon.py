"""Muon: momentum, orthogonalised, for the matrices of a model's blocks; AdamW for everything else (Jordan 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmkit.measure.limits import has_bf16
from lmkit.optim.adamw import MASTER, SWEEP_ELEMENTS, AdamW, decay_of, settings_of, sweeps
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
    # A matrix of zeros stays zero.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
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
    """This rank's elements of linear maps. The maps lie in a flat tensor that is cut into one part per rank.

    Attributes:
        part: this rank's part, flat; on some ranks it may be padding alone.
        pieces: parameters of the optimizer (flat), each with its place in this rank's part.
        maps: start in the flat tensor, rows and columns of every linear map, also of those on other ranks.
        begin: of this rank's part.
        gather: (n,), like `part` -> (ranks * n,), the parts of all ranks. Collective.
        has_gradient: whether this step updates the maps; equal on all ranks.
    """

    part: Tensor
    pieces: list[tuple[Tensor, slice]]
    maps: list[tuple[int, int, int]]
    begin: int
    gather: Callable[[Tensor], Tensor]
    has_gradient: Callable[[], bool]


def maps_of(rows: Sequence[int], columns: int, start: int) -> list[tuple[int, int, int]]:
    """Return `MatrixShard.maps` of a parameter whose linear maps have these rows, and which begins at `start`."""
    before = accumulate(rows, initial=0)
    return [(start + first * columns, some, columns) for first, some in zip(before, rows, strict=False)]


class Muon(AdamW):
    """Muon for matrices in blocks, AdamW for embedding, head and gains (Jordan 2024, "Muon").

        m = momentum m + (1 - momentum) g        u = momentum m + (1 - momentum) g
        w = (1 - r decay) w - r sqrt(max(1, rows / columns)) orthogonalize(u)

    with r the matrices' own learning rate, which follows the schedule of `lr`: r = lr matrix_lr / (the recipe's lr).

    A group may have the key "parts": for each parameter the numbers of rows of the linear maps that lie in it, one
    above the other, or () for AdamW. Each map is orthogonalised alone; all maps of one shape in one batched product.

    Args:
        params: groups, as in `AdamW`, with "parts"; `lmkit.model.layers.linear_maps` returns a model's.
        lr, betas, eps, weight_decay: as in `AdamW`; the decay of a group applies to its matrices, too.
        matrix_lr: learning rate of matrices while `group["lr"]` is `lr`.
        momentum: decay of the running mean of their gradients.
        iterations: of `orthogonalize`.

    Attributes:
        shards: set by a strategy that shards the optimizer. Momentum, weights and their updates stay on the rank that
            holds them. Directions are gathered, and a rank orthogonalises every map that has elements in its part.

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
            for sweep in sweeps(_matrices(group), lambda pair: pair[0].numel(), SWEEP_ELEMENTS["cuda"]):
                self._update_matrices(sweep, group)
        reached = [shard for shard in self.shards if shard.has_gradient()]
        for shards in sweeps(reached, _elements_of, SWEEP_ELEMENTS["cuda"]):
            self._update_shards(shards)
        super().step()
        return loss

    def _updates(self, params: list[Tensor]) -> Any:
        matrices = {param for group in self.param_groups for param, _ in _matrices(group)}
        matrices.update(param for shard in self.shards for param, _ in shard.pieces)
        return super()._updates([param for param in params if param not in matrices])

    def _momentum(self, param: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor to update (the parameter or its master) and the running mean of its gradient."""
        state = self.state[param]
        exact = state.get(MASTER, param)
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(exact)
        return exact, state[MOMENTUM]

    def _rates(self, lr: float | Tensor, device: torch.device) -> tuple[float | Tensor, float | Tensor]:
        """Return the gradient's share in the new mean, and the learning rate; both 0 if `decision` skips the step.

        They are equal bits whether `lr` is a number or, in a CUDA graph, a float64 scalar on the device.
        """
        new, rate = 1 - self.momentum, lr * self.lr_ratio
        if self.decision is None:
            return new, rate
        made = (self.decision != 0).to(device, torch.float32)
        return new * made, (rate * made).float()

    def _update_matrices(self, matrices: list[tuple[Tensor, Sequence[int]]], group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[_Part]] = {}
        for param, parts in matrices:
            exact, mean = self._momentum(param)
            views = (tensor.split(list(parts)) for tensor in (exact, self._gradient(param, exact), mean))
            for part in map(_Part._make, zip(*views, strict=True)):
                by_shape.setdefault(part.gradient.shape, []).append(part)
        new, rate = self._rates(group["lr"], matrices[0][0].device)
        for (rows, columns), alike in by_shape.items():
            for part in alike:
                part.mean.lerp_(part.gradient, new)
            kind = _dtype_of_products(alike[0].gradient)
            directions = torch.stack(
                [part.gradient.lerp(part.mean, self.momentum).to(kind) for part in alike]
            )
            changes = orthogonalize(directions, iterations=self.iterations)
            for part, change in zip(alike, changes, strict=True):
                _move(part.weight, change, rate * max(1.0, rows / columns) ** 0.5, rate, group)
        for param, _ in matrices:
            if MASTER in self.state[param]:
                param.copy_(self.state[param][MASTER])

    def _update_shards(self, shards: list[MatrixShard]) -> None:
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor, slice, slice, dict[str, Any]]]] = {}
        for shard in shards:
            kind = _dtype_of_directions(shard.part)
            direction = torch.zeros_like(shard.part, dtype=kind)
            updated = [(param, where) for param, where in shard.pieces if param.grad is not None]
            for param, where in updated:
                exact, mean = self._momentum(param)
                gradient = self._gradient(param, exact)
                mean.lerp_(gradient, self._rates(0.0, gradient.device)[0])
                direction[where] = gradient.lerp(mean, self.momentum).to(kind)
            whole = shard.gather(direction)
            for start, rows, columns in shard.maps:
                matrix = whole[start : start + rows * columns].view(rows, columns)
                for param, where in updated:
                    first = max(start, shard.begin + where.start)
                    stop = min(start + rows * columns, shard.begin + where.stop)
                    if first < stop:
                        before = shard.begin + where.start
                        own = slice(first - before, stop - before)
                        in_matrix = slice(first - start, stop - start)
                        by_shape.setdefault((rows, columns), []).append(
                            (matrix, param, own, in_matrix, group_of[param])
                        )
        for (rows, columns), alike in by_shape.items():
            changes = orthogonalize(torch.stack([matrix for matrix, *_ in alike]), iterations=self.iterations)
            for (_, param, own, in_matrix, group), change in zip(alike, changes, strict=True):
                rate = self._rates(group["lr"], param.device)[1]
                weight = self.state[param].get(MASTER, param)[own]
                scaled = rate * max(1.0, rows / columns) ** 0.5
                _move(weight, change.flatten()[in_matrix].to(weight.dtype), scaled, rate, group)
                if param in self.copies:
                    self.copies[param][own] = weight.to(self.copies[param].dtype)

    def _gradient(self, param: Tensor, exact: Tensor) -> Tensor:
        gradient = param.grad.to(exact.dtype)  # type: ignore[union-attr]
        if self.gradient_factor is not None:
            gradient = gradient * self.gradient_factor.to(gradient)
        if self.decision is not None:  # the gradient may hold NaN, which a factor of 0 would keep
            gradient = torch.where(self.decision.to(gradient.device) != 0, gradient, 0.0)
        return gradient


class _Part(NamedTuple):
    """Views of one linear map's rows: (rows, columns) each."""

    weight: Tensor
    gradient: Tensor
    mean: Tensor


def _matrices(group: dict[str, Any]) -> list[tuple[Tensor, Sequence[int]]]:
    """Return the group's matrices that have a gradient, with their parts."""
    parts = group.get("parts", [()] * len(group["params"]))
    pairs = zip(group["params"], parts, strict=True)
    return [(param, rows) for param, rows in pairs if rows and param.grad is not None]


def _elements_of(shard: MatrixShard) -> int:
    return sum(rows * columns for _, rows, columns in shard.maps)


def _move(
    weight: Tensor, direction: Tensor, rate: float | Tensor, decay: float | Tensor, group: dict[str, Any]
) -> None:
    """Decay a weight by `decay` times the group's decay, and move it against an orthogonalised direction."""
    decayed = weight * (weight * direction > 0) if group["cautious"] else weight
    share: float | Tensor = decay_of(group, group["lr"])
    _subtract(weight, decayed, decay * (share.float() if isinstance(share, Tensor) else share))
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
