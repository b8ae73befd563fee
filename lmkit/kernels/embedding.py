"""Rows of an embedding for token ids, and the gradient: the sum of the output's gradients over each id's places.

Two ways to the sum, both in float32:

* atomic: every place adds its row to the table, in any order. Fast, but not the same bits on every run;
* sorted: one program adds up the places of an id, in their order. The same bits on every run.

`torch.use_deterministic_algorithms` selects the sorted way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from lmkit.core.autograd import differentiable_once
from lmkit.kernels.launch import Launch, as_rows, calls_of, count_tiles
from lmkit.kernels.operators import save_once

ROWS, COLUMNS = 32, 256  # of a tile that a program of the sorted way adds up at a time


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of weight (vocab_size, d_model) for ids (...): (..., d_model). Differentiable once in weight.

    The gradient has the dtype that the weight's `grad_dtype` asks for: float32, where it may have any.
    """
    return Embedding.apply(ids, weight)[0]


@triton.jit
def scatter_add_kernel(grad_pointer, ids_pointer, table_pointer, grad_stride, width, BLOCK: tl.constexpr):
    """One place a program."""
    place = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    grad = tl.load(grad_pointer + place * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(ids_pointer + place).to(tl.int64)
    tl.atomic_add(table_pointer + row * width + columns, grad, mask=inside, sem="relaxed")


@triton.jit
def sorted_sum_kernel(
    grad_pointer,
    ids_pointer, order_pointer,  # sorted; the place of each
    table_pointer, grad_stride, places, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program for each place and tile of columns; that of an id's first place adds up all of its places."""
    first = tl.program_id(0)
    row = tl.load(ids_pointer + first)
    before = tl.load(ids_pointer + first - 1, mask=first > 0, other=-1)
    if row != before:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < width
        total = tl.zeros((COLUMNS,), tl.float32)
        start = first
        matches = tl.full((), ROWS, tl.int32)
        while matches == ROWS:  # sorted: an id that fills a tile may go on
            index = start + tl.arange(0, ROWS)
            same = tl.load(ids_pointer + index, mask=index < places, other=-1) == row
            place = tl.load(order_pointer + index, mask=same, other=0).to(tl.int64)
            at = grad_pointer + place[:, None] * grad_stride + columns[None, :]
            tile = tl.load(at, mask=same[:, None] & inside[None, :], other=0.0)
            total += tl.sum(tile.to(tl.float32), 0)
            start += ROWS
            matches = tl.sum(same.to(tl.int32))
        at = table_pointer + row.to(tl.int64) * width + columns
        tl.store(at, total.to(table_pointer.dtype.element_ty), mask=inside)


def _atomic_launch(options: tuple, grad: Tensor, *_: Tensor) -> Launch:
    constants = {"BLOCK": triton.next_power_of_2(grad.shape[1]), "num_warps": 4}
    return (len(grad), 1), (grad.stride(0), grad.shape[1]), constants


def _sorted_launch(options: tuple, grad: Tensor, *_: Tensor) -> Launch:
    places, width = grad.shape
    columns = min(COLUMNS, triton.next_power_of_2(width))
    grid = (places, count_tiles(width, columns))
    return grid, (grad.stride(0), places, width), {"ROWS": ROWS, "COLUMNS": columns, "num_warps": 4}


atomic_calls = calls_of(scatter_add_kernel, _atomic_launch)
sorted_calls = calls_of(sorted_sum_kernel, _sorted_launch)


def gradient(grad: Tensor, ids: Tensor, vocab_size: int, deterministic: bool, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the table, (vocab_size, d_model), rounded once to `dtype`, from the gradient of the
    rows, (..., d_model)."""
    grad, ids = as_rows(grad), ids.reshape(-1)
    table = grad.new_zeros(vocab_size, grad.shape[1], dtype=dtype if deterministic else torch.float32)
    if len(ids) and deterministic:
        in_order, order = ids.sort(stable=True)
        sorted_calls((grad, in_order, order), (table,), (dtype,))
    elif len(ids):
        atomic_calls((grad, ids), (table,), ())
    return table.to(dtype)


class Embedding(torch.autograd.Function):
    """`apply(ids, weight)` returns (rows, an empty tensor)."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        # The gradient can have another dtype than the weight on leaves only.
        wanted = weight.grad_dtype if weight.is_leaf else weight.dtype
        ctx.options = (len(weight), torch.float32 if wanted is None else wanted)
        rows = F.embedding(ids, weight)
        return rows, save_once(ctx, rows, ids)

    @staticmethod
    @differentiable_once("embedding", instead="torch.nn.functional.embedding has a second derivative")
    def backward(ctx: Any, saved: Any, grad: Tensor, _: None) -> tuple[None, Tensor]:
        vocab_size, dtype = ctx.options
        return None, gradient(grad, saved[0], vocab_size, torch.are_deterministic_algorithms_enabled(), dtype)
