"""AdamW: Adam with weight decay kept apart from the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmkit.kernels.adamw import AdamWLaunch

# Elements that one sweep of the update works on: temporary memory is that much, and on a CPU the five arrays of a
# sweep stay in the cache from one operation to the next.
SWEEP_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 26}

# Where, and for which dtypes, the update is one pass of our own kernel instead.
ONE_PASS_DEVICES = {"cuda"}
ONE_PASS_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
MOST_LAUNCHES = 64
"""Lists of parameters whose places are remembered from step to step: a model has a few."""


class Scalars(NamedTuple):
    """The numbers of an update that all its elements share.

    Both bias corrections are moved out of the arrays (Kingma and Ba 2015, end of section 2):
    sqrt(v / c) + eps = (sqrt(v) + eps sqrt(c)) / sqrt(c)

    Attributes:
        kept: what decay leaves of a weight, 1 - lr decay.
        eps: with the correction of the second moment's root.
        rate: times m / (sqrt(v) + eps) is added to the weight: -lr, with both corrections.
    """

    beta1: float
    beta2: float
    kept: float
    eps: float
    rate: float


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

    Attributes:
        gradient_factor: a scalar on the parameters' device that gradients are multiplied by as they are read, until
            `zero_grad`: clipping then needs no pass over them. `grad` itself stays as it is.
        copies: parameter -> a contiguous tensor of its shape and any dtype, which every step writes the new value to.

    Raises:
        ValueError: a setting is out of range.

    State per parameter: `step` (float32 scalar on the CPU), `exp_avg`, `exp_avg_sq` (as the parameter), the names
    and shapes of `torch.optim.AdamW`; either loads the other's state, where that was not made with `maximize` or
    `amsgrad`. A gradient may be of another dtype than its parameter, where that one's `grad_dtype` allows it.

    On CUDA devices, parameters of at most 32 bits whose tensors are all contiguous are updated by
    `lmkit.kernels.adamw`: in one pass over memory, calculated in float32. All others, and everything on a CPU, are
    updated by a few operations over many tensors at once, calculated in the dtype of the parameter:
    `_update_by_operations` is the update to read.
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
        self._forget_tensors()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called for a copy of the optimizer, and when state is loaded."""
        super().__setstate__(state)
        if "copies" not in self.__dict__:
            self._forget_tensors()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of another optimizer like this one.

        Raises:
            ValueError: it was made with a setting of `torch.optim.AdamW` that this class lacks.
        """
        for setting in ("maximize", "amsgrad"):
            if any(group.get(setting) for group in state_dict["param_groups"]):
                raise ValueError(
                    f"the state was made with {setting}=True, which this AdamW cannot go on with"
                )
        super().load_state_dict(state_dict)

    def _forget_tensors(self) -> None:
        self.gradient_factor: Tensor | None = None
        self.copies: dict[Tensor, Tensor] = {}
        self._launches: dict[tuple[int, ...], AdamWLaunch] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for kind, updates in self._advance(group["params"]).items():
                scalars = _scalars(group, kind.step)
                if kind.fits_one_pass:
                    self._update_in_one_pass(updates, scalars)
                else:
                    for sweep in sweeps(updates):
                        self._update_by_operations(sweep, scalars)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and `gradient_factor` with them."""
        self.gradient_factor = None
        super().zero_grad(set_to_none)

    def _advance(self, params: list[Tensor]) -> dict[_Kind, list[Update]]:
        """Count the step; sort what has a gradient by what can be updated together (all of it, as a rule)."""
        updates, steps = [], []
        for param in params:
            grad = param.grad
            if grad is None:
                continue
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            steps.append(state["step"])
            updates.append(Update(param, grad, state["exp_avg"], state["exp_avg_sq"], self.copies.get(param)))
        if steps:
            torch._foreach_add_(steps, 1)
        alike: dict[_Kind, list[Update]] = {}
        for update, step in zip(updates, steps, strict=True):
            alike.setdefault(_kind(update, int(step)), []).append(update)
        return alike

    def _update_by_operations(self, updates: list[Update], scalars: Scalars) -> None:
        """One update of parameters that share device, dtypes and step count."""
        params, given, means, squares, copies = _columns(updates)
        grads = [grad.to(param.dtype) for grad, param in zip(given, params, strict=True)]
        if self.gradient_factor is not None:
            grads = list(torch._foreach_mul(grads, self.gradient_factor.to(params[0].device)))
        torch._foreach_lerp_(means, grads, 1 - scalars.beta1)
        torch._foreach_mul_(squares, scalars.beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - scalars.beta2)
        if scalars.kept != 1:
            torch._foreach_mul_(params, scalars.kept)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_add_(denominators, scalars.eps)
        torch._foreach_addcdiv_(params, means, denominators, scalars.rate)
        if copies:
            torch._foreach_copy_(copies, params)

    def _update_in_one_pass(self, updates: list[Update], scalars: Scalars) -> None:
        """The same by one launch of a kernel."""
        from lmkit.kernels.adamw import AdamWLaunch  # Triton is imported, and needed, only here

        columns = _columns(updates)
        which = tuple(map(id, columns[0]))  # parameters live as long as their optimizer
        if which not in self._launches:
            if len(self._launches) >= MOST_LAUNCHES:
                self._launches.clear()
            self._launches[which] = AdamWLaunch()
        factor = self.gradient_factor
        if factor is not None:
            factor = factor.to(columns[0][0].device, torch.float32)
        self._launches[which](*columns, scalars, factor)


