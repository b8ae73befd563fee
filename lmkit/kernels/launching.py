"""How the launchers hand tensors and constants to the kernels."""

from functools import cache
from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lmkit.kernels.interpreter import INTERPRETED, let_scalars_index
from lmkit.kernels.tilings import Tiling

if INTERPRETED:
    let_scalars_index()


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
        "PRECISION": precision,
        "DESCRIPTORS": tiling.descriptors,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


def source(x: Tensor, rows: int, constants: dict[str, Any]) -> Tensor | TensorDescriptor:
    """What a kernel reads tiles of `rows` rows of x from: x itself, or a descriptor for the copy engine."""
    if not constants["DESCRIPTORS"]:
        return x
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, rows, constants["MAIN"]])


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
    batch, heads, length, head_dim = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return x.new_empty((batch, heads, length, head_dim))


def head_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of (batch, heads, seq); along head_dim the stride is 1."""
    batch, head, row, _ = x.stride()
    return batch, head, row
