"""The deterministic half of the backward: dQ of one tile of 128 queries, and delta = rowsum(dO * O) for the
other half.

dQ = scale dS K sums over all keys. Here one block sees them all, in a fixed order, so every bit is
reproducible and no float32 scratch is needed; the price is computing S and dP twice (7 products in all
instead of 5). Q and dO stay in shared memory, K and V stream past; S = Q K^T and dP = dO V^T have queries
along rows, so dS feeds dQ += dS K straight from registers and nothing is exchanged between the warp groups.

delta and lse (in log2 units, padded with +inf) are written out for `key_value_gradient_kernel`, which runs
next. Partitions, slots and barriers as there.
"""

# ruff: noqa: RUF059 (all partitions share one argument list; none needs all of it)

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

from lmkit.kernels.hopper.fragments import keep_columns_up_to
from lmkit.kernels.hopper.products import issue_product
from lmkit.kernels.hopper.synchronization import (
    FIRST_NAMED_BARRIER,
    named_barrier_arrive,
    named_barrier_wait,
)
from lmkit.kernels.hopper.tiles import count_key_blocks, locate_longest_first
from lmkit.kernels.hopper.versions import partition_barrier

QUERIES = gl.constexpr(128)  # query rows of a block, 64 for each consumer
SLOT_THREADS = gl.constexpr(288)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _producer(descriptors, buffers, barriers, problem, pointers, scale_log2, scale, shift, D: gl.constexpr,
              KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
              TAIL: gl.constexpr):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, dq_desc = descriptors
    q_tile, do_tile, k_tiles, v_tiles = buffers
    q_full, k_full, v_full = barriers
    num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles = problem
    element_bytes: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    place, flat_head = locate_longest_first(num_query_tiles, batches * heads, together)
    tile = num_query_tiles - 1 - place  # the last tile has the most keys
    batch = flat_head // heads
    head = flat_head % heads
    key_head = head // group
    blocks = count_key_blocks(tile, num_keys, QUERIES, KEYS, CAUSAL)
    mbarrier.expect(q_full, 2 * QUERIES * D * element_bytes)
    tma.async_copy_global_to_shared(q_desc, [batch, head, tile * QUERIES, 0], q_full, q_tile)
    tma.async_copy_global_to_shared(do_desc, [batch, head, tile * QUERIES, 0], q_full, do_tile)
    for step in range(blocks):
        first_key = (blocks - 1 - step) * KEYS
        k_slot = step % K_STAGES
        # K is given back one step late (dQ is waited for behind the next S), hence the - 1
        if step >= K_STAGES - 1:
            named_barrier_wait(FIRST_NAMED_BARRIER + k_slot, SLOT_THREADS)
        mbarrier.expect(k_full.index(k_slot), KEYS * D * element_bytes)
        tma.async_copy_global_to_shared(
            k_desc, [batch, key_head, first_key, 0], k_full.index(k_slot), k_tiles.index(k_slot)
        )
        v_slot = step % V_STAGES
        if step >= V_STAGES:
            named_barrier_wait(FIRST_NAMED_BARRIER + K_STAGES + v_slot, SLOT_THREADS)
        mbarrier.expect(v_full.index(v_slot), KEYS * D * element_bytes)
        tma.async_copy_global_to_shared(
            v_desc, [batch, key_head, first_key, 0], v_full.index(v_slot), v_tiles.index(v_slot)
        )
    # Every arrival of the consumers finds its partner before this warp leaves
    for i in gl.static_range(K_STAGES - 1):
        if blocks + i >= K_STAGES - 1:
            named_barrier_wait(FIRST_NAMED_BARRIER + (blocks + i) % K_STAGES, SLOT_THREADS)
    for i in gl.static_range(V_STAGES):
        if blocks + i >= V_STAGES:
            named_barrier_wait(FIRST_NAMED_BARRIER + K_STAGES + (blocks + i) % V_STAGES, SLOT_THREADS)


