"""Attention backward on Hopper: dK and dV of one tile of 128 keys, and (fast mode) its share of dQ.

With P = exp(scale Q K^T - lse) and delta = rowsum(dO * O) (FlashAttention-2, Dao 2023, Algorithm 2):

    dV = P^T dO,   dP = dO V^T,   dS = P * (dP - delta),   dK = scale dS^T Q,   dQ = scale dS K

Who does what: K and V stay in shared memory; one **producer** warp streams Q and dO tiles with their lse
and delta; two **consumer** warp groups own 64 keys each. They compute the transposes, S^T = K Q^T and dP^T
= V dO^T: so P^T and dS^T come out as the register operands that dV += P^T dO and dK += dS^T Q need, and
lse, delta lie along columns. Only dS goes through shared memory, because dQ sums over the keys of both warp
groups.

The order inside a step keeps the tensor cores busy during the exponentials: S and dP are issued together;
while dP runs, P is computed; while dV runs, dS; while dK runs, dQ is handed on; the wait for dK happens in
the next step, behind its S.

dQ: tiles of different keys add up. ADD_DQ: the copy engine adds float32 tiles to a scratch in global memory
(order of arrival, so not reproducible); blocks start at different query tiles so that they do not queue for
the same rows. Otherwise dQ is left to `query_gradient_kernel`, and every bit is reproducible.

Barriers: `full` mbarriers as in the forward kernel. Slots are given back through named barriers (the
producer joins 256 consumer threads), because `mbarrier.arrive` would cost the consumers two barriers of
their own.
"""

# ruff: noqa: RUF059, SIM108 (all partitions share one argument list; none needs all of it;
# compile-time branches read better in full)

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

from lmkit.kernels.hopper.fragments import in_thread_order, keep_columns_from, multiply_half
from lmkit.kernels.hopper.products import issue_product
from lmkit.kernels.hopper.synchronization import (
    FIRST_NAMED_BARRIER,
    named_barrier_arrive,
    named_barrier_wait,
)
from lmkit.kernels.hopper.tiles import locate_longest_first
from lmkit.kernels.hopper.versions import partition_barrier, tma_add_to_global

KEYS = gl.constexpr(128)  # keys of a block, 64 for each consumer
STAGES = gl.constexpr(2)  # slots for Q and for dO
SLOT_THREADS = gl.constexpr(288)  # 256 of the consumers, 32 of the producer
NEVER = gl.constexpr(1 << 30)  # a first column that no query reaches


