"""Attention forward on Hopper: O = softmax(Q K^T scale) V and the log-sum-exp, in one persistent,
warp-specialised kernel.

Who does what (FlashAttention-3, Shah et al. 2024, Sections 3.1 and 3.2):

* one **producer** warp copies Q, K and V tiles into shared memory with the tensor memory accelerator (TMA),
  as far ahead as there are free slots;
* two or three **consumer** warp groups own 64 query rows each. In step j a consumer issues S_j = Q K_j^T and,
  right behind, O += P_{j-1} V_{j-1}; while the second product runs it turns S_j into P_j. P stays in
  registers;
* of two consumers, one issues its products while the other computes exponentials (ping-pong); three find
  enough to overlap without taking turns.

Barriers, each with its reason: `full` mbarriers tell consumers that a tile has landed (TMA counts its
bytes), `empty` ones tell the producer that a slot may be overwritten; the two named barriers are the
ping-pong's tokens.

Softmax without a running maximum. The usual online softmax takes the maximum of every block, and with it
shuffles and a rescaling of O. Here the row maximum of the first block is the REFERENCE of the row: P =
2^(score - reference), the row sum l and O all carry that factor, which cancels in O / l, so any reference
gives the exact softmax as long as nothing overflows. One vote per block guards that: when a thread's part of
the block's row sum passes `lift_above`, or is NaN, the consumer computes the block's scores once more (its K
has not been given back yet), lifts its rows' references to the new maxima and rescales O and l. Ordinary data
pay two compares and a barrier a block, data that jump one more product and its exponentials where they jump,
and the result is exact on all of them: nothing that overflowed has yet reached O or l.

What the static reference costs is one rounding: the largest P of a row is not exactly 1, so where one key takes
most of a row, the 16-bit rounding of its P shows in O (2.3e-3 where an online softmax has 1.7e-3), and through
delta in dQ and dK. SUM_ROUNDED divides O by the sum of the rounded P instead, where it cancels; the log-sum-exp
keeps the exact sum. That is 128 instructions a block of 128 keys: 1 to 2% at D = 256, but 8 to 12% at D = 128 and
14 to 19% at D = 64, where issue slots are short.
"""

# ruff: noqa: RUF059, SIM102, SIM108 (all partitions share one argument list; none needs all of it;
# compile-time conditions stand apart from those of the run)

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

from lmkit.kernels.hopper.fragments import (
    exp2_unfused,
    keep_columns_up_to,
    pack_pairs,
    rounded_sums_within_threads,
    scale_rows,
    sum_within_threads,
    unpack_pairs,
)
from lmkit.kernels.hopper.products import issue_product
from lmkit.kernels.hopper.synchronization import (
    FIRST_NAMED_BARRIER,
    any_exceeds,
    declare_vote,
    named_barrier_arrive,
    named_barrier_wait,
)
from lmkit.kernels.hopper.tiles import count_key_blocks, count_tiles, locate_tile
from lmkit.kernels.hopper.versions import partition_barrier

ROWS = gl.constexpr(64)  # query rows of one consumer: the height of a wgmma
BOTH_CONSUMERS = gl.constexpr(256)  # threads
# Finite, so that a row whose first block is masked keeps 2^(-inf - reference) = 0
LOWEST_REFERENCE = gl.constexpr(-1.0e30)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def lift_above(dtype):
    """Limit of a thread's part of a block's row sum, as a PTX number: 2^60 leaves O and l room for 2^60
    such blocks (bf16 P has float32's range), 2^12 keeps P within float16."""
    return "0f45800000" if dtype == gl.float16 else "0f5D800000"


