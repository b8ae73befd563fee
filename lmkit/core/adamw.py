"""AdamW: Adam with weight decay that does not go through the gradient (Loshchilov and Hutter 2019)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), in PyTorch's form:

        m = beta1 m + (1 - beta1) g              v = beta2 v + (1 - beta2) g^2
        w = (1 - lr decay) w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    >>> layer = torch.nn.Linear(4, 2)
    >>> optimizer = AdamW(decay_groups(layer.parameters(), weight_decay=0.1), lr=1e-3)
    >>> layer(torch.ones(4)).sum().backward()
    >>> optimizer.step()

    State per parameter: `step` (float32 scalar), `exp_avg` (m) and `exp_avg_sq` (v), as in `torch.optim.AdamW`.

    Args:
        params: parameters, or groups as `decay_groups` makes them; a group may override every setting.
        lr: learning rate; the training loop sets `group["lr"]` before each step.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: a step subtracts lr * weight_decay of each weight.

    Raises:
        ValueError: a setting is out of range; a parameter is complex.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be 0 or more, got {lr}")
        beta1, beta2 = betas
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be 0 or more, got {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which may override every setting."""
        # Unwrapped: PyTorch's wrapper imports torch._dynamo, which is slow and needed only for torch.compile.
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)
        if any(param.is_complex() for param in self.param_groups[-1]["params"]):
            raise ValueError("complex parameters are not supported: optimize torch.view_as_real of them")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returns."""
        loss = None if closure is None else loss_of(closure)
        for group in self.param_groups:
            self.update(group, [param for param in group["params"] if param.grad is not None])
        return loss

    def update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update parameters of a group, which all have a gradient."""
        for param in params:
            state = self.state[param]
            if not state:
                state.update(new_state(param))
            state["step"] += 1
            scalars = scalars_of(group, int(state["step"]))
            assert param.grad is not None
            adamw_update([param], [param.grad], [state["exp_avg"]], [state["exp_avg_sq"]], scalars)


def loss_of(closure: Callable[[], Any]) -> Any:
    """Return what an optimizer's closure computes, with gradients."""
    with torch.enable_grad():
        return closure()


def new_state(param: Tensor) -> dict[str, Tensor]:
    """Return the state of a parameter that was never updated."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device="cpu"),
        "exp_avg": torch.zeros_like(param),
        "exp_avg_sq": torch.zeros_like(param),
    }


class Scalars(NamedTuple):
    """The scalars of an update.

    They contain both bias corrections, so that these cost no operation on arrays (Kingma and Ba 2015, end of
    section 2): sqrt(v / c) + eps = (sqrt(v) + eps sqrt(c)) / sqrt(c)

    Attributes:
        kept: the share of a weight that decay leaves, 1 - lr decay.
        eps: eps sqrt(c), c being the second moment's correction.
        rate: the factor of m / (sqrt(v) + eps): -lr with both corrections.
    """

    beta1: float
    beta2: float
    kept: float
    eps: float
    rate: float


def scalars_of(group: dict[str, Any], step: int) -> Scalars:
    """Return the scalars of a group's update number `step`, counted from 1."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    root_correction = (1 - beta2**step) ** 0.5
    return Scalars(
        beta1,
        beta2,
        kept=1 - lr * group["weight_decay"],
        eps=group["eps"] * root_correction,
        rate=-lr * root_correction / (1 - beta1**step),
    )


def adamw_update(
    params: list[Tensor], grads: list[Tensor], means: list[Tensor], squares: list[Tensor], scalars: Scalars
) -> None:
    """Update parameters and moments in place; all lists share one device and one step count."""
    torch._foreach_lerp_(means, grads, 1 - scalars.beta1)  # m = beta1 m + (1 - beta1) g
    torch._foreach_mul_(squares, scalars.beta2)  # v = beta2 v
    torch._foreach_addcmul_(squares, grads, grads, 1 - scalars.beta2)  # v += (1 - beta2) g^2
    if scalars.kept != 1:
        torch._foreach_mul_(params, scalars.kept)  # w = (1 - lr decay) w
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_add_(denominators, scalars.eps)  # sqrt(v) + eps
    # w -= lr m / (sqrt(v) + eps), with both bias corrections
    torch._foreach_addcdiv_(params, means, denominators, scalars.rate)


def decay_groups(params: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with weight decay, vectors (gains of norms, biases) without.

    Decay would pull a gain to zero, away from its neutral value of one. Parameters that need no gradient are left
    out, and so are empty groups. A rank's flat part of a parameter counts by its attribute `whole_dim`, the
    dimensions of the whole.
    """
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for param in params:
        if param.requires_grad:
            (matrices if getattr(param, "whole_dim", param.dim()) >= 2 else vectors).append(param)
    decayed = [{"params": matrices, "weight_decay": weight_decay}] if matrices else []
    return decayed + ([{"params": vectors, "weight_decay": 0.0}] if vectors else [])
