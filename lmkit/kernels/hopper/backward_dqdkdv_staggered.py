"""Compute dQ, dK and dV together on Hopper: the fast backward of D = 64, and of long unmasked D = 128.

One CTA owns 128 keys: it computes their dK and dV and adds their share to the sum of dQ. The mathematics, the
transposes, the producer and the sum of dQ are those of `backward_dqdkdv_lockstep` (read it first). There two warp
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

Barriers. `step` counts query tiles; its slot is step % STAGES, its round step // STAGES.

| barrier | who arrives | who waits, for which phase |
|-|-|-|
| kv_full | the producer's `expect`, then TMA's bytes of K and V | both consumers, phase 0, once |
| q_full [slot] | the producer's `expect`, then the bytes of Q and lse | both consumers, round & 1 |
| do_full [slot] | the producer's `expect`, then the bytes of dO and delta | both consumers, round & 1 |
| named, Q_FREE + slot | both consumers, one step late, when dK of the slot's step is done | the producer |
| named, DO_FREE + slot | both consumers, when dV of the slot's step is done | the producer |
| named, DS_FULL + 2 consumer + step % 2 | it, when its dS is stored; once before step 0 | the other, a step late |
| named, LAST | each consumer, when its last dQ has read K | both: then K's tiles may stage dK |

Nobody announces that dS has been read: who stores dS(j) has waited for the other's dS(j-1), which was announced when
the other's dQ(j-2), the last reader of this buffer, was done.

Cost of the variants (sm_90, Triton 3.6; over all masks). Registers: a thread at launch, then of a consumer; the
producer keeps 24. The spills lie outside of the loop or at its rim.

| variant | queries of a step | registers | shared memory, of 227 KiB | spilled bytes a thread |
|-|-|-|-|-|
| D = 64, bfloat16 | 128 | 168, 240 | 194 KiB | 28 to 36 |
| D = 64, float16 | 128 | 168, 240 | 194 KiB | 36 to 64 |
| D = 128, bfloat16, no mask | 64 | 168, 240 | 193 KiB | 16 to 20 |
"""

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
from lmkit.kernels.hopper import fragments, schedule, wgmma
from lmkit.kernels.hopper.backward_dqdkdv_lockstep import (
    KEYS,
    NEVER,
    STAGES,
    Descriptors,
    Problem,
    Tiles,
    allocate_barriers,
    locate_work,
    next_query_tile,
    stream_queries,
)
from lmkit.kernels.hopper.barriers import partition_barrier
from lmkit.kernels.hopper.tma import allocate_slots, tma_add, tma_load, tma_store

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
def _producer(call, CAUSAL: gl.constexpr, FIRST: gl.constexpr):
    """Load K and V once with TMA, a box for each consumer, then Q and dO tile after tile."""
    descriptors, tiles, barriers, problem, _, _, last = call
    QUERIES: gl.constexpr = descriptors.q.block_type.shape[2]
    work = locate_work(problem, last, QUERIES, CAUSAL, FIRST)
    mbarrier.expect(barriers.kv_full, 4 * descriptors.k.block_type.nbytes)
    for i in gl.static_range(2):
        key_box = [work.batch, work.key_head, work.key_tile * KEYS + i * HALF, 0]
        tma_load(descriptors.k, key_box, barriers.kv_full, tiles.k.index(i))
        tma_load(descriptors.v, key_box, barriers.kv_full, tiles.v.index(i))
    stream_queries(descriptors, tiles, barriers, problem, work, QUERIES, Q_FREE, DO_FREE)


