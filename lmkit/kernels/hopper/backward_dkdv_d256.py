"""dK and dV of one tile of 64 keys for D = 256, where a warp group has registers for one of them only.

Accumulators of 64 x 256 fill 128 registers a thread. So the first warp group holds dV and computes S^T = K
Q^T and P^T, the second holds dK and computes dP^T = V dO^T and dS^T: each one product from shared memory
and one from registers a step, and all that passes between them is P, in float32 through shared memory, in
one direction. The first may run two tiles ahead of the second, so one's exponentials fall into the other's
products. A **producer** warp streams Q and dO, as in `backward_kernel`.

lse, delta and dQ come from `dq_kernel`, which runs before: nothing is added up in the order of
arrival, every bit is reproducible.

Rows of keys past the end may hold anything, also NaN: row k of dK and dV depends on key k alone, and the
copy engine leaves out what is outside.

| barrier | who arrives | who waits, for which phase |
|-|-|-|
| k_full | the producer's `expect`, then TMA's bytes | the first warp group, phase 0, once |
| v_full | the same | the second warp group, phase 0, once |
| q_full [slot] | the producer's `expect`, then the bytes of Q and lse | both, (step // STAGES) & 1 |
| do_full [slot] | the producer's `expect`, then the bytes of dO and delta | both, (step // STAGES) & 1 |
| named, SLOT_FREE + slot | each warp group, when its products of the step are done | the producer |
| named, P_READY + slot | the first warp group, when P is stored | the second |
| named, P_FREE + slot | the second, when P is loaded; both slots once at the start | the first |

Shared memory, of 227 KiB: K and V with 32 KiB each, two slots of Q and of dO with 32 each, two of P with 16
each; with lse and delta 225 KiB. Registers: launched with 168 a thread; both consumers take 240, the producer
keeps 24.
"""

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

from lmkit.kernels.hopper.backward_dkdv_d128 import Problem
from lmkit.kernels.hopper.barriers import (
    FIRST_NAMED_BARRIER,
    SLOT_THREADS,
    allocate_mbarriers,
    await_last_slots,
    await_slot,
    named_barrier_arrive,
    named_barrier_wait,
    partition_barrier,
)
from lmkit.kernels.hopper.fragments import from_thread_order, in_thread_order, keep_columns_from
from lmkit.kernels.hopper.schedule import locate_longest_first
from lmkit.kernels.hopper.tma import fetch_rows, send_through, tma_load
from lmkit.kernels.hopper.wgmma import accumulator_layout, issue_scores, operand_layout

ROWS = gl.constexpr(64)  # keys of a block, and queries of a step
STAGES = gl.constexpr(2)  # slots for Q with dO, and for P
SLOT_FREE = gl.constexpr(FIRST_NAMED_BARRIER.value)  # named barriers, one a slot
P_READY = gl.constexpr(FIRST_NAMED_BARRIER.value + STAGES.value)
P_FREE = gl.constexpr(FIRST_NAMED_BARRIER.value + 2 * STAGES.value)
P_THREADS = gl.constexpr(256)  # both warp groups


class Descriptors(NamedTuple):
    """Of global memory: (batch, heads, sequence, at most D); lse and delta flat."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    do: tma.tensor_descriptor
    lse: tma.tensor_descriptor
    delta: tma.tensor_descriptor
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor


class Tiles(NamedTuple):
    """In shared memory; all but k and v by slots."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor


class Barriers(NamedTuple):
    """mbarriers: one a slot, one a slot, one, one (see the module)."""

    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor


@gluon.jit
def _locate(problem, CAUSAL: gl.constexpr):
    """(key tile, batch, key head, query tiles that see these keys) of this block."""
    key_heads = problem.heads // problem.group
    num_heads = problem.batches * key_heads
    key_tile, flat_key_head = locate_longest_first(problem.num_key_tiles, num_heads, problem.together)
    count = problem.num_query_tiles
    if CAUSAL:
        # Keys that no query sees (more keys than queries) take the last tile, wholly masked: a loop that
        # may run zero times makes ptxas serialise the products (C7515)
        count = gl.maximum(problem.num_query_tiles - key_tile, 1)
    return key_tile, flat_key_head // key_heads, flat_key_head % key_heads, count


