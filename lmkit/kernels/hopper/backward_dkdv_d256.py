"""Compute dK and dV of 64 keys on Hopper for D = 256, where a warp group has registers for one of them only.

Accumulators of 64 x 256 fill 128 registers a thread. So the first warp group holds dV and computes S^T = K Q^T and
P^T, the second holds dK and computes dP^T = V dO^T and dS^T: each does one product from shared memory and one from
registers a step. All that passes between them is P, in float32 through shared memory, in one direction. A
**producer** warp streams Q and dO with TMA, as in `backward_dqdkdv_lockstep` (which has the formulas).

Timeline. The first warp group may run two tiles ahead of the second, so its exponentials fall into the other's
products:

    producer       | TMA Q(j+1), lse, dO(j+1), delta, into a slot that both gave back  |
    value consumer | S(j)      | P(j) = exp, store P(j) | dV += P(j)^T dO(j)            |
    key consumer   | dP(j-1)   | load P(j-1), dS(j-1)   | dK += dS(j-1)^T Q(j-1)        |

lse, delta and dQ come from `backward_dq_deterministic`, which runs before: nothing is added up in the order of
arrival, and every bit is reproducible.

Rows of keys past the end may hold anything, also NaN: row k of dK and dV depends on key k alone, and TMA does not
write what lies outside of the tensor.

| barrier | who arrives | who waits, for which phase |
|-|-|-|
| k_full | the producer's `expect`, then TMA's bytes | the value consumer, phase 0, once |
| v_full | the same | the key consumer, phase 0, once |
| q_full [slot] | the producer's `expect`, then the bytes of Q and lse | both, (step // STAGES) & 1 |
| do_full [slot] | the producer's `expect`, then the bytes of dO and delta | both, (step // STAGES) & 1 |
| named, SLOT_FREE + slot | each warp group, when its products of the step are done | the producer |
| named, P_READY + slot | the value consumer, when P is stored | the key consumer |
| named, P_FREE + slot | the key consumer, when P is loaded; both slots once at the start | the value consumer |

Shared memory is full, 225 of 227 KiB: K and V with 32 KiB each, two slots of Q and of dO with 32 each, two of P with
16 each, lse and delta.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmkit.kernels.hopper import barriers as sync
from lmkit.kernels.hopper import schedule, wgmma
from lmkit.kernels.hopper.backward_dqdkdv_lockstep import Problem
from lmkit.kernels.hopper.barriers import partition_barrier
from lmkit.kernels.hopper.tma import allocate_slots, allocate_tile, fetch_rows, send_through, tma_load

ROWS = gl.constexpr(64)  # keys of a block, and queries of a step
STAGES = gl.constexpr(2)  # slots for Q with dO, and for P
SLOT_FREE = gl.constexpr(sync.FIRST_NAMED_BARRIER.value)  # named barriers, one a slot
P_READY = gl.constexpr(sync.FIRST_NAMED_BARRIER.value + STAGES.value)
P_FREE = gl.constexpr(sync.FIRST_NAMED_BARRIER.value + 2 * STAGES.value)
P_THREADS = gl.constexpr(256)  # both warp groups

# Of global memory: (batch, heads, sequence, at most D); lse and delta flat
Descriptors = namedtuple("Descriptors", ["q", "k", "v", "do", "lse", "delta", "dk", "dv"])
# In shared memory; all but k and v by slots
Tiles = namedtuple("Tiles", ["q", "do", "k", "v", "lse", "delta", "p"])
# mbarriers: one a slot, one a slot, one, one (see the module)
Barriers = namedtuple("Barriers", ["q_full", "do_full", "k_full", "v_full"])
# The compile-time parameters of `dkdv_d256_kernel`
Shape = namedtuple("Shape", ["D", "USED", "CAUSAL", "FIRST"])


@gluon.jit
def _locate(problem, last, CAUSAL: gl.constexpr, FIRST: gl.constexpr):
    """Return (key tile, batch, key head, last query tile that sees these keys, number of them) of this CTA."""
    key_heads = problem.heads // problem.group
    num_heads = problem.batches * key_heads
    key_tile, flat_key_head = schedule.locate_longest_first(
        gl.program_id(0), problem.num_key_tiles, num_heads, problem.together
    )
    batch = flat_key_head // key_heads
    top = problem.num_query_tiles - 1
    count = problem.num_query_tiles
    if CAUSAL:
        if FIRST:
            top = schedule.load_bound(last, batch, (key_tile + 1) * ROWS - 1, problem.num_keys) // ROWS
        # Keys that no query sees (more keys than queries) take the last tile, wholly masked: a loop that may run
        # zero times makes ptxas serialise the products (C7515).
        count = gl.maximum(top + 1 - key_tile, 1)
    return key_tile, batch, flat_key_head % key_heads, top, count


@gluon.jit
def _producer(call, shape):
    """Load K and V once with TMA, then Q and dO tile after tile."""
    descriptors, tiles, barriers, problem, _, _, last = call
    key_tile, batch, key_head, top, count = _locate(problem, last, shape.CAUSAL, shape.FIRST)
    mbarrier.expect(barriers.k_full, descriptors.k.block_type.nbytes)
    key_box = [batch, key_head, key_tile * ROWS, 0]
    tma_load(descriptors.k, key_box, barriers.k_full, tiles.k)
    steps = gl.maximum(count * problem.group, 1)
    for step in range(steps):
        slot = step % STAGES
        head = key_head * problem.group + step // count
        # From the last tile down: CTAs that run together read the same tiles together.
        tile = top - step % count
        row = (batch * problem.heads + head) * problem.padded + tile * ROWS
        sync.await_slot(SLOT_FREE, step, STAGES, 0)
        fetch_rows(descriptors.q, batch, head, tile * ROWS, tiles.q,
                   descriptors.lse, row, tiles.lse, barriers.q_full, slot)  # fmt: skip
        if step == 0:
            mbarrier.expect(barriers.v_full, descriptors.v.block_type.nbytes)
            tma_load(descriptors.v, key_box, barriers.v_full, tiles.v)
        fetch_rows(descriptors.do, batch, head, tile * ROWS, tiles.do,
                   descriptors.delta, row, tiles.delta, barriers.do_full, slot)  # fmt: skip
    sync.await_last_slots(SLOT_FREE, steps, STAGES, 0)


@gluon.jit
def _value_consumer(call, shape):
    """Compute P for both warp groups, and dV."""
    D: gl.constexpr = shape.D
    descriptors, tiles, barriers, problem, scale_log2, _, last = call
    DTYPE: gl.constexpr = descriptors.q.dtype
    SCORES: gl.constexpr = wgmma.accumulator_layout(ROWS)
    GRADIENT: gl.constexpr = wgmma.accumulator_layout(D)
    OPERAND: gl.constexpr = wgmma.operand_layout(GRADIENT)
    key_tile, batch, key_head, top, count = _locate(problem, last, shape.CAUSAL, shape.FIRST)
    steps = gl.maximum(count * problem.group, 1)
    k = tiles.k.reshape([ROWS, D])
    keys = key_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    bounds = keys
    if shape.FIRST:
        bounds = schedule.load_bounds(last, batch, keys, problem.num_keys)
    dv = gl.zeros([ROWS, D], gl.float32, GRADIENT)
    mbarrier.wait(barriers.k_full, 0)
    for step in range(steps):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        q = tiles.q.index(slot).reshape([ROWS, D])
        do = tiles.do.index(slot).reshape([ROWS, D])
        mbarrier.wait(barriers.q_full.index(slot), phase)
        score_job = wgmma.issue_scores(k, q, shape.USED, SCORES)
        mbarrier.wait(barriers.do_full.index(slot), phase)
        lse = tiles.lse.index(slot).load(gl.SliceLayout(0, SCORES))
        scores = warpgroup_mma_wait(0, deps=[score_job])
        exponent = scores * scale_log2 - gl.expand_dims(lse, 0)  # (64 keys, 64 queries): transposed
        if shape.CAUSAL:
            tile = top - step % count
            exponent = wgmma.keep_columns_from(exponent, keys - tile * ROWS, -float("inf"))
            if shape.FIRST:
                exponent = wgmma.keep_columns_up_to(exponent, bounds - tile * ROWS, -float("inf"))
        p = gl.exp2(exponent)
        sync.named_barrier_wait(P_FREE + slot, P_THREADS)
        tiles.p.index(slot).store(wgmma.in_thread_order(p))
        sync.named_barrier_arrive(P_READY + slot, P_THREADS)
        p_operand = gl.convert_layout(p.to(DTYPE), OPERAND)
        # The wait is here and not behind the next S, because ptxas serialises a product in flight across the loop's
        # end (C7512). The other warp group's products fill the gap.
        dv = warpgroup_mma_wait(0, deps=[warpgroup_mma(p_operand, do, dv, is_async=True)])
        sync.named_barrier_arrive(SLOT_FREE + slot, sync.SLOT_THREADS)
    for i in gl.static_range(STAGES):
        sync.named_barrier_wait(P_FREE + (steps + i) % STAGES, P_THREADS)  # the last arrivals' partners
    # This warp group, the only reader of K, is done with it: its tile stages dV on the way out.
    partition_barrier()
    send_through(tiles.k, dv.to(DTYPE), descriptors.dv, batch, key_head, key_tile)


@gluon.jit
def _key_consumer(call, shape):
    """Compute dS from the other warp group's P, and dK."""
    D: gl.constexpr = shape.D
    descriptors, tiles, barriers, problem, _, scale, last = call
    DTYPE: gl.constexpr = descriptors.q.dtype
    SCORES: gl.constexpr = wgmma.accumulator_layout(ROWS)
    GRADIENT: gl.constexpr = wgmma.accumulator_layout(D)
    OPERAND: gl.constexpr = wgmma.operand_layout(GRADIENT)
    key_tile, batch, key_head, _, count = _locate(problem, last, shape.CAUSAL, shape.FIRST)
    steps = gl.maximum(count * problem.group, 1)
    v = tiles.v.reshape([ROWS, D])
    dk = gl.zeros([ROWS, D], gl.float32, GRADIENT)
    for i in gl.static_range(STAGES):
        sync.named_barrier_arrive(P_FREE + i, P_THREADS)
    mbarrier.wait(barriers.v_full, 0)
    for step in range(steps):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        q = tiles.q.index(slot).reshape([ROWS, D])
        do = tiles.do.index(slot).reshape([ROWS, D])
        mbarrier.wait(barriers.do_full.index(slot), phase)
        dp_job = wgmma.issue_scores(v, do, shape.USED, SCORES)
        mbarrier.wait(barriers.q_full.index(slot), phase)
        delta = tiles.delta.index(slot).load(gl.SliceLayout(0, SCORES))
        dp = warpgroup_mma_wait(0, deps=[dp_job])
        dp = dp * scale - gl.expand_dims(delta, 0)
        sync.named_barrier_wait(P_READY + slot, P_THREADS)
        p = wgmma.from_thread_order(tiles.p.index(slot), dp)
        sync.named_barrier_arrive(P_FREE + slot, P_THREADS)
        ds_operand = gl.convert_layout((p * dp).to(DTYPE), OPERAND)
        dk = warpgroup_mma_wait(0, deps=[warpgroup_mma(ds_operand, q, dk, is_async=True)])
        sync.named_barrier_arrive(SLOT_FREE + slot, sync.SLOT_THREADS)
    # This warp group, the only reader of V, is done with it: its tile stages dK on the way out.
    partition_barrier()
    send_through(tiles.v, dk.to(DTYPE), descriptors.dk, batch, key_head, key_tile)


