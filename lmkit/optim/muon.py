"""Muon: momentum, orthogonalised, for the matrices of a model's blocks; AdamW for everything else (Jordan 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmkit.optim.adamw import MASTER, SWEEP_ELEMENTS, AdamW, decay_of, settings_of
from lmkit.registry import OPTIMIZERS

if TYPE_CHECKING:
    from lmkit.recipe.tables import OptimizerConfig

MOMENTUM = "momentum_buffer"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial a x + b x^3 + c x^5, whose iterates take singular values of 0.002 to 1 to about 1: the slope
at 0 is as steep as five iterations allow (Jordan 2024)."""


def orthogonalize(matrices: Tensor, *, iterations: int = 5) -> Tensor:
    """Bring all singular values of each matrix near 1, by Newton-Schulz iterations of degree 5.

    With G = U S V^T, the result is U p(S / |G|) V^T, where p is the iterated polynomial of `COEFFICIENTS`. Singular
    values of at least 0.002 |G| (the Frobenius norm) end between 0.68 and 1.21 after five iterations.

    Args:
        matrices: (..., rows, columns)

    Returns:
        A tensor of the same shape and dtype. CUDA devices compute it in bfloat16.
    """
    a, b, c = COEFFICIENTS
    rows, columns = matrices.shape[-2:]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x.mT if rows > columns else x  # the products are those of the shorter side
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(
        torch.finfo(x.dtype).tiny
    )  # a matrix of zeros stays zero
    for _ in range(iterations):
        gram = x @ x.mT  # (..., short, short)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if rows > columns else x).to(matrices.dtype)


class Muon(AdamW):
    """Muon for matrices in blocks, AdamW for embedding, head and gains (Jordan 2024, "Muon").

        m = momentum m + (1 - momentum) g        u = momentum m + (1 - momentum) g
        w = (1 - r decay) w - r sqrt(max(1, rows / columns)) orthogonalize(u)

    with r the matrices' own learning rate, which follows the schedule of `lr`: r = lr matrix_lr / (the recipe's lr).

    A group may have the key "parts": for each parameter the numbers of rows of the linear maps that lie in it, one
    above the other, or () for AdamW. Each map is orthogonalised alone; all maps of one shape in one batched product.

    Args:
        params: as of `AdamW`, with "parts"; `lmkit.model.layers.linear_maps` knows those of a model.
        lr, betas, eps, weight_decay: as of `AdamW`; the decay of a group applies to its matrices, too.
        matrix_lr: learning rate of matrices while `group["lr"]` is `lr`.
        momentum: decay of the running mean of their gradients.
        iterations: of `orthogonalize`.

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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for sweep in _sweeps(_matrices(group)):
                self._update_matrices(sweep, group)
        super().step()
        return loss

    def _updates(self, params: list[Tensor]) -> Any:
        matrices = {param for group in self.param_groups for param, _ in _matrices(group)}
        return super()._updates([param for param in params if param not in matrices])

    def _update_matrices(self, matrices: list[tuple[Tensor, Sequence[int]]], group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[_Part]] = {}
        for param, parts in matrices:
            state = self.state[param]
            exact = state.get(MASTER, param)
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(exact)
            views = (
                tensor.split(list(parts)) for tensor in (exact, self._gradient(param, exact), state[MOMENTUM])
            )
            for part in map(_Part._make, zip(*views, strict=True)):
                by_shape.setdefault(part.gradient.shape, []).append(part)
        new: float | Tensor = 1 - self.momentum
        rate: float | Tensor = group["lr"] * self.lr_ratio
        if self.decision is not None:
            made = (self.decision != 0).to(matrices[0][0].device, torch.float32)
            new, rate = new * made, rate * made
        for (rows, columns), alike in by_shape.items():
            for part in alike:
                part.mean.lerp_(part.gradient, new)
            directions = torch.stack([part.gradient.lerp(part.mean, self.momentum) for part in alike])
            changes = orthogonalize(directions, iterations=self.iterations)
            changes *= -rate * max(1.0, rows / columns) ** 0.5
            for part, change in zip(alike, changes, strict=True):
                decayed = part.weight * (part.weight * change < 0) if group["cautious"] else part.weight
                part.weight.sub_(decayed * (rate * decay_of(group, group["lr"]))).add_(change)
        for param, _ in matrices:
            if MASTER in self.state[param]:
                param.copy_(self.state[param][MASTER])

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


def _sweeps(matrices: list[tuple[Tensor, Sequence[int]]]) -> Iterator[list[tuple[Tensor, Sequence[int]]]]:
    """Split matrices into sweeps of about SWEEP_ELEMENTS, which bound the temporary memory."""
    sweep: list[tuple[Tensor, Sequence[int]]] = []
    elements = 0
    for matrix, parts in matrices:
        if sweep and elements + matrix.numel() > SWEEP_ELEMENTS["cuda"]:
            yield sweep
            sweep, elements = [], 0
        sweep.append((matrix, parts))
        elements += matrix.numel()
    if sweep:
        yield sweep


@OPTIMIZERS.register(
    "muon",
    order=2,
    elementwise=False,
    moments=1,
    keeps_masters=True,
    options={"matrix_lr": 0.02, "momentum": 0.95, "iterations": 5},
)
def make_muon(groups: list[dict[str, Any]], options: OptimizerConfig) -> Muon:
    """Make the optimizer of the recipe's tables `[optimizer]` and `[optimizer.options]`."""
    own: dict[str, Any] = {**OPTIMIZERS.facts("muon").options, **options.options}
    return Muon(groups, **settings_of(options), **own)
