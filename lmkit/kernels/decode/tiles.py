"""The tiles of the products of a decode step."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

PART = 16  # features in a sum of squares; smaller tiles, as of a single row, sum fewer


class Tile(NamedTuple):
    """Tile of a program: outputs, columns per iteration (per slice, with several rows), warps, pipeline stages."""

    outputs: int
    columns: int
    warps: int
    stages: int


# Name of the matrix -> tile, measured for bfloat16 on an H200: first for a width of 2048, then for a width of 768,
# where a row is short enough for one warp, which needs to wait for no other warp, then for widths from 4096 on.
SINGLE_ROW = {
    "qkv": Tile(8, 2048, 8, 1),
    "output": Tile(2, 2048, 2, 1),
    "gate_up": Tile(2, 2048, 4, 1),
    "down": Tile(4, 2048, 4, 1),
    "head": Tile(4, 2048, 4, 1),
}
SINGLE_SHORT_ROW = {
    "qkv": Tile(2, 1024, 1, 1),
    "output": Tile(2, 1024, 1, 1),
    "gate_up": Tile(2, 1024, 1, 1),
    "down": Tile(2, 2048, 2, 1),
    "head": Tile(4, 1024, 1, 1),
}
SINGLE_LONG_ROW = SINGLE_ROW | {
    "qkv": Tile(4, 4096, 4, 1),
    "output": Tile(8, 1024, 2, 1),
    "gate_up": Tile(2, 4096, 4, 1),
    "head": Tile(4, 4096, 4, 1),
}
FEW_ROWS = {
    "qkv": Tile(16, 128, 4, 3),
    "output": Tile(16, 128, 4, 3),
    "gate_up": Tile(16, 128, 4, 3),
    "down": Tile(16, 64, 4, 6),
    "head": Tile(32, 128, 4, 3),
}
FP8_SINGLE_ROW = {
    "qkv": Tile(4, 1024, 1, 1),
    "output": Tile(4, 2048, 2, 1),
    "gate_up": Tile(2, 2048, 2, 1),
    "down": Tile(4, 2048, 4, 1),
    "head": Tile(8, 2048, 4, 1),
}
FP8_SINGLE_SHORT_ROW = {
    "qkv": Tile(2, 1024, 4, 1),
    "output": Tile(8, 1024, 4, 1),
    "gate_up": Tile(4, 1024, 2, 1),
    "down": Tile(8, 2048, 8, 1),
    "head": Tile(8, 1024, 2, 1),
}
FP8_SINGLE_LONG_ROW = FP8_SINGLE_ROW | {
    "qkv": Tile(4, 4096, 4, 1),
    "output": Tile(8, 2048, 4, 1),
    "gate_up": Tile(4, 4096, 4, 1),
    "head": Tile(4, 4096, 4, 1),
}
FP8_FEW_ROWS = {
    "qkv": Tile(32, 128, 4, 2),
    "output": Tile(16, 256, 4, 2),
    "gate_up": Tile(16, 128, 4, 3),
    "down": Tile(16, 128, 4, 4),
    "head": Tile(32, 128, 4, 3),
}
FP8_FEW_LONG_ROWS = FP8_FEW_ROWS | {"qkv": Tile(32, 128, 4, 3), "gate_up": Tile(32, 128, 4, 3)}
FEW_ROWS_IN_FLOAT32 = dict.fromkeys(
    FEW_ROWS, Tile(16, 16, 4, 2)
)  # larger tiles would not fit into shared memory


def tile_of(name: str, rows: int, columns: int, dtype: torch.dtype, *, fp8: bool = False) -> Tile:
    """Return the tile of a matrix with this many columns. Of the rows, only whether there is a single one matters.

    Args:
        dtype: of the rows.
        fp8: the matrix is an `Fp8Matrix`.
    """
    short = columns <= (4096 if name == "down" else 1024)
    long = columns >= 4096  # "down" has the same tile as below
    if rows == 1 and fp8:
        table = FP8_SINGLE_SHORT_ROW if short else FP8_SINGLE_LONG_ROW if long else FP8_SINGLE_ROW
    elif rows == 1:
        table = SINGLE_SHORT_ROW if short else SINGLE_LONG_ROW if long else SINGLE_ROW
    elif dtype == torch.float32:
        table = FEW_ROWS_IN_FLOAT32
    elif fp8:
        table = FP8_FEW_LONG_ROWS if long else FP8_FEW_ROWS
    else:
        table = FEW_ROWS
    tile = table[name]
    return tile._replace(columns=min(tile.columns, triton.next_power_of_2(columns)))


def parts_of(features: int, tile: Tile) -> int:
    """Return how many sums of squares a residual product with this tile writes per row."""
    return features // min(PART, tile.outputs)