@gluon.jit(do_not_specialize=list(Problem._fields))
def dkdv_d256_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc,
                         last, num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles,
                         num_key_tiles, scale_log2, scale,
                         D: gl.constexpr, USED: gl.constexpr, CAUSAL: gl.constexpr,
                         REGISTERS: gl.constexpr, FIRST: gl.constexpr):  # fmt: skip
    """Allocate and start the partitions of one CTA per (tile of 64 keys, key head of the batch).

    Descriptors: (batch, heads, sequence, at most D) in boxes of (1, 1, 64, D); lse_desc and delta_desc flat float32
    in boxes of 64, `padded` rows a head, lse in log2 units with +inf past num_queries, delta times scale. USED: of
    the D columns S and dP take these (see issue_scores). last: read only with FIRST, see `schedule.load_bound`.
    """
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    P_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=1, order=[1, 0])
    tiles = Tiles(
        allocate_slots(q_desc, STAGES),
        allocate_slots(do_desc, STAGES),
        allocate_tile(k_desc),
        allocate_tile(v_desc),
        allocate_slots(lse_desc, STAGES),
        allocate_slots(delta_desc, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS * ROWS // 32, 32], P_LAYOUT),
    )
    q_full = sync.make_mbarriers(STAGES)
    do_full = sync.make_mbarriers(STAGES)
    k_full = sync.make_mbarrier()
    v_full = sync.make_mbarrier()
    fence_async_shared()
    partition_barrier()
    descriptors = Descriptors(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc)
    barriers = Barriers(q_full, do_full, k_full, v_full)
    problem = Problem(
        num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles
    )
    call = (descriptors, tiles, barriers, problem, scale_log2, scale, last)
    shape: gl.constexpr = Shape(D, USED, CAUSAL, FIRST)
    gl.warp_specialize(
        [(_value_consumer, (call, shape)), (_key_consumer, (call, shape)), (_producer, (call, shape))],
        [4, 1],
        [REGISTERS, 24],
    )
