"""Compute one consumer's rows of a tile in the Hopper forward kernel (read `forward_kernel` first).

Softmax without a running maximum. The row maximum of the first block (or 6 above it, see FEW_KEYS) is the REFERENCE
of the row: P = 2^(score - reference). The row sum l and O carry the same factor, which cancels in O / l, so any
reference gives the exact softmax as long as nothing overflows. A vote guards that: when a thread's part of the
block's row sum passes `lift_above`, or is NaN, the block LIFTS: the consumer computes its scores once more (K has
not been given back yet), raises its rows' references to the new maxima and rescales O and l, which nothing that
overflowed has reached yet.

Peaks. With a static reference the largest P of a row is not exactly 1. Where one key takes most of a row, the
16-bit rounding of its P would show in O, and through delta in dQ and dK. So O is divided by a sum that holds the
largest P as rounded, where the error cancels; the log-sum-exp keeps the exact sum. Only blocks with a peak, where a
thread's part of the row sum passes FOLLOW_ABOVE, look for their largest P and vote again on `lift_above`.

Two nested loops. The first block of a tile and a block that lifts share the code of the outer loop, because every
consumer has a copy of the code and the instruction cache is small. So do the last blocks of a tile, which `first`
cuts: the inner loop needs no mask.
"""

from collections import namedtuple
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lmkit.kernels.flash.tiles import LN_2
from lmkit.kernels.hopper import barriers as sync
from lmkit.kernels.hopper import fragments, schedule, wgmma
from lmkit.kernels.hopper.barriers import partition_barrier
from lmkit.kernels.hopper.tma import tma_store

ROWS = gl.constexpr(64)  # query rows of one consumer: the height of a wgmma
BOTH_CONSUMERS = gl.constexpr(256)  # threads
# Finite, so that a row whose first block is masked keeps 2^(-inf - reference) = 0
LOWEST_REFERENCE = gl.constexpr(-1.0e30)
# Limit of a thread's part of a block's row sum, as a PTX number: 2^9, below every `lift_above`. Rows that stay below
# it keep an error close to that of an online softmax.
FOLLOW_ABOVE = gl.constexpr("0f44000000")
# The maximum of few keys says little about a row: rows that see one key of their first block would often find a peak
# in every block, and all consumers of the SM would wait for them. A reference that is higher by a whole power of two
# leaves the largest P as exact as 1.
FEW_KEYS = gl.constexpr(4)
MARGIN_OF_FEW = gl.constexpr(6.0)  # powers of two

# Of global memory: (batch, heads, sequence, at most D)
Descriptors = namedtuple("Descriptors", ["q", "k", "v", "o"])
# In shared memory: (consumer or slot, 1, 1, rows, D); units: a number a consumer
Tiles = namedtuple("Tiles", ["q", "k", "v", "o", "units"])
# mbarriers: two a consumer for Q, two a slot for K and two for V (see the module)
Barriers = namedtuple("Barriers", ["q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty"])


class Problem(NamedTuple):
    """The sizes of a call."""

    num_queries: gl.tensor
    num_keys: gl.tensor
    heads: gl.tensor  # query heads of one batch item
    group: gl.tensor  # query heads to a key head
    num_tiles: gl.tensor  # of a head: 64 queries times the consumers
    num_heads: gl.tensor  # query heads of the whole batch


# The compile-time parameters of `forward_kernel` that the partitions need
Shape = namedtuple("Shape", ["D", "USED", "KEYS", "STAGES", "CAUSAL", "TAIL", "CONSUMERS", "OWN_O", "FIRST"])


@gluon.constexpr_function
def lift_above(dtype):
    """Return the limit of a thread's part of a block's row sum, as a PTX number: 2^60 leaves O and l room for 2^60
    such blocks (bf16 P has float32's range), 2^12 keeps P within float16."""
    return "0f45800000" if dtype == gl.float16 else "0f5D800000"


