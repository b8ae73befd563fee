"""AdamW for training: `lmkit.core.adamw` with float32 masters, one launch on a GPU, and decisions on the device."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lmkit.core import adamw as core
from lmkit.core.adamw import Scalars, adamw_update, loss_of, new_state, scalars_of
from lmkit.registry import OPTIMIZERS

if TYPE_CHECKING:
    from lmkit.kernels.adamw import AdamWLaunch
    from lmkit.recipe.tables import OptimizerConfig

Item = TypeVar("Item")
# Elements that one sweep of the update works on. This bounds temporary memory; on a CPU a sweep stays in the cache.
SWEEP_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 26}

# Devices and dtypes for which a kernel of ours updates in one pass over memory.
ONE_PASS_DEVICES = {"cuda"}
ONE_PASS_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
MASTER = "master"
"""Name of the state that holds float32 weights; the parameters are rounded copies of them."""
MOST_LAUNCHES = 64
"""Most prepared launches that are kept, one for each list of parameters; a model has a few."""


class AdamW(core.AdamW):
    """`lmkit.core.adamw.AdamW`, whose arguments it has, and what fast training needs of it.

    Attributes:
        gradient_factor: a scalar on the parameters' device, or None. Until `zero_grad`, `step` multiplies gradients
            by it as it reads them; `grad` itself does not change.
        decision: a scalar on the parameters' device, or None. Until `zero_grad`, `step` changes nothing and does not
            count if it is zero. If all parameters are updated in one pass, the host does not read it, and the
            learning rate may be a scalar on the device, too.
        copies: parameter -> a contiguous tensor of its shape and any dtype, to which every step writes the new value.

    State per parameter: that of `torch.optim.AdamW`, with `step` on the device after a decision; either loads the
    other's state. With `keep_masters` there is also `master`; the moments have its dtype.

    On CUDA devices, `lmkit.kernels.adamw` updates contiguous parameters of at most 32 bits in one pass over memory,
    in float32. `adamw_update` updates everything else, a sweep of parameters at a time.
    """

    writes_copies = True  # whether it obeys `copies`

    # PyTorch's wrapper imports torch._dynamo, which is slow and needed only for torch.compile.
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    __signature__ = inspect.signature(core.AdamW)

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._forget_tensors()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy of the optimizer, or loaded state."""
        super().__setstate__(state)
        if "copies" not in self.__dict__:
            self._forget_tensors()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an AdamW, of this class or of PyTorch; a ValueError if this class lacks its settings."""
        for setting in ("maximize", "amsgrad"):
            if any(group.get(setting) for group in state_dict["param_groups"]):
                raise ValueError(f"the state was made with {setting}=True, which this AdamW does not support")
        decays = [group for group in state_dict["param_groups"] if group["weight_decay"]]
        if any(group.get("decoupled_weight_decay") is False for group in decays):
            wrong = "the state was made with weight decay in the gradient, as Adam has it, not AdamW"
            raise ValueError(wrong)
        masters = {param for param, state in self.state.items() if MASTER in state}
        super().load_state_dict(state_dict)
        self._cohorts.clear()
        # The base class casts state to the parameter's dtype.
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            state = state_dict["state"].get(index, {})
            if MASTER in state or param in masters:
                for name in state.keys() - {"step"}:
                    self.state[param][name] = state[name].to(param.device, copy=True)
            if param in masters and MASTER not in state:
                self.state[param][MASTER] = param.detach().float()

    def keep_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Keep float32 weights (parameter -> value before rounding) in the state `master`; before the first step."""
        for param, master in masters.items():
            self.state[param][MASTER] = master

    def _forget_tensors(self) -> None:
        self.gradient_factor: Tensor | None = None
        self.decision: Tensor | None = None
        self._cohorts: dict[Tensor, int] = {}
        self._settings: dict[tuple, Tensor] = {}
        self.copies: dict[Tensor, Tensor] = {}
        self._launches: dict[tuple[int, ...], AdamWLaunch] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returns."""
        loss = None if closure is None else loss_of(closure)
        work, fits_one_pass = [], True
        for group in self.param_groups:
            for kind, updates in self._updates(group).items():
                fits = kind.device.type in ONE_PASS_DEVICES and kind.fits_one_pass
                work.append((group, updates, fits))
                fits_one_pass &= fits
        decision = self.decision
        if decision is not None and not fits_one_pass:
            if not decision:  # waits for the device
                return loss
            decision = None
        for group, updates, fits in work:
            if decision is None:
                self._update(group, updates, in_one_pass=fits)
            else:
                self._update_if(decision, group, updates)
        return loss

    def _update(self, group: dict[str, Any], updates: list[Update], *, in_one_pass: bool) -> None:
        """Count the step, and update parameters of one kind: by one launch of a kernel, or a sweep at a time."""
        self._cohorts.clear()
        counts = []
        for update in updates:
            update.state["step"] = update.state["step"].cpu()  # the device counted before
            counts.append(update.state["step"])
        torch._foreach_add_(counts, 1)
        by_count: dict[int, list[Update]] = {}
        for update, count in zip(updates, counts, strict=True):
            by_count.setdefault(int(count), []).append(update)
        for count, alike in by_count.items():
            scalars = scalars_of(group, count)
            if in_one_pass:
                self._update_in_one_pass(alike, scalars, decided=None)
                continue
            limit = SWEEP_ELEMENTS.get(alike[0].param.device.type, SWEEP_ELEMENTS["cuda"])
            sizes = map(Tensor.numel, map(attrgetter("param"), alike))
            for sweep in sweeps(alike, sizes, limit):
                params, grads, means, squares, copies, _ = map(list, zip(*sweep, strict=True))
                grads = list(map(Tensor.type_as, grads, params))  # masters are wider than gradients
                if self.gradient_factor is not None:
                    grads = list(torch._foreach_mul(grads, self.gradient_factor.to(params[0].device)))
                adamw_update(params, grads, means, squares, scalars)
                if copies[0] is not None:
                    torch._foreach_copy_(copies, params)

    def _update_if(self, decision: Tensor, group: dict[str, Any], updates: list[Update]) -> None:
        """Make the updates if `decision` is not zero; the host does not wait for it."""
        from lmkit.kernels.adamw import decide

        device = updates[0].param.device
        decision, lr = decision.to(device), group["lr"]
        beta1, beta2 = betas = group["betas"]
        settings = (*betas, group["eps"], group["weight_decay"])
        if (device, settings) not in self._settings:
            self._settings[device, settings] = torch.tensor(settings, dtype=torch.float64).to(device)
        if not isinstance(lr, Tensor):
            lr = torch.full((), lr, dtype=torch.float64, device=device)
        for alike in self._count_on_device(updates, decision):
            step = alike[0].state["step"]
            decided = decide(decision, step, lr, self._settings[device, settings])
            self._update_in_one_pass(alike, Scalars(beta1, beta2, 0, 0, 0), decided)

    @contextmanager
    def captured(self) -> Iterator[object]:
        """Let a CUDA graph capture the steps inside; yield an object that must live as long as the graph. Every
        parameter must have been updated before."""
        before = self._launches
        launches = self._launches = {which: launch.for_graph() for which, launch in before.items()}
        try:
            yield launches
        finally:
            self._launches = before
        for launch in launches.values():
            launch.send()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and `gradient_factor` and `decision` with them."""
        self.gradient_factor = self.decision = None
        inspect.unwrap(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def _updates(self, group: dict[str, Any]) -> dict[_Kind, list[Update]]:
        """Group the parameters with a gradient by their kind; make state for new ones."""
        by_kind: dict[_Kind, list[Update]] = {}
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            state = self.state[param]
            master = state.get(MASTER)
            exact, copy = (param, self.copies.get(param)) if master is None else (master, param)
            if "step" not in state:
                state.update(new_state(exact))
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            is_contiguous = exact.is_contiguous() and grad.is_contiguous() and mean.is_contiguous()
            is_contiguous &= square.is_contiguous() and (copy is None or copy.is_contiguous())
            copy_dtype = None if copy is None else copy.dtype
            kind = _Kind(exact.device, exact.dtype, grad.dtype, copy_dtype, is_contiguous)
            by_kind.setdefault(kind, []).append(Update(exact, grad, mean, square, copy, state))
        return by_kind

    def _count_on_device(self, updates: list[Update], decision: Tensor) -> list[list[Update]]:
        """Count the step if it is made; group updates with equal numbers of steps, without reading the numbers: those
        of a cohort, as long as every step updates all of them or none."""
        numbers = itertools.count(max(self._cohorts.values(), default=0) + 1)
        sizes = Counter(self._cohorts.values())
        before: dict[tuple[str, int], list[Update]] = {}
        for update in updates:
            state = update.state
            was_loaded = state["step"].device != update.param.device
            if update.param in self._cohorts and not was_loaded:
                before.setdefault(("cohort", self._cohorts[update.param]), []).append(update)
            else:
                steps = int(state["step"])
                state["step"] = torch.full((), steps, dtype=torch.float32, device=update.param.device)
                before.setdefault(("steps", steps), []).append(update)
        for (known, number), alike in before.items():
            if known == "steps" or len(alike) < sizes[number]:
                self._cohorts |= dict.fromkeys([update.param for update in alike], next(numbers))
        counts = [update.state["step"] for update in updates]
        made = (decision != 0).to(counts[0])
        torch._foreach_add_(counts, [made] * len(counts))  # the host would read a single tensor
        return list(before.values())

    def _update_in_one_pass(self, updates: list[Update], scalars: Scalars, decided: Tensor | None) -> None:
        """Make the same update with one launch of a kernel."""
        from lmkit.kernels.adamw import AdamWLaunch  # imports Triton

        params, grads, means, squares, copies, _ = map(list, zip(*updates, strict=True))
        which = tuple(map(id, params))  # ids stay unique: parameters live as long as their optimizer
        if which not in self._launches:
            if len(self._launches) >= MOST_LAUNCHES:
                self._launches.clear()
            self._launches[which] = AdamWLaunch()
        factor = self.gradient_factor
        if factor is not None:
            factor = factor.to(params[0].device, torch.float32)
        copies = [] if copies[0] is None else copies
        self._launches[which](params, grads, means, squares, copies, scalars, factor, decided)


@OPTIMIZERS.register("adamw", order=1, keeps_masters=True)
def make_adamw(groups: list[dict[str, Any]], options: OptimizerConfig) -> AdamW:
    """Make the optimizer of the recipe's table `[optimizer]`; the groups hold the weight decay."""
    return AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)


class Update(NamedTuple):
    """The tensors of one parameter's update; `copy` receives the new value."""

    param: Tensor  # the parameter, or its master if it has one
    grad: Tensor
    mean: Tensor
    square: Tensor
    copy: Tensor | None
    state: dict[str, Any]


class _Kind(NamedTuple):
    """The properties that all updates of one launch or sweep share."""

    device: torch.device
    dtype: torch.dtype
    grad_dtype: torch.dtype
    copy_dtype: torch.dtype | None
    contiguous: bool

    @property
    def fits_one_pass(self) -> bool:
        dtypes = {self.dtype, self.grad_dtype, self.copy_dtype or self.dtype}
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) < (8, 0):
            return False  # too old for Triton
        return self.contiguous and dtypes <= ONE_PASS_DTYPES


def sweeps(items: Iterable[Item], sizes: Iterable[int], limit: int) -> Iterator[list[Item]]:
    """Split items of these `sizes` in order into sweeps of at most `limit` elements, but at least one item."""
    sweep: list[Item] = []
    elements = 0
    for item, size in zip(items, sizes, strict=True):
        if sweep and elements + size > limit:
            yield sweep
            sweep, elements = [], 0
        sweep.append(item)
        elements += size
    if sweep:
        yield sweep
