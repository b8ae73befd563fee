"""Compute dQ of 128 queries on Hopper, deterministically, and delta = scale rowsum(dO * O) for the kernel of dK and
dV.

dQ = dS K sums over all keys. Here one CTA sees them all, in a fixed order, so every bit is reproducible and no
float32 scratch is needed; the price is computing S and dP twice (7 products in all instead of 5). Q and dO stay in
shared memory, K and V stream past. S = Q K^T and dP = dO V^T have queries along rows, so dS feeds dQ += dS K
straight from registers and the warp groups exchange nothing.

delta and lse (in log2 units, padded with +inf) are written out for `backward_dqdkdv_lockstep` or
`backward_dkdv_d256`, which runs next.

A **producer** warp loads with TMA; two **consumer** warp groups, one partition of eight warps, own 64 queries each.
Timeline of a step (a block of keys) of a consumer. Every product is an asynchronous wgmma:

    producer     | TMA K(j+1) | TMA V(j+1)                     |
    consumer     | wait K(j)  | wait V(j)    | P(j) = exp      | dS(j)            |
    tensor cores | dQ(j-1)    | S(j)         | dP(j)           | then dQ(j) ...   |

At D = 64 and 128 the warp groups take turns to issue S and dP, so that the exponentials of one meet the products of
the other.

| barrier | who arrives | who waits, for which phase |
|-|-|-|
| q_full | the producer's `expect`, then TMA's bytes of Q and dO | both consumers, phase 0, once |
| k_full [slot] | the producer's `expect`, then the bytes of K | both consumers, (step // K_STAGES) & 1 |
| v_full [slot] | the producer's `expect`, then the bytes of V | both consumers, (step // V_STAGES) & 1 |
| named, K_FREE + slot | both consumers, one step late, when dQ of the slot's step is done | the producer |
| named, V_FREE + slot | both consumers, when dP of the slot's step is done | the producer |
| named, TURN + consumer | the other consumer, when its S and dP are issued | this one, before its S |

Nothing spills. D = 256 takes 225 of 227 KiB of shared memory, hence one slot of V.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmkit.kernels.flash.tiles import LOG2_E
from lmkit.kernels.hopper import barriers as sync
from lmkit.kernels.hopper import schedule, wgmma
from lmkit.kernels.hopper.barriers import partition_barrier
from lmkit.kernels.hopper.tma import allocate_slots, allocate_tile, fetch_tile, send_through, tma_load

QUERIES = gl.constexpr(128)  # query rows of a block, 64 for each consumer
K_FREE = gl.constexpr(sync.FIRST_NAMED_BARRIER.value)  # named barriers, one a slot; V_FREE's follow
TURN = gl.constexpr(14)  # named barriers 14 and 15: one a warp group

# Of global memory: (batch, heads, sequence, HEAD_DIM)
Descriptors = namedtuple("Descriptors", ["q", "k", "v", "do", "dq"])
# In shared memory; k and v by slots
Tiles = namedtuple("Tiles", ["q", "do", "k", "v"])
# mbarriers: one for both Q and dO, one a slot of K, one a slot of V (see the module)
Barriers = namedtuple("Barriers", ["q_full", "k_full", "v_full"])
# The sizes of a call, as `backward_dqdkdv_lockstep.Problem` explains them
Problem = namedtuple(
    "Problem",
    ["num_queries", "num_keys", "padded", "batches", "heads", "group", "together", "num_query_tiles"],
)

# What is read and written without TMA (see dq_kernel)
Pointers = namedtuple(
    "Pointers", ["lse_in", "lse_out", "delta_out", "out", "out_batch", "out_head", "out_row"]
)
# The compile-time parameters of `dq_kernel`
Shape = namedtuple(
    "Shape", ["D", "HEAD_DIM", "USED", "KEYS", "K_STAGES", "V_STAGES", "CAUSAL", "TAIL", "FIRST"]
)


@gluon.jit
def _locate(problem):
    """Return (query tile, batch * heads + head) of this CTA."""
    num_heads = problem.batches * problem.heads
    place, flat_head = schedule.locate_longest_first(
        gl.program_id(0), problem.num_query_tiles, num_heads, problem.together
    )
    return problem.num_query_tiles - 1 - place, flat_head  # the last tile has the most keys


@gluon.jit
def _count_blocks(tile, batch, problem, first, shape):
    """Return (key blocks up to the tile's last query, how many of them a CTA meets: not those that `first` hides)."""
    blocks = schedule.count_key_blocks(tile, problem.num_keys, QUERIES, shape.KEYS, shape.CAUSAL)
    seen = blocks
    if shape.FIRST:
        seen -= schedule.load_bound(first, batch, tile * QUERIES, problem.num_queries) // shape.KEYS
    return blocks, seen


@gluon.jit
def _producer(call, shape):
    """Load Q and dO once with TMA, then K and V, from the last block that the tile sees to the first."""
    descriptors, tiles, barriers, problem, _, _, _, first = call
    V_FREE: gl.constexpr = K_FREE + shape.K_STAGES
    tile, flat_head = _locate(problem)
    batch = flat_head // problem.heads
    head = flat_head % problem.heads
    key_head = head // problem.group
    blocks, seen = _count_blocks(tile, batch, problem, first, shape)
    mbarrier.expect(barriers.q_full, 2 * descriptors.q.block_type.nbytes)
    query_box = [batch, head, tile * QUERIES, 0]
    tma_load(descriptors.q, query_box, barriers.q_full, tiles.q)
    tma_load(descriptors.do, query_box, barriers.q_full, tiles.do)
    for step in range(seen):
        first_key = (blocks - 1 - step) * shape.KEYS
        k_slot = step % shape.K_STAGES
        sync.await_slot(K_FREE, step, shape.K_STAGES, 1)  # dQ is waited for behind the next S
        fetch_tile(descriptors.k, batch, key_head, first_key, barriers.k_full, tiles.k, k_slot)
        v_slot = step % shape.V_STAGES
        sync.await_slot(V_FREE, step, shape.V_STAGES, 0)
        fetch_tile(descriptors.v, batch, key_head, first_key, barriers.v_full, tiles.v, v_slot)
    sync.await_last_slots(K_FREE, seen, shape.K_STAGES, 1)
    sync.await_last_slots(V_FREE, seen, shape.V_STAGES, 0)


@gluon.jit
def _consumers(call, shape):
    """Compute as both warp groups, in one partition of eight warps: rows 0-63 of a (128, N) tile are the first's."""
    D: gl.constexpr = shape.D
    descriptors, tiles, barriers, problem, pointers, scale_log2, scale, first = call
    V_FREE: gl.constexpr = K_FREE + shape.K_STAGES
    TURNS: gl.constexpr = D < 256  # D = 256 has one slot for V only
    DTYPE: gl.constexpr = descriptors.q.dtype
    SCORES: gl.constexpr = wgmma.accumulator_layout(shape.KEYS, 8)
    SCORES_PRODUCTS: gl.constexpr = wgmma.count_score_wgmmas(shape.USED, D)
    DQ: gl.constexpr = wgmma.accumulator_layout(D, 8)
    OPERAND: gl.constexpr = wgmma.operand_layout(DQ)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    # 16-byte loads of O, a row's elements within one warp
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    num_queries = problem.num_queries
    tile, flat_head = _locate(problem)
    batch = flat_head // problem.heads
    head = flat_head % problem.heads
    flat_head = flat_head.to(gl.int64)
    blocks, seen = _count_blocks(tile, batch, problem, first, shape)
    rows = tile * QUERIES + gl.arange(0, QUERIES, ROW)
    bounds = rows
    if shape.FIRST:
        bounds = schedule.load_bounds(first, batch, rows, num_queries)
    lse = LOG2_E * gl.load(
        pointers.lse_in + flat_head * num_queries + rows, mask=rows < num_queries, other=float("inf")
    )
    gl.store(pointers.lse_out + flat_head * problem.padded + rows, lse)
    out_rows = tile * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(1, OUT))
    out_columns = gl.arange(0, D, gl.SliceLayout(0, OUT))
    out_pointers = pointers.out + 8 * (batch * pointers.out_batch + head * pointers.out_head)
    out_offsets = gl.expand_dims(8 * (out_rows * pointers.out_row), 1) + gl.expand_dims(out_columns, 0)
    out_inside = wgmma.inside(out_rows < num_queries, out_columns, shape.HEAD_DIM)
    o = gl.load(out_pointers + out_offsets, mask=out_inside, other=0.0)
    q = tiles.q.reshape([QUERIES, D])
    do = tiles.do.reshape([QUERIES, D])
    dq = warpgroup_mma_init(gl.zeros([QUERIES, D], gl.float32, DQ))
    mbarrier.wait(barriers.q_full, 0)
    delta = scale * gl.convert_layout(gl.sum(o.to(gl.float32) * do.load(OUT).to(gl.float32), 1), ROW)
    gl.store(pointers.delta_out + flat_head * problem.padded + rows, delta)
    if TURNS:
        sync.begin_turns(TURN)
    for step in range(seen):
        first_key = (blocks - 1 - step) * shape.KEYS
        k_slot = step % shape.K_STAGES
        v_slot = step % shape.V_STAGES
        k = tiles.k.index(k_slot).reshape([shape.KEYS, D])
        mbarrier.wait(barriers.k_full.index(k_slot), (step // shape.K_STAGES) & 1)
        if TURNS:
            sync.take_turn(TURN)
        score_job = wgmma.issue_scores(q, k, shape.USED, SCORES)
        dq = warpgroup_mma_wait(SCORES_PRODUCTS, deps=[dq])
        sync.named_barrier_arrive(K_FREE + (step + shape.K_STAGES - 1) % shape.K_STAGES, sync.SLOT_THREADS)
        mbarrier.wait(barriers.v_full.index(v_slot), (step // shape.V_STAGES) & 1)
        v = tiles.v.index(v_slot).reshape([shape.KEYS, D])
        dp_job = wgmma.issue_scores(do, v, shape.USED, SCORES)
        if TURNS:
            sync.pass_turn(TURN)
        scores = warpgroup_mma_wait(SCORES_PRODUCTS, deps=[score_job])
        exponent = scores * scale_log2 - gl.expand_dims(lse, 1)  # (128 queries, KEYS)
        exponent = wgmma.hide_keys(exponent, rows, first_key, problem.num_keys, shape.CAUSAL, shape.TAIL)
        if shape.FIRST:
            exponent = wgmma.keep_columns_from(exponent, bounds - first_key, -float("inf"))
        p = gl.exp2(exponent)
        dp, p = warpgroup_mma_wait(0, deps=[dp_job, p])
        sync.named_barrier_arrive(V_FREE + v_slot, sync.SLOT_THREADS)
        ds = (p * (dp * scale - gl.expand_dims(delta, 1))).to(DTYPE)
        dq = warpgroup_mma(gl.convert_layout(ds, OPERAND), k, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    if TURNS:
        sync.end_turns(TURN)
    # Q is done with: its tile stages dQ on the way out.
    partition_barrier()
    send_through(tiles.q, dq.to(DTYPE), descriptors.dq, batch, head, tile)


@gluon.jit(do_not_specialize=["out_batch", "out_head", "out_row", *Problem._fields])
def dq_kernel(q_desc, k_desc, v_desc, do_desc, dq_desc, lse_in, lse_out, delta_out, out, first,
                          out_batch: gl.int64, out_head: gl.int64, out_row: gl.int64,
                          num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles,
                          scale_log2, scale, D: gl.constexpr, HEAD_DIM: gl.constexpr, USED: gl.constexpr,
                          KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
                          CAUSAL: gl.constexpr, TAIL: gl.constexpr, FIRST: gl.constexpr):  # fmt: skip
    """Allocate and start the partitions of one CTA per (query tile, head of the batch).

    HEAD_DIM: of the tensors; D, the width of their boxes, may be larger. USED: of the D columns S and dP take these
    (see issue_scores). out_batch, out_head, out_row: strides of out in units of 8 elements (so that 16-byte loads
    are known to be aligned). lse_in: (heads of the batch, num_queries), natural; lse_out, delta_out: (heads of the
    batch, padded), lse in log2 units, delta times scale. first: read only with FIRST, see `schedule.load_bound`.
    """
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    tiles = Tiles(
        allocate_tile(q_desc),
        allocate_tile(do_desc),
        allocate_slots(k_desc, K_STAGES),
        allocate_slots(v_desc, V_STAGES),
    )
    q_full = sync.make_mbarrier()
    k_full = sync.make_mbarriers(K_STAGES)
    v_full = sync.make_mbarriers(V_STAGES)
    fence_async_shared()
    partition_barrier()
    descriptors = Descriptors(q_desc, k_desc, v_desc, do_desc, dq_desc)
    barriers = Barriers(q_full, k_full, v_full)
    problem = Problem(num_queries, num_keys, padded, batches, heads, group, together, num_query_tiles)
    pointers = Pointers(lse_in, lse_out, delta_out, out, out_batch, out_head, out_row)
    call = (descriptors, tiles, barriers, problem, pointers, scale_log2, scale, first)
    shape: gl.constexpr = Shape(D, HEAD_DIM, USED, KEYS, K_STAGES, V_STAGES, CAUSAL, TAIL, FIRST)
    gl.warp_specialize([(_consumers, (call, shape)), (_producer, (call, shape))], [1], [24])