@gluon.jit
def take_turn(index: gl.constexpr, CONSUMERS: gl.constexpr):
    """Wait until the other of two consumers has issued its products (ping-pong). Three do not take turns."""
    if CONSUMERS == 2:
        sync.named_barrier_wait(sync.FIRST_NAMED_BARRIER + index, BOTH_CONSUMERS)


@gluon.jit
def pass_turn(index: gl.constexpr, CONSUMERS: gl.constexpr):
    """Let the other of two consumers issue its products."""
    if CONSUMERS == 2:
        sync.named_barrier_arrive(sync.FIRST_NAMED_BARRIER + 1 - index, BOTH_CONSUMERS)


@gluon.jit
def _await_tile(full, block, STAGES: gl.constexpr, wanted=True):
    """Wait for K or V of this block, whose `full` barriers these are, if it is `wanted`."""
    mbarrier.wait(full.index(block % STAGES), (block // STAGES) & 1, pred=wanted)


@gluon.jit
def _hand_back_unread(barriers, block, STAGES: gl.constexpr):
    """Give back the slots of a block that this consumer does not see."""
    _await_tile(barriers.k_full, block, STAGES)
    mbarrier.arrive(barriers.k_empty.index(block % STAGES), count=1)
    _await_tile(barriers.v_full, block, STAGES)
    mbarrier.arrive(barriers.v_empty.index(block % STAGES), count=1)


@gluon.jit
def _raise_references(
    scores, scale_log2, reference, rows, first_key, num_keys, CAUSAL: gl.constexpr, TAIL: gl.constexpr
):
    """Return (the rows' new references, the factor for what was computed with the old ones).

    A reference is the row's maximum so far, or MARGIN_OF_FEW above it.
    """
    highest = gl.maximum(gl.max(scores, 1) * scale_log2, reference)
    visible = fragments.count_visible_keys(rows, first_key, num_keys, scores.shape[1], CAUSAL, TAIL)
    highest += gl.where(visible <= FEW_KEYS, MARGIN_OF_FEW, 0.0)
    return highest, gl.exp2(reference - highest)


@gluon.jit
def attend(index: gl.constexpr, call, shape, turn, tile, flat_head, block):
    """Compute this consumer's 64 rows of a tile; return the number of the next block.

    The outer loop takes blocks that set references, with S alone in flight: the first of a tile, those that lift, and
    those that `first` cuts. The inner loop takes the blocks after it, S together with O += P V of the block before.
    Of a block that lifts only that O += P V counts, and its K and V are still there: the outer loop begins it anew.
    """
    D: gl.constexpr = shape.D
    descriptors, tiles, barriers, problem, lse, scale_log2, first, _ = call
    TILE: gl.constexpr = ROWS * shape.CONSUMERS
    DTYPE: gl.constexpr = descriptors.q.dtype
    SCORES: gl.constexpr = wgmma.accumulator_layout(shape.KEYS)
    OUT: gl.constexpr = wgmma.accumulator_layout(D)
    PROBABILITIES: gl.constexpr = wgmma.operand_layout(OUT)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    my_vote: gl.constexpr = sync.FIRST_NAMED_BARRIER + shape.CONSUMERS + index
    num_keys = problem.num_keys
    blocks = schedule.count_key_blocks(tile, num_keys, TILE, shape.KEYS, shape.CAUSAL)
    first_row = tile * TILE + index * ROWS
    own_blocks = blocks
    if shape.CAUSAL and TILE > shape.KEYS:
        own_blocks = gl.minimum(blocks, gl.cdiv(first_row + ROWS, shape.KEYS))
        if own_blocks < blocks:  # one may lie wholly above this consumer's diagonal
            take_turn(index, shape.CONSUMERS)  # one turn a block, also for this one
            pass_turn(index, shape.CONSUMERS)
            _hand_back_unread(barriers, block, shape.STAGES)
            block += 1
    rows = first_row + gl.arange(0, ROWS, ROW)
    seen = own_blocks
    clear = own_blocks  # in which `first` hides nothing
    unread = 0  # blocks at the end that only other consumers see
    batch = flat_head // problem.heads
    if shape.FIRST:
        hidden = schedule.load_bound(first, batch, tile * TILE, problem.num_queries) // shape.KEYS
        hides_all = schedule.load_bound(first, batch, first_row, problem.num_queries) // shape.KEYS
        seen -= hides_all
        unread = hides_all - hidden
        last_bound = schedule.load_bound(first, batch, first_row + ROWS - 1, problem.num_queries)
        clear -= gl.cdiv(last_bound, shape.KEYS)
        bounds = schedule.load_bounds(first, batch, rows, problem.num_queries)

    nothing = gl.zeros([ROWS, shape.KEYS], gl.float32, SCORES)
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    sums = fragments.sum_within_threads(nothing)  # (64, 4)
    surplus = sums  # of the blocks' largest P, by their rounding
    reference = gl.full([ROWS], LOWEST_REFERENCE, gl.float32, ROW)
    packed = fragments.pack_pairs(nothing, DTYPE)  # P of the block before, (64, KEYS / 2)
    mbarrier.wait(barriers.q_full.index(index), turn & 1)
    q = tiles.q.index(index).reshape([ROWS, D])
    _await_tile(barriers.k_full, block, shape.STAGES)
    # It is at least 1. Told so, the compiler sees that nobody multiplies the zeros of `packed`, and keeps none.
    seen = gl.maximum(seen, 1)
    i = 0
    lifts = 0
    while i < seen:
        # A block that sets references. Only the first of a tile meets the diagonal, the end of the keys or few
        # keys; for others, their mask and the margin do nothing.
        slot = block % shape.STAGES
        phase = (block // shape.STAGES) & 1
        is_new = i == 0  # a block that lifts had its turn in the inner loop
        if shape.FIRST:
            is_new = lifts == 0
            if is_new & (i > 0):  # `first` cuts the block: O += P V of the block before has not been issued
                previous = (block - 1) % shape.STAGES
                probabilities = fragments.unpack_pairs(packed, DTYPE, PROBABILITIES)
                v = tiles.v.index(previous).reshape([shape.KEYS, D])
                out_job = warpgroup_mma(probabilities, v, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[out_job])
                mbarrier.arrive(barriers.v_empty.index(previous), count=1)
        if is_new:
            take_turn(index, shape.CONSUMERS)
        k = tiles.k.index(slot).reshape([shape.KEYS, D])
        score_job = wgmma.issue_scores(q, k, shape.USED, SCORES)
        if is_new:
            pass_turn(index, shape.CONSUMERS)
        scores = warpgroup_mma_wait(0, deps=[score_job])  # (64 queries, KEYS)
        mbarrier.arrive(barriers.k_empty.index(slot), count=1)
        first_key = (own_blocks - 1 - i) * shape.KEYS
        if shape.FIRST:
            if i == 0:
                scores = fragments.hide_keys(scores, rows, first_key, num_keys, shape.CAUSAL, shape.TAIL)
            if i >= clear:
                scores = fragments.keep_columns_from(scores, bounds - first_key, -float("inf"))
        else:
            scores = fragments.hide_keys(scores, rows, first_key, num_keys, shape.CAUSAL, shape.TAIL)
        reference, factor = _raise_references(
            scores, scale_log2, reference, rows, first_key, num_keys, shape.CAUSAL, shape.TAIL
        )
        p = fragments.exp2_unfused(scores, scale_log2, reference)
        sums = fragments.scale_rows(sums, factor) + fragments.sum_within_threads(p)
        surplus = fragments.scale_rows(surplus, factor)
        if i > 0:  # O is still 0 at the first
            acc = fragments.scale_rows(acc, factor)
        packed = fragments.pack_pairs(p, DTYPE)
        more = i + 1 < seen
        _await_tile(barriers.k_full, block + 1, shape.STAGES, more)
        mbarrier.wait(barriers.v_full.index(slot), phase)
        block += 1
        i += 1

        # Its successors. The step before has waited for K of this block and V of the previous one.
        lifts = 0
        while (i < clear) & (lifts == 0):
            slot = block % shape.STAGES
            previous = (block - 1) % shape.STAGES
            probabilities = fragments.unpack_pairs(packed, DTYPE, PROBABILITIES)
            take_turn(index, shape.CONSUMERS)
            k = tiles.k.index(slot).reshape([shape.KEYS, D])
            v = tiles.v.index(previous).reshape([shape.KEYS, D])
            score_job = wgmma.issue_scores(q, k, shape.USED, SCORES)
            out_job = warpgroup_mma(probabilities, v, acc, is_async=True)
            pass_turn(index, shape.CONSUMERS)
            scores = warpgroup_mma_wait(1, deps=[score_job])
            p = gl.exp2(scores * scale_log2 - gl.expand_dims(reference, 1))
            block_sums = fragments.sum_within_threads(p)
            # The vote stands here because it needs all exponentials and ptxas moves no barrier: they stay in
            # the shadow of the products.
            peaks = sync.any_exceeds(block_sums, FOLLOW_ABOVE, my_vote, index)
            # The wait for the next operands stands here because its spin loop ends the basic block: ptxas cannot
            # move the wait for O += P V above the exponentials that should overlap with it.
            more = i + 1 < seen
            _await_tile(barriers.k_full, block + 1, shape.STAGES, more)
            _await_tile(barriers.v_full, block, shape.STAGES)
            # the softmax's results as dependencies: they are computed before this wait, not after
            acc, p, block_sums = warpgroup_mma_wait(0, deps=[out_job, p, block_sums])
            mbarrier.arrive(barriers.v_empty.index(previous), count=1)
            lifts = peaks
            if peaks != 0:
                lifts = sync.any_exceeds(block_sums, lift_above(DTYPE), my_vote, index)
                if lifts == 0:  # a lifted row's largest P is exactly 1
                    surplus = surplus + fragments.rounding_of_largest(p, DTYPE, sums)
            if lifts == 0:
                mbarrier.arrive(barriers.k_empty.index(slot), count=1)
                sums = sums + block_sums
                packed = fragments.pack_pairs(p, DTYPE)
                block += 1
                i += 1

    if shape.OWN_O:
        mbarrier.arrive(barriers.q_empty.index(index), count=1)
    slot = (block - 1) % shape.STAGES
    v = tiles.v.index(slot).reshape([shape.KEYS, D])
    out_job = warpgroup_mma(fragments.unpack_pairs(packed, DTYPE, PROBABILITIES), v, acc, is_async=True)
    row_sum = gl.convert_layout(gl.sum(sums, 1), ROW)
    rounded_sum = gl.convert_layout(gl.sum(sums + surplus, 1), ROW)
    acc = warpgroup_mma_wait(0, deps=[out_job])
    mbarrier.arrive(barriers.v_empty.index(slot), count=1)
    if shape.FIRST:
        for _ in range(unread):
            take_turn(index, shape.CONSUMERS)
            pass_turn(index, shape.CONSUMERS)
            _hand_back_unread(barriers, block, shape.STAGES)
            block += 1
    out = fragments.scale_rows(acc, 1.0 / rounded_sum)
    row_lse = (reference + gl.log2(row_sum)) * LN_2
    written = rows < problem.num_queries
    gl.store(lse + flat_head.to(gl.int64) * problem.num_queries + rows, row_lse, mask=written)
    # Through a tile of its own, O leaves while the next Q lands; where there is no room for one, through Q's.
    if shape.OWN_O:
        tma.store_wait(0)
    tiles.o.index(index).reshape([ROWS, D]).store(out.to(DTYPE))
    fence_async_shared()
    partition_barrier()
    tma_store(
        descriptors.o,
        [flat_head // problem.heads, flat_head % problem.heads, first_row, 0],
        tiles.o.index(index),
    )
    if not shape.OWN_O:
        tma.store_wait(0)
        mbarrier.arrive(barriers.q_empty.index(index), count=1)
    return block
