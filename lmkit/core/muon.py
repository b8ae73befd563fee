"""Muon: momentum, orthogonalised, for the matrices of a model's blocks; AdamW for everything else (Jordan 2024).

    m = momentum m + (1 - momentum) g        u = momentum m + (1 - momentum) g
    w = (1 - r decay) w - r sqrt(max(1, rows / columns)) orthogonalize(u)

with r the matrices' own learning rate, which follows the schedule of `lr`: r = matrix_lr (lr now) / (initial lr).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmkit.core.adamw import AdamW

MOMENTUM = "momentum_buffer"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the odd polynomial a x + b x^3 + c x^5. Five iterations of it bring singular values between 0.002 and
1 close to 1; its slope at 0 is as steep as that allows (Jordan 2024)."""


def orthogonalize(matrices: Tensor, *, iterations: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Bring all singular values of each matrix near 1, by Newton-Schulz iterations of degree 5.

    With G = U S V^T, the result is U p(S / |G|) V^T, where p is the iterated polynomial of `COEFFICIENTS`. Singular
    values of at least 0.002 |G| (the Frobenius norm) end between 0.68 and 1.21 after five iterations.

    Args:
        matrices: (..., rows, columns)
        dtype: of the products; bfloat16 suffices. None: that of the matrices.

    Returns:
        A tensor of the same shape and dtype.
    """
    a, b, c = COEFFICIENTS
    rows, columns = matrices.shape[-2:]
    x = matrices.reshape(-1, rows, columns).to(dtype or matrices.dtype)
    x = x.mT.contiguous() if rows > columns else x  # the Gram matrix has the shorter side
    # Zeros stay zeros. Elements below 1e-22 have squares of 0 in float32: their norm would be too small.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-15)
    for _ in range(iterations):
        gram = x @ x.mT  # (batch, short, short)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if rows > columns else x).reshape(matrices.shape).to(matrices.dtype)


def directions_of(grads: Sequence[Tensor], means: Sequence[Tensor], momentum: float) -> list[Tensor]:
    """Add gradients to their running means m; return u of each, a new tensor."""
    torch._foreach_lerp_(list(means), list(grads), 1 - momentum)
    return list(torch._foreach_lerp(list(grads), list(means), momentum))


def move_matrices(
    weights: Sequence[Tensor],
    directions: Sequence[Tensor],
    *,
    rate: float | Tensor,
    decay: float | Tensor,
    iterations: int = 5,
    dtype: torch.dtype | None = None,
) -> None:
    """Move weights along their orthogonalised directions, in place; all matrices of a shape in one batched product.

    Args:
        rate: r.
        decay: r times the weight decay; the number 0 decays nothing.
        iterations, dtype: of `orthogonalize`.
    """
    by_shape: dict[torch.Size, tuple[list[Tensor], list[Tensor]]] = {}
    for weight, direction in zip(weights, directions, strict=True):
        moved, alike = by_shape.setdefault(weight.shape, ([], []))
        moved.append(weight)
        alike.append(direction)
    for shape, (moved, alike) in by_shape.items():
        joined = directions[0].new_empty((len(alike), *shape), dtype=dtype or directions[0].dtype)
        torch._foreach_copy_(list(joined.unbind()), alike)
        scaled = rate * scale_of(*shape)
        for weight, change in zip(moved, orthogonalize(joined, iterations=iterations), strict=True):
            move(weight, change, scaled, decay)


def scale_of(rows: int, columns: int) -> float:
    """Return the factor of the learning rate of a matrix."""
    return max(1.0, rows / columns) ** 0.5


def move(weight: Tensor, direction: Tensor, rate: float | Tensor, decay: float | Tensor) -> None:
    """Subtract `decay` times a weight from it (the number 0 costs nothing), and `rate` times an orthogonalised
    direction, multiplied in the weight's dtype; each in one pass over memory if the factor is a CUDA tensor."""
    for change, factor in ((weight, decay), (direction, rate)):
        if isinstance(factor, Tensor) and factor.is_cuda:
            weight.addcmul_(change, factor, value=-1)
        elif isinstance(factor, Tensor) or factor:
            weight.sub_(change.to(weight.dtype) * factor)


class Muon(AdamW):
    """Muon for the parameters of groups with the key "is_matrix" set, AdamW for the others.

    Usual: the matrices of blocks by Muon; embedding, head, gains and biases by AdamW.

    State of a matrix: `momentum_buffer`, shaped as the matrix. Every group holds `lr_ratio` (matrix_lr / lr),
    `momentum` and `iterations`.

    Args:
        params: groups, as in `AdamW`, with the key "is_matrix"; each may have its own `lr` and `matrix_lr`.
        lr, betas, eps, weight_decay: as in `AdamW`; the decay of a group applies to its matrices, too.
        matrix_lr: first learning rate of matrices; it changes as `group["lr"]` does, which must not begin at 0.
        momentum: decay of the running mean of their gradients.
        iterations: of `orthogonalize`.

    Raises:
        ValueError: a setting is out of range; no group has the key "is_matrix".
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        matrix_lr: float = 0.02,
        momentum: float = 0.95,
        iterations: int = 5,
        **adamw: Any,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if not iterations >= 1:
            raise ValueError(f"iterations must be 1 or more, got {iterations}")
        super().__init__(params, lr=lr, **adamw)
        self._check(self.param_groups)
        self.defaults |= {"matrix_lr": matrix_lr, "momentum": momentum, "iterations": iterations}
        self._complete_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in `AdamW`."""
        super().add_param_group(param_group)
        if "matrix_lr" in self.defaults:  # else the constructor completes the groups
            self._complete_groups()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy of the optimizer, or loaded state; ValueError: an AdamW made it."""
        self._check(state["param_groups"])
        super().__setstate__(state)
        self._complete_groups()

    @staticmethod
    def _check(groups: list[dict[str, Any]]) -> None:
        if "is_matrix" not in set().union(*groups):
            raise ValueError('no group of Muon says which parameters are matrices: set the key "is_matrix"')

    def _complete_groups(self) -> None:
        for group in self.param_groups:
            for param in group["params"] if group.get("is_matrix") else ():
                if param.dim() != 2:
                    raise ValueError(
                        "a group with is_matrix has a parameter that is no matrix, or a part of one"
                    )
            for key in ("momentum", "iterations"):
                group.setdefault(key, self.defaults[key])
            matrix_lr, lr = group.pop("matrix_lr", self.defaults["matrix_lr"]), group["lr"]
            if "lr_ratio" in group:
                continue
            if not matrix_lr >= 0:
                raise ValueError(f"matrix_lr must be 0 or more, got {matrix_lr}")
            if matrix_lr and not lr:
                raise ValueError(f"lr must not be 0, because matrix_lr is {matrix_lr} relative to it")
            group["lr_ratio"] = matrix_lr / lr if lr else 0.0

    def update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        if not group.get("is_matrix"):
            return super().update(group, params)
        for param in params:
            if MOMENTUM not in self.state[param]:
                self.state[param][MOMENTUM] = torch.zeros_like(param)
        means = [self.state[param][MOMENTUM] for param in params]
        grads = [param.grad for param in params if param.grad is not None]
        directions = directions_of(grads, means, group["momentum"])
        rate = group["lr"] * group["lr_ratio"]
        decay = rate * group["weight_decay"]
        return move_matrices(params, directions, rate=rate, decay=decay, iterations=group["iterations"])
