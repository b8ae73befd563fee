"""Kernel launches that cost little when warm.

Triton inspects every argument of every call to find out which compiled variant fits, and wraps descriptors and
launches in several layers of Python: 15 to 25 us a kernel, and a backward pass is two or three. Nothing of that
changes while shapes, strides, data types, alignment and device stay. So a launch is prepared once for these (the
launchers keep what they prepared by these keys), and a warm call only encodes the descriptors for the pointers of the
day and calls Triton's C launcher. Hooks of Triton's profiler do not see these calls.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton

from lmkit.kernels.versions import encoded_type, raw_launch, tensor_map_encoder


class PreparedLaunch:
    """One variant of a kernel, its grid and all arguments but the pointers. Call it with the pointers."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        tensors: Sequence[Any],
        scalars: tuple,
        constants: tuple,
        **options: Any,
    ) -> None:
        """Compiles the kernel, unless that has been done.

        Args:
            tensors: the kernel's first parameters, in order, as one would launch it with: tensors, and tensor
                descriptors. Their pointers are not kept, only whether they are multiples of 16.
            scalars, constants: its other parameters, in order.
            options: Triton's, such as num_warps.
        """
        compiled = kernel.warmup(*tensors, *scalars, *constants, grid=(*grid, 1), **options)
        metas = iter(compiled.metadata.tensordesc_meta or ())
        self._arguments: list[Any] = []  # in order, with None where a call fills in a pointer or a descriptor
        # For each tensor: its place in these, and what its descriptor is encoded from besides the pointer
        self._places: list[tuple[int, tuple | None]] = []
        for tensor in tensors:
            place = len(self._arguments)
            self._arguments.append(None)
            if isinstance(tensor, torch.Tensor):
                self._places.append((place, None))
                continue
            shape, strides = list(tensor.shape), list(tensor.strides)
            meta = next(metas)
            element = (
                meta["swizzle"],
                meta["elem_size"],
                encoded_type(meta["elem_type"]),
                meta["block_size"],
            )
            self._places.append((place, (*element, shape, strides, 0)))  # 0: zeros outside
            self._arguments += [*shape, *strides]
        self._arguments += [*scalars, *constants]
        self._launch = raw_launch(compiled, (*grid, 1))
        self._encode = tensor_map_encoder()
        self._device = torch.cuda.current_device()
        self._current_stream = triton.runtime.driver.active.get_current_stream

    def __call__(self, *pointers: int) -> None:
        """Launches on the device's current stream; the device must be the one it was prepared on."""
        encode, arguments = self._encode, self._arguments.copy()
        for pointer, (place, fixed) in zip(pointers, self._places, strict=True):
            arguments[place] = pointer if fixed is None else encode(pointer, *fixed)
        self._launch(self._current_stream(self._device), arguments)
