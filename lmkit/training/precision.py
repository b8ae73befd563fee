"""What `train.precision` means.

| precision | weights | matrix products | masters, moments |
|-|-|-|-|
| `fp32` | float32 | float32 | weights, float32 |
| `bf16` | matrices bf16, gains float32 | bf16 | float32, float32 |
| `fp8` | as `bf16` | bf16; fp8 for outputs and input gradients of large layers (`lmkit.model.fp8`) | as `bf16` |
| `bf16-autocast` | float32, cast anew in every pass | bf16 (`torch.autocast`) | weights, float32 |
| `fp16` | float32, cast anew in every pass | fp16 (`torch.autocast`), loss scaled | weights, float32 |
| `auto` | see `with_precision` | | |

`fsdp` gathers the weights of a layer in one dtype: in `bf16` and `fp8` it computes with gains in bf16, too. Their
masters are float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from lmkit.recipe.recipe import Recipe
from lmkit.registry import OPTIMIZERS
from lmkit.training.checkpoint import LossScaleState

PRODUCTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "bf16-autocast": torch.bfloat16,
    "fp16": torch.float16,
}
"""precision -> dtype of the matrix products, and of what goes in and comes out of those in fp8."""
NARROW_WEIGHTS = ("bf16", "fp8")
"""Precisions whose matrices are bf16, with masters."""
GROWTH_INTERVAL = 2000
INITIAL_SCALE = 65536.0
SMALLEST_SCALE = 1.0


def with_precision(recipe: Recipe, *, has_bf16: bool, saved: str | None = None) -> Recipe:
    """Return the recipe with the precision that "auto" stands for: that of a checkpoint, or what suits the device.

    Without instructions for bf16 it is "fp32"; else "bf16", or "bf16-autocast" if the optimizer keeps no masters.
    """
    if recipe.train is None or recipe.train.precision != "auto":
        return recipe
    narrow = "bf16" if OPTIMIZERS.facts(recipe.optimizer.name).keeps_masters else "bf16-autocast"
    return recipe.changed(train={"precision": saved or (narrow if has_bf16 else "fp32")})


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Run matrix products in `precision`, where the weights do not have its dtype."""
    if precision in ("fp32", *NARROW_WEIGHTS):
        return nullcontext()
    return torch.autocast(device.type, dtype=PRODUCTS[precision])


@torch.no_grad()
def hold_weights(model: nn.Module, precision: str) -> dict[Tensor, Tensor]:
    """Cast the matrices of a model to bf16, in place, if that is what the precision means; return parameter -> its
    value before that, where it was wider."""
    masters: dict[Tensor, Tensor] = {}
    for parameter in model.parameters() if precision in NARROW_WEIGHTS else ():
        if parameter.dim() >= 2 and parameter.dtype != torch.bfloat16:
            masters[parameter] = parameter.detach()
            parameter.data = parameter.detach().bfloat16()
    return masters


class GradientSums:
    """Add up the gradients of micro-batches in float32.

    Strategies reduce gradients in the dtype of their parameters. So the sum is rounded to that dtype before the last
    micro-batch is added to it; all other additions are in float32.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad and p.dtype == torch.bfloat16]
        self._sums: dict[Tensor, Tensor] = {}

    def take(self) -> None:
        """Add the gradients of one micro-batch, and drop them."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if parameter in self._sums:
                self._sums[parameter] += parameter.grad
            else:
                self._sums[parameter] = parameter.grad.float()
            parameter.grad = None

    def give(self) -> None:
        """Set the gradients to the sums."""
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()


class LossScale:
    """Scale the loss dynamically for fp16 (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

    Gradients below 6e-8 vanish in fp16, so the loss is multiplied by a factor, and the gradients are divided by it.
    The factor, a float32 scalar on the device, is halved when a gradient overflows (that step is skipped) and doubled
    after `GROWTH_INTERVAL` good steps. Unlike torch's GradScaler it lets all ranks share one decision.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def unscale_(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide the gradients by the factor."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def judge(self, bad: torch.Tensor) -> torch.Tensor:
        """Count a good step, or halve the factor after a `bad` one, whose loss or gradient is not finite; return
        whether it is bad although the factor is at its minimum. Bool scalars on the device."""
        can_shrink = self.scale > SMALLEST_SCALE
        good_steps = (self._good_steps + 1) * ~bad
        grows = good_steps >= GROWTH_INTERVAL
        self._good_steps.copy_(good_steps * ~grows)
        self.scale *= 1 + grows.float() - 0.5 * (bad & can_shrink)
        return bad & ~can_shrink

    def state(self) -> LossScaleState:
        return LossScaleState(scale=self.scale.item(), good_steps=int(self._good_steps))

    def restore(self, state: LossScaleState) -> None:
        self.scale.fill_(state.scale)
        self._good_steps.fill_(state.good_steps)
