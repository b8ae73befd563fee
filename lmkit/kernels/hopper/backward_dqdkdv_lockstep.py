"""Compute dK and dV of 128 keys on Hopper, and with ADD_DQ their share of dQ: D = 128, and deterministic D = 64.

With P = exp(scale Q K^T - lse) and delta = rowsum(dO * O) (FlashAttention-2, Dao 2023, algorithm 2):

    dV = P^T dO,   dP = dO V^T,   dS = scale P * (dP - delta),   dK = dS^T Q,   dQ = dS K

dS is scaled before it is rounded to 16 bits, as cuDNN does it; the multiply-add that subtracts delta (which carries
the scale already) does it for free.

K and V stay in shared memory. One **producer** warp streams Q and dO tiles, with their lse and delta, with TMA. Two
**consumer** warp groups, one partition of eight warps, own 64 keys each. They compute the transposes, S^T = K Q^T
and dP^T = V dO^T: P^T and dS^T come out as the register operands of dV += P^T dO and dK += dS^T Q, and lse and
delta lie along columns. Only dS goes through shared memory, because dQ sums over the keys of both warp groups.

Timeline of a step (a tile of queries) of a consumer. Every product is an asynchronous wgmma:

    producer     | TMA Q(j+1), lse | TMA dO(j+1), delta                                       |
    consumer     | wait Q(j), dO(j)| P(j) = exp     | dS(j)          | with ADD_DQ: store dS, dQ
    tensor cores | dK(j-1)   S(j)  | dP(j)          | dV(j)          | dQ(j)  dK(j) ...        |
    TMA          |                 |                |                | adds dQ(j-1) to memory  |

S and dP are issued together; P is computed while dP runs, dS while dV runs; dQ is handed to TMA while dK runs; the
wait for dK comes in the next step, behind its S. Without ADD_DQ nothing is exchanged, and the warp groups take
turns to issue S and dP, so that the exponentials of one meet the products of the other. With ADD_DQ the barriers of
dS and dQ keep them in step.

dQ. Tiles of different keys add up. With ADD_DQ, TMA adds float32 tiles to a scratch in global memory, in the order
of arrival, which is not reproducible; CTAs start at different query tiles so that they do not queue for the same
rows. Otherwise `backward_dq_deterministic` computes dQ, and every bit is reproducible.

Barriers. Slots are given back through named barriers, because `mbarrier.arrive` would cost the consumers two
barriers of their own. `step` counts query tiles; its slot is step % STAGES, its round step // STAGES.

| barrier | who arrives | who waits, for which phase |
|-|-|-|
| kv_full | the producer's `expect`, then TMA's bytes of K and V | both consumers, phase 0, once |
| q_full [slot] | the producer's `expect`, then the bytes of Q and lse | both consumers, round & 1 |
| do_full [slot] | the producer's `expect`, then the bytes of dO and delta | both consumers, round & 1 |
| named, Q_FREE + slot | both consumers, one step late, when dK of the slot's step is done | the producer |
| named, DO_FREE + slot | both consumers, when dV of the slot's step is done | the producer |
| named, TURN + consumer (without ADD_DQ) | the other consumer, when its S and dP are issued | it, before its S |
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmkit.kernels.hopper import barriers as sync
from lmkit.kernels.hopper import schedule, wgmma
from lmkit.kernels.hopper.barriers import partition_barrier
from lmkit.kernels.hopper.tma import allocate_slots, allocate_tile, fetch_rows, tma_add, tma_load, tma_store

KEYS = gl.constexpr(128)  # keys of a block, 64 for each consumer
STAGES = gl.constexpr(2)  # slots for Q and for dO
Q_FREE = gl.constexpr(sync.FIRST_NAMED_BARRIER.value)  # named barriers, one a slot
DO_FREE = gl.constexpr(sync.FIRST_NAMED_BARRIER.value + STAGES.value)
TURN = gl.constexpr(sync.FIRST_NAMED_BARRIER.value + 2 * STAGES.value)  # one a warp group
NEVER = gl.constexpr(1 << 30)  # a first column that no query reaches

# Of global memory: (batch, heads, sequence, at most D); lse and delta flat; dq: the scratch that is added to
Descriptors = namedtuple("Descriptors", ["q", "k", "v", "do", "lse", "delta", "dk", "dv", "dq"])
# In shared memory; q, do, lse, delta by slots; ds and dq: unused without ADD_DQ
Tiles = namedtuple("Tiles", ["q", "do", "k", "v", "lse", "delta", "ds", "dq"])
# mbarriers: one a slot, one a slot, one for both K and V (see the module)
Barriers = namedtuple("Barriers", ["q_full", "do_full", "kv_full"])


class Problem(NamedTuple):
    """The sizes of a call."""

    num_queries: gl.tensor
    num_keys: gl.tensor
    padded: gl.tensor  # rows of a head's lse, delta and sum of dQ
    batches: gl.tensor
    heads: gl.tensor  # query heads of one batch item
    group: gl.tensor  # query heads to a key head
    together: gl.tensor  # heads whose blocks start together (see locate_longest_first)
    num_query_tiles: gl.tensor
    num_key_tiles: gl.tensor


class Work(NamedTuple):
    """What one block does: a tile of keys, and the query tiles that see it, of `group` heads."""

    batch: gl.tensor
    key_head: gl.tensor
    key_tile: gl.tensor
    first_head: gl.tensor  # the group's first query head
    lowest: gl.tensor  # lowest query tile of a head
    count: gl.tensor  # query tiles of a head
    start: gl.tensor  # the query tile to begin with


# The compile-time parameters of `dqdkdv_lockstep_kernel`
Shape = namedtuple("Shape", ["QUERIES", "D", "USED", "CAUSAL", "TAIL", "ADD_DQ", "PACKED_P", "FIRST"])


@gluon.jit
def locate_work(unit, problem, last, QUERIES: gl.constexpr, CAUSAL: gl.constexpr, FIRST: gl.constexpr):
    """Return this CTA's work. last: read only with FIRST, see `schedule.load_bound`. CTAs with different keys start
    at different query tiles (the diagonal, or as many tiles down), so their sums of dQ meet at different rows."""
    key_heads = problem.heads // problem.group
    num_heads = problem.batches * key_heads
    if FIRST:
        key_tile, flat_key_head = schedule.locate_uneven(
            unit, problem.num_key_tiles, num_heads, problem.together
        )
    else:
        key_tile, flat_key_head = schedule.locate_longest_first(
            unit, problem.num_key_tiles, num_heads, problem.together
        )
    batch = flat_key_head // key_heads
    key_head = flat_key_head % key_heads
    first_head = key_head * problem.group
    lowest = 0
    start = (key_tile * (KEYS // QUERIES)) % problem.num_query_tiles
    if CAUSAL:
        # Keys that no query sees (more keys than queries) take the last tile, wholly masked: a loop that may run
        # zero times makes ptxas serialise the products (C7515).
        lowest = gl.minimum(key_tile * (KEYS // QUERIES), problem.num_query_tiles - 1)
        start = lowest
    count = problem.num_query_tiles - lowest
    if FIRST:
        last_query = schedule.load_bound(last, batch, (key_tile + 1) * KEYS - 1, problem.num_keys)
        count = gl.maximum(last_query // QUERIES + 1 - lowest, 1)
    return Work(batch, key_head, key_tile, first_head, lowest, count, start)


@gluon.jit
def next_query_tile(tile, head, work):
    """Return the next (tile, head): one tile down, round the corner at the end; back at `start`, the next head."""
    tile += 1
    tile = gl.where(tile == work.lowest + work.count, work.lowest, tile)
    return tile, gl.where(tile == work.start, head + 1, head)


@gluon.jit
def allocate_barriers():
    """Return the initialised mbarriers."""
    q_full = sync.make_mbarriers(STAGES)
    do_full = sync.make_mbarriers(STAGES)
    kv_full = sync.make_mbarrier()
    fence_async_shared()
    partition_barrier()
    return Barriers(q_full, do_full, kv_full)


@gluon.jit
def stream_queries(descriptors, tiles, barriers, problem, work,
                   QUERIES: gl.constexpr, Q_FREE: gl.constexpr, DO_FREE: gl.constexpr):  # fmt: skip
    """Load Q with lse and dO with delta, tile after tile, into slots that the consumers give back."""
    head = work.first_head
    tile = work.start
    steps = gl.maximum(work.count * problem.group, 1)
    for step in range(steps):
        fetch_queries(descriptors, tiles, barriers, problem, work, head, tile, step, QUERIES, Q_FREE, DO_FREE)
        tile, head = next_query_tile(tile, head, work)
    return steps


@gluon.jit
def fetch_queries(descriptors, tiles, barriers, problem, work, head, tile, step,
                  QUERIES: gl.constexpr, Q_FREE: gl.constexpr, DO_FREE: gl.constexpr):  # fmt: skip
    """Load Q with lse and dO with delta of a step."""
    slot = step % STAGES
    row = (work.batch * problem.heads + head) * problem.padded + tile * QUERIES
    sync.await_slot(Q_FREE, step, STAGES, 1)  # dK is waited for behind the next S
    fetch_rows(descriptors.q, work.batch, head, tile * QUERIES, tiles.q,
               descriptors.lse, row, tiles.lse, barriers.q_full, slot)  # fmt: skip
    sync.await_slot(DO_FREE, step, STAGES, 0)
    fetch_rows(descriptors.do, work.batch, head, tile * QUERIES, tiles.do,
               descriptors.delta, row, tiles.delta, barriers.do_full, slot)  # fmt: skip


@gluon.jit
def await_all_slots(steps, Q_FREE: gl.constexpr, DO_FREE: gl.constexpr):
    """Wait, as the producer, until all slots of `stream_queries` have been given back."""
    sync.await_last_slots(Q_FREE, steps, STAGES, 1)
    sync.await_last_slots(DO_FREE, steps, STAGES, 0)


@gluon.jit
def _producer(call, shape):
    """Load K and V once with TMA, then Q and dO tile after tile."""
    descriptors, tiles, barriers, problem, _, _, last = call
    work = locate_work(gl.program_id(0), problem, last, shape.QUERIES, shape.CAUSAL, shape.FIRST)
    batch = work.batch
    mbarrier.expect(barriers.kv_full, 2 * descriptors.k.block_type.nbytes)
    key_box = [batch, work.key_head, work.key_tile * KEYS, 0]
    tma_load(descriptors.k, key_box, barriers.kv_full, tiles.k)
    tma_load(descriptors.v, key_box, barriers.kv_full, tiles.v)
    steps = stream_queries(descriptors, tiles, barriers, problem, work, shape.QUERIES, Q_FREE, DO_FREE)
    await_all_slots(steps, Q_FREE, DO_FREE)


@gluon.jit
def _consumers(call, shape):
    """Compute as both warp groups, in one partition of eight warps: rows 0-63 of a (128, N) tile are the first's."""
    D: gl.constexpr = shape.D
    descriptors, tiles, barriers, problem, scale_log2, scale, last = call
    DTYPE: gl.constexpr = descriptors.q.dtype
    SCORES: gl.constexpr = wgmma.accumulator_layout(shape.QUERIES, 8)
    SCORES_PRODUCTS: gl.constexpr = wgmma.count_score_wgmmas(shape.USED, D)
    GRADIENT: gl.constexpr = wgmma.accumulator_layout(D, 8)
    OPERAND: gl.constexpr = wgmma.operand_layout(GRADIENT)
    # 64 rows, one warp group's height: the warp groups share its columns
    DQ: gl.constexpr = wgmma.accumulator_layout(D // 2, 4, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    num_keys = problem.num_keys
    work = locate_work(gl.program_id(0), problem, last, shape.QUERIES, shape.CAUSAL, shape.FIRST)
    batch = work.batch
    k = tiles.k.reshape([KEYS, D])
    v = tiles.v.reshape([KEYS, D])
    keys = work.key_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    bounds = keys
    if shape.FIRST:
        bounds = schedule.load_bounds(last, batch, keys, num_keys)
    dv = gl.zeros([KEYS, D], gl.float32, GRADIENT)
    dk = warpgroup_mma_init(gl.zeros([KEYS, D], gl.float32, GRADIENT))
    mbarrier.wait(barriers.kv_full, 0)
    head = work.first_head
    tile = work.start
    if not shape.ADD_DQ:
        sync.begin_turns(TURN)
    for step in range(gl.maximum(work.count * problem.group, 1)):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        q = tiles.q.index(slot).reshape([shape.QUERIES, D])
        do = tiles.do.index(slot).reshape([shape.QUERIES, D])
        mbarrier.wait(barriers.q_full.index(slot), phase)
        if not shape.ADD_DQ:
            sync.take_turn(TURN)
        score_job = wgmma.issue_scores(k, q, shape.USED, SCORES)
        lse = tiles.lse.index(slot).load(COLUMN)
        if shape.PACKED_P:  # short of registers: have dK of the previous step out of the way first
            dk = warpgroup_mma_wait(SCORES_PRODUCTS, deps=[dk])
            sync.named_barrier_arrive(Q_FREE + (step + STAGES - 1) % STAGES, sync.SLOT_THREADS)
        mbarrier.wait(barriers.do_full.index(slot), phase)
        dp_job = wgmma.issue_scores(v, do, shape.USED, SCORES)
        if not shape.ADD_DQ:
            sync.pass_turn(TURN)
        if shape.PACKED_P:
            scores = warpgroup_mma_wait(SCORES_PRODUCTS, deps=[score_job])
        else:
            scores, dk = warpgroup_mma_wait(SCORES_PRODUCTS, deps=[score_job, dk])
            sync.named_barrier_arrive(Q_FREE + (step + STAGES - 1) % STAGES, sync.SLOT_THREADS)
        exponent = scores * scale_log2 - gl.expand_dims(lse, 0)  # (128 keys, QUERIES): transposed
        if shape.CAUSAL:
            # Query i sees keys j <= i; keys past the end see nobody (P might overflow there, and inf * 0 is not 0).
            # Needed at the diagonal only; but at D = 128 the branch makes ptxas serialise the products (C7512), so
            # the mask is always applied there.
            if D == 128 or shape.TAIL or shape.FIRST or tile * shape.QUERIES < (work.key_tile + 1) * KEYS:
                first_query = gl.where(keys < num_keys, keys - tile * shape.QUERIES, NEVER)
                exponent = wgmma.keep_columns_from(exponent, first_query, -float("inf"))
            if shape.FIRST:
                last_query = bounds - tile * shape.QUERIES
                exponent = wgmma.keep_columns_up_to(exponent, last_query, -float("inf"))
        elif shape.TAIL:
            exponent = gl.where(gl.expand_dims(keys < num_keys, 1), exponent, -float("inf"))
        p = gl.exp2(exponent)
        if shape.PACKED_P:
            packed = wgmma.pack_pairs(p, DTYPE)
            kept = wgmma.keep_pairs(p, DTYPE)
            p_operand = wgmma.unpack_pairs(packed, DTYPE, OPERAND)
        else:
            p_operand = gl.convert_layout(p.to(DTYPE), OPERAND)
        delta = tiles.delta.index(slot).load(COLUMN)
        dv_job = warpgroup_mma(p_operand, do, dv, is_async=True)
        # P is among the dependencies so that the exponentials come before this wait, not after.
        if shape.PACKED_P:
            dp, packed, kept = warpgroup_mma_wait(1, deps=[dp_job, packed, kept])
            dp = dp * scale - gl.expand_dims(delta, 0)
            ds_pairs = wgmma.multiply_pairs(packed, kept, dp, DTYPE)
            ds = wgmma.unpack_pairs(ds_pairs, DTYPE, SCORES)
            ds_operand = wgmma.unpack_pairs(ds_pairs, DTYPE, OPERAND)
        else:
            dp, p = warpgroup_mma_wait(1, deps=[dp_job, p])
            dp = dp * scale - gl.expand_dims(delta, 0)
            ds = (p * dp).to(DTYPE)
            ds_operand = gl.convert_layout(ds, OPERAND)
        if shape.ADD_DQ:
            tiles.ds.store(ds)
            fence_async_shared()
            # By the barrier TMA has read the previous dQ out of its tile. (A store_wait that no barrier follows
            # directly makes Triton add one.)
            tma.store_wait(0)
            partition_barrier()
            dq_job = wgmma.issue_product(tiles.ds.permute((1, 0)), k, DQ)
            dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
            dq, dv, p_operand = warpgroup_mma_wait(1, deps=[dq_job, dv_job, p_operand])
            sync.named_barrier_arrive(DO_FREE + slot, sync.SLOT_THREADS)
            tiles.dq.store(wgmma.in_thread_order(dq))
            fence_async_shared()
            partition_barrier()
            first_row = (batch * problem.heads + head) * problem.padded + tile * shape.QUERIES
            tma_add(descriptors.dq, [first_row * (D // 32), 0], tiles.dq)
        else:
            dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
            dv, p_operand = warpgroup_mma_wait(1, deps=[dv_job, p_operand])
            sync.named_barrier_arrive(DO_FREE + slot, sync.SLOT_THREADS)
        tile, head = next_query_tile(tile, head, work)
    dk = warpgroup_mma_wait(0, deps=[dk])
    if not shape.ADD_DQ:
        sync.end_turns(TURN)
    # K and V are done with: their tiles stage dK and dV on the way out.
    partition_barrier()
    v.store(dv.to(DTYPE))
    k.store(dk.to(DTYPE))
    fence_async_shared()
    partition_barrier()
    key_box = [batch, work.key_head, work.key_tile * KEYS, 0]
    tma_store(descriptors.dv, key_box, tiles.v)
    tma_store(descriptors.dk, key_box, tiles.k)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=list(Problem._fields))
def dqdkdv_lockstep_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc,
                              last, num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles,
                              num_key_tiles, scale_log2, scale,
                              QUERIES: gl.constexpr, D: gl.constexpr, USED: gl.constexpr, CAUSAL: gl.constexpr,
                              TAIL: gl.constexpr, ADD_DQ: gl.constexpr, PACKED_P: gl.constexpr,
                              FIRST: gl.constexpr):  # fmt: skip
    """Allocate and start the partitions of one CTA per (key tile, key head of the batch).

    Descriptors: (batch, heads, sequence, at most D) in boxes of (1, 1, QUERIES or 128, D), zeros beyond the head;
    lse_desc and delta_desc flat float32, `padded` rows a head, lse in log2 units with +inf past num_queries, delta
    times scale; dq_desc float32, rows of 32 (see in_thread_order). TAIL: num_keys is no multiple of 128. last: read
    only with FIRST, see `schedule.load_bound`.

    USED: of the D columns S and dP take these (see issue_scores). ADD_DQ: for D = 128 only.

    PACKED_P saves the registers that D = 64 lacks (steps of 128 queries): dV takes P with 16 bits, and for dS only
    the bits of P that these do not hold are kept, half a register a number (`wgmma.keep_pairs`). With bfloat16
    that is 24 of float32's 32 bits, its exponent among them: dK of a key that hardly anybody attends to stays
    precise.
    """
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = allocate_slots(q_desc, STAGES)
    do_tiles = allocate_slots(do_desc, STAGES)
    k_tile = allocate_tile(k_desc)
    v_tile = allocate_tile(v_desc)
    lse_tiles = allocate_slots(lse_desc, STAGES)
    delta_tiles = allocate_slots(delta_desc, STAGES)
    ds_tile = lse_tiles  # never used
    dq_tile = lse_tiles
    if ADD_DQ:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype)
        ds_tile = gl.allocate_shared_memory(dtype, [KEYS, QUERIES], ds_layout)
        dq_tile = allocate_tile(dq_desc)
    barriers = allocate_barriers()
    descriptors = Descriptors(
        q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc
    )
    tiles = Tiles(q_tiles, do_tiles, k_tile, v_tile, lse_tiles, delta_tiles, ds_tile, dq_tile)
    problem = Problem(
        num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles
    )
    call = (descriptors, tiles, barriers, problem, scale_log2, scale, last)
    shape: gl.constexpr = Shape(QUERIES, D, USED, CAUSAL, TAIL, ADD_DQ, PACKED_P, FIRST)
    gl.warp_specialize([(_consumers, (call, shape)), (_producer, (call, shape))], [1], [24])
