"""Compute dQ, dK and dV together on Hopper: the fast backward of D = 64, and of long unmasked D = 128.

One CTA owns 128 keys at a time: it computes their dK and dV and adds their share to the sum of dQ. The mathematics,
the transposes, the producer and the sum of dQ are those of `backward_dqdkdv_lockstep` (read it first). There two warp
groups meet at two barriers a step; at D = 64, with twice the exponentials of D = 128 for the same products, both
would compute exponentials while the tensor cores idle.

So each consumer is a **partition of its own**. It has dK and dV of 64 keys, and a 64 x 64 part of each step's dQ:
at D = 64, in steps of 128 queries, 64 of the queries; at D = 128, in steps of 64, half of the columns. Of the other
it needs only dS, because dQ sums over the keys of both. dS has two buffers: its owner stores it, announces it and
goes on; the other waits for it behind S of its next step. So the two may drift apart by half a step.

Timeline of a step of a consumer; the other one is half a step behind, and its exponentials meet these products.
Every product is an asynchronous wgmma:

    producer     | TMA Q(j+1), lse, into a free slot          | TMA dO(j+1), delta                |
    consumer     | wait S(j)            | P(j) = exp          | wait dP(j)  | dS(j), announce it  |
    tensor cores | S(j) dK(j-1) dQ(j-1) | dK(j-1) dQ(j-1)     | dP(j)       | dV(j)               |
    TMA          |                      |                     | adds dQ(j-1) to global memory     |

Nothing is in flight where the loop closes: in every partition except the first, ptxas would serialise it (C7512).

With `first`, where a tile of keys takes few steps, a CTA works through many (`schedule.draw_unit`). Two steps into a
tile the producer draws the next, loads its K and V into a second buffer and announces in shared memory what it is;
then it loads the rest of this tile's Q and dO, and the first of the next. The consumers read what is announced before
their last products. dK and dV leave through a buffer of dS, and `step` goes on counting. Without `first`, the
registers that this takes cost more than it saves.

Barriers, beside q_full, do_full, Q_FREE and DO_FREE of `backward_dqdkdv_lockstep`. `turn` counts tiles of keys.

| barrier | who arrives | who waits, for which phase |
|-|-|-|
| kv_full | the producer's `expect`, then TMA's bytes of K and V | both consumers, phase 0, once |
| with `first`, kv_full [turn % 2] | the same, behind what is announced | both consumers, (turn // 2) & 1 |
| the same, kv_empty [turn % 2] | both consumers, when they are done | the producer, ((turn // 2) & 1) ^ 1 |
| named, DS_FULL + 2 consumer + step % 2 | it, when its dS is stored; once before step 0 | the other, a step late |
| named, LAST (without `first`) | each consumer, when its last dQ has read K | both: then K's tiles may stage dK |

With `first`, a tile's first step waits for no dS, and none is announced before step 0; shared memory is full, 226 of
227 KiB. Nobody announces that dS has been read: who stores dS(j) has waited for the other's dS(j-1), which was
announced when the other's dQ(j-2), the last reader of this buffer, was done.
"""

from collections import namedtuple

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

from lmkit.kernels.hopper import barriers as sync
from lmkit.kernels.hopper import schedule, wgmma
from lmkit.kernels.hopper.backward_dqdkdv_lockstep import (
    KEYS,
    NEVER,
    STAGES,
    Descriptors,
    Problem,
    Work,
    allocate_barriers,
    await_all_slots,
    fetch_queries,
    locate_work,
    next_query_tile,
    stream_queries,
)
from lmkit.kernels.hopper.barriers import partition_barrier
from lmkit.kernels.hopper.tma import allocate_slots, tma_add, tma_load, tma_store