@gluon.jit
def _consumers(descriptors, buffers, barriers, problem, pointers, scale_log2, scale, shift, D: gl.constexpr,
               KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
               TAIL: gl.constexpr):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, dq_desc = descriptors
    q_tile, do_tile, k_tiles, v_tiles = buffers
    q_full, k_full, v_full = barriers
    num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles = problem
    lse_in, lse_out, delta_out, out, out_batch, out_head, out_row = pointers
    DTYPE: gl.constexpr = q_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, KEYS, 16]
    )
    DQ: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, D, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=DQ, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    # 16-byte loads of O, a row's elements within one warp
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    place, flat_head = locate_longest_first(num_query_tiles, batches * heads, together)
    tile = num_query_tiles - 1 - place  # the last tile has the most keys
    batch = flat_head // heads
    head = flat_head % heads
    flat_head = flat_head.to(gl.int64)
    blocks = count_key_blocks(tile, num_keys, QUERIES, KEYS, CAUSAL)
    rows = tile * QUERIES + gl.arange(0, QUERIES, ROW)
    lse = LOG2E * gl.load(
        lse_in + flat_head * num_queries + rows, mask=rows < num_queries, other=float("inf")
    )
    gl.store(lse_out + flat_head * padded + rows, lse - shift)
    out_rows = tile * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(1, OUT))
    out_columns = gl.arange(0, D, gl.SliceLayout(0, OUT))
    out_pointers = out + 8 * (batch * out_batch + head * out_head)
    out_offsets = gl.expand_dims(8 * (out_rows * out_row), 1) + gl.expand_dims(out_columns, 0)
    o = gl.load(out_pointers + out_offsets, mask=gl.expand_dims(out_rows < num_queries, 1), other=0.0)
    q = q_tile.reshape([QUERIES, D])
    do = do_tile.reshape([QUERIES, D])
    dq = warpgroup_mma_init(gl.zeros([QUERIES, D], gl.float32, DQ))
    mbarrier.wait(q_full, 0)
    delta = gl.convert_layout(gl.sum(o.to(gl.float32) * do.load(OUT).to(gl.float32), 1), ROW)
    gl.store(delta_out + flat_head * padded + rows, delta)
    for step in range(blocks):
        first_key = (blocks - 1 - step) * KEYS
        k_slot = step % K_STAGES
        v_slot = step % V_STAGES
        k = k_tiles.index(k_slot).reshape([KEYS, D])
        mbarrier.wait(k_full.index(k_slot), (step // K_STAGES) & 1)
        score_job = issue_product(q, k.permute((1, 0)), SCORES)
        dq = warpgroup_mma_wait(1, deps=[dq])
        named_barrier_arrive(FIRST_NAMED_BARRIER + (step + K_STAGES - 1) % K_STAGES, SLOT_THREADS)
        mbarrier.wait(v_full.index(v_slot), (step // V_STAGES) & 1)
        v = v_tiles.index(v_slot).reshape([KEYS, D])
        dp_job = issue_product(do, v.permute((1, 0)), SCORES)
        scores = warpgroup_mma_wait(1, deps=[score_job])
        exponent = scores * scale_log2 - gl.expand_dims(lse, 1)  # (128 queries, 128 keys)
        if CAUSAL:
            exponent = keep_columns_up_to(exponent, gl.minimum(rows, num_keys - 1) - first_key, -float("inf"))
        elif TAIL:
            exponent = keep_columns_up_to(exponent, rows * 0 + (num_keys - 1 - first_key), -float("inf"))
        p = gl.exp2(exponent)
        dp, p = warpgroup_mma_wait(0, deps=[dp_job, p])
        named_barrier_arrive(FIRST_NAMED_BARRIER + K_STAGES + v_slot, SLOT_THREADS)
        ds = (p * (dp - gl.expand_dims(delta, 1))).to(DTYPE)
        dq = warpgroup_mma(gl.convert_layout(ds, OPERAND), k, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    partition_barrier()  # Q has served: its tile stages dQ on the way out
    q.store((dq * scale).to(DTYPE))
    fence_async_shared()
    partition_barrier()
    tma.async_copy_shared_to_global(dq_desc, [batch, head, tile * QUERIES, 0], q_tile)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "out_batch",
        "out_head",
        "out_row",
        "num_queries",
        "num_keys",
        "padded",
        "batches",
        "heads",
        "group",
        "together",
        "num_query_tiles",
    ]
)
def query_gradient_kernel(q_desc, k_desc, v_desc, do_desc, dq_desc, lse_in, lse_out, delta_out, out,
                          out_batch: gl.int64, out_head: gl.int64, out_row: gl.int64,
                          num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles,
                          scale_log2, scale, shift, D: gl.constexpr, KEYS: gl.constexpr,
                          K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
                          TAIL: gl.constexpr):  # fmt: skip
    """One block per (query tile, head of the batch), `together` heads at a time (see locate_longest_first).
    Allocates and starts the partitions.

    out_batch, out_head, out_row: strides of out in units of 8 elements (so that 16-byte loads are known to
    be aligned). lse_in: (heads of the batch, num_queries), natural; lse_out, delta_out: (heads of the
    batch, padded), lse in log2 units less `shift`.
    """
    gdc_wait()
    gdc_launch_dependents()
    dtype: gl.constexpr = q_desc.dtype
    q_tile = gl.allocate_shared_memory(dtype, [1, 1, QUERIES, D], q_desc.layout)
    do_tile = gl.allocate_shared_memory(dtype, [1, 1, QUERIES, D], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [K_STAGES, 1, 1, KEYS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [V_STAGES, 1, 1, KEYS, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    partition_barrier()
    descriptors = (q_desc, k_desc, v_desc, do_desc, dq_desc)
    buffers = (q_tile, do_tile, k_tiles, v_tiles)
    barriers = (q_full, k_full, v_full)
    problem = (num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles)
    pointers = (lse_in, lse_out, delta_out, out, out_batch, out_head, out_row)
    gl.warp_specialize(
        [
            (_consumers, (descriptors, buffers, barriers, problem, pointers, scale_log2, scale, shift,
                         D, KEYS, K_STAGES, V_STAGES, CAUSAL, TAIL)),
            (_producer, (descriptors, buffers, barriers, problem, pointers, scale_log2, scale, shift,
                         D, KEYS, K_STAGES, V_STAGES, CAUSAL, TAIL)),
        ],
        [1],
        [24],
    )  # fmt: skip
