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
    """Gradients of `parameters`, packed into `flat`; `views[i]` is where the i-th one lies, in its shape."""

    parameters: Sequence[nn.Parameter]
    flat: torch.Tensor
    views: Sequence[torch.Tensor]

    def unpack(self) -> None:
        """Copy back what travelled in another dtype; nothing to do where `grad` is the view itself."""
        gradients = gradients_of(self.parameters)
        apart = [(g, view) for g, view in zip(gradients, self.views, strict=True) if g is not view]
        if apart:
            torch._foreach_copy_([gradient for gradient, _ in apart], [view for _, view in apart])


def pack_gradients(parameters: Sequence[nn.Parameter], wire_dtype: torch.dtype) -> PackedGradients:
    """Put the gradients into one new tensor of `wire_dtype` with a single copy kernel.

    Where the dtype is the gradients' own, `grad` then points at the view: what the collective writes there is
    the gradient, and nothing is copied back. One contiguous gradient alone is its own flat tensor.
    All parameters have gradients, on one device and of one dtype.
    """
    gradients = gradients_of(parameters)
    first = gradients[0]
    if len(gradients) == 1 and first.dtype == wire_dtype and first.is_contiguous():
        return PackedGradients(parameters, first.view(-1), gradients)
    flat = torch.empty(sum(gradient.numel() for gradient in gradients), dtype=wire_dtype, device=first.device)
    views = _unflatten_dense_tensors(flat, gradients)
    torch._foreach_copy_(views, gradients)
    if first.dtype == wire_dtype:
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
    return PackedGradients(parameters, flat, views)


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Every parameter's gradient; all of them must have one."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(parameters)
    return gradients


def group_by_kind(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split by device and dtype: only like lies beside like. Order is kept within each group."""
    groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return list(groups.values())


@dataclass
class ReducingBucket:
    """A packed bucket whose reduction is under way."""

    packed: PackedGradients
    pending: PendingMean

    def wait(self) -> None:
        self.pending.wait()
        self.packed.unpack()
