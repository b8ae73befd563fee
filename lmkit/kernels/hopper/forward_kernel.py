"""Compute attention forward on Hopper: O = softmax(Q K^T scale) V and the log-sum-exp, in one persistent kernel.

Warp specialisation and the overlap of products and softmax follow FlashAttention-3 (Shah et al. 2024, sections 3.1
and 3.2). One CTA runs on each SM and works through the tiles that `schedule` deals out to it. Its warps are split:

* one **producer** warp loads Q, K and V tiles into shared memory with TMA, as far ahead as there are free slots;
* two or three **consumer** warp groups own 64 query rows each and keep O and P in registers.

A tile of queries meets its key blocks from the last that it sees back to the first, so the masked one comes first. K
and V go round in STAGES slots: `block` counts key blocks over all tiles, block % STAGES is its slot, block //
STAGES its round.

Timeline of two consumers in the steady state. S = Q K^T and PV are asynchronous wgmmas on the tensor cores; a
consumer issues both of a step together and computes its softmax while the other's products run (ping-pong). Three
consumers do not take turns.

    producer    | TMA K(j+1)         | TMA V(j+1)         | TMA K(j+2)         | TMA V(j+2)         |
    consumer 0  | issue S(j), PV(j-1)| softmax(j)         | issue S(j+1), PV(j)| softmax(j+1)       |
    consumer 1  | softmax(j-1)       | issue S(j), PV(j-1)| softmax(j)         | issue S(j+1), PV(j)|
    tensor cores| S(j) PV(j-1) of 0  | S(j) PV(j-1) of 1  | S(j+1) PV(j) of 0  | S(j+1) PV(j) of 1  |

One step of a consumer, in order: take the turn; issue S(j) and O += P(j-1) V(j-1); pass the turn; wait for S(j);
exponentials and row sums; vote; wait for K(j+1), V(j) and PV(j-1); give the slots of V(j-1) and K(j) back.

Barriers. A `full` mbarrier completes a phase when TMA has delivered the bytes of a tile, an `empty` one when every
consumer has given the slot back. Phases are numbered 0, 1, 0, 1...: consumers wait for the parity of their round,
the producer for the opposite one, which lets its first round through.

| barrier | who arrives | who waits, for which phase |
|-|-|-|
| k_full, v_full [slot] | the producer's `expect`, then TMA's bytes | every consumer, round & 1 |
| k_empty, v_empty [slot] | every consumer, when it is done with the tile | the producer, (round & 1) ^ 1 |
| q_full [consumer] | the producer's `expect`, then TMA's bytes | that consumer, turn & 1 |
| q_empty [consumer] | that consumer, after its last S; without OWN_O, after O | the producer, (turn & 1) ^ 1 |
| named, 9 + consumer | the other of two consumers (`bar.arrive`) | that consumer, before it issues products |
| named, 9 + CONSUMERS + consumer | the 128 threads of that consumer, at each of its votes | the same threads |

Registers and shared memory (at most 192 of 227 KiB): `forward.REGISTERS`, `forward.ForwardConfig`; nothing spills
(tests/kernels/hopper/test_compile.py). The producer keeps 24 registers.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmkit.kernels.flash.tiles import LN_2
from lmkit.kernels.hopper import barriers as sync
from lmkit.kernels.hopper import schedule, wgmma
from lmkit.kernels.hopper.barriers import partition_barrier
from lmkit.kernels.hopper.tma import allocate_slots, fetch_tile, tma_store

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
    """Return (the rows' new references, each the row's maximum so far or MARGIN_OF_FEW above it; the factor for what
    was computed with the old ones)."""
    highest = gl.maximum(gl.max(scores, 1) * scale_log2, reference)
    visible = wgmma.count_visible_keys(rows, first_key, num_keys, scores.shape[1], CAUSAL, TAIL)
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
    sums = wgmma.sum_within_threads(nothing)  # (64, 4)
    surplus = sums  # of the blocks' largest P, by their rounding
    reference = gl.full([ROWS], LOWEST_REFERENCE, gl.float32, ROW)
    packed = wgmma.pack_pairs(nothing, DTYPE)  # P of the block before, (64, KEYS / 2)
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
                probabilities = wgmma.unpack_pairs(packed, DTYPE, PROBABILITIES)
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
                scores = wgmma.hide_keys(scores, rows, first_key, num_keys, shape.CAUSAL, shape.TAIL)
            if i >= clear:
                scores = wgmma.keep_columns_from(scores, bounds - first_key, -float("inf"))
        else:
            scores = wgmma.hide_keys(scores, rows, first_key, num_keys, shape.CAUSAL, shape.TAIL)
        reference, factor = _raise_references(
            scores, scale_log2, reference, rows, first_key, num_keys, shape.CAUSAL, shape.TAIL
        )
        p = wgmma.exp2_unfused(scores, scale_log2, reference)
        sums = wgmma.scale_rows(sums, factor) + wgmma.sum_within_threads(p)
        surplus = wgmma.scale_rows(surplus, factor)
        if i > 0:  # O is still 0 at the first
            acc = wgmma.scale_rows(acc, factor)
        packed = wgmma.pack_pairs(p, DTYPE)
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
            probabilities = wgmma.unpack_pairs(packed, DTYPE, PROBABILITIES)
            take_turn(index, shape.CONSUMERS)
            k = tiles.k.index(slot).reshape([shape.KEYS, D])
            v = tiles.v.index(previous).reshape([shape.KEYS, D])
            score_job = wgmma.issue_scores(q, k, shape.USED, SCORES)
            out_job = warpgroup_mma(probabilities, v, acc, is_async=True)
            pass_turn(index, shape.CONSUMERS)
            scores = warpgroup_mma_wait(1, deps=[score_job])
            p = gl.exp2(scores * scale_log2 - gl.expand_dims(reference, 1))
            block_sums = wgmma.sum_within_threads(p)
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
                    surplus = surplus + wgmma.rounding_of_largest(p, DTYPE, sums)
            if lifts == 0:
                mbarrier.arrive(barriers.k_empty.index(slot), count=1)
                sums = sums + block_sums
                packed = wgmma.pack_pairs(p, DTYPE)
                block += 1
                i += 1

    if shape.OWN_O:
        mbarrier.arrive(barriers.q_empty.index(index), count=1)
    slot = (block - 1) % shape.STAGES
    v = tiles.v.index(slot).reshape([shape.KEYS, D])
    out_job = warpgroup_mma(wgmma.unpack_pairs(packed, DTYPE, PROBABILITIES), v, acc, is_async=True)
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
    out = wgmma.scale_rows(acc, 1.0 / rounded_sum)
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


@gluon.jit
def _producer(call, shape):
    """Load tiles with TMA. K comes before Q in the first turn: the consumers' last step with the old Q hides both."""
    _, tiles, barriers, problem, _, _, _, drawn = call
    block = 0
    if shape.FIRST:
        units = problem.num_tiles * problem.num_heads
        unit = gl.program_id(0)
        turn = 0
        while unit < units:
            next_unit = schedule.draw_unit(drawn, units)
            tile, flat_head = schedule.locate_unit(unit, problem.num_tiles, problem.num_heads)
            block = _load_tile(call, shape, turn, unit, tile, flat_head, block)
            unit = next_unit
            turn += 1
        for c in gl.static_range(shape.CONSUMERS):
            mbarrier.wait(barriers.q_empty.index(c), (turn & 1) ^ 1)
            schedule.announce_unit(tiles.units.index(c), -1)
            mbarrier.arrive(barriers.q_full.index(c), count=1)
    else:
        turns, pairs = schedule.count_turns(problem.num_tiles, problem.num_heads, shape.CAUSAL)
        for turn in range(turns):
            tile, flat_head = schedule.locate_tile(
                turn, problem.num_tiles, problem.num_heads, pairs, shape.CAUSAL
            )
            block = _load_tile(call, shape, turn, 0, tile, flat_head, block)


