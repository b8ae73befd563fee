"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

Gradients below 6e-8 vanish in fp16, so the loss is multiplied by a factor that keeps them large and the gradients
are divided by it before anything looks at them. The factor is halved when a gradient overflows (that step is left
out) and doubled after a long time without. Unlike torch's GradScaler the decision is made elsewhere, so that all
ranks share it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lmkit.training.state import LossScaleState

GROWTH_INTERVAL = 2000
INITIAL = 65536.0
SMALLEST = 1.0


class LossScale:
    """The factor, and when to change it."""

    def __init__(self) -> None:
        self.scale = INITIAL
        self._good_steps = 0

    def unscale_(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide the gradients by the factor."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def shrink(self) -> bool:
        """After an overflow: halve the factor. False if it cannot shrink any more: then the overflow is real."""
        self._good_steps = 0
        if self.scale <= SMALLEST:
            return False
        self.scale /= 2
        return True

    def keep(self) -> None:
        """After a good step."""
        self._good_steps += 1
        if self._good_steps >= GROWTH_INTERVAL:
            self._good_steps = 0
            self.scale *= 2

    def restore(self, state: LossScaleState) -> None:
        """Go on from a checkpoint."""
        self.scale, self._good_steps = state.scale, state.good_steps

    def state(self) -> LossScaleState:
        return LossScaleState(scale=self.scale, good_steps=self._good_steps)