# In shared memory; k and v: a tile for each buffer and consumer; units: with `first`, what is announced of the
# key tile in each of two buffers: its number, its query tiles of a head, batch item, key head, first query that does
# not see all of it
Tiles = namedtuple("Tiles", ["q", "do", "k", "v", "lse", "delta", "ds", "dq", "units"])
HALF = gl.constexpr(64)  # keys of a consumer, and queries and columns of its part of dQ
LAST = gl.constexpr(7)  # named barriers: all from here to 15 (Triton's own are 0 to 3 with these partitions)
Q_FREE = gl.constexpr(8)
DO_FREE = gl.constexpr(10)
DS_FULL = gl.constexpr(12)
BOTH_CONSUMERS = gl.constexpr(256)  # threads
# The second consumer begins this much later, about a third of a step. Their first tiles come at the same time, so
# without it the drift that the barriers allow would come about by chance only.
HEAD_START_NS = gl.constexpr(800)


@gluon.jit
def add_up(index: gl.constexpr, call, key_tile, bounds, turn, before,
            CAUSAL: gl.constexpr, TAIL: gl.constexpr, FIRST: gl.constexpr):  # fmt: skip
    """Compute dK and dV of a tile, and its steps' parts of dQ.

    Return (steps so far, `before` at first; with FIRST also what `next_tile` returns, of which `key_tile` and
    `bounds` are the last).
    """
    descriptors, tiles, barriers, problem, scale_log2, scale, last, _ = call
    DTYPE: gl.constexpr = descriptors.q.dtype
    QUERIES: gl.constexpr = descriptors.q.block_type.shape[2]
    D: gl.constexpr = descriptors.q.block_type.shape[3]
    SCORES: gl.constexpr = wgmma.accumulator_layout(QUERIES, 4)
    GRADIENT: gl.constexpr = wgmma.accumulator_layout(D, 4)
    OPERAND: gl.constexpr = wgmma.operand_layout(GRADIENT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    # Whether lse is loaded before the wait for S: where that makes ptxas spill less.
    LSE_FIRST: gl.constexpr = D == 128 or (gl.float16 == DTYPE and not CAUSAL)
    buffer = turn & 1
    if FIRST:
        work = announced_work(tiles, key_tile, buffer, problem, QUERIES, 4)
    else:
        work = locate_work(gl.program_id(0), problem, last, QUERIES, CAUSAL, FIRST)
    k = tiles.k.index(2 * buffer + index).reshape([HALF, D])
    v = tiles.v.index(2 * buffer + index).reshape([HALF, D])
    keys = work.key_tile * KEYS + index * HALF + gl.arange(0, HALF, ROW)
    dv = gl.zeros([HALF, D], gl.float32, GRADIENT)
    dk = gl.zeros([HALF, D], gl.float32, GRADIENT)
    # The first step has none before it: its dK multiplies these zeros, its dQ is of no use and nobody adds it.
    ds_pairs = wgmma.pack_pairs(gl.zeros([HALF, QUERIES], gl.float32, SCORES), DTYPE)
    if not FIRST:
        sync.named_barrier_arrive(_ds_full(index, 1), BOTH_CONSUMERS)
        mbarrier.wait(barriers.kv_full, 0)
        begin_late(index)
    first_clear = (work.key_tile + 1) * KEYS  # causal: queries from here on see all keys of the tile
    if TAIL:
        first_clear = gl.where(first_clear > problem.num_keys, NEVER, first_clear)
    first_cut = NEVER  # with `first`: queries from here on do not see all keys of the tile
    if FIRST:
        first_cut = schedule.read_unit(tiles.units.index(8 * buffer + 4), 4)
    head = work.first_head
    tile = work.start
    first_row = work.batch * problem.heads * problem.padded
    if D == 64:
        first_row += index * HALF  # of the consumer's part of dQ
    row_before = 0  # where dQ of the step before goes
    steps = before + gl.maximum(work.count * problem.group, 1)
    for step in range(before, steps):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        q = tiles.q.index(slot).reshape([QUERIES, D])
        do = tiles.do.index(slot).reshape([QUERIES, D])
        mbarrier.wait(barriers.q_full.index(slot), phase)
        score_job = wgmma.issue_product(k, q.permute((1, 0)), SCORES)
        q_before = tiles.q.index(gl.where(step == before, slot, (step + 1) % STAGES)).reshape([QUERIES, D])
        dk_job = warpgroup_mma(wgmma.unpack_pairs(ds_pairs, DTYPE, OPERAND), q_before, dk, is_async=True)
        lse = tiles.lse.index(slot).load(COLUMN)
        # of step - 1, whose buffer is that of step + 1
        dq_job = _issue_dq(index, tiles, step + 1, buffer, step > before, FIRST)
        if LSE_FIRST:
            scores, lse = warpgroup_mma_wait(3, deps=[score_job, lse])
        else:
            scores = warpgroup_mma_wait(3, deps=[score_job])
        exponent = scores * scale_log2 - gl.expand_dims(lse, 0)  # (64 keys, QUERIES): transposed
        clear = first_clear, first_cut
        exponent = _hide_keys(exponent, keys, bounds, tile, clear, problem.num_keys, CAUSAL, TAIL, FIRST)
        p = gl.exp2(exponent)
        packed = wgmma.pack_pairs(p, DTYPE)
        kept = wgmma.keep_pairs(p, DTYPE)
        # This wait is a loop, and a loop ends the basic block: ptxas leaves the exponentials in front of what
        # follows.
        mbarrier.wait(barriers.do_full.index(slot), phase)
        dq, dk, packed, kept = warpgroup_mma_wait(0, deps=[dq_job, dk_job, packed, kept])
        sync.named_barrier_arrive(Q_FREE + (step + STAGES - 1) % STAGES, sync.SLOT_THREADS)
        _stage_dq(index, tiles, dq)
        fence_async_shared()
        partition_barrier()
        if step > before:
            _add_dq(index, descriptors, tiles, first_row + row_before)
        row_before = head * problem.padded + tile * QUERIES
        p_operand = wgmma.unpack_pairs(packed, DTYPE, OPERAND)
        delta = tiles.delta.index(slot).load(COLUMN)
        dp_job = wgmma.issue_product(v, do.permute((1, 0)), SCORES)
        dv_job = warpgroup_mma(p_operand, do, dv, is_async=True)
        dp, packed, kept = warpgroup_mma_wait(1, deps=[dp_job, packed, kept])
        dp = dp * scale - gl.expand_dims(delta, 0)
        ds_pairs = wgmma.multiply_pairs(packed, kept, dp, DTYPE)
        _announce_ds(index, tiles, step, wgmma.unpack_pairs(ds_pairs, DTYPE, SCORES))
        dv, p_operand = warpgroup_mma_wait(0, deps=[dv_job, p_operand])
        sync.named_barrier_arrive(DO_FREE + slot, sync.SLOT_THREADS)
        tile, head = next_query_tile(tile, head, work)
    if FIRST:  # the next tile's bounds are loaded while the last products run
        key_tile, bounds = next_tile(index, call, turn + 1, ROW)
    dq_job = _issue_dq(index, tiles, steps + 1, buffer, True, FIRST)
    last_q = tiles.q.index((steps + 1) % STAGES).reshape([QUERIES, D])
    dk_job = warpgroup_mma(wgmma.unpack_pairs(ds_pairs, DTYPE, OPERAND), last_q, dk, is_async=True)
    dq, dk = warpgroup_mma_wait(0, deps=[dq_job, dk_job])
    if FIRST:
        _stage_dq(index, tiles, dq)
        # Both consumers have read dS of the step before the last: it makes room for dK and dV on the way out.
        _ds_tile(tiles, steps, index, 0).store(dk.to(DTYPE))
        _ds_tile(tiles, steps, index, 1).store(dv.to(DTYPE))
        dk_tile = tiles.ds.index(_ds_number(tiles, steps, index, 0))
        dv_tile = tiles.ds.index(_ds_number(tiles, steps, index, 1))
    else:
        if D == 64:  # here, or below at D = 128: where each is faster
            _stage_dq(index, tiles, dq)
        # K and V are done with: their tiles stage dK and dV on the way out.
        v.store(dv.to(DTYPE))
        sync.named_barrier_wait(LAST, BOTH_CONSUMERS)  # K by the other's dQ, too
        k.store(dk.to(DTYPE))
        if D == 128:
            _stage_dq(index, tiles, dq)
        dk_tile = tiles.k.index(index)
        dv_tile = tiles.v.index(index)
    fence_async_shared()
    partition_barrier()
    _add_dq(index, descriptors, tiles, first_row + row_before)
    key_box = [work.batch, work.key_head, work.key_tile * KEYS + index * HALF, 0]
    tma_store(descriptors.dv, key_box, dv_tile)
    tma_store(descriptors.dk, key_box, dk_tile)
    return steps, key_tile, bounds


@gluon.jit
def next_tile(index: gl.constexpr, call, turn, ROW: gl.constexpr):
    """Wait for the tile of keys of this turn; return its number, -1 if there is none, and the last queries of this
    consumer's keys."""
    _, tiles, barriers, problem, _, _, last, _ = call
    buffer = turn & 1
    mbarrier.wait(barriers.kv_full.index(buffer), (turn >> 1) & 1)
    key_tile = schedule.read_unit(tiles.units.index(8 * buffer), 4)
    batch = schedule.read_unit(tiles.units.index(8 * buffer + 2), 4)
    keys = key_tile * KEYS + index * HALF + gl.arange(0, HALF, ROW)
    return key_tile, schedule.load_bounds(last, batch, keys, problem.num_keys, key_tile >= 0)


@gluon.jit
def announced_work(tiles, key_tile, buffer, problem, QUERIES: gl.constexpr, WARPS: gl.constexpr):
    """Return what `locate_work` found, as a partition of so many warps, from the numbers announced with K and V."""
    count = schedule.read_unit(tiles.units.index(8 * buffer + 1), WARPS)
    batch = schedule.read_unit(tiles.units.index(8 * buffer + 2), WARPS)
    key_head = schedule.read_unit(tiles.units.index(8 * buffer + 3), WARPS)
    lowest = gl.minimum(key_tile * (KEYS // QUERIES), problem.num_query_tiles - 1)
    return Work(batch, key_head, key_tile, key_head * problem.group, lowest, count, lowest)


@gluon.jit
def begin_late(index: gl.constexpr):
    """Have the second consumer sleep for HEAD_START_NS to twice as long (the guarantee of PTX)."""
    PTX: gl.constexpr = f"nanosleep.u32 {HEAD_START_NS}; mov.b32 $0, 0;"
    if index == 1:
        sync.run_ptx(PTX, 0)


@gluon.jit
def _hide_keys(exponent, keys, bounds, tile, clear, num_keys,
               CAUSAL: gl.constexpr, TAIL: gl.constexpr, FIRST: gl.constexpr):  # fmt: skip
    """Return -inf where query i of the tile must not see key j > i, and for keys past the end (P might overflow
    there, and inf * 0 is not 0). FIRST: nor does it see keys whose last query, in `bounds`, is before it. All
    queries from the first of `clear` up to the second see all keys."""
    QUERIES: gl.constexpr = exponent.shape[1]
    first_clear, first_cut = clear
    if FIRST:
        if tile * QUERIES < first_clear:
            first_query = gl.where(keys < num_keys, keys - tile * QUERIES, NEVER)
            exponent = wgmma.keep_columns_from(exponent, first_query, -float("inf"))
        if (tile + 1) * QUERIES > first_cut:
            exponent = wgmma.keep_columns_up_to(exponent, bounds - tile * QUERIES, -float("inf"))
    elif CAUSAL:
        if tile * QUERIES < first_clear:
            first_query = gl.where(keys < num_keys, keys - tile * QUERIES, NEVER)
            exponent = wgmma.keep_columns_from(exponent, first_query, -float("inf"))
    elif TAIL:
        exponent = gl.where(gl.expand_dims(keys < num_keys, 1), exponent, -float("inf"))
    return exponent


@gluon.jit
def _ds_full(index, step):
    """Return the named barrier of consumer `index`'s dS of `step`."""
    return DS_FULL + 2 * index + (step & 1)


@gluon.jit
def _ds_number(tiles, step, index, part):
    """Return which tile `_ds_tile` is."""
    PARTS: gl.constexpr = tiles.ds.shape[0] // 4
    return (step & 1) * (2 * PARTS) + PARTS * index + part


@gluon.jit
def _ds_tile(tiles, step, index, part):
    """Return dS of `step`, (64 keys, 64 queries): consumer `index`'s keys, the queries of this `part`."""
    return tiles.ds.index(_ds_number(tiles, step, index, part)).reshape([HALF, HALF])


@gluon.jit
def _announce_ds(index: gl.constexpr, tiles, step, ds):
    """Store this consumer's dS of `step`, (64 keys, QUERIES), for both."""
    if ds.shape[1] == 128:
        left, right = wgmma.left_and_right(ds)
        _ds_tile(tiles, step, index, 0).store(left)
        _ds_tile(tiles, step, index, 1).store(right)
    else:
        _ds_tile(tiles, step, index, 0).store(ds)
    fence_async_shared()
    sync.named_barrier_arrive(_ds_full(index, step), BOTH_CONSUMERS)


@gluon.jit
def _issue_dq(index: gl.constexpr, tiles, step, buffer, is_real, FIRST: gl.constexpr):
    """Issue this consumer's part of dQ over all 128 keys, when the other has announced its dS."""
    DQ: gl.constexpr = wgmma.accumulator_layout(HALF, 4)
    if FIRST:
        sync.named_barrier_wait_if(is_real, _ds_full(1 - index, step), BOTH_CONSUMERS)
    else:
        sync.named_barrier_wait(_ds_full(1 - index, step), BOTH_CONSUMERS)
    ds, k = _dq_factors(index, tiles, step, buffer, 0)
    job = wgmma.issue_product(ds, k, DQ)
    ds, k = _dq_factors(index, tiles, step, buffer, 1)
    return warpgroup_mma(ds, k, job, is_async=True)


@gluon.jit
def _dq_factors(index: gl.constexpr, tiles, step, buffer, owner: gl.constexpr):
    """Return the factors of consumer `index`'s dQ over consumer `owner`'s keys: (64 queries, 64 keys) of dS, of K
    (64 keys, 64)."""
    D: gl.constexpr = tiles.k.shape[4]
    k = tiles.k.index(2 * buffer + owner).reshape([HALF, D])
    if D == 64:
        ds = _ds_tile(tiles, step, owner, index)
    else:
        ds = _ds_tile(tiles, step, owner, 0)
        k = k.slice(index * HALF, HALF, dim=1)
    return ds.permute((1, 0)), k


@gluon.jit
def _stage_dq(index: gl.constexpr, tiles, dq):
    """Store this consumer's part of dQ into its tile, once TMA has read the previous one out of it."""
    tma.store_wait(0)
    partition_barrier()
    tile = tiles.dq.index(index)
    tile.store(wgmma.in_thread_order(dq).reshape(tile.shape))


@gluon.jit
def _add_dq(index: gl.constexpr, descriptors, tiles, row):
    """Have TMA add this consumer's part of dQ to the sum, whose queries begin at `row`."""
    D: gl.constexpr = tiles.k.shape[4]
    place = [row * (D // 32), 0] if D == 64 else [row // 16, index * (HALF // 2), 0]
    tma_add(descriptors.dq, place, tiles.dq.index(index))


Barriers = namedtuple("Barriers", ["q_full", "do_full", "kv_full", "kv_empty"])  # with `first`


@gluon.jit
def _allocate_barriers():
    """Return the initialised mbarriers of calls with `first`."""
    q_full = sync.make_mbarriers(STAGES)
    do_full = sync.make_mbarriers(STAGES)
    kv_full = sync.make_mbarriers(2)
    kv_empty = sync.make_mbarriers(2, 2)
    fence_async_shared()
    partition_barrier()
    return Barriers(q_full, do_full, kv_full, kv_empty)


@gluon.jit
def _producer(call, CAUSAL: gl.constexpr, FIRST: gl.constexpr):
    """Load K and V of each tile with TMA, a box for each consumer, then Q and dO tile after tile."""
    descriptors, tiles, barriers, problem, _, _, last, drawn = call
    QUERIES: gl.constexpr = descriptors.q.block_type.shape[2]
    if FIRST:
        units = problem.num_key_tiles * problem.batches * (problem.heads // problem.group)
        turn = 0
        before = 0
        _announce_tile(call, gl.program_id(0), units, turn, QUERIES, CAUSAL)
        key_tile = schedule.read_unit(tiles.units.index(0), 1)
        while key_tile >= 0:
            work = announced_work(tiles, key_tile, turn & 1, problem, QUERIES, 1)
            head = work.first_head
            tile = work.start
            steps = before + gl.maximum(work.count * problem.group, 1)
            for step in range(before, steps):
                fetch_queries(
                    descriptors, tiles, barriers, problem, work, head, tile, step, QUERIES, Q_FREE, DO_FREE
                )
                tile, head = next_query_tile(tile, head, work)
                # Early enough for the next tile to be there in time, late enough to find its buffer free
                if step == gl.minimum(before + 2, steps - 1):
                    unit = schedule.draw_unit(drawn, units)
                    _announce_tile(call, unit, units, turn + 1, QUERIES, CAUSAL)
            before = steps
            turn += 1
            key_tile = schedule.read_unit(tiles.units.index(8 * (turn & 1)), 1)
        await_all_slots(before, Q_FREE, DO_FREE)
    else:
        work = locate_work(gl.program_id(0), problem, last, QUERIES, CAUSAL, FIRST)
        _load_keys(descriptors, tiles, barriers.kv_full, work, 0)
        steps = stream_queries(descriptors, tiles, barriers, problem, work, QUERIES, Q_FREE, DO_FREE)
        await_all_slots(steps, Q_FREE, DO_FREE)


@gluon.jit
def _announce_tile(call, unit, units, turn, QUERIES: gl.constexpr, CAUSAL: gl.constexpr):
    """Load K and V of the tile of this turn, and tell the consumers what it is; -1: none is left."""
    descriptors, tiles, barriers, problem, _, _, last, _ = call
    buffer = turn & 1
    full = barriers.kv_full.index(buffer)
    mbarrier.wait(barriers.kv_empty.index(buffer), ((turn >> 1) & 1) ^ 1)
    if unit < units:
        work = locate_work(unit, problem, last, QUERIES, CAUSAL, True)
        first_cut = 1 + schedule.load_bound(last, work.batch, work.key_tile * KEYS, problem.num_keys)
        schedule.announce_unit(tiles.units.index(8 * buffer), work.key_tile)
        schedule.announce_unit(tiles.units.index(8 * buffer + 1), work.count)
        schedule.announce_unit(tiles.units.index(8 * buffer + 2), work.batch)
        schedule.announce_unit(tiles.units.index(8 * buffer + 3), work.key_head)
        schedule.announce_unit(tiles.units.index(8 * buffer + 4), first_cut)
        _load_keys(descriptors, tiles, full, work, buffer)
    else:
        schedule.announce_unit(tiles.units.index(8 * buffer), -1)
        mbarrier.arrive(full, count=1)


@gluon.jit
def _load_keys(descriptors, tiles, full, work, buffer):
    """Load K and V into a buffer, a box for each consumer."""
    mbarrier.expect(full, 4 * descriptors.k.block_type.nbytes)
    for i in gl.static_range(2):
        key_box = [work.batch, work.key_head, work.key_tile * KEYS + i * HALF, 0]
        tma_load(descriptors.k, key_box, full, tiles.k.index(2 * buffer + i))
        tma_load(descriptors.v, key_box, full, tiles.v.index(2 * buffer + i))


@gluon.jit
def _consumer(index: gl.constexpr, call, CAUSAL: gl.constexpr, TAIL: gl.constexpr, FIRST: gl.constexpr):
    """Compute as warp group `index`, 0 or 1: dK and dV of its keys of each tile, and its part of each step's dQ."""
    descriptors, _, barriers, _, _, _, _, _ = call
    if FIRST:
        QUERIES: gl.constexpr = descriptors.q.block_type.shape[2]
        ROW: gl.constexpr = gl.SliceLayout(1, wgmma.accumulator_layout(QUERIES, 4))
        turn = 0
        steps = 0
        key_tile, bounds = next_tile(index, call, turn, ROW)
        begin_late(index)
        while key_tile >= 0:
            steps, key_tile, bounds = add_up(index, call, key_tile, bounds, turn, steps, CAUSAL, TAIL, FIRST)
            mbarrier.arrive(barriers.kv_empty.index(turn & 1), count=1)
            turn += 1
    else:
        add_up(index, call, 0, 0, 0, 0, CAUSAL, TAIL, FIRST)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=list(Problem._fields))
def dqdkdv_staggered_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc,
                           last, drawn, num_queries, num_keys, padded, batches, heads, group, together,
                           num_query_tiles, num_key_tiles, scale_log2, scale,
                           CAUSAL: gl.constexpr, TAIL: gl.constexpr, REGISTERS: gl.constexpr,
                           FIRST: gl.constexpr):  # fmt: skip
    """Allocate and start the partitions of one CTA per (key tile, key head of the batch), with FIRST of one per SM.

    Descriptors as `dqdkdv_lockstep_kernel`'s, with boxes of 128 queries of 64 numbers or 64 of 128, but those of
    K, V, dK, dV in boxes of 64 keys, and dq_desc in boxes of a consumer's part: at D = 64 (128, 32); at D = 128
    (4, 32, 32) of the sum as (queries / 16, 64, 32). REGISTERS: a thread's of the second consumer. last: as
    `dqdkdv_lockstep_kernel`'s. drawn: for FIRST, see `schedule.draw_unit`.
    """
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    dtype: gl.constexpr = q_desc.dtype
    QUERIES: gl.constexpr = q_desc.block_type.shape[2]
    q_tiles = allocate_slots(q_desc, STAGES)
    do_tiles = allocate_slots(do_desc, STAGES)
    BUFFERS: gl.constexpr = 2 if FIRST else 1
    k_tiles = allocate_slots(k_desc, 2 * BUFFERS)
    v_tiles = allocate_slots(v_desc, 2 * BUFFERS)
    lse_tiles = allocate_slots(lse_desc, STAGES)
    delta_tiles = allocate_slots(delta_desc, STAGES)
    PARTS: gl.constexpr = QUERIES // HALF
    if FIRST:
        ds_tiles = allocate_slots(dk_desc, 4 * PARTS)
    else:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HALF], dtype)
        ds_tiles = gl.allocate_shared_memory(dtype, [4 * PARTS, HALF, HALF], ds_layout)  # see _ds_tile
    dq_tiles = allocate_slots(dq_desc, 2)
    if FIRST:
        barriers = _allocate_barriers()
        units = schedule.allocate_units(16)
    else:
        barriers = allocate_barriers()
        units = q_tiles
    descriptors = Descriptors(
        q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc
    )
    tiles = Tiles(q_tiles, do_tiles, k_tiles, v_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles, units)
    problem = Problem(
        num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles
    )
    call = (descriptors, tiles, barriers, problem, scale_log2, scale, last, drawn)
    gl.warp_specialize(
        [
            (_consumer, (0, call, CAUSAL, TAIL, FIRST)),
            (_consumer, (1, call, CAUSAL, TAIL, FIRST)),
            (_producer, (call, CAUSAL, FIRST)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