@gluon.jit
def _producer(
    descriptors,
    tiles,
    barriers,
    problem,
    scale_log2,
    scale,
    D: gl.constexpr,
    USED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """The copying warp: K and V once, then Q and dO tile after tile."""
    key_tile, batch, key_head, count = _locate(problem, CAUSAL)
    mbarrier.expect(barriers.k_full, descriptors.k.block_type.nbytes)
    key_box = [batch, key_head, key_tile * ROWS, 0]
    tma_load(descriptors.k, key_box, barriers.k_full, tiles.k)
    steps = gl.maximum(count * problem.group, 1)
    for step in range(steps):
        slot = step % STAGES
        head = key_head * problem.group + step // count
        # From the last tile down: blocks that run together read the same tiles together
        tile = problem.num_query_tiles - 1 - step % count
        row = (batch * problem.heads + head) * problem.padded + tile * ROWS
        await_slot(SLOT_FREE, step, STAGES, 0)
        fetch_rows(descriptors.q, batch, head, tile * ROWS, tiles.q,
                   descriptors.lse, row, tiles.lse, barriers.q_full, slot)  # fmt: skip
        if step == 0:
            mbarrier.expect(barriers.v_full, descriptors.v.block_type.nbytes)
            tma_load(descriptors.v, key_box, barriers.v_full, tiles.v)
        fetch_rows(descriptors.do, batch, head, tile * ROWS, tiles.do,
                   descriptors.delta, row, tiles.delta, barriers.do_full, slot)  # fmt: skip
    await_last_slots(SLOT_FREE, steps, STAGES, 0)


@gluon.jit
def _value_consumer(descriptors, tiles, barriers, problem, scale_log2, scale,
                    D: gl.constexpr, USED: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """P for both warp groups, and dV."""
    DTYPE: gl.constexpr = descriptors.q.dtype
    SCORES: gl.constexpr = accumulator_layout(ROWS)
    GRADIENT: gl.constexpr = accumulator_layout(D)
    OPERAND: gl.constexpr = operand_layout(GRADIENT)
    key_tile, batch, key_head, count = _locate(problem, CAUSAL)
    steps = gl.maximum(count * problem.group, 1)
    k = tiles.k.reshape([ROWS, D])
    keys = key_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    dv = gl.zeros([ROWS, D], gl.float32, GRADIENT)
    mbarrier.wait(barriers.k_full, 0)
    for step in range(steps):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        q = tiles.q.index(slot).reshape([ROWS, D])
        do = tiles.do.index(slot).reshape([ROWS, D])
        mbarrier.wait(barriers.q_full.index(slot), phase)
        score_job = issue_scores(k, q, USED, SCORES)
        mbarrier.wait(barriers.do_full.index(slot), phase)
        lse = tiles.lse.index(slot).load(gl.SliceLayout(0, SCORES))
        scores = warpgroup_mma_wait(0, deps=[score_job])
        exponent = scores * scale_log2 - gl.expand_dims(lse, 0)  # (64 keys, 64 queries): transposed
        if CAUSAL:
            tile = problem.num_query_tiles - 1 - step % count
            exponent = keep_columns_from(exponent, keys - tile * ROWS, -float("inf"))
        p = gl.exp2(exponent)
        named_barrier_wait(P_FREE + slot, P_THREADS)
        tiles.p.index(slot).store(in_thread_order(p))
        named_barrier_arrive(P_READY + slot, P_THREADS)
        p_operand = gl.convert_layout(p.to(DTYPE), OPERAND)
        # Waited for here and not beside the next S: in flight across the loop's end, ptxas serialises it
        # (C7512). The other warp group's products fill the gap.
        dv = warpgroup_mma_wait(0, deps=[warpgroup_mma(p_operand, do, dv, is_async=True)])
        named_barrier_arrive(SLOT_FREE + slot, SLOT_THREADS)
    for i in gl.static_range(STAGES):
        named_barrier_wait(P_FREE + (steps + i) % STAGES, P_THREADS)  # the last arrivals' partners
    # K has served this warp group, its only reader: its tile stages dV on the way out
    partition_barrier()
    send_through(tiles.k, dv.to(DTYPE), descriptors.dv, batch, key_head, key_tile)


@gluon.jit
def _key_consumer(descriptors, tiles, barriers, problem, scale_log2, scale,
                  D: gl.constexpr, USED: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """dS from the other warp group's P, and dK."""
    DTYPE: gl.constexpr = descriptors.q.dtype
    SCORES: gl.constexpr = accumulator_layout(ROWS)
    GRADIENT: gl.constexpr = accumulator_layout(D)
    OPERAND: gl.constexpr = operand_layout(GRADIENT)
    key_tile, batch, key_head, count = _locate(problem, CAUSAL)
    steps = gl.maximum(count * problem.group, 1)
    v = tiles.v.reshape([ROWS, D])
    dk = gl.zeros([ROWS, D], gl.float32, GRADIENT)
    for i in gl.static_range(STAGES):
        named_barrier_arrive(P_FREE + i, P_THREADS)
    mbarrier.wait(barriers.v_full, 0)
    for step in range(steps):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        q = tiles.q.index(slot).reshape([ROWS, D])
        do = tiles.do.index(slot).reshape([ROWS, D])
        mbarrier.wait(barriers.do_full.index(slot), phase)
        dp_job = issue_scores(v, do, USED, SCORES)
        mbarrier.wait(barriers.q_full.index(slot), phase)
        delta = tiles.delta.index(slot).load(gl.SliceLayout(0, SCORES))
        dp = warpgroup_mma_wait(0, deps=[dp_job])
        dp = dp * scale - gl.expand_dims(delta, 0)
        named_barrier_wait(P_READY + slot, P_THREADS)
        p = from_thread_order(tiles.p.index(slot), dp)
        named_barrier_arrive(P_FREE + slot, P_THREADS)
        ds_operand = gl.convert_layout((p * dp).to(DTYPE), OPERAND)
        dk = warpgroup_mma_wait(0, deps=[warpgroup_mma(ds_operand, q, dk, is_async=True)])
        named_barrier_arrive(SLOT_FREE + slot, SLOT_THREADS)
    # V has served this warp group, its only reader: its tile stages dK on the way out
    partition_barrier()
    send_through(tiles.v, dk.to(DTYPE), descriptors.dk, batch, key_head, key_tile)


@gluon.jit(do_not_specialize=["num_queries", "num_keys", "padded", "batches", "heads", "group", "together",
                              "num_query_tiles", "num_key_tiles"])  # fmt: skip
def dkdv_d256_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc,
                         num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles,
                         num_key_tiles, scale_log2, scale,
                         D: gl.constexpr, USED: gl.constexpr, CAUSAL: gl.constexpr,
                         REGISTERS: gl.constexpr):  # fmt: skip
    """One block per (tile of 64 keys, key head of the batch). Allocates and starts the partitions.

    Descriptors: (batch, heads, sequence, at most D) in boxes of (1, 1, 64, D); lse_desc and delta_desc flat float32
    in boxes of 64, `padded` rows a head, lse in log2 units with +inf past num_queries, delta times scale. USED: of
    the D columns S and dP take these (see issue_scores).
    """
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    dtype: gl.constexpr = q_desc.dtype
    P_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=1, order=[1, 0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], do_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, ROWS, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, ROWS, D], v_desc.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout)
    p_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS * ROWS // 32, 32], P_LAYOUT)
    q_full = allocate_mbarriers(STAGES)
    do_full = allocate_mbarriers(STAGES)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    fence_async_shared()
    partition_barrier()
    descriptors = Descriptors(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc)
    tiles = Tiles(q_tiles, do_tiles, k_tile, v_tile, lse_tiles, delta_tiles, p_tiles)
    barriers = Barriers(q_full, do_full, k_full, v_full)
    problem = Problem(
        num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles
    )
    gl.warp_specialize(
        [
            (_value_consumer, (descriptors, tiles, barriers, problem, scale_log2, scale, D, USED, CAUSAL)),
            (_key_consumer, (descriptors, tiles, barriers, problem, scale_log2, scale, D, USED, CAUSAL)),
            (_producer, (descriptors, tiles, barriers, problem, scale_log2, scale, D, USED, CAUSAL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
