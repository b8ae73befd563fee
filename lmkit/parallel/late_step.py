"""An optimizer's step around gradients that are still being reduced: the others first, these when they have come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class LateStep:
    """Makes an optimizer step in two parts while gradients are on their way; otherwise changes nothing.

    The embedding's gradient is the largest of many models and the last to be ready: no backward pass is left to hide
    its reduction behind, but the step of all other parameters is. The optimizer must pass over parameters without a
    gradient and keep its state per parameter, as PyTorch's do.

    Args:
        late: tells whose gradients are on their way.
        wait: makes them whole.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        late: Callable[[], Iterable[nn.Parameter]],
        wait: Callable[[], None],
    ) -> None:
        self._late = late
        self._wait = wait
        self._withheld: dict[nn.Parameter, torch.Tensor | None] = {}
        self._is_second = False
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_second:
            return
        late = {parameter: parameter.grad for parameter in self._late()}
        if len(args) > 1 or kwargs:  # a closure computes the gradients anew
            self._wait()
            return
        self._withheld = late
        for parameter in late:
            parameter.grad = None

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_second or not self._withheld:
            return
        late, self._withheld = self._withheld, {}
        for parameter, gradient in late.items():
            parameter.grad = gradient
        self._wait()
        others = [p for group in optimizer.param_groups for p in group["params"] if p not in late]
        with _without_gradients(others):
            self._is_second = True
            try:
                optimizer.step()
            finally:
                self._is_second = False


@contextmanager
def _without_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    held = {parameter: parameter.grad for parameter in parameters}
    for parameter in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held.items():
            parameter.grad = gradient