class Update(NamedTuple):
    """The tensors of one parameter's update."""

    param: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    copy: Tensor | None


class _Kind(NamedTuple):
    """What updates have in common that are made together."""

    step: int
    device: torch.device
    dtype: torch.dtype
    grad_dtype: torch.dtype
    copy_dtype: torch.dtype | None
    contiguous: bool

    @property
    def fits_one_pass(self) -> bool:
        dtypes = {self.dtype, self.grad_dtype, self.copy_dtype or self.dtype}
        return self.contiguous and self.device.type in ONE_PASS_DEVICES and dtypes <= ONE_PASS_DTYPES


def _columns(
    updates: list[Update],
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Parameters, gradients, moments and copies (an empty list where there are none) of updates of one kind."""
    params, grads, means, squares, copies = map(list, zip(*updates, strict=True))
    return params, grads, means, squares, [copy for copy in copies if copy is not None]


def _kind(update: Update, step: int) -> _Kind:
    param, grad, mean, square, copy = update
    return _Kind(
        step,
        param.device,
        param.dtype,
        grad.dtype,
        None if copy is None else copy.dtype,
        param.is_contiguous() and grad.is_contiguous() and mean.is_contiguous() and square.is_contiguous(),
    )


def _scalars(group: dict[str, Any], step: int) -> Scalars:
    """The numbers of a group's update number `step`, which counts from 1."""
    beta1, beta2 = group["betas"]
    root_correction = (1 - beta2**step) ** 0.5
    return Scalars(
        beta1,
        beta2,
        kept=1 - group["lr"] * group["weight_decay"],
        eps=group["eps"] * root_correction,
        rate=-group["lr"] * root_correction / (1 - beta1**step),
    )


def sweeps(updates: list[Update]) -> Iterator[list[Update]]:
    """Cut updates on one device into runs of about SWEEP_ELEMENTS."""
    limit = SWEEP_ELEMENTS.get(updates[0].param.device.type, SWEEP_ELEMENTS["cuda"])
    sweep: list[Update] = []
    elements = 0
    for update in updates:
        if sweep and elements + update.param.numel() > limit:
            yield sweep
            sweep, elements = [], 0
        sweep.append(update)
        elements += update.param.numel()
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
