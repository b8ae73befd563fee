"""Gradients side by side in one flat tensor, so that one collective moves many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._utils import _unflatten_dense_tensors

from lmkit.parallel.reduction import PendingMean


@dataclass
class PackedGradients:
    """Gradients packed into `flat`; `views[i]` is where `gradients[i]` lies, in its shape.

    Attributes:
        in_place: the views are the parameters' gradients now.
    """

    flat: torch.Tensor
    views: list[torch.Tensor]
    gradients: list[torch.Tensor]
    in_place: bool

    def unpack(self) -> None:
        """Copy back what travelled in another dtype; nothing to do where `grad` is the view itself."""
        if not self.in_place:
            torch._foreach_copy_(self.gradients, self.views)


def pack_gradients(
    parameters: Sequence[nn.Parameter], gradients: list[torch.Tensor], wire_dtype: torch.dtype
) -> PackedGradients:
    """Put the parameters' gradients into one new tensor of `wire_dtype` with a single copy kernel.

    Where the dtype is the gradients' own, `grad` then points at the view: what the collective writes there is
    the gradient, and nothing is copied back. All are on one device and of one dtype.
    """
    first = gradients[0]
    same_dtype = first.dtype == wire_dtype
    flat = torch.empty(sum(gradient.numel() for gradient in gradients), dtype=wire_dtype, device=first.device)
    views = list(_unflatten_dense_tensors(flat, gradients))
    torch._foreach_copy_(views, gradients)
    if same_dtype:
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
    return PackedGradients(flat, views, gradients, in_place=same_dtype)


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Every parameter's gradient; all of them must have one."""
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    assert len(gradients) == len(parameters)
    return gradients


def group_by_kind(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split by device and dtype: only like lies beside like. Order is kept within each group."""
    groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(groups.values())


class ReducingBucket:
    """Gradients whose mean is under way.

    Args:
        pending: the reduction, of the gradients themselves or of `packed`.
    """

    def __init__(self, pending: PendingMean, packed: PackedGradients | None = None) -> None:
        self._pending = pending
        self._packed = packed

    def wait(self) -> None:
        """Make the bucket's gradients the mean (on GPUs: for the current stream)."""
        self._pending.wait()
        if self._packed is not None:
            self._packed.unpack()

    def abandon(self) -> None:
        """Let the collective end; its result is not wanted."""
        self._pending.work.wait()
