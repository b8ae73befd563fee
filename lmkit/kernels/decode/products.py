"""Multiply up to 16 rows by a matrix at nearly the memory's bandwidth, fused with the operations around it.

    y = n(x) W^T        n(x) = x or, with a norm, x g / sqrt(mean(x^2) + eps)

`THEN` names the fused end: "store" writes y; "swiglu" writes silu(gate) up of the joined result; "residual" adds y
to the stream; "logits" applies the rules for the next token (banned ids, repetition penalty) and finds the largest
logit.

RMSNorm (Zhang and Sennrich 2019) needs no kernel. The kernel that updates the stream h also writes h g, and sums of
h^2 over 16 features each (`Stream.parts`). The next product multiplies h g and scales its results by
1 / sqrt(mean(h^2) + eps).

Weights in fp8 (`Fp8Matrix`) are widened in registers. The scales of their rows multiply the sums.

A single row is multiplied in registers, and its first tile of weights is loaded before the kernel waits for the
previous kernel. 2 to 16 rows use tensor cores. Their columns are cut into four slices, one per warp, so that a tile
of 16 outputs occupies four warps, and small matrices still spread over all SMs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product, starmap
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmkit.kernels.decode.rows import MOST_ROWS, Rules
from lmkit.kernels.fp8 import cast_rows, plain_cast_rows
from lmkit.kernels.launch import count_tiles, prepare_call

PART = 16  # features in a sum of squares; smaller tiles, as of a single row, sum fewer
SLICES = 4
SLOTS = tl.constexpr(32)  # slots for the largest logit of a row
NOTHING = tl.constexpr(-(1 << 63))  # the lowest key

Then = Literal["store", "swiglu", "residual", "logits"]


@triton.jit(do_not_specialize=["rows", "num_parts"])
def single_row_kernel(
    x_pointer,  # (1, K)
    weight_pointer,  # (outputs, K); (2 outputs, K) with "swiglu"
    scales_pointer,  # float32, the scale of each row of the weights; read with FP8
    out_pointer,  # (1, outputs); with "residual" the stream, which is also read
    gain_pointer,  # (outputs), the gain of the norm after the residual sum
    normed_pointer,  # (1, outputs), the new stream times the gain
    parts_pointer,  # sums of squares of the stream: read with NORM, written with "residual"
    best_pointer,  # (1, SLOTS) int64, largest keys of logits, see `keys_of`
    banned_pointer, seen_pointer, settings_pointer,
    rows, outputs, eps, num_parts,
    K: tl.constexpr, THEN: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr, PENALTY: tl.constexpr,
    MOST_PARTS: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute TILE_N outputs per program."""
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    b = tl.arange(0, 1)
    k = tl.arange(0, TILE_K)
    weight_at = weight_pointer + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * K + k[None, :]
    if FP8:  # eight bytes a load: with sixteen, threads would not have the columns of x that they multiply
        weight_at = tl.max_contiguous(weight_at, [1, 8])
    up_at = weight_at + outputs.to(tl.int64) * K
    weight = tl.load(weight_at, mask=(k < K)[None, :], other=0.0)  # (TILE_N, TILE_K)
    if THEN == "swiglu":
        up = tl.load(up_at, mask=(k < K)[None, :], other=0.0)
    early = load_early(scales_pointer, gain_pointer, banned_pointer, n, outputs, THEN, FP8)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    written = load_written(out_pointer, parts_pointer, n, b, rows, outputs, num_parts, THEN, NORM, MOST_PARTS)
    x = tl.load(x_pointer + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    sums = weight.to(tl.float32) * x
    if THEN == "swiglu":
        up_sums = up.to(tl.float32) * x
    for begin in range(TILE_K, K, TILE_K):
        inside = k < K - begin
        x = tl.load(x_pointer + begin + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        sums += tl.load(weight_at + begin, mask=inside[None, :], other=0.0).to(tl.float32) * x
        if THEN == "swiglu":
            up_sums += tl.load(up_at + begin, mask=inside[None, :], other=0.0).to(tl.float32) * x
    y = tl.sum(sums, 1)[:, None]  # (TILE_N, 1)
    y_up = y
    if THEN == "swiglu":
        y_up = tl.sum(up_sums, 1)[:, None]
    finish(
        y, y_up, early, written, n, b, rows, outputs, eps, out_pointer, normed_pointer, parts_pointer, best_pointer,
        seen_pointer, settings_pointer, K, THEN, NORM, FP8, PENALTY, TILE_N, 1,
    )  # fmt: skip


# Not specialised, so that all numbers of rows run one binary and give the same bits.
@triton.jit(do_not_specialize=["rows", "num_parts"])
def few_rows_kernel(
    x_pointer,  # (rows, K); the others as in `single_row_kernel`, with `rows` rows
    weight_pointer, scales_pointer, out_pointer, gain_pointer, normed_pointer, parts_pointer, best_pointer,
    banned_pointer, seen_pointer, settings_pointer, rows, outputs, eps, num_parts,
    K: tl.constexpr, THEN: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr, PENALTY: tl.constexpr,
    MOST_PARTS: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute TILE_N outputs of up to 16 rows per program."""
    SLICE: tl.constexpr = K // 4
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    b = tl.arange(0, 16)
    k = tl.arange(0, TILE_K)
    slices = tl.arange(0, 4)[:, None, None] * SLICE
    weight_at = weight_pointer + tl.minimum(n, outputs - 1).to(tl.int64)[None, :, None] * K + k[None, None, :]
    weight_at += slices  # (4, TILE_N, TILE_K)
    up_at = weight_at + outputs.to(tl.int64) * K
    x_at = x_pointer + b[None, None, :] * K + k[None, :, None] + slices  # (4, TILE_K, 16)
    early = load_early(scales_pointer, gain_pointer, banned_pointer, n, outputs, THEN, FP8)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    written = load_written(out_pointer, parts_pointer, n, b, rows, outputs, num_parts, THEN, NORM, MOST_PARTS)
    sums = tl.zeros((4, TILE_N, 16), tl.float32)
    up_sums = tl.zeros((4, TILE_N, 16), tl.float32)
    for begin in tl.range(0, SLICE, TILE_K, num_stages=STAGES):
        inside = k < SLICE - begin
        weight = tl.load(weight_at + begin, mask=inside[None, None, :], other=0.0)
        x = tl.load(x_at + begin, mask=inside[None, :, None] & (b < rows)[None, None, :], other=0.0)
        sums = tl.dot(weight.to(tl.float32).to(x.dtype), x, sums, input_precision="ieee")
        if THEN == "swiglu":
            up = tl.load(up_at + begin, mask=inside[None, None, :], other=0.0)
            up_sums = tl.dot(up.to(tl.float32).to(x.dtype), x, up_sums, input_precision="ieee")
    y = tl.sum(sums, 0)  # (TILE_N, 16)
    y_up = y
    if THEN == "swiglu":
        y_up = tl.sum(up_sums, 0)
    finish(
        y, y_up, early, written, n, b, rows, outputs, eps, out_pointer, normed_pointer, parts_pointer, best_pointer,
        seen_pointer, settings_pointer, K, THEN, NORM, FP8, PENALTY, TILE_N, 16,
    )  # fmt: skip


@triton.jit
def load_early(
    scales_pointer, gain_pointer, banned_pointer, n, outputs, THEN: tl.constexpr, FP8: tl.constexpr
):
    """Load what `finish` needs and no kernel of the step writes: the next norm's gain, or which ids are banned; the
    scales of the rows of fp8 weights."""
    if THEN == "logits":
        late = tl.load(banned_pointer + n, mask=n < outputs, other=0).to(tl.float32)
    elif THEN == "residual":
        late = tl.load(gain_pointer + n, mask=n < outputs, other=0.0).to(tl.float32)
    else:
        late = n.to(tl.float32)
    row_scale, up_scale = late, late
    if FP8:
        row_scale = tl.load(scales_pointer + n, mask=n < outputs, other=0.0)
    if FP8 and THEN == "swiglu":
        up_scale = tl.load(scales_pointer + outputs + n, mask=n < outputs, other=0.0)
    return late, row_scale, up_scale


@triton.jit
def load_written(
    out_pointer, parts_pointer, n, b, rows, outputs, num_parts,
    THEN: tl.constexpr, NORM: tl.constexpr, MOST_PARTS: tl.constexpr,
):  # fmt: skip
    """Load what earlier kernels of the step have written and `finish` needs: the stream, and its sums of squares."""
    stream = b[None, :].to(tl.int64) * outputs + n[:, None]
    if THEN == "residual":
        inside = (n < outputs)[:, None] & (b < rows)[None, :]
        stream = tl.load(out_pointer + stream, mask=inside, other=0.0)
    parts = b[:, None].to(tl.float32)
    if NORM:
        part = tl.arange(0, MOST_PARTS)
        there = (b < rows)[:, None] & (part < num_parts)[None, :]
        parts = tl.load(parts_pointer + b[:, None] * num_parts + part[None, :], mask=there, other=0.0)
    return stream, parts


@triton.jit
def finish(
    y,  # (TILE_N, ROWS) float32
    y_up, early, written, n, b, rows, outputs, eps,
    out_pointer, normed_pointer, parts_pointer, best_pointer, seen_pointer, settings_pointer,
    K: tl.constexpr, THEN: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr, PENALTY: tl.constexpr,
    TILE_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scale a tile of results, apply the fused end `THEN` and store it."""
    late, row_scale, up_scale = early
    stream, parts = written
    if FP8:
        y *= row_scale[:, None]
        y_up *= up_scale[:, None]
    if NORM:
        scale = tl.rsqrt(tl.sum(parts, 1) / K + eps)  # (rows)
        y *= scale[None, :]
        y_up *= scale[None, :]
    inside = (n < outputs)[:, None] & (b < rows)[None, :]
    at = b[None, :].to(tl.int64) * outputs + n[:, None]
    if THEN == "store":
        tl.store(out_pointer + at, y.to(out_pointer.dtype.element_ty), mask=inside)
    elif THEN == "swiglu":
        y = y / (1 + tl.exp(-y)) * y_up
        tl.store(out_pointer + at, y.to(out_pointer.dtype.element_ty), mask=inside)
    elif THEN == "logits":
        if PENALTY:
            seen = tl.load(seen_pointer + at, mask=inside, other=0)
            y = tl.where(seen != 0, penalized(y, settings_pointer), y)
        y = tl.where((late == 0)[:, None] & (n < outputs)[:, None], y, float("-inf"))
        tl.store(out_pointer + at, y, mask=inside)
        largest = tl.max(keys_of(y, n[:, None]), 0)  # (ROWS)
        # Several slots per row: a thousand programs would queue at a single one.
        slot = tl.program_id(0) % SLOTS
        tl.atomic_max(best_pointer + b * SLOTS + slot, largest, mask=b < rows, sem="relaxed")
    else:
        new = (stream.to(tl.float32) + y).to(out_pointer.dtype.element_ty)
        tl.store(out_pointer + at, new, mask=inside)
        wide = new.to(tl.float32)  # the norm sees what the next layer reads
        normed = wide * late[:, None]
        tl.store(normed_pointer + at, normed.to(normed_pointer.dtype.element_ty), mask=inside)
        SIZE: tl.constexpr = 16 if TILE_N > 16 else TILE_N
        squares = tl.sum(tl.reshape(wide * wide, (TILE_N // SIZE, SIZE, ROWS)), 1)
        part = tl.program_id(0) * (TILE_N // SIZE) + tl.arange(0, TILE_N // SIZE)
        parts_at = b[None, :] * (outputs // SIZE) + part[:, None]
        there = (part < outputs // SIZE)[:, None] & (b < rows)[None, :]
        tl.store(parts_pointer + parts_at, squares, mask=there)


@triton.jit
def keys_of(logits, ids):
    """Return integers in the order of logits (NaN above infinity), of equal ones the lowest id first."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # no -0.0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(logits == logits, bits, 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def logit_of(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def penalized(logits, settings_pointer):
    """Return logits of tokens that the text already holds, penalized as in `penalize`."""
    penalty = tl.load(settings_pointer + 4).to(tl.float32)
    return tl.where(logits > 0, logits / penalty, logits * penalty)


# Tiles


class Tile(NamedTuple):
    """Tile of a program: outputs, columns per iteration (per slice, with several rows), warps, pipeline stages."""

    outputs: int
    columns: int
    warps: int
    stages: int


MATRICES = ("qkv", "output", "gate_up", "down", "head")


def _tiles(*sizes: tuple[int, int, int, int]) -> dict[str, Tile]:
    return dict(zip(MATRICES, starmap(Tile, sizes), strict=True))


# (rows, fp8, row length) -> tiles of `MATRICES`, measured for bfloat16 on an H200: "middle" for a width of 2048,
# "short" for 768, where one warp holds a row and waits for no other warp, "long" for widths from 4096 on. "down" has
# one tile for middle and long rows.
TILES = {
    (1, False, "short"): _tiles((2, 1024, 1, 1), (2, 1024, 1, 1), (2, 1024, 1, 1), (2, 2048, 2, 1), (4, 1024, 1, 1)),
    (1, False, "middle"): _tiles((8, 2048, 8, 1), (2, 2048, 2, 1), (2, 2048, 4, 1), (4, 2048, 4, 1), (4, 2048, 4, 1)),
    (1, False, "long"): _tiles((4, 4096, 4, 1), (8, 1024, 2, 1), (2, 4096, 4, 1), (4, 2048, 4, 1), (4, 4096, 4, 1)),
    (1, True, "short"): _tiles((2, 1024, 4, 1), (8, 1024, 4, 1), (4, 1024, 2, 1), (8, 2048, 8, 1), (8, 1024, 2, 1)),
    (1, True, "middle"): _tiles((4, 1024, 1, 1), (4, 2048, 2, 1), (2, 2048, 2, 1), (4, 2048, 4, 1), (8, 2048, 4, 1)),
    (1, True, "long"): _tiles((4, 4096, 4, 1), (8, 2048, 4, 1), (4, 4096, 4, 1), (4, 2048, 4, 1), (4, 4096, 4, 1)),
    **dict.fromkeys(
        product((MOST_ROWS,), (False,), ("short", "middle", "long")),
        _tiles((16, 128, 4, 3), (16, 128, 4, 3), (16, 128, 4, 3), (16, 64, 4, 6), (32, 128, 4, 3)),
    ),
    **dict.fromkeys(
        product((MOST_ROWS,), (True,), ("short", "middle")),
        _tiles((32, 128, 4, 2), (16, 256, 4, 2), (16, 128, 4, 3), (16, 128, 4, 4), (32, 128, 4, 3)),
    ),
    (MOST_ROWS, True, "long"): _tiles(
        (32, 128, 4, 3), (16, 256, 4, 2), (32, 128, 4, 3), (16, 128, 4, 4), (32, 128, 4, 3)
    ),
}  # fmt: skip
# Larger tiles would not fit into shared memory.
FEW_ROWS_IN_FLOAT32 = Tile(16, 16, 4, 2)


def tile_of(name: str, rows: int, columns: int, dtype: torch.dtype, *, fp8: bool = False) -> Tile:
    """Return the tile of a matrix for one row or several of this dtype; fp8: the matrix is an `Fp8Matrix`."""
    length = "long" if columns >= 4096 else "middle"
    if columns <= (4096 if name == "down" else 1024):
        length = "short"
    tile = TILES[1 if rows == 1 else MOST_ROWS, fp8, length][name]
    if rows > 1 and dtype == torch.float32:
        tile = FEW_ROWS_IN_FLOAT32
    return tile._replace(columns=min(tile.columns, triton.next_power_of_2(columns)))


def parts_of(features: int, tile: Tile) -> int:
    """Return how many sums of squares a residual product with this tile writes per row."""
    return features // min(PART, tile.outputs)


class Fp8Matrix(NamedTuple):
    """A matrix in fp8 (e4m3), (out, in), with a float32 scale for each row, (out): values[n, k] scales[n]."""

    values: Tensor
    scales: Tensor


Matrix = Tensor | Fp8Matrix


def to_fp8(weight: Tensor) -> Fp8Matrix:
    """Round a matrix (out, in); a row with an infinity or NaN becomes NaN wherever it is multiplied."""
    values, scales = (cast_rows if weight.is_cuda else plain_cast_rows)(weight.detach())
    return Fp8Matrix(values, scales[:, 0])


class Stream(NamedTuple):
    """The residual stream of a step, and its values that the next norm needs.

    Attributes:
        total: (rows, d_model)
        normed: (rows, d_model), the stream times the gain of the next norm.
        parts: float32, room for d_model sums of squares per row; row b begins at b * (number of parts).
    """

    total: Tensor
    normed: Tensor
    parts: Tensor


def prepare_product(
    name: str,
    x: Tensor,
    weight: Matrix,
    out: Tensor,
    stream: Stream,
    *,
    then: Then = "store",
    gain: Tensor | None = None,
    num_parts: int = 0,
    eps: float = 0.0,
    rules: Rules | None = None,
    best: Tensor | None = None,
    pdl: bool = False,
) -> Callable[[], None]:
    """Prepare a product of `x` (rows, in) with the matrix `name`.

    Args:
        out: (rows, out); "residual": `stream.total`; "logits": float32.
        gain: "residual": (out), gain of the next norm.
        num_parts: if > 0, x is `stream.normed`, with this many sums of squares per row.
        rules, best: "logits": the rules to apply; (rows, SLOTS) int64, receives the largest keys.
        pdl: begin before the previous kernel has ended.
    """
    rows, columns = x.shape
    fp8 = isinstance(weight, Fp8Matrix)
    values, scales = weight if isinstance(weight, Fp8Matrix) else (weight, x)
    outputs = values.shape[0] // (2 if then == "swiglu" else 1)
    assert rows == 1 or (rows <= MOST_ROWS and columns % SLICES == 0)
    tile = tile_of(name, rows, columns, x.dtype, fp8=fp8)
    if rules is None:
        rules = Rules(x, x, x, False)
    gain = x if gain is None else gain
    best = x if best is None else best
    tensors = (x, values, scales, out, gain, stream.normed, stream.parts, best, *rules[:3])
    most_parts = triton.next_power_of_2(columns // (2 if rows == 1 else PART))
    of_call = {"K": columns, "THEN": then, "NORM": num_parts > 0, "FP8": fp8, "PENALTY": rules.penalizes}
    of_tile = {"TILE_N": tile.outputs, "TILE_K": tile.columns, "STAGES": tile.stages, "num_warps": tile.warps}
    constants = {**of_call, **of_tile, "MOST_PARTS": most_parts}
    kernel = single_row_kernel if rows == 1 else few_rows_kernel
    grid = (count_tiles(outputs, tile.outputs), 1)
    return prepare_call(kernel, grid, tensors, (rows, outputs, eps, num_parts), constants, pdl=pdl)
