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
    the gradient, and nothing is copied back. One contiguous gradient alone is its own flat tensor.
    All are on one device and of one dtype.
    """
    first = gradients[0]
    same_dtype = first.dtype == wire_dtype
    if len(gradients) == 1 and same_dtype and first.is_contiguous():
        return PackedGradients(first.view(-1), gradients, gradients, in_place=True)
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
    """A packed bucket whose reduction is under way."""

    def __init__(self, packed: PackedGradients, pending: PendingMean) -> None:
        self._packed = packed
        self._pending = pending
        # A gradient that is its own flat tensor may share its storage, and with it the count of changes, with
        # others (slices of one matrix product); it is sent when its own hook says that it is complete.
        self._version = packed.flat._version if packed.in_place and len(packed.gradients) > 1 else None

    def wait(self) -> None:
        """Make the bucket's gradients the mean.

        Raises:
            ValueError: a gradient was changed after its bucket had been sent.
        """
        if self._version is not None and self._packed.flat._version != self._version:
            raise ValueError(
                "a gradient was added to after it had been sent to the other ranks: call "
                "zero_grad(set_to_none=True) after every step, and no_sync() for passes that only accumulate"
            )
        self._pending.wait()
        self._packed.unpack()

    def abandon(self) -> None:
        """Let the collective end; its result is not wanted."""
        self._pending.work.wait()
