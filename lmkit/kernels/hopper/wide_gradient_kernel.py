"""dK and dV of one tile of 64 keys for head_dim 256, where a warp group has registers for one of them only.

Accumulators of 64 x 256 fill 128 registers a thread. So the first warp group holds dV and computes S^T = K
Q^T and P^T, the second holds dK and computes dP^T = V dO^T and dS^T: each one product from shared memory
and one from registers a step, and all that passes between them is P, in float32 through shared memory, in
one direction. The first may run two tiles ahead of the second, so one's exponentials fall into the other's
products.

lse, delta and dQ come from `query_gradient_kernel`, which runs before: nothing is added up in the order of
arrival, every bit is reproducible.

Rows of keys past the end may hold anything, also NaN: row k of dK and dV depends on key k alone, and the
copy engine leaves out what is outside.
"""

# ruff: noqa: RUF059 (all partitions share one argument list; none needs all of it)

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

from lmkit.kernels.hopper.fragments import from_thread_order, in_thread_order, keep_columns_from
from lmkit.kernels.hopper.products import issue_product
from lmkit.kernels.hopper.synchronization import (
    FIRST_NAMED_BARRIER,
    named_barrier_arrive,
    named_barrier_wait,
)
from lmkit.kernels.hopper.tiles import locate_longest_first
from lmkit.kernels.hopper.versions import partition_barrier

ROWS = gl.constexpr(64)  # keys of a block, and queries of a step
STAGES = gl.constexpr(2)  # slots for Q with dO, and for P
SLOT_FREE = gl.constexpr(FIRST_NAMED_BARRIER.value)  # named barriers, one a slot
P_READY = gl.constexpr(FIRST_NAMED_BARRIER.value + 2)
P_FREE = gl.constexpr(FIRST_NAMED_BARRIER.value + 4)
SLOT_THREADS = gl.constexpr(288)  # both warp groups and the producer
P_THREADS = gl.constexpr(256)


@gluon.jit
def _locate(problem, CAUSAL: gl.constexpr):
    """(key tile, batch, key head, query tiles that see these keys) of this block."""
    num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles = problem
    key_heads = heads // group
    key_tile, flat_key_head = locate_longest_first(num_key_tiles, batches * key_heads, together)
    tiles = num_query_tiles
    if CAUSAL:
        # Keys that no query sees (more keys than queries) take the last tile, wholly masked: a loop that
        # may run zero times makes ptxas serialise the products (C7515)
        tiles = gl.maximum(num_query_tiles - key_tile, 1)
    return key_tile, flat_key_head // key_heads, flat_key_head % key_heads, tiles