@gluon.jit
def _query_tiles(key_tile, num_query_tiles, QUERIES: gl.constexpr, CAUSAL: gl.constexpr):
    """(lowest query tile that sees these keys, number of them, the one to start with).

    Blocks that run at the same time mostly differ in key_tile: starting at the diagonal (causal) or at as
    many tiles down (full) spreads them over the queries, so their additions to dQ meet at different rows.
    """
    lowest = 0
    start = (key_tile * (KEYS // QUERIES)) % num_query_tiles
    if CAUSAL:
        # Keys that no query sees (more keys than queries) take the last tile, wholly masked: a loop that
        # may run zero times makes ptxas serialise the products (C7515)
        lowest = gl.minimum(key_tile * (KEYS // QUERIES), num_query_tiles - 1)
        start = lowest
    return lowest, num_query_tiles - lowest, start


@gluon.jit
def _next_query_tile(tile, head, lowest, start, num_query_tiles):
    """One tile down, round the corner at the end; back at `start` the next query head of the group begins."""
    tile += 1
    tile = gl.where(tile == num_query_tiles, lowest, tile)
    return tile, gl.where(tile == start, head + 1, head)


@gluon.jit
def _producer(descriptors, buffers, barriers, problem, scale_log2, dk_scale, dv_scale,
              QUERIES: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr,
              ADD_DQ: gl.constexpr, HALF_P: gl.constexpr):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc = descriptors
    q_tiles, do_tiles, k_tile, v_tile, lse_tiles, delta_tiles, ds_tile, dq_tile = buffers
    q_full, do_full, kv_full = barriers
    num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles = problem
    element_bytes: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    key_heads = heads // group
    key_tile, flat_key_head = locate_longest_first(num_key_tiles, batches * key_heads, together)
    batch = flat_key_head // key_heads
    first_head = (flat_key_head % key_heads) * group
    lowest, tiles, start = _query_tiles(key_tile, num_query_tiles, QUERIES, CAUSAL)
    mbarrier.expect(kv_full, 2 * KEYS * D * element_bytes)
    tma.async_copy_global_to_shared(
        k_desc, [batch, flat_key_head % key_heads, key_tile * KEYS, 0], kv_full, k_tile
    )
    tma.async_copy_global_to_shared(
        v_desc, [batch, flat_key_head % key_heads, key_tile * KEYS, 0], kv_full, v_tile
    )
    head = first_head
    tile = start
    for step in range(gl.maximum(tiles * group, 1)):
        slot = step % STAGES
        row = (batch * heads + head) * padded + tile * QUERIES
        # A Q slot is given back one step late (dK is waited for behind the next S), hence the - 1
        if step >= STAGES - 1:
            named_barrier_wait(FIRST_NAMED_BARRIER + slot, SLOT_THREADS)
        mbarrier.expect(q_full.index(slot), QUERIES * (D * element_bytes + 4))
        tma.async_copy_global_to_shared(
            q_desc, [batch, head, tile * QUERIES, 0], q_full.index(slot), q_tiles.index(slot)
        )
        tma.async_copy_global_to_shared(lse_desc, [row], q_full.index(slot), lse_tiles.index(slot))
        if step >= STAGES:
            named_barrier_wait(FIRST_NAMED_BARRIER + STAGES + slot, SLOT_THREADS)
        mbarrier.expect(do_full.index(slot), QUERIES * (D * element_bytes + 4))
        tma.async_copy_global_to_shared(
            do_desc, [batch, head, tile * QUERIES, 0], do_full.index(slot), do_tiles.index(slot)
        )
        tma.async_copy_global_to_shared(delta_desc, [row], do_full.index(slot), delta_tiles.index(slot))
        tile, head = _next_query_tile(tile, head, lowest, start, num_query_tiles)
    step = gl.maximum(tiles * group, 1)
    # Every arrival of the consumers finds its partner before this warp leaves
    for i in gl.static_range(STAGES - 1):
        if step + i >= STAGES - 1:
            named_barrier_wait(FIRST_NAMED_BARRIER + (step + i) % STAGES, SLOT_THREADS)
    for i in gl.static_range(STAGES):
        if step + i >= STAGES:
            named_barrier_wait(FIRST_NAMED_BARRIER + STAGES + (step + i) % STAGES, SLOT_THREADS)


@gluon.jit
def _consumers(descriptors, buffers, barriers, problem, scale_log2, dk_scale, dv_scale,
               QUERIES: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr,
               ADD_DQ: gl.constexpr, HALF_P: gl.constexpr):  # fmt: skip
    """Both warp groups in one partition of eight warps: rows 0-63 of each (128, N) tile are the first
    group's."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc = descriptors
    q_tiles, do_tiles, k_tile, v_tile, lse_tiles, delta_tiles, ds_tile, dq_tile = buffers
    q_full, do_full, kv_full = barriers
    num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles = problem
    DTYPE: gl.constexpr = q_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, QUERIES, 16]
    )
    GRADIENT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, D, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=GRADIENT, k_width=2)
    # dQ has QUERIES rows: 64 are one warp group's height, then the groups share its columns
    DQ: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[8, 1] if QUERIES == 128 else [4, 2],
        instr_shape=[16, D if QUERIES == 128 else D // 2, 16],
    )
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    key_heads = heads // group
    key_tile, flat_key_head = locate_longest_first(num_key_tiles, batches * key_heads, together)
    batch = flat_key_head // key_heads
    first_head = (flat_key_head % key_heads) * group
    lowest, tiles, start = _query_tiles(key_tile, num_query_tiles, QUERIES, CAUSAL)
    k = k_tile.reshape([KEYS, D])
    v = v_tile.reshape([KEYS, D])
    keys = key_tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    dv = gl.zeros([KEYS, D], gl.float32, GRADIENT)
    dk = warpgroup_mma_init(gl.zeros([KEYS, D], gl.float32, GRADIENT))
    mbarrier.wait(kv_full, 0)
    head = first_head
    tile = start
    for step in range(gl.maximum(tiles * group, 1)):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        q = q_tiles.index(slot).reshape([QUERIES, D])
        do = do_tiles.index(slot).reshape([QUERIES, D])
        mbarrier.wait(q_full.index(slot), phase)
        score_job = issue_product(k, q.permute((1, 0)), SCORES)
        lse = lse_tiles.index(slot).load(COLUMN)
        if HALF_P:  # short of registers: have dK of the previous step out of the way first
            dk = warpgroup_mma_wait(1, deps=[dk])
            named_barrier_arrive(FIRST_NAMED_BARRIER + (step + STAGES - 1) % STAGES, SLOT_THREADS)
        mbarrier.wait(do_full.index(slot), phase)
        dp_job = issue_product(v, do.permute((1, 0)), SCORES)
        if HALF_P:
            scores = warpgroup_mma_wait(1, deps=[score_job])
        else:
            scores, dk = warpgroup_mma_wait(1, deps=[score_job, dk])
            named_barrier_arrive(FIRST_NAMED_BARRIER + (step + STAGES - 1) % STAGES, SLOT_THREADS)
        exponent = scores * scale_log2 - gl.expand_dims(lse, 0)  # (128 keys, QUERIES): transposed
        if CAUSAL:
            # query >= key, and keys past the end see nobody (P might overflow there, and inf * 0 is not 0)
            # Only at the diagonal; but with D = 128 this branch makes ptxas serialise the products (C7512):
            # always, then
            if D == 128 or TAIL or tile * QUERIES < (key_tile + 1) * KEYS:
                first_query = gl.where(keys < num_keys, keys - tile * QUERIES, NEVER)
                exponent = keep_columns_from(exponent, first_query, -float("inf"))
        elif TAIL:
            exponent = gl.where(gl.expand_dims(keys < num_keys, 1), exponent, -float("inf"))
        p = gl.exp2(exponent)
        p_operand = gl.convert_layout(p.to(DTYPE), OPERAND)
        if HALF_P:
            p = p.to(gl.float16)
        delta = delta_tiles.index(slot).load(COLUMN)
        dv_job = warpgroup_mma(p_operand, do, dv, is_async=True)
        dp, p = warpgroup_mma_wait(1, deps=[dp_job, p])
        dp = dp - gl.expand_dims(delta, 0)
        if HALF_P:
            ds = multiply_half(p, dp, DTYPE)
        else:
            ds = (p * dp).to(DTYPE)
        ds_operand = gl.convert_layout(ds, OPERAND)
        if ADD_DQ:
            ds_tile.store(ds)
            fence_async_shared()
            # By the barrier the copy engine has read the previous dQ out of its tile. (A store_wait that no
            # barrier follows directly makes Triton add one.)
            tma.store_wait(0)
            partition_barrier()
            dq_job = issue_product(ds_tile.permute((1, 0)), k, DQ)
            dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
            dq, dv, p_operand = warpgroup_mma_wait(1, deps=[dq_job, dv_job, p_operand])
            named_barrier_arrive(FIRST_NAMED_BARRIER + STAGES + slot, SLOT_THREADS)
            dq_tile.store(in_thread_order(dq))
            fence_async_shared()
            partition_barrier()
            first_row = (batch * heads + head) * padded + tile * QUERIES
            tma_add_to_global(dq_desc, [first_row * (D // 32), 0], dq_tile)
        else:
            dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
            dv, p_operand = warpgroup_mma_wait(1, deps=[dv_job, p_operand])
            named_barrier_arrive(FIRST_NAMED_BARRIER + STAGES + slot, SLOT_THREADS)
        tile, head = _next_query_tile(tile, head, lowest, start, num_query_tiles)
    dk = warpgroup_mma_wait(0, deps=[dk])
    # K and V have served: their tiles stage dK and dV on the way out
    partition_barrier()
    v.store((dv * dv_scale).to(DTYPE))
    k.store((dk * dk_scale).to(DTYPE))
    fence_async_shared()
    partition_barrier()
    tma.async_copy_shared_to_global(dv_desc, [batch, flat_key_head % key_heads, key_tile * KEYS, 0], v_tile)
    tma.async_copy_shared_to_global(dk_desc, [batch, flat_key_head % key_heads, key_tile * KEYS, 0], k_tile)
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
def key_value_gradient_kernel(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc,
                              num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles,
                              num_key_tiles, scale_log2, dk_scale, dv_scale,
                              QUERIES: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr,
                              ADD_DQ: gl.constexpr, HALF_P: gl.constexpr):  # fmt: skip
    """One block per (key tile, key head of the batch), `together` heads at a time (see locate_longest_first).
    Allocates and starts the partitions.

    Descriptors: (batch, heads, sequence, D) in boxes of (1, 1, QUERIES or 128, D); lse_desc and delta_desc
    flat float32, `padded` rows a head, lse in log2 units with +inf past num_queries; dq_desc float32, rows
    of 32 (see in_thread_order). TAIL: num_keys is no multiple of 128.

    HALF_P saves the registers that D = 64 lacks (steps of 128 queries) and keeps P for dS in float16, four
    times finer than the bf16 that dV takes. So that small P do not underflow, lse comes less a `shift`
    (15): P is 2^15 times itself, at most 2^15, and so are dV, dS and all that follows; dk_scale, dv_scale
    (and the finishing pass) take it out again. What is below 2^-39 all the same adds nothing to dK and dQ, so a
    key that nobody attends to by more (2^-29 and below: with less precision) has a dK of zero.
    """
    gdc_wait()
    gdc_launch_dependents()
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, QUERIES, D], do_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, KEYS, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, KEYS, D], v_desc.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], lse_desc.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], delta_desc.layout)
    if ADD_DQ:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype)
        ds_tile = gl.allocate_shared_memory(dtype, [KEYS, QUERIES], ds_layout)
        dq_tile = gl.allocate_shared_memory(gl.float32, [QUERIES * D // 32, 32], dq_desc.layout)
    else:
        ds_tile = lse_tiles
        dq_tile = lse_tiles
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
    mbarrier.init(kv_full, count=1)
    fence_async_shared()
    partition_barrier()
    descriptors = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc)
    buffers = (q_tiles, do_tiles, k_tile, v_tile, lse_tiles, delta_tiles, ds_tile, dq_tile)
    barriers = (q_full, do_full, kv_full)
    problem = (num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles, num_key_tiles)
    gl.warp_specialize(
        [
            (_consumers, (descriptors, buffers, barriers, problem, scale_log2, dk_scale, dv_scale,
                         QUERIES, D, CAUSAL, TAIL, ADD_DQ, HALF_P)),
            (_producer, (descriptors, buffers, barriers, problem, scale_log2, dk_scale, dv_scale,
                         QUERIES, D, CAUSAL, TAIL, ADD_DQ, HALF_P)),
        ],
        [1],
        [24],
    )  # fmt: skip
