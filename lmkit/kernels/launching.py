"""How the launchers hand tensors and constants to the kernels, and how they launch them cheaply."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lmkit.kernels.interpreter import INTERPRETED, let_scalars_index
from lmkit.kernels.prepared import PreparedLaunch
from lmkit.kernels.tilings import Tiling
from lmkit.kernels.tuning import choose_tiling
from lmkit.kernels.versions import INSTALLED_MINOR, SUPPORTED_MINORS

if INTERPRETED:
    let_scalars_index()

PREPARES = not INTERPRETED and INSTALLED_MINOR in SUPPORTED_MINORS


@cache  # `next_power_of_2` costs a microsecond, and every new length asks
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
    main, _ = head_parts(x.shape[3], split=False)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, main])


Start = Callable[..., None]  # launches, on the pointers that it is called with


def prepare_launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor | TensorDescriptor, ...],
    numbers: tuple,
    constants: dict,
) -> Start:
    """What launches the kernel with these arguments, but for the tensors' pointers: it is called with new ones.

    Where nothing can be prepared (see PREPARES), it launches on these very tensors.

    Args:
        tensors, numbers: the kernel's arguments in order, tensors first.
        constants: its compile-time arguments and Triton's options, by name.
    """
    if not PREPARES:
        return lambda *pointers: kernel[(programs,)](*tensors, *numbers, **constants)
    names = kernel.arg_names[len(tensors) + len(numbers) :]
    values = tuple(constants[name] for name in names)
    options = {name: value for name, value in constants.items() if name not in names}
    return PreparedLaunch(kernel, (programs, 1), tensors, numbers, values, **options)


def prepare_tuned(
    name: str,
    prepare: Callable[[Tiling], Start],
    tensors: tuple[Tensor, ...],
    *,
    read: tuple[Tensor, ...],
    causal: bool,
    precision: str,
    tiling: Tiling | None,
) -> Start:
    """`prepare(tiling)`, or with None the one for the tiling that ships or measures best.

    Args:
        name: the kernel's, for `tuning`.
        tensors: whose pointers the kernel is measured on.
        read: those that it loads tiles from, q and k first.
    """
    prepare = cache(prepare)
    if tiling is None:
        pointers = [x.data_ptr() for x in tensors]
        q, k, *_ = read

        def launch(tiling: Tiling) -> None:
            prepare(tiling)(*pointers)

        tiling = choose_tiling(name, q, k, causal, precision, descriptors_reach(*read), launch)
    return prepare(tiling)


class Calls:
    """Calls of a function that launches kernels, prepared once for each kind of call.

    What launches the kernels may depend on the inputs' shapes, strides, dtypes and device, on which addresses are
    multiples of 16, and on the options: that is a kind. Everything else about a call is its pointers.
    """

    MOST_KINDS = 1024  # a length that grows with every call must not fill the memory

    def __init__(self, prepare: Callable[..., Start]) -> None:
        """`prepare(*inputs, *outputs, *options)` gives what launches on the pointers of inputs and outputs."""
        self.prepare = prepare
        self.prepared: dict[tuple, Start] = {}

    def __call__(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], options: tuple) -> None:
        """Launches on the inputs' device, on its current stream.

        Args:
            inputs: tensors of any layout. outputs: tensors whose layout follows from the inputs'.
            options: hashable.
        """
        device = inputs[0].device
        pointers = [x.data_ptr() for x in inputs]
        pointers += [x.data_ptr() for x in outputs]
        together = 0
        for pointer in pointers:
            together |= pointer
        aligned = together % 16 == 0 or tuple(pointer % 16 == 0 for pointer in pointers)
        kind = (device, aligned, *options, *[(x.shape, x.stride(), x.dtype) for x in inputs])
        start = self.prepared.get(kind)
        with selected(device):
            if start is None:
                start = self.prepare(*inputs, *outputs, *options)
                # What is chosen during a capture is not measured (see `tuning`): a later call may do better
                if PREPARES and not torch.cuda.is_current_stream_capturing():
                    if len(self.prepared) >= self.MOST_KINDS:
                        self.prepared.clear()
                    self.prepared[kind] = start
            start(*pointers)


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