@gluon.jit
def _producer(
    descriptors, buffers, barriers, problem, scale_log2, dk_scale, D: gl.constexpr, CAUSAL: gl.constexpr
):
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc = descriptors
    q_tiles, do_tiles, k_tile, v_tile, lse_tiles, delta_tiles, p_tiles = buffers
    q_full, do_full, k_full, v_full = barriers
    num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles = problem
    tile_bytes: gl.constexpr = ROWS * D * (q_desc.dtype.primitive_bitwidth // 8)
    key_tile, batch, key_head, tiles = _locate(problem, CAUSAL)
    mbarrier.expect(k_full, tile_bytes)
    tma.async_copy_global_to_shared(k_desc, [batch, key_head, key_tile * ROWS, 0], k_full, k_tile)
    steps = gl.maximum(tiles * group, 1)
    for step in range(steps):
        slot = step % STAGES
        head = key_head * group + step // tiles
        # From the last tile down: blocks that run together read the same tiles together
        tile = num_query_tiles - 1 - step % tiles
        row = (batch * heads + head) * padded + tile * ROWS
        if step >= STAGES:
            named_barrier_wait(SLOT_FREE + slot, SLOT_THREADS)
        mbarrier.expect(q_full.index(slot), tile_bytes + ROWS * 4)
        tma.async_copy_global_to_shared(
            q_desc, [batch, head, tile * ROWS, 0], q_full.index(slot), q_tiles.index(slot)
        )
        tma.async_copy_global_to_shared(lse_desc, [row], q_full.index(slot), lse_tiles.index(slot))
        if step == 0:
            mbarrier.expect(v_full, tile_bytes)
            tma.async_copy_global_to_shared(v_desc, [batch, key_head, key_tile * ROWS, 0], v_full, v_tile)
        mbarrier.expect(do_full.index(slot), tile_bytes + ROWS * 4)
        tma.async_copy_global_to_shared(
            do_desc, [batch, head, tile * ROWS, 0], do_full.index(slot), do_tiles.index(slot)
        )
        tma.async_copy_global_to_shared(delta_desc, [row], do_full.index(slot), delta_tiles.index(slot))
    # Every arrival of the consumers finds its partner before this warp leaves
    for i in gl.static_range(STAGES):
        if steps + i >= STAGES:
            named_barrier_wait(SLOT_FREE + (steps + i) % STAGES, SLOT_THREADS)


@gluon.jit
def _value_consumer(descriptors, buffers, barriers, problem, scale_log2, dk_scale,
                    D: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """P for both warp groups, and dV."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc = descriptors
    q_tiles, do_tiles, k_tile, v_tile, lse_tiles, delta_tiles, p_tiles = buffers
    q_full, do_full, k_full, v_full = barriers
    num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles = problem
    DTYPE: gl.constexpr = q_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRADIENT, k_width=2)
    key_tile, batch, key_head, tiles = _locate(problem, CAUSAL)
    steps = gl.maximum(tiles * group, 1)
    k = k_tile.reshape([ROWS, D])
    keys = key_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    dv = gl.zeros([ROWS, D], gl.float32, GRADIENT)
    mbarrier.wait(k_full, 0)
    for step in range(steps):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        q = q_tiles.index(slot).reshape([ROWS, D])
        do = do_tiles.index(slot).reshape([ROWS, D])
        mbarrier.wait(q_full.index(slot), phase)
        score_job = issue_product(k, q.permute((1, 0)), SCORES)
        mbarrier.wait(do_full.index(slot), phase)
        lse = lse_tiles.index(slot).load(gl.SliceLayout(0, SCORES))
        scores = warpgroup_mma_wait(0, deps=[score_job])
        exponent = scores * scale_log2 - gl.expand_dims(lse, 0)  # (64 keys, 64 queries): transposed
        if CAUSAL:
            tile = num_query_tiles - 1 - step % tiles
            exponent = keep_columns_from(exponent, keys - tile * ROWS, -float("inf"))
        p = gl.exp2(exponent)
        named_barrier_wait(P_FREE + slot, P_THREADS)
        p_tiles.index(slot).store(in_thread_order(p))
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
    k.store(dv.to(DTYPE))
    fence_async_shared()
    partition_barrier()
    tma.async_copy_shared_to_global(dv_desc, [batch, key_head, key_tile * ROWS, 0], k_tile)
    tma.store_wait(0)


@gluon.jit
def _key_consumer(descriptors, buffers, barriers, problem, scale_log2, dk_scale,
                  D: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """dS from the other warp group's P, and dK."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc = descriptors
    q_tiles, do_tiles, k_tile, v_tile, lse_tiles, delta_tiles, p_tiles = buffers
    q_full, do_full, k_full, v_full = barriers
    num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles = problem
    DTYPE: gl.constexpr = q_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRADIENT, k_width=2)
    key_tile, batch, key_head, tiles = _locate(problem, CAUSAL)
    steps = gl.maximum(tiles * group, 1)
    v = v_tile.reshape([ROWS, D])
    dk = gl.zeros([ROWS, D], gl.float32, GRADIENT)
    for i in gl.static_range(STAGES):
        named_barrier_arrive(P_FREE + i, P_THREADS)
    mbarrier.wait(v_full, 0)
    for step in range(steps):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        q = q_tiles.index(slot).reshape([ROWS, D])
        do = do_tiles.index(slot).reshape([ROWS, D])
        mbarrier.wait(do_full.index(slot), phase)
        dp_job = issue_product(v, do.permute((1, 0)), SCORES)
        mbarrier.wait(q_full.index(slot), phase)
        delta = delta_tiles.index(slot).load(gl.SliceLayout(0, SCORES))
        dp = warpgroup_mma_wait(0, deps=[dp_job])
        dp = dp - gl.expand_dims(delta, 0)
        named_barrier_wait(P_READY + slot, P_THREADS)
        p = from_thread_order(p_tiles.index(slot), dp)
        named_barrier_arrive(P_FREE + slot, P_THREADS)
        ds_operand = gl.convert_layout((p * dp).to(DTYPE), OPERAND)
        dk = warpgroup_mma_wait(0, deps=[warpgroup_mma(ds_operand, q, dk, is_async=True)])
        named_barrier_arrive(SLOT_FREE + slot, SLOT_THREADS)
    partition_barrier()
    v.store((dk * dk_scale).to(DTYPE))
    fence_async_shared()
    partition_barrier()
    tma.async_copy_shared_to_global(dk_desc, [batch, key_head, key_tile * ROWS, 0], v_tile)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_queries",
        "num_keys",
        "padded",
        "batches",
        "heads",
        "group",
        "together",
        "num_query_tiles",
        "num_key_tiles",
    ]
)
def wide_gradient_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc,
                         num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles,
                         num_key_tiles, scale_log2, dk_scale,
                         D: gl.constexpr, CAUSAL: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
    """One block per (tile of 64 keys, key head of the batch). Allocates and starts the partitions.

    Descriptors: (batch, heads, sequence, D) in boxes of (1, 1, 64, D); lse_desc and delta_desc flat float32
    in boxes of 64, `padded` rows a head, lse in log2 units with +inf past num_queries.
    """
    gdc_wait()
    gdc_launch_dependents()
    dtype: gl.constexpr = q_desc.dtype
    P_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=1, order=[1, 0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, D], do_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, ROWS, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, ROWS, D], v_desc.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout)
    p_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS * ROWS // 32, 32], P_LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    fence_async_shared()
    partition_barrier()
    descriptors = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc)
    buffers = (q_tiles, do_tiles, k_tile, v_tile, lse_tiles, delta_tiles, p_tiles)
    barriers = (q_full, do_full, k_full, v_full)
    problem = (num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles)
    gl.warp_specialize(
        [
            (_value_consumer, (descriptors, buffers, barriers, problem, scale_log2, dk_scale, D, CAUSAL)),
            (_key_consumer, (descriptors, buffers, barriers, problem, scale_log2, dk_scale, D, CAUSAL)),
            (_producer, (descriptors, buffers, barriers, problem, scale_log2, dk_scale, D, CAUSAL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
