"""Hooks on parameters that do not keep alive what they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def on_gradient(parameter: nn.Parameter, method: Callable[..., None], *before: Any) -> RemovableHandle:
    """Call the bound `method(*before, parameter)` whenever a backward pass has completed the parameter's gradient.

    PyTorch holds such a hook where Python's garbage collector does not look: one that held its object would keep it,
    and the model and the optimizer state that it knows, to the end of the process.
    """
    reference = weakref.WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        method = reference()
        if method is not None:
            method(*before, parameter)

    return parameter.register_post_accumulate_grad_hook(hook)
