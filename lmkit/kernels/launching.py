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
    return all(
        x.itemsize == 2
        and x.data_ptr() % 16 == 0
        and x.stride(3) == 1
        and min(x.stride()) > 0
        and (x.stride(0) | x.stride(1) | x.stride(2)) % 8 == 0
        for x in tensors
    )


def head_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of (batch, heads, seq); along head_dim the stride is 1."""
    batch, head, row, _ = x.stride()
    return batch, head, row
