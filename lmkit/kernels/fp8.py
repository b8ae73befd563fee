"""Cast 16-bit matrices to fp8 (e4m3) with a scale for each row, and transposed: the factors of fp8 products.

A row's scale is its largest magnitude / 448, the largest number of e4m3, but at least 2^-126; what is stored is
x / scale, rounded to the nearest. One program sees a whole row, so it reads it once. Four numbers are converted and
packed into a word by inline PTX: ptxas 12.8 reads bytes of Triton's own fp8 casts from registers that nobody wrote
(Triton 3.6).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.kernels.launch import Launch, as_rows, calls_of, count_tiles

E4M3 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-126)  # the inverse of a smaller one may be infinite
TILE_ROWS, TILE_COLUMNS = 128, 64  # of a matrix that is transposed


def plain_cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `cast_rows` by PyTorch operations: the form to read."""
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    # By a number, PyTorch would multiply by its inverse.
    scale = (largest / torch.full_like(largest, LARGEST.value)).clamp(min=SMALLEST_SCALE.value)
    return (wide * (1.0 / scale)).clamp(-LARGEST.value, LARGEST.value).to(E4M3), scale


def plain_cast_transposed(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `cast_transposed` by PyTorch operations: the form to read."""
    transposed = (x.float().t() * (1.0 / scale)).clamp(-LARGEST.value, LARGEST.value)
    return transposed.to(E4M3).contiguous(), scale.expand(1, x.shape[1]).contiguous()


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (rows, columns) in fp8 and its scales, float32 (rows, 1); columns are a multiple of 16. A row with an
    infinity or NaN becomes NaN wherever it is multiplied."""
    x = as_rows(x)
    cast, places = make_room(x)
    row_calls((x,), places, ())
    return cast


def make_room(x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return tensors for the cast of x (rows, columns) and its scales, and the same for a kernel, as words."""
    low = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    return (low, scale), (low.view(torch.int32), scale)


def keep_cast(x: Tensor, cast: tuple[Tensor, Tensor]) -> None:
    """Keep beside x what `cast_rows` would return for it, for the one product that reads it next."""
    x.cast_rows = cast  # type: ignore[attr-defined]


def take_cast(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return what `keep_cast` has kept beside this very tensor, and forget it; autograd hands the object on."""
    cast = getattr(x, "cast_rows", None)
    if cast is not None:
        del x.cast_rows  # type: ignore[attr-defined]
    return cast


def cast_transposed(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the transpose of x (rows, columns) in fp8, (columns, rows), and the scale of each column, (1, columns).

    scale: float32, a scalar on the device: x / scale is stored. Rows are a multiple of 16.
    """
    x = as_rows(x)
    rows, columns = x.shape
    out = torch.empty(columns, rows, dtype=E4M3, device=x.device)
    scales = torch.empty(1, columns, dtype=torch.float32, device=x.device)
    transposed_calls((x, scale), (out.view(torch.int32), scales), ())
    return out, scales


@triton.jit
def _four_to_word(a, b, c, d):
    """Round four float32 to e4m3, a in the lowest byte."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;"
        " mov.b32 $0, {l, h}; }",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def pack(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (ROWS, COLUMNS / 4) words of (ROWS, COLUMNS) float32."""
    even, odd = tl.split(tl.reshape(x, (ROWS, COLUMNS // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return _four_to_word(a, b, c, d)


@triton.jit
def scale_of_rows(largest):
    """Return the scales of rows with these largest magnitudes."""
    return tl.maximum(tl.div_rn(largest, LARGEST), SMALLEST_SCALE)


@triton.jit
def cast_rows_kernel(
    x_pointer,
    out_pointer,  # words of four numbers
    scale_pointer, stride, rows,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,  # covers COLUMNS
    ROWS: tl.constexpr,  # of a program
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (columns < COLUMNS)[None, :]
    x = tl.load(x_pointer + row[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    # An infinite scale makes the products NaN; a NaN, which a maximum may drop, stays one through the cast.
    scale = scale_of_rows(tl.max(tl.abs(x), 1))
    words = pack(x * tl.div_rn(1.0, scale)[:, None], ROWS, BLOCK)
    place = tl.arange(0, BLOCK // 4)
    there = (row < rows)[:, None] & (place < COLUMNS // 4)[None, :]
    tl.store(out_pointer + row[:, None] * (COLUMNS // 4) + place[None, :], words, mask=there)
    tl.store(scale_pointer + row, scale, mask=row < rows)


@triton.jit
def cast_transposed_kernel(
    x_pointer, scale_pointer,
    out_pointer,  # words of four numbers
    scales_pointer, stride, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of (ROWS, COLUMNS) a program; tiles that lie below one another have neighbouring numbers."""
    tiles = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) // tiles) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_pointer + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)
    scale = tl.load(scale_pointer)
    transposed = tl.trans(x).to(tl.float32) * tl.div_rn(1.0, scale)  # transposed with 16 bits, then cast
    words = pack(transposed, COLUMNS, ROWS)
    word = (tl.program_id(0) % tiles) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    there = (column < columns)[:, None] & (word < rows // 4)[None, :]
    tl.store(out_pointer + column[:, None].to(tl.int64) * (rows // 4) + word[None, :], words, mask=there)
    if tl.program_id(0) % tiles == 0:
        tl.store(scales_pointer + column, tl.zeros((COLUMNS,), tl.float32) + scale, mask=column < columns)


def _rows_launch(options: tuple, x: Tensor, *_: Tensor) -> Launch:
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    together = max(1, 1024 // block)
    warps = min(max(block // 512, 4), 16)
    constants = {"COLUMNS": columns, "BLOCK": block, "ROWS": together, "num_warps": warps}
    return (count_tiles(rows, together), 1), (x.stride(0), rows), constants


def _transposed_launch(options: tuple, x: Tensor, *_: Tensor) -> Launch:
    rows, columns = x.shape
    tiles = count_tiles(rows, TILE_ROWS) * count_tiles(columns, TILE_COLUMNS)
    constants = {"ROWS": TILE_ROWS, "COLUMNS": TILE_COLUMNS, "num_warps": 4}
    return (tiles, 1), (x.stride(0), rows, columns), constants


row_calls = calls_of(cast_rows_kernel, _rows_launch)
transposed_calls = calls_of(cast_transposed_kernel, _transposed_launch)
