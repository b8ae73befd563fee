"""Kernel launches that cost little when warm.

Triton inspects every argument of every call to find out which compiled variant fits (90 us with four
descriptors). Our kernels differ in nothing but their compile-time constants, the data type and the device,
so the variant is looked up by those, and from the second call on the compiled kernel is launched directly.
"""

from collections.abc import Hashable
from typing import Any

import torch


class Launch:
    """A kernel with its compiled variants.

    Sound only for kernels whose other arguments never change what Triton compiles: integers marked
    do_not_specialize (or annotated i64), pointers always 16-byte aligned, descriptors with boxes that
    follow from the constants.
    """

    def __init__(self, kernel, **options):
        self._kernel = kernel
        self._options = options
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self, grid: tuple[int, int], dtype: torch.dtype, arguments: tuple, constants: tuple, **options
    ):
        """Launches on the current device and stream; `constants` are the kernel's constexpr parameters, in
        order."""
        variant = (torch.cuda.current_device(), dtype, constants)
        compiled = self._compiled.get(variant)
        if compiled is None:
            launch = self._kernel[grid]
            self._compiled[variant] = launch(*arguments, *constants, **self._options, **options)
        else:
            compiled[(*grid, 1)](*arguments, *constants)
