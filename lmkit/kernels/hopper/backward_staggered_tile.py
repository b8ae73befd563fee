"""Compute as one consumer of `backward_dqdkdv_staggered` (read it first): the steps of a tile of keys."""

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

from lmkit.kernels.hopper import barriers as sync
from lmkit.kernels.hopper import fragments, schedule, wgmma
from lmkit.kernels.hopper.backward_dqdkdv_lockstep import (
    KEYS,
    NEVER,
    STAGES,
    Work,
    locate_work,
    next_query_tile,
)
from lmkit.kernels.hopper.barriers import partition_barrier
from lmkit.kernels.hopper.tma import tma_add, tma_store

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
    ds_pairs = fragments.pack_pairs(gl.zeros([HALF, QUERIES], gl.float32, SCORES), DTYPE)
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
        dk_job = warpgroup_mma(fragments.unpack_pairs(ds_pairs, DTYPE, OPERAND), q_before, dk, is_async=True)
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
        packed = fragments.pack_pairs(p, DTYPE)
        kept = fragments.keep_pairs(p, DTYPE)
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
        p_operand = fragments.unpack_pairs(packed, DTYPE, OPERAND)
        delta = tiles.delta.index(slot).load(COLUMN)
        dp_job = wgmma.issue_product(v, do.permute((1, 0)), SCORES)
        dv_job = warpgroup_mma(p_operand, do, dv, is_async=True)
        dp, packed, kept = warpgroup_mma_wait(1, deps=[dp_job, packed, kept])
        dp = dp * scale - gl.expand_dims(delta, 0)
        ds_pairs = fragments.multiply_pairs(packed, kept, dp, DTYPE)
        _announce_ds(index, tiles, step, fragments.unpack_pairs(ds_pairs, DTYPE, SCORES))
        dv, p_operand = warpgroup_mma_wait(0, deps=[dv_job, p_operand])
        sync.named_barrier_arrive(DO_FREE + slot, sync.SLOT_THREADS)
        tile, head = next_query_tile(tile, head, work)
    if FIRST:  # the next tile's bounds are loaded while the last products run
        key_tile, bounds = next_tile(index, call, turn + 1, ROW)
    dq_job = _issue_dq(index, tiles, steps + 1, buffer, True, FIRST)
    last_q = tiles.q.index((steps + 1) % STAGES).reshape([QUERIES, D])
    dk_job = warpgroup_mma(fragments.unpack_pairs(ds_pairs, DTYPE, OPERAND), last_q, dk, is_async=True)
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
            exponent = fragments.keep_columns_from(exponent, first_query, -float("inf"))
        if (tile + 1) * QUERIES > first_cut:
            exponent = fragments.keep_columns_up_to(exponent, bounds - tile * QUERIES, -float("inf"))
    elif CAUSAL:
        if tile * QUERIES < first_clear:
            first_query = gl.where(keys < num_keys, keys - tile * QUERIES, NEVER)
            exponent = fragments.keep_columns_from(exponent, first_query, -float("inf"))
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
    """Return dS of `step`, (64 keys, 64 queries): consumer `index`'s keys, the queries of this `part` of the
    step."""
    return tiles.ds.index(_ds_number(tiles, step, index, part)).reshape([HALF, HALF])


@gluon.jit
def _announce_ds(index: gl.constexpr, tiles, step, ds):
    """Store this consumer's dS of `step`, (64 keys, QUERIES), for both."""
    if ds.shape[1] == 128:
        left, right = fragments.left_and_right(ds)
        _ds_tile(tiles, step, index, 0).store(left)
        _ds_tile(tiles, step, index, 1).store(right)
    else:
        _ds_tile(tiles, step, index, 0).store(ds)
    fence_async_shared()
    sync.named_barrier_arrive(_ds_full(index, step), BOTH_CONSUMERS)


@gluon.jit
def _issue_dq(index: gl.constexpr, tiles, step, buffer, is_real, FIRST: gl.constexpr):
    """Issue this consumer's part of dQ over all 128 keys, when the other has announced its dS of `step` (or of the
    step two before)."""
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
    """Return the factors of consumer `index`'s part of dQ over the keys of consumer `owner`: (64 queries, 64 keys)
    of dS and (64 keys, 64) of K."""
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
    tile.store(fragments.in_thread_order(dq).reshape(tile.shape))


@gluon.jit
def _add_dq(index: gl.constexpr, descriptors, tiles, row):
    """Have TMA add this consumer's part of dQ to the sum. Its queries begin at `row`; at D = 128 its columns are
    those of consumer `index`."""
    D: gl.constexpr = tiles.k.shape[4]
    place = [row * (D // 32), 0] if D == 64 else [row // 16, index * (HALF // 2), 0]
    tma_add(descriptors.dq, place, tiles.dq.index(index))
