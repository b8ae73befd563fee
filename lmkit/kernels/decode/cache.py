"""Copy the keys and values of whole texts into their rows of the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lmkit.kernels.launch import LaunchCache, Start, count_tiles, prepare_launch

TILE = 32  # positions per program


@triton.jit(do_not_specialize=["seq", "capacity"])
def store_kernel(
    k_pointer,  # (texts, KV_HEADS, seq, DIM), with stride 1 along DIM
    v_pointer,
    rows_pointer,  # (texts) int64
    keys_pointer,  # (rows, KV_HEADS, capacity, DIM)
    values_pointer,
    rows_stride,
    k_stride_text,
    k_stride_head,
    k_stride_seq,
    v_stride_text,
    v_stride_head,
    v_stride_seq,
    seq,
    capacity,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy TILE positions of one text and head per program."""
    text, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    row = tl.load(rows_pointer + text * rows_stride)
    t, d = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, PADDED_DIM)
    inside = (t < seq)[:, None] & (d < DIM)[None, :]
    text, place = text.to(tl.int64), t.to(tl.int64)[:, None]
    k_at = text * k_stride_text + head * k_stride_head + place * k_stride_seq + d[None, :]
    v_at = text * v_stride_text + head * v_stride_head + place * v_stride_seq + d[None, :]
    target = ((row * KV_HEADS + head) * capacity + t[:, None]) * DIM + d[None, :]
    k = tl.load(k_pointer + k_at, mask=inside)
    v = tl.load(v_pointer + v_at, mask=inside)
    tl.store(keys_pointer + target, k, mask=inside)
    tl.store(values_pointer + target, v, mask=inside)


def store(k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Copy k, v (texts, kv_heads, seq, head_dim) into rows (texts) of (rows, kv_heads, capacity, head_dim)."""
    assert k.stride(-1) == v.stride(-1) == 1
    assert k.dtype == keys.dtype
    calls((k, v, rows), (keys, values), (keys.shape[2],))


def _prepare(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    k, v, rows, *_ = tensors
    (capacity,) = options
    texts, kv_heads, seq, head_dim = k.shape
    constants = {
        "KV_HEADS": kv_heads,
        "DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "TILE": TILE,
        "num_warps": 4,
    }
    grid = texts * kv_heads, count_tiles(seq, TILE)
    numbers = rows.stride(0), *k.stride()[:3], *v.stride()[:3], seq, capacity
    return prepare_launch(store_kernel, grid, tensors, numbers, constants)


calls = LaunchCache(_prepare)