@gluon.jit
def _load_tile(call, shape, turn, unit, tile, flat_head, block):
    """Load Q of a tile, and the K and V that it meets; return the next block's number. FIRST: announce the unit."""
    descriptors, tiles, barriers, problem, _, _, first, _ = call
    TILE: gl.constexpr = ROWS * shape.CONSUMERS
    batch = flat_head // problem.heads
    head = flat_head % problem.heads
    key_head = head // problem.group
    blocks = schedule.count_key_blocks(tile, problem.num_keys, TILE, shape.KEYS, shape.CAUSAL)
    hidden = 0
    if shape.FIRST:
        hidden = schedule.load_bound(first, batch, tile * TILE, problem.num_queries) // shape.KEYS
    for i in range(blocks - hidden):
        first_key = (blocks - 1 - i) * shape.KEYS  # from the diagonal back: the masked block comes first
        slot = block % shape.STAGES
        free = ((block // shape.STAGES) & 1) ^ 1
        mbarrier.wait(barriers.k_empty.index(slot), free)
        fetch_tile(descriptors.k, batch, key_head, first_key, barriers.k_full, tiles.k, slot)
        if i == 0:
            for c in gl.static_range(shape.CONSUMERS):
                mbarrier.wait(barriers.q_empty.index(c), (turn & 1) ^ 1)
                if shape.FIRST:
                    schedule.announce_unit(tiles.units.index(c), unit)
                first_row = tile * TILE + c * ROWS
                fetch_tile(descriptors.q, batch, head, first_row, barriers.q_full, tiles.q, c)
        mbarrier.wait(barriers.v_empty.index(slot), free)
        fetch_tile(descriptors.v, batch, key_head, first_key, barriers.v_full, tiles.v, slot)
        block += 1
    return block


@gluon.jit
def _consumer(index: gl.constexpr, call, shape):
    """Compute 64 rows of every tile, as one warp group. `block` counts key blocks over all tiles."""
    _, tiles, barriers, problem, _, _, _, _ = call
    sync.declare_vote(index)
    block = 0
    if index == 1:
        pass_turn(index, shape.CONSUMERS)  # consumer 0 goes first
    if shape.FIRST:
        turn = 0
        mbarrier.wait(barriers.q_full.index(index), 0)
        unit = schedule.read_unit(tiles.units.index(index), 4)
        while unit >= 0:
            tile, flat_head = schedule.locate_unit(unit, problem.num_tiles, problem.num_heads)
            block = attend(index, call, shape, turn, tile, flat_head, block)
            turn += 1
            mbarrier.wait(barriers.q_full.index(index), turn & 1)
            unit = schedule.read_unit(tiles.units.index(index), 4)
    else:
        turns, pairs = schedule.count_turns(problem.num_tiles, problem.num_heads, shape.CAUSAL)
        for turn in range(turns):
            tile, flat_head = schedule.locate_tile(
                turn, problem.num_tiles, problem.num_heads, pairs, shape.CAUSAL
            )
            block = attend(index, call, shape, turn, tile, flat_head, block)
    tma.store_wait(0)
    if index == 0:
        take_turn(index, shape.CONSUMERS)  # takes the token that consumer 1 gave last


@gluon.jit(do_not_specialize=list(Problem._fields))
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse, first, drawn, num_queries, num_keys, heads, group, num_tiles,
                   num_heads, scale_log2,
                   D: gl.constexpr, USED: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
                   CAUSAL: gl.constexpr, TAIL: gl.constexpr, CONSUMERS: gl.constexpr, OWN_O: gl.constexpr,
                   REGISTERS: gl.constexpr, FIRST: gl.constexpr):  # fmt: skip
    """Allocate the slots and barriers and start the partitions.

    Descriptors are rank 4, (batch, heads, sequence, at most D): q and o in boxes of (1, 1, 64, D), k and v of (1, 1,
    KEYS, D), zeros beyond the head. lse: float32 (num_heads, num_queries), natural. first: for FIRST, see `schedule`.
    drawn: for FIRST, see `schedule.draw_unit`. group: query heads per key head. num_heads: over the batch.
    scale_log2: scale * log2(e). TAIL: num_keys is no multiple of KEYS. OWN_O: O leaves through tiles of its own,
    otherwise through Q's. REGISTERS: a consumer's, after it took the producer's share. USED: of the D columns S = Q
    K^T takes these (see issue_scores).
    """
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    q_tiles = allocate_slots(q_desc, CONSUMERS)
    o_tiles = q_tiles
    if OWN_O:
        o_tiles = allocate_slots(o_desc, CONSUMERS)
    units = q_tiles
    if FIRST:
        units = schedule.allocate_units(CONSUMERS)
    tiles = Tiles(q_tiles, allocate_slots(k_desc, STAGES), allocate_slots(v_desc, STAGES), o_tiles, units)
    q_full = sync.make_mbarriers(CONSUMERS)
    q_empty = sync.make_mbarriers(CONSUMERS)
    k_full = sync.make_mbarriers(STAGES)
    k_empty = sync.make_mbarriers(STAGES, CONSUMERS)
    v_full = sync.make_mbarriers(STAGES)
    v_empty = sync.make_mbarriers(STAGES, CONSUMERS)
    fence_async_shared()
    partition_barrier()
    descriptors = Descriptors(q_desc, k_desc, v_desc, o_desc)
    barriers = Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)
    problem = Problem(num_queries, num_keys, heads, group, num_tiles, num_heads)
    call = (descriptors, tiles, barriers, problem, lse, scale_log2, first, drawn)
    shape: gl.constexpr = Shape(D, USED, KEYS, STAGES, CAUSAL, TAIL, CONSUMERS, OWN_O, FIRST)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (0, call, shape)), (_consumer, (1, call, shape)), (_producer, (call, shape))],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, call, shape)),
                (_consumer, (1, call, shape)),
                (_consumer, (2, call, shape)),
                (_producer, (call, shape)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
