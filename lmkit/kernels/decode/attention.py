"""Attend from one new token of each row to the filled part of its cache: split-K flash-decoding (Dao et al. 2023).

A program attends from the query heads of one group to one split of the old keys. It rotates the queries (RoPE) and
multiplies them, as the rows of one matrix, by the keys that they share. The program of the row's last split also
stores the new key and adds it as a separate softmax state, so that nothing just written is read. The last program of
a row and key head to finish merges the states of all splits:

    state (m, l, a) = (max s, sum exp2(s - m), sum exp2(s - m) v)        out = a / l

Splits begin at fixed positions and are merged in order, so a row's result does not depend on the batch. Programs
beyond the end of a row, or before its window, exit at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmkit.kernels.launch import Launch, calls_of, count_tiles, prepare_call


@triton.jit(do_not_specialize=["capacity"])
def attend_kernel(
    qkv_pointer,  # (rows, (HEADS + 2 KV_HEADS) * DIM)
    keys_pointer, values_pointer,  # (rows, KV_HEADS, capacity, DIM)
    place_pointer,  # (rows) int64
    cos_sin_pointer,  # (capacity, DIM / 2, 2) float32
    out_pointer,  # (rows, HEADS * DIM)
    sums_pointer,  # float32 (rows * KV_HEADS, MOST_SPLITS, GROUP, PADDED_DIM), a of each split
    totals_pointer,  # float32 (rows * KV_HEADS, MOST_SPLITS, 2, GROUP), m and l of each split
    arrived_pointer,  # (rows * KV_HEADS) int32, how many splits are done; zero between steps
    capacity,
    scale,  # factor of scores, times log2 e
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head, padded to a power of 2
    SPLIT: tl.constexpr, TILE: tl.constexpr, MOST_SPLITS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a token sees, itself among them; 0: all
):  # fmt: skip
    """Attend to one split of the old keys of one row and key head per program."""
    row_head, split = tl.program_id(0), tl.program_id(1)
    row, head = row_head // KV_HEADS, row_head % KV_HEADS
    # Only the last kernel of a step writes it, so it may be read before the wait, like old keys and values.
    place = tl.load(place_pointer + row).to(tl.int32)
    # A row longer than this launch allows has ended: nobody reads its result, but its counter must be right.
    splits = tl.minimum(tl.maximum(tl.cdiv(place, SPLIT), 1), tl.num_programs(1))
    first_key, first_split = window_begin(place, splits, SPLIT, WINDOW)
    if (split >= splits) | (split < first_split):
        return
    ROWS: tl.constexpr = 16 if GROUP < 16 else GROUP  # of the product
    old = tl.minimum(place - split * SPLIT, SPLIT)  # keys in this split
    base = row_head.to(tl.int64) * capacity * DIM
    begin = base + split * SPLIT * DIM
    d, g, t = tl.arange(0, PADDED_DIM), tl.arange(0, ROWS), tl.arange(0, TILE)
    d_inside = d < DIM
    angle_at = cos_sin_pointer + place * DIM + (d // 2) * 2
    cos = tl.load(angle_at, mask=d_inside, other=0.0)
    sin = tl.load(angle_at + 1, mask=d_inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kind: tl.constexpr = keys_pointer.dtype.element_ty
    new = qkv_pointer + row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    group: tl.constexpr = HEADS // KV_HEADS
    heads = head * group + g
    q_inside = (g < group)[:, None] & d_inside[None, :]
    q = rotated(new + heads[:, None] * DIM, d[None, :], cos[None, :], sin[None, :], q_inside).to(kind)
    k_new = rotated(new + (HEADS + head) * DIM, d, cos, sin, d_inside).to(kind)
    v_new = tl.load(new + (HEADS + KV_HEADS + head) * DIM + d, mask=d_inside, other=0.0).to(kind)
    top = tl.full((ROWS,), -1e30, tl.float32)  # finite: a row without old keys must not give NaN
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    unseen = tl.maximum(first_key - split * SPLIT, 0) if WINDOW else 0  # of the keys in this split
    for i in tl.range(unseen // TILE * TILE, old, TILE, num_stages=STAGES):
        visible = t + i < old
        if WINDOW:
            visible &= t + i >= unseen
        k_at = keys_pointer + begin + (i + t)[None, :] * DIM + d[:, None]
        v_at = values_pointer + begin + (i + t)[:, None] * DIM + d[None, :]
        k = tl.load(k_at, mask=visible[None, :] & d_inside[:, None], other=0.0)
        v = tl.load(v_at, mask=visible[:, None] & d_inside[None, :], other=0.0)
        top, total, sums = fold(top, total, sums, q, k, v, visible, scale)
    if split == splits - 1:
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
        highest = tl.maximum(top, score)
        old_weight, new_weight = tl.exp2(top - highest), tl.exp2(score - highest)
        top = highest
        total = total * old_weight + new_weight
        sums = sums * old_weight[:, None] + v_new.to(tl.float32)[None, :] * new_weight[:, None]
        tl.store(keys_pointer + base + place * DIM + d, k_new, mask=d_inside)
        tl.store(values_pointer + base + place * DIM + d, v_new, mask=d_inside)
    out = out_pointer + row.to(tl.int64) * (HEADS * DIM) + head * (group * DIM)
    if splits - first_split == 1:
        result = (sums / total[:, None]).to(out_pointer.dtype.element_ty)
        tl.store(out + g[:, None] * DIM + d[None, :], result, mask=q_inside)
    else:
        slot = (row_head * MOST_SPLITS + split).to(tl.int64)
        kept = g < GROUP
        tl.store(
            sums_pointer + (slot * GROUP + g[:, None]) * PADDED_DIM + d[None, :], sums, mask=kept[:, None]
        )
        tl.store(totals_pointer + slot * (2 * GROUP) + g, top, mask=kept)
        tl.store(totals_pointer + slot * (2 * GROUP) + GROUP + g, total, mask=kept)
        merge(
            sums_pointer, totals_pointer, arrived_pointer, out, row_head, first_split, splits, d,
            HEADS // KV_HEADS, DIM, PADDED_DIM, GROUP, MOST_SPLITS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["capacity"])
def attend_single_row_kernel(
    qkv_pointer,  # as in `attend_kernel`, with one row
    keys_pointer, values_pointer, place_pointer, cos_sin_pointer, out_pointer,
    sums_pointer, totals_pointer, arrived_pointer, capacity, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MOST_SPLITS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend to one split of the old keys of a key head per program. The keys are in registers before the wait, and
    are multiplied there: tensor cores would need them in shared memory."""
    head, split = tl.program_id(0), tl.program_id(1)
    place = tl.load(place_pointer).to(tl.int32)
    splits = tl.minimum(tl.maximum(tl.cdiv(place, SPLIT), 1), tl.num_programs(1))
    first_key, first_split = window_begin(place, splits, SPLIT, WINDOW)
    if (split >= splits) | (split < first_split):
        return
    base = head.to(tl.int64) * capacity * DIM
    d, t = tl.arange(0, PADDED_DIM), tl.arange(0, SPLIT)
    d_inside = d < DIM
    visible = split * SPLIT + t < place
    if WINDOW:
        visible &= split * SPLIT + t >= first_key
    at = base + (split * SPLIT + t)[:, None] * DIM + d[None, :]
    inside = visible[:, None] & d_inside[None, :]
    k = tl.load(keys_pointer + at, mask=inside, other=0.0)  # (SPLIT, PADDED_DIM)
    v = tl.load(values_pointer + at, mask=inside, other=0.0)
    angle_at = cos_sin_pointer + place * DIM + (d // 2) * 2
    cos = tl.load(angle_at, mask=d_inside, other=0.0)
    sin = tl.load(angle_at + 1, mask=d_inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kind: tl.constexpr = keys_pointer.dtype.element_ty
    group: tl.constexpr = HEADS // KV_HEADS
    k_new = rotated(qkv_pointer + (HEADS + head) * DIM, d, cos, sin, d_inside).to(kind)
    v_new = tl.load(qkv_pointer + (HEADS + KV_HEADS + head) * DIM + d, mask=d_inside, other=0.0).to(kind)
    last = split == splits - 1
    out = out_pointer + head * (group * DIM)
    for g in tl.static_range(group):
        q = rotated(qkv_pointer + (head * group + g) * DIM, d, cos, sin, d_inside).to(kind).to(tl.float32)
        scores = tl.sum(k.to(tl.float32) * q[None, :], 1) * scale
        scores = tl.where(visible, scores, float("-inf"))
        new_score = tl.where(last, tl.sum(k_new.to(tl.float32) * q, 0) * scale, -1e30)
        top = tl.maximum(tl.max(scores, 0), new_score)
        weights = tl.exp2(scores - top)
        new_weight = tl.where(last, tl.exp2(new_score - top), 0.0)
        total = tl.sum(weights, 0) + new_weight
        sums = tl.sum(v.to(tl.float32) * weights[:, None], 0) + v_new.to(tl.float32) * new_weight
        if splits - first_split == 1:
            tl.store(out + g * DIM + d, (sums / total).to(out_pointer.dtype.element_ty), mask=d_inside)
        else:
            slot = head * MOST_SPLITS + split
            tl.store(sums_pointer + (slot * GROUP + g) * PADDED_DIM + d, sums)
            tl.store(totals_pointer + slot * (2 * GROUP) + g, top)
            tl.store(totals_pointer + slot * (2 * GROUP) + GROUP + g, total)
    if last:
        tl.store(keys_pointer + base + place * DIM + d, k_new, mask=d_inside)
        tl.store(values_pointer + base + place * DIM + d, v_new, mask=d_inside)
    if splits - first_split > 1:
        merge(
            sums_pointer, totals_pointer, arrived_pointer, out, head, first_split, splits, d,
            HEADS // KV_HEADS, DIM, PADDED_DIM, GROUP, MOST_SPLITS,
        )  # fmt: skip


@triton.jit
def window_begin(place, splits, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first key that the token at `place` sees, and the first split: that of the key, or the last."""
    if not WINDOW:
        return 0, 0
    first_key = tl.maximum(place - (WINDOW - 1), 0)
    return first_key, tl.minimum(first_key // SPLIT, splits - 1)


@triton.jit
def merge(
    sums_pointer, totals_pointer, arrived_pointer, out, row_head, first_split, splits, d,
    HEADS: tl.constexpr,  # query heads of the group
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr, MOST_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the states of all splits, in the last program of a row and key head to arrive."""
    tl.debug_barrier()  # all threads of the program have stored before one counts it as arrived
    if tl.atomic_add(arrived_pointer + row_head, 1, sem="acq_rel") == splits - first_split - 1:
        s, h = tl.arange(0, triton.next_power_of_2(MOST_SPLITS)), tl.arange(0, GROUP)
        there = ((s < splits) & (s >= first_split))[:, None]
        slots = (row_head * MOST_SPLITS + s).to(tl.int64)[:, None]
        tops_at = totals_pointer + slots * (2 * GROUP) + h[None, :]
        tops = tl.load(tops_at, mask=there, other=float("-inf"))  # (splits, GROUP)
        totals = tl.load(tops_at + GROUP, mask=there, other=0.0)
        parts_at = ((slots * GROUP + h[None, :]) * PADDED_DIM)[:, :, None] + d[None, None, :]
        parts = tl.load(sums_pointer + parts_at, mask=there[:, :, None], other=0.0)
        weights = tl.exp2(tops - tl.max(tops, 0)[None, :])
        merged = tl.sum(parts * weights[:, :, None], 0) / tl.sum(totals * weights, 0)[:, None]
        inside = (h < HEADS)[:, None] & (d < DIM)[None, :]
        tl.store(out + h[:, None] * DIM + d[None, :], merged.to(out.dtype.element_ty), mask=inside)
        tl.store(arrived_pointer + row_head, 0)


@triton.jit
def rotated(base, d, cos, sin, mask):
    """Rotate neighbouring channels (2i, 2i + 1)."""
    own = tl.load(base + d, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(base + (d ^ 1), mask=mask, other=0.0).to(tl.float32)
    return own * cos + other * tl.where(d % 2 == 0, -sin, sin)


@triton.jit
def fold(top, total, sums, q, k, v, visible, scale):
    """Add keys (PADDED_DIM, TILE) and values (TILE, PADDED_DIM) to the softmax states of the rows of q."""
    scores = tl.dot(q, k, input_precision="ieee") * scale  # (ROWS, TILE)
    scores = tl.where(visible[None, :], scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    weights, old_weight = tl.exp2(scores - highest[:, None]), tl.exp2(top - highest)
    sums = tl.dot(weights.to(v.dtype), v, sums * old_weight[:, None], input_precision="ieee")
    return highest, total * old_weight + tl.sum(weights, 1), sums


class Split(NamedTuple):
    """Keys per program, keys per iteration, warps and pipeline stages."""

    keys: int
    tile: int
    warps: int
    stages: int


def split_of(rows: int, head_dim: int, group: int, dtype: torch.dtype) -> Split:
    """Return the split: for a single row one tile per program, for low latency; for several a loop. `group`: query
    heads per key head."""
    wide = dtype == torch.float32 or head_dim > 128
    if rows == 1:
        if wide:
            return Split(64, 64, 8, 1)
        if group > 1:
            return Split(128, 128, 8, 1)  # limited by registers
        return Split(128, 128, 4, 1) if head_dim > 64 else Split(256, 256, 8, 1)
    return Split(256, 32, 4, 2) if wide else Split(256, 64, 4, 3)  # limited by shared memory


class AttendSpace(NamedTuple):
    """Memory of the splits' softmax states, shared by all layers; for shapes see `attend_kernel`."""

    sums: Tensor
    totals: Tensor
    arrived: Tensor


def attend_space(
    rows: int, heads: int, kv_heads: int, head_dim: int, capacity: int, like: Tensor
) -> AttendSpace:
    """Allocate the memory for a cache of `capacity` tokens with the dtype and device of `like`."""
    splits = count_tiles(capacity, split_of(rows, head_dim, heads // kv_heads, like.dtype).keys)
    states = rows * kv_heads * splits * triton.next_power_of_2(heads // kv_heads)
    return AttendSpace(
        like.new_empty(states * triton.next_power_of_2(max(16, head_dim)), dtype=torch.float32),
        like.new_empty(states * 2, dtype=torch.float32),
        like.new_zeros(rows * kv_heads, dtype=torch.int32),
    )


def prepare_attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    cos_sin: Tensor,
    out: Tensor,
    space: AttendSpace,
    *,
    longest: int,
    window: int | None = None,
    pdl: bool = False,
) -> Callable[[], None]:
    """Prepare a step's attention; shapes as of `attend_kernel`. The keys and values of qkv join the cache.

    Args:
        longest: most old keys that a row may have.
        window: how many tokens a token sees, itself among them; None: all earlier ones.
        pdl: begin before the previous kernel has ended.
    """
    rows, kv_heads, capacity, head_dim = keys.shape
    heads = out.shape[1] // head_dim
    split = split_of(rows, head_dim, heads // kv_heads, keys.dtype)
    sizes = {"DIM": head_dim, "PADDED_DIM": triton.next_power_of_2(max(16, head_dim)), "WINDOW": window or 0}
    group = {"HEADS": heads, "KV_HEADS": kv_heads, "GROUP": triton.next_power_of_2(heads // kv_heads)}
    splits = {"SPLIT": split.keys, "TILE": split.tile, "STAGES": split.stages, "num_warps": split.warps}
    constants = {**sizes, **group, **splits, "MOST_SPLITS": count_tiles(capacity, split.keys)}
    tensors = (qkv, keys, values, place, cos_sin, out, *space)
    grid = (rows * kv_heads, count_tiles(max(longest, 1), split.keys))
    scale = head_dim**-0.5 * math.log2(math.e)
    kernel = attend_single_row_kernel if rows == 1 else attend_kernel
    return prepare_call(kernel, grid, tensors, (capacity, scale), constants, pdl=pdl)


# Keys and values of whole texts

STORED = 32  # positions per program


@triton.jit(do_not_specialize=["seq", "capacity"])
def store_kernel(
    k_pointer,  # (texts, KV_HEADS, seq, DIM), with stride 1 along DIM
    v_pointer,
    rows_pointer,  # (texts) int64
    keys_pointer,  # (rows, KV_HEADS, capacity, DIM)
    values_pointer,
    rows_stride,
    k_stride_text, k_stride_head, k_stride_seq, v_stride_text, v_stride_head, v_stride_seq, seq, capacity,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
    store_calls((k, v, rows), (keys, values), (keys.shape[2],))


def _store_launch(options: tuple, k: Tensor, v: Tensor, rows: Tensor, *_: Tensor) -> Launch:
    (capacity,) = options
    texts, kv_heads, seq, head_dim = k.shape
    constants = {"KV_HEADS": kv_heads, "DIM": head_dim, "PADDED_DIM": triton.next_power_of_2(head_dim)}
    constants |= {"TILE": STORED, "num_warps": 4}
    grid = texts * kv_heads, count_tiles(seq, STORED)
    numbers = rows.stride(0), *k.stride()[:3], *v.stride()[:3], seq, capacity
    return grid, numbers, constants


store_calls = calls_of(store_kernel, _store_launch)