@gluon.jit
def _producer(descriptors, buffers, barriers, problem, lse, scale_log2, D: gl.constexpr,
              KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr,
              CONSUMERS: gl.constexpr, OWN_O: gl.constexpr, SUM_ROUNDED: gl.constexpr):  # fmt: skip
    """The copying warp. K before Q in the first turn: the consumers' last step with the old Q hides both."""
    q_desc, k_desc, v_desc, o_desc = descriptors
    q_tiles, k_tiles, v_tiles, o_tiles = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    num_queries, num_keys, heads, group, num_tiles, num_heads = problem
    TILE: gl.constexpr = ROWS * CONSUMERS
    element_bytes: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    block = 0
    turns, pairs = count_tiles(num_tiles, num_heads, CAUSAL)
    for turn in range(turns):
        tile, flat_head = locate_tile(turn, num_tiles, num_heads, pairs, CAUSAL)
        batch = flat_head // heads
        head = flat_head % heads
        key_head = head // group
        blocks = count_key_blocks(tile, num_keys, TILE, KEYS, CAUSAL)
        for i in range(blocks):
            first_key = (blocks - 1 - i) * KEYS  # from the diagonal back: the masked block comes first
            slot = block % STAGES
            free = ((block // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), free)
            mbarrier.expect(k_full.index(slot), KEYS * D * element_bytes)
            tma.async_copy_global_to_shared(
                k_desc, [batch, key_head, first_key, 0], k_full.index(slot), k_tiles.index(slot)
            )
            if i == 0:
                for c in gl.static_range(CONSUMERS):
                    mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
                    mbarrier.expect(q_full.index(c), ROWS * D * element_bytes)
                    tma.async_copy_global_to_shared(
                        q_desc, [batch, head, tile * TILE + c * ROWS, 0], q_full.index(c), q_tiles.index(c)
                    )
            mbarrier.wait(v_empty.index(slot), free)
            mbarrier.expect(v_full.index(slot), KEYS * D * element_bytes)
            tma.async_copy_global_to_shared(
                v_desc, [batch, key_head, first_key, 0], v_full.index(slot), v_tiles.index(slot)
            )
            block += 1


@gluon.jit
def _lift(scores, scale_log2, reference):
    """New references: the maxima so far. Returns P and its sums under them, and the factor for everything older."""
    highest = gl.maximum(gl.max(scores, 1) * scale_log2, reference)
    factor = gl.exp2(reference - highest)
    p = exp2_unfused(scores, scale_log2, highest)
    return p, sum_within_threads(p), highest, factor


@gluon.jit
def _consumer(index: gl.constexpr, descriptors, buffers, barriers, problem, lse, scale_log2, D: gl.constexpr,
              KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr,
              CONSUMERS: gl.constexpr, OWN_O: gl.constexpr, SUM_ROUNDED: gl.constexpr):  # fmt: skip
    """One warp group: 64 rows of every tile. `block` counts key blocks over all tiles: slot and phase
    follow from it."""
    q_desc, k_desc, v_desc, o_desc = descriptors
    q_tiles, k_tiles, v_tiles, o_tiles = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    num_queries, num_keys, heads, group, num_tiles, num_heads = problem
    TILE: gl.constexpr = ROWS * CONSUMERS
    DTYPE: gl.constexpr = q_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    PROBABILITIES: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    PING_PONG: gl.constexpr = CONSUMERS == 2
    my_turn: gl.constexpr = FIRST_NAMED_BARRIER + index
    other_turn: gl.constexpr = FIRST_NAMED_BARRIER + 1 - index
    my_vote: gl.constexpr = FIRST_NAMED_BARRIER + CONSUMERS + index
    declare_vote(index)
    block = 0
    if PING_PONG and index == 1:
        named_barrier_arrive(other_turn, BOTH_CONSUMERS)  # consumer 0 goes first
    turns, pairs = count_tiles(num_tiles, num_heads, CAUSAL)
    for turn in range(turns):
        tile, flat_head = locate_tile(turn, num_tiles, num_heads, pairs, CAUSAL)
        blocks = count_key_blocks(tile, num_keys, TILE, KEYS, CAUSAL)
        first_row = tile * TILE + index * ROWS
        own_blocks = blocks
        if CAUSAL and TILE > KEYS:
            own_blocks = gl.minimum(blocks, gl.cdiv(first_row + ROWS, KEYS))
            # One block may lie wholly above this consumer's diagonal: hand it back unread
            if own_blocks < blocks:
                if PING_PONG:  # one turn a block, also for this one
                    named_barrier_wait(my_turn, BOTH_CONSUMERS)
                    named_barrier_arrive(other_turn, BOTH_CONSUMERS)
                mbarrier.wait(k_full.index(block % STAGES), (block // STAGES) & 1)
                mbarrier.arrive(k_empty.index(block % STAGES), count=1)
                mbarrier.wait(v_full.index(block % STAGES), (block // STAGES) & 1)
                mbarrier.arrive(v_empty.index(block % STAGES), count=1)
                block += 1
        rows = first_row + gl.arange(0, ROWS, ROW)

        # First block, alone in flight. It is the only one that meets the diagonal or the end of the keys.
        mbarrier.wait(q_full.index(index), turn & 1)
        q = q_tiles.index(index).reshape([ROWS, D])
        slot = block % STAGES
        phase = (block // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        if PING_PONG:
            if PING_PONG:
                named_barrier_wait(my_turn, BOTH_CONSUMERS)
        k = k_tiles.index(slot).reshape([KEYS, D])
        score_job = issue_product(q, k.permute((1, 0)), SCORES)
        if PING_PONG:
            if PING_PONG:
                named_barrier_arrive(other_turn, BOTH_CONSUMERS)
        scores = warpgroup_mma_wait(0, deps=[score_job])  # (64 rows, 128 keys)
        mbarrier.arrive(k_empty.index(slot), count=1)
        first_key = (own_blocks - 1) * KEYS
        if CAUSAL:
            scores = keep_columns_up_to(scores, gl.minimum(rows, num_keys - 1) - first_key, -float("inf"))
        elif TAIL:
            scores = keep_columns_up_to(scores, rows * 0 + (num_keys - 1 - first_key), -float("inf"))
        reference = gl.maximum(gl.max(scores, 1) * scale_log2, LOWEST_REFERENCE)
        p = exp2_unfused(scores, scale_log2, reference)
        sums = sum_within_threads(p)
        rounded = gl.zeros_like(sums)
        packed = pack_pairs(p, DTYPE)
        mbarrier.wait(k_full.index((block + 1) % STAGES), ((block + 1) // STAGES) & 1, pred=own_blocks > 1)
        mbarrier.wait(v_full.index(slot), phase)
        acc = gl.zeros([ROWS, D], gl.float32, OUT)
        block += 1

        for i in range(1, own_blocks):
            slot = block % STAGES
            previous = (block - 1) % STAGES
            # K of this block and V of the previous one were waited for at the end of the previous step
            probabilities = unpack_pairs(packed, DTYPE, PROBABILITIES)
            if PING_PONG:
                named_barrier_wait(my_turn, BOTH_CONSUMERS)
            k = k_tiles.index(slot).reshape([KEYS, D])
            v = v_tiles.index(previous).reshape([KEYS, D])
            score_job = issue_product(q, k.permute((1, 0)), SCORES)
            out_job = warpgroup_mma(probabilities, v, acc, is_async=True)
            if PING_PONG:
                named_barrier_arrive(other_turn, BOTH_CONSUMERS)
            if SUM_ROUNDED:
                rounded = rounded + rounded_sums_within_threads(packed, DTYPE, sums)
            scores = warpgroup_mma_wait(1, deps=[score_job])
            p = gl.exp2(scores * scale_log2 - gl.expand_dims(reference, 1))
            block_sums = sum_within_threads(p)
            # Waiting for the next operands HERE matters: the loop in it is a border between basic blocks,
            # which keeps ptxas from moving the wait for O += P V above the exponentials that should overlap
            # with it.
            mbarrier.wait(
                k_full.index((block + 1) % STAGES), ((block + 1) // STAGES) & 1, pred=i + 1 < own_blocks
            )
            mbarrier.wait(v_full.index(slot), (block // STAGES) & 1)
            # the softmax's results as dependencies: they are computed before this wait, not after
            acc, p, block_sums = warpgroup_mma_wait(0, deps=[out_job, p, block_sums])
            if any_exceeds(block_sums, lift_above(DTYPE), my_vote, index) != 0:
                scores = warpgroup_mma_wait(0, deps=[issue_product(q, k.permute((1, 0)), SCORES)])
                p, block_sums, reference, factor = _lift(scores, scale_log2, reference)
                sums, acc = scale_rows(sums, factor), scale_rows(acc, factor)
                rounded = scale_rows(rounded, factor)
            mbarrier.arrive(v_empty.index(previous), count=1)
            mbarrier.arrive(k_empty.index(slot), count=1)
            sums = sums + block_sums
            packed = pack_pairs(p, DTYPE)
            block += 1

        if OWN_O:
            mbarrier.arrive(q_empty.index(index), count=1)
        slot = (block - 1) % STAGES
        v = v_tiles.index(slot).reshape([KEYS, D])
        out_job = warpgroup_mma(unpack_pairs(packed, DTYPE, PROBABILITIES), v, acc, is_async=True)
        row_sum = gl.convert_layout(gl.sum(sums, 1), ROW)
        rounded_sum = row_sum
        if SUM_ROUNDED:
            rounded = rounded + rounded_sums_within_threads(packed, DTYPE, sums)
            rounded_sum = gl.convert_layout(gl.sum(rounded, 1), ROW)
        acc = warpgroup_mma_wait(0, deps=[out_job])
        mbarrier.arrive(v_empty.index(slot), count=1)
        out = scale_rows(acc, 1.0 / rounded_sum)
        row_lse = (reference + gl.log2(row_sum)) * LN2
        gl.store(lse + flat_head.to(gl.int64) * num_queries + rows, row_lse, mask=rows < num_queries)
        # Through a tile of its own, O leaves while the next Q lands; where there is no room for one, through Q's
        if OWN_O:
            tma.store_wait(0)
        o_tiles.index(index).reshape([ROWS, D]).store(out.to(DTYPE))
        fence_async_shared()
        partition_barrier()
        tma.async_copy_shared_to_global(
            o_desc, [flat_head // heads, flat_head % heads, first_row, 0], o_tiles.index(index)
        )
        if not OWN_O:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(index), count=1)
    tma.store_wait(0)
    if PING_PONG and index == 0:
        named_barrier_wait(my_turn, BOTH_CONSUMERS)  # takes the token that consumer 1 gave last


@gluon.jit(do_not_specialize=["num_queries", "num_keys", "heads", "group", "num_tiles", "num_heads"])
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse, num_queries, num_keys, heads, group, num_tiles,
                   num_heads, scale_log2,
                   D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
                   TAIL: gl.constexpr, CONSUMERS: gl.constexpr, OWN_O: gl.constexpr, SUM_ROUNDED: gl.constexpr,
                   REGISTERS: gl.constexpr):  # fmt: skip
    """Allocates the slots and barriers and starts the three partitions.

    Descriptors are rank 4, (batch, heads, sequence, D): q and o in boxes of (1, 1, 64, D), k and v of (1,
    1, KEYS, D). lse: float32 (num_heads, num_queries), natural logarithm. group: query heads per key head.
    num_heads: over the batch. scale_log2: scale * log2(e). TAIL: num_keys is no multiple of KEYS. OWN_O: O
    leaves through tiles of its own, otherwise through Q's. SUM_ROUNDED: O is divided by the sum of P as rounded
    for the product (see the module). REGISTERS: a consumer's, after it took the producer's share.
    """
    gdc_wait()
    gdc_launch_dependents()
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    if OWN_O:
        o_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], o_desc.layout)
    else:
        o_tiles = q_tiles
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    partition_barrier()
    descriptors = (q_desc, k_desc, v_desc, o_desc)
    buffers = (q_tiles, k_tiles, v_tiles, o_tiles)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    problem = (num_queries, num_keys, heads, group, num_tiles, num_heads)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, descriptors, buffers, barriers, problem, lse, scale_log2,
                             D, KEYS, STAGES, CAUSAL, TAIL, CONSUMERS, OWN_O, SUM_ROUNDED)),
                (_consumer, (1, descriptors, buffers, barriers, problem, lse, scale_log2,
                             D, KEYS, STAGES, CAUSAL, TAIL, CONSUMERS, OWN_O, SUM_ROUNDED)),
                (_producer, (descriptors, buffers, barriers, problem, lse, scale_log2,
                             D, KEYS, STAGES, CAUSAL, TAIL, CONSUMERS, OWN_O, SUM_ROUNDED)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, descriptors, buffers, barriers, problem, lse, scale_log2,
                             D, KEYS, STAGES, CAUSAL, TAIL, CONSUMERS, OWN_O, SUM_ROUNDED)),
                (_consumer, (1, descriptors, buffers, barriers, problem, lse, scale_log2,
                             D, KEYS, STAGES, CAUSAL, TAIL, CONSUMERS, OWN_O, SUM_ROUNDED)),
                (_consumer, (2, descriptors, buffers, barriers, problem, lse, scale_log2,
                             D, KEYS, STAGES, CAUSAL, TAIL, CONSUMERS, OWN_O, SUM_ROUNDED)),
                (_producer, (descriptors, buffers, barriers, problem, lse, scale_log2,
                             D, KEYS, STAGES, CAUSAL, TAIL, CONSUMERS, OWN_O, SUM_ROUNDED)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
