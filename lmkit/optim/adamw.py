"""AdamW: Adam with weight decay kept apart from the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

# Elements that one sweep of the update works on: temporary memory is that much, and on a CPU the five arrays of a
# sweep stay in the cache from one operation to the next.
SWEEP_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 26}


class AdamW(torch.optim.Optimizer):
    """Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2, in PyTorch's form:

        m = beta1 m + (1 - beta1) g              v = beta2 v + (1 - beta2) g^2
        w = (1 - lr decay) w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        params: parameters, or groups as `decay_groups` makes them; a group may override every setting.
        lr: learning rate; the loop sets `group["lr"]` before each step.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of each weight, times lr, that is taken away per step.

    Raises:
        ValueError: a setting is out of range.

    State per parameter: `step` (float32 scalar on the CPU), `exp_avg`, `exp_avg_sq` (as the parameter), the names
    and shapes of `torch.optim.AdamW`; either loads the other's state. The parameters of a step are updated by a few
    operations over many tensors at once.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be 0 or more, got {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be 0 or more, got {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params, step in self._advance(group["params"]):
                for sweep in _sweeps(params):
                    self._update(sweep, group, step)
        return loss

    def _advance(self, params: list[Tensor]) -> Iterator[tuple[list[Tensor], int]]:
        """Count the step; yield the parameters by the number of steps they have seen (one number, as a rule)."""
        ready = [param for param in params if param.grad is not None]
        for param in ready:
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        if ready:
            torch._foreach_add_([self.state[param]["step"] for param in ready], 1)
        alike: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        for param in ready:
            key = (int(self.state[param]["step"]), param.device, param.dtype)
            alike.setdefault(key, []).append(param)
        for (step, _, _), members in alike.items():
            yield members, step

    def _update(self, params: list[Tensor], group: dict[str, Any], step: int) -> None:
        """One update of parameters that share device, dtype and step count."""
        beta1, beta2 = group["betas"]
        lr, eps, weight_decay = group["lr"], group["eps"], group["weight_decay"]
        grads = [param.grad for param in params if param.grad is not None]
        means = [self.state[param]["exp_avg"] for param in params]
        squares = [self.state[param]["exp_avg_sq"] for param in params]

        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        if weight_decay:
            torch._foreach_mul_(params, 1 - lr * weight_decay)
        # Both bias corrections are moved out of the arrays (Kingma and Ba 2015, end of section 2):
        # sqrt(v / c) + eps = (sqrt(v) + eps sqrt(c)) / sqrt(c)
        root_correction = (1 - beta2**step) ** 0.5
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_add_(denominators, eps * root_correction)
        torch._foreach_addcdiv_(params, means, denominators, -lr * root_correction / (1 - beta1**step))


def _sweeps(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Cut a list of tensors of one device into runs of about SWEEP_ELEMENTS."""
    limit = SWEEP_ELEMENTS.get(params[0].device.type, SWEEP_ELEMENTS["cuda"])
    sweep: list[Tensor] = []
    elements = 0
    for param in params:
        if sweep and elements + param.numel() > limit:
            yield sweep
            sweep, elements = [], 0
        sweep.append(param)
        elements += param.numel()
    yield sweep


def decay_groups(params: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with weight decay; vectors (the norms' gains) without.

    A gain is a scale per channel that decay would pull to zero, away from its neutral value of one. Parameters that
    need no gradient are left out; so is an empty group.
    """
    trained = [param for param in params if param.requires_grad]
    matrices = [param for param in trained if param.dim() >= 2]
    vectors = [param for param in trained if param.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
