"""Launches of the Hopper kernels, prepared from descriptions alone: shapes, strides and data types, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lmkit.kernels.hopper.tensors import shared_layout
from lmkit.kernels.prepared import PreparedLaunch


@dataclass(frozen=True)
class Boxes:
    """A tensor that a kernel copies box by box; strides as from `box_strides`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    box: tuple[int, ...]


def prepare_launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: Sequence[Boxes | torch.dtype],
    scalars: tuple,
    constants: tuple,
    **options: Any,
) -> PreparedLaunch:
    """A PreparedLaunch of a kernel whose first parameters are boxes (a descriptor) or data types (a plain pointer,
    16-byte aligned)."""
    return PreparedLaunch(kernel, grid, [_example(x) for x in tensors], scalars, constants, **options)


def _example(tensor: Boxes | torch.dtype) -> torch.Tensor | TensorDescriptor:
    """What Triton needs to see of an argument to compile for it."""
    if isinstance(tensor, torch.dtype):
        return torch.empty(0, dtype=tensor)
    layout = shared_layout(tensor.box, tensor.dtype)
    base = torch.empty((0,) * len(tensor.shape), dtype=tensor.dtype)
    return TensorDescriptor(base, list(tensor.shape), list(tensor.strides), list(tensor.box), layout)