@gluon.jit
def _consumer(index: gl.constexpr, call, CAUSAL: gl.constexpr, TAIL: gl.constexpr, FIRST: gl.constexpr):
    """Compute as warp group `index`, 0 or 1: dK and dV of its 64 keys, and its part of each step's dQ."""
    descriptors, tiles, barriers, problem, scale_log2, scale, last = call
    DTYPE: gl.constexpr = descriptors.q.dtype
    QUERIES: gl.constexpr = descriptors.q.block_type.shape[2]
    D: gl.constexpr = descriptors.q.block_type.shape[3]
    SCORES: gl.constexpr = wgmma.accumulator_layout(QUERIES, 4)
    GRADIENT: gl.constexpr = wgmma.accumulator_layout(D, 4)
    OPERAND: gl.constexpr = wgmma.operand_layout(GRADIENT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    # Whether lse is loaded before the wait for S: where that makes ptxas spill less.
    LSE_FIRST: gl.constexpr = D == 128 or (gl.float16 == DTYPE and not CAUSAL)
    work = locate_work(problem, last, QUERIES, CAUSAL, FIRST)
    k = tiles.k.index(index).reshape([HALF, D])
    v = tiles.v.index(index).reshape([HALF, D])
    keys = work.key_tile * KEYS + index * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    dv = gl.zeros([HALF, D], gl.float32, GRADIENT)
    dk = gl.zeros([HALF, D], gl.float32, GRADIENT)
    # Step 0 has no step before it: its dK multiplies these zeros, its dQ is of no use and nobody adds it.
    ds_pairs = fragments.pack_pairs(gl.zeros([HALF, QUERIES], gl.float32, SCORES), DTYPE)
    sync.named_barrier_arrive(_ds_full(index, 1), BOTH_CONSUMERS)
    mbarrier.wait(barriers.kv_full, 0)
    if index == 1:
        _sleep(HEAD_START_NS)
    first_clear = (work.key_tile + 1) * KEYS  # causal: queries from here on see all keys of the tile
    if TAIL:
        first_clear = gl.where(first_clear > problem.num_keys, NEVER, first_clear)
    bounds = keys
    first_cut = NEVER  # with `first`: queries from here on do not see all keys of the tile
    if FIRST:
        bounds = schedule.load_bounds(last, work.batch, keys, problem.num_keys)
        first_cut = 1 + schedule.load_bound(last, work.batch, work.key_tile * KEYS, problem.num_keys)
    head = work.first_head
    tile = work.start
    first_row = work.batch * problem.heads * problem.padded
    if D == 64:
        first_row += index * HALF  # of the consumer's part of dQ
    row_before = 0  # where dQ of the step before goes
    steps = gl.maximum(work.count * problem.group, 1)
    for step in range(steps):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        q = tiles.q.index(slot).reshape([QUERIES, D])
        do = tiles.do.index(slot).reshape([QUERIES, D])
        mbarrier.wait(barriers.q_full.index(slot), phase)
        score_job = wgmma.issue_product(k, q.permute((1, 0)), SCORES)
        q_before = tiles.q.index(gl.where(step == 0, 0, (step + 1) % STAGES)).reshape([QUERIES, D])
        dk_job = warpgroup_mma(fragments.unpack_pairs(ds_pairs, DTYPE, OPERAND), q_before, dk, is_async=True)
        lse = tiles.lse.index(slot).load(COLUMN)
        dq_job = _issue_dq(index, tiles, step + 1)  # of step - 1, whose buffer is that of step + 1
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
        if step > 0:
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
    dq_job = _issue_dq(index, tiles, steps + 1)
    last_q = tiles.q.index((steps + 1) % STAGES).reshape([QUERIES, D])
    dk_job = warpgroup_mma(fragments.unpack_pairs(ds_pairs, DTYPE, OPERAND), last_q, dk, is_async=True)
    dq, dk = warpgroup_mma_wait(0, deps=[dq_job, dk_job])
    if D == 64:  # here, or below at D = 128: where each is faster
        _stage_dq(index, tiles, dq)
    # K and V are done with: their tiles stage dK and dV on the way out.
    v.store(dv.to(DTYPE))
    sync.named_barrier_wait(LAST, BOTH_CONSUMERS)  # K by the other's dQ, too
    k.store(dk.to(DTYPE))
    if D == 128:
        _stage_dq(index, tiles, dq)
    fence_async_shared()
    partition_barrier()
    _add_dq(index, descriptors, tiles, first_row + row_before)
    key_box = [work.batch, work.key_head, work.key_tile * KEYS + index * HALF, 0]
    tma_store(descriptors.dv, key_box, tiles.v.index(index))
    tma_store(descriptors.dk, key_box, tiles.k.index(index))
    tma.store_wait(0)


@gluon.jit
def _sleep(nanoseconds: gl.constexpr):
    """Sleep for up to twice as long (the guarantee of PTX)."""
    PTX: gl.constexpr = f"nanosleep.u32 {nanoseconds}; mov.b32 $0, 0;"
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
        if (tile * QUERIES < first_clear) | ((tile + 1) * QUERIES > first_cut):
            first_query = gl.where(keys < num_keys, keys - tile * QUERIES, NEVER)
            exponent = fragments.keep_columns_from(exponent, first_query, -float("inf"))
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
def _ds_tile(tiles, step, index, part):
    """Return dS of `step`, (64 keys, 64 queries): consumer `index`'s keys, the queries of this `part` of the
    step."""
    PARTS: gl.constexpr = tiles.ds.shape[0] // 4
    return tiles.ds.index((step & 1) * (2 * PARTS) + PARTS * index + part)


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
def _issue_dq(index: gl.constexpr, tiles, step):
    """Issue this consumer's part of dQ over all 128 keys, when the other has announced its dS of `step` (or of the
    step two before)."""
    DQ: gl.constexpr = wgmma.accumulator_layout(HALF, 4)
    sync.named_barrier_wait(_ds_full(1 - index, step), BOTH_CONSUMERS)
    ds, k = _dq_factors(index, tiles, step, 0)
    job = wgmma.issue_product(ds, k, DQ)
    ds, k = _dq_factors(index, tiles, step, 1)
    return warpgroup_mma(ds, k, job, is_async=True)


@gluon.jit
def _dq_factors(index: gl.constexpr, tiles, step, owner: gl.constexpr):
    """Return the factors of consumer `index`'s part of dQ over the keys of consumer `owner`: (64 queries, 64 keys)
    of dS and (64 keys, 64) of K."""
    D: gl.constexpr = tiles.k.shape[4]
    k = tiles.k.index(owner).reshape([HALF, D])
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


@gluon.jit(do_not_specialize=list(Problem._fields))
def dqdkdv_staggered_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc,
                           last, num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles,
                           num_key_tiles, scale_log2, scale,
                           CAUSAL: gl.constexpr, TAIL: gl.constexpr, REGISTERS: gl.constexpr,
                           FIRST: gl.constexpr):  # fmt: skip
    """Allocate and start the partitions of one CTA per (key tile, key head of the batch).

    Descriptors as `dqdkdv_lockstep_kernel`'s, with boxes of 128 queries of 64 numbers or 64 of 128, but those of
    K, V, dK, dV in boxes of 64 keys, and dq_desc in boxes of a consumer's part: at D = 64 (128, 32); at D = 128
    (4, 32, 32) of the sum as (queries / 16, 64, 32). REGISTERS: a thread's of the second consumer. last: as
    `dqdkdv_lockstep_kernel`'s.
    """
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    dtype: gl.constexpr = q_desc.dtype
    QUERIES: gl.constexpr = q_desc.block_type.shape[2]
    q_tiles = allocate_slots(q_desc, STAGES)
    do_tiles = allocate_slots(do_desc, STAGES)
    k_tiles = allocate_slots(k_desc, 2)
    v_tiles = allocate_slots(v_desc, 2)
    lse_tiles = allocate_slots(lse_desc, STAGES)
    delta_tiles = allocate_slots(delta_desc, STAGES)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HALF], dtype)
    ds_tiles = gl.allocate_shared_memory(dtype, [4 * QUERIES // HALF, HALF, HALF], ds_layout)  # see _ds_tile
    dq_tiles = allocate_slots(dq_desc, 2)
    barriers = allocate_barriers()
    descriptors = Descriptors(
        q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc
    )
    tiles = Tiles(q_tiles, do_tiles, k_tiles, v_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles)
    problem = Problem(
        num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles
    )
    call = (descriptors, tiles, barriers, problem, scale_log2, scale, last)
    gl.warp_specialize(
        [
            (_consumer, (0, call, CAUSAL, TAIL, FIRST)),
            (_consumer, (1, call, CAUSAL, TAIL, FIRST)),
            (_producer, (call, CAUSAL, FIRST)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
