"""How the launchers hand tensors and constants to the kernels, and how they launch them cheaply."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lmkit.kernels.interpreter import INTERPRETED, let_scalars_index
from lmkit.kernels.tilings import Tiling

if INTERPRETED:
    let_scalars_index()


@cache  # asked for in every launch
def head_parts(head_dim: int, split: bool) -> tuple[int, int]:
    """(main, rest): the powers of two that a head is held in; rest = 0 if it is one part.

    >>> head_parts(80, split=True), head_parts(80, split=False), head_parts(64, split=True)
    ((64, 16), (128, 0), (64, 0))
    """
    padded = max(16, triton.next_power_of_2(head_dim))
    if not split or padded == head_dim or padded == 16:
        return padded, 0
    rest = max(16, triton.next_power_of_2(head_dim - padded // 2))
    return (padded, 0) if rest == padded // 2 else (padded // 2, rest)


@cache
def kernel_constants(head_dim: int, causal: bool, precision: str, tiling: Tiling) -> dict[str, Any]:
    """The compile-time arguments that all kernels share."""
    main, rest = head_parts(head_dim, tiling.split and not tiling.descriptors)
    return {
        "HEAD_DIM": head_dim,
        "MAIN": main,
        "REST": rest,
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "CAUSAL": causal,
        "PRECISION": "ieee" if INTERPRETED else precision,  # NumPy multiplies exactly, whatever was asked for
        "REGISTERS": tiling.registers,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


def source(x: Tensor, rows: int, tiling: Tiling) -> Tensor | TensorDescriptor:
    """What a kernel reads tiles of `rows` rows of x from: x itself, or a descriptor for the copy engine."""
    if not tiling.descriptors:
        return x
    # Made without its constructor, which checks what `descriptors_reach` has checked: 4 us a tensor.
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base = x
    descriptor.shape = x.shape
    descriptor.strides = x.stride()
    descriptor.block_shape = [1, 1, rows, head_parts(x.shape[3], split=False)[0]]
    descriptor.padding = "zero"
    return descriptor


class Launch:
    """A kernel whose warm launches skip Triton's inspection of every argument (20 us).

    What Triton compiles depends on the dtypes, the constants and on which numbers and addresses are multiples of
    16. A call with the numbers of an earlier one, the usual case, finds its compiled variant by them.
    """

    MOST_VARIANTS = 4096  # a length that grows with every call must not fill the memory

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple, tuple[Any, tuple]] = {}

    def __call__(
        self, programs: int, tensors: tuple[Tensor | TensorDescriptor, ...], numbers: tuple, constants: dict
    ) -> None:
        """Launches on the current device and stream.

        Args:
            tensors, numbers: the kernel's arguments in order, tensors first.
            constants: its compile-time arguments by name.
        """
        if INTERPRETED:
            self.kernel[(programs,)](*tensors, *numbers, **constants)
            return
        bases = [x if isinstance(x, Tensor) else x.base for x in tensors]
        addresses = [base.data_ptr() % 16 == 0 for base in bases]
        # The first is read through what all are read through: pointers, or descriptors.
        read_by, device, dtype = type(tensors[0]), bases[0].device.index, bases[0].dtype
        variant = (read_by, device, dtype, *numbers, *addresses, *constants.values())
        known = self.compiled.get(variant)
        if known is not None:
            compiled, trailing = known
            compiled[(programs, 1, 1)](*tensors, *numbers, *trailing)
            return
        compiled = self.kernel[(programs,)](*tensors, *numbers, **constants)
        if len(self.compiled) >= self.MOST_VARIANTS:
            self.compiled.clear()
        trailing = tuple(constants[name] for name in self.kernel.arg_names[len(tensors) + len(numbers) :])
        self.compiled[variant] = compiled, trailing


def selected(device: torch.device) -> AbstractContextManager:
    """Makes the tensors' device the one that kernels are launched on; for free where it is already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def descriptors_reach(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can address all of these: 16-byte aligned, 16 bit wide, innermost stride 1."""
    for x in tensors:
        batch, head, row, dim = x.stride()
        if dim != 1 or (batch | head | row) % 8 or not (batch and head and row):
            return False
        if x.itemsize != 2 or x.data_ptr() % 16:
            return False
    return True


def count_tiles(length: int, size: int) -> int:
    """How many tiles of `size` cover `length` (`triton.cdiv` costs microseconds of host time)."""
    return -(-length // size)


def empty_in_order_of(x: Tensor) -> Tensor:
    """An uninitialised dense tensor shaped as x, in (batch, seq, heads, head_dim) order if x lies so.

    A slice of a fused projection does; then the model's next view of the output needs no copy.
    """
    if x.is_contiguous():
        return torch.empty_like(x)
    batch, heads, length, head_dim = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return x.new_empty((batch, heads, length, head_dim))


def head_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of (batch, heads, seq); along head_dim the stride is 1."""
    batch, head, row, _ = x.stride()
    return batch, head, row
