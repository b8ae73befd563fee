"""Kernel launches that cost little when warm.

Triton inspects every argument of every call to find out which compiled variant fits, and wraps descriptors
and launches in several layers of Python: 15 to 25 us a kernel, and a backward pass is three. Nothing of
that changes while shapes, strides, data type and device stay. So a launch is prepared once for these (the
launchers keep what they prepared by these keys), and a warm call only encodes the descriptors for the
pointers of the day and calls Triton's C launcher. Hooks of Triton's profiler do not see warm calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lmkit.kernels.hopper.tensors import shared_layout
from lmkit.kernels.hopper.versions import encoded_type, raw_launch, tensor_map_encoder


@dataclass(frozen=True)
class Boxes:
    """A tensor that a kernel copies box by box; strides as from `box_strides`."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    box: tuple[int, ...]


class PreparedLaunch:
    """One variant of a kernel, its grid and all arguments but the pointers. Call it with the pointers."""

    def __init__(
        self,
        kernel,
        grid: tuple[int, int],
        tensors: Sequence[Boxes | torch.dtype],
        scalars: tuple,
        constants: tuple,
        **options,
    ):
        """Compiles the kernel, unless that has been done.

        Args:
            tensors: the kernel's first parameters, in order: boxes for a descriptor, a data type for a
                plain pointer (16-byte aligned).
            scalars, constants: its other parameters, in order.
            options: Triton's, such as num_warps.
        """
        examples = [_example(tensor) for tensor in tensors]
        compiled = kernel.warmup(*examples, *scalars, *constants, grid=(*grid, 1), **options)
        metas = iter(compiled.metadata.tensordesc_meta or ())
        self._tensors: list[tuple[tuple | None, tuple[int, ...]]] = []
        for tensor in tensors:
            if isinstance(tensor, torch.dtype):
                self._tensors.append((None, ()))
                continue
            shape, strides = list(tensor.shape), list(tensor.strides)
            meta = next(metas)
            element = (
                meta["swizzle"],
                meta["elem_size"],
                encoded_type(meta["elem_type"]),
                meta["block_size"],
            )
            self._tensors.append(((*element, shape, strides, 0), (*shape, *strides)))  # 0: zeros outside
        self._rest = (*scalars, *constants)
        self._launch = raw_launch(compiled, (*grid, 1))
        self._encode = tensor_map_encoder()
        self._device = torch.cuda.current_device()
        self._current_stream = triton.runtime.driver.active.get_current_stream

    def __call__(self, *pointers: int) -> None:
        """Launches on the device's current stream; the device must be the one it was prepared on."""
        encode, arguments = self._encode, []
        for pointer, (fixed, shape_and_strides) in zip(pointers, self._tensors, strict=True):
            if fixed is None:
                arguments.append(pointer)
            else:
                arguments.append(encode(pointer, *fixed))
                arguments.extend(shape_and_strides)
        arguments.extend(self._rest)
        self._launch(self._current_stream(self._device), arguments)


def _example(tensor: Boxes | torch.dtype):
    """What Triton needs to see of an argument to compile for it."""
    if isinstance(tensor, torch.dtype):
        return torch.empty(0, dtype=tensor)
    layout = shared_layout(tensor.box, tensor.dtype)
    base = torch.empty((0,) * len(tensor.shape), dtype=tensor.dtype)
    return TensorDescriptor(base, list(tensor.shape), list(tensor.strides), list(tensor.box), layout)
