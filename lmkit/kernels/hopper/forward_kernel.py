"""Attention forward on Hopper: O = softmax(Q K^T scale) V and the log-sum-exp, in one persistent, warp-specialised kernel.

Who does what (FlashAttention-3, Shah et al. 2024, Sections 3.1 and 3.2):

* one **producer** warp copies Q, K and V tiles into shared memory with the tensor memory accelerator (TMA), as far
  ahead as there are free slots;
* two **consumer** warp groups own 64 query rows each. In step j a consumer issues S_j = Q K_j^T and, right behind,
  O += P_{j-1} V_{j-1}; while the second product runs it turns S_j into P_j. P stays in registers;
* the consumers take turns (ping-pong): one issues its products while the other computes exponentials.

Barriers, each with its reason: `full` mbarriers tell consumers that a tile has landed (TMA counts its bytes), `empty`
ones tell the producer that a slot may be overwritten; the two named barriers are the ping-pong's tokens.

Softmax without a running maximum. The usual online softmax takes the maximum of every block, and with it shuffles and a
rescaling of O. Here the row maximum of the first block is the REFERENCE of the row: P = 2^(score - reference), the row sum l
and O all carry that factor, which cancels in O / l, so any reference gives the exact softmax as long as nothing overflows.
One warp vote per block guards that: when a thread's part of the block's row sum passes RESCUE_ABOVE, or is NaN,
the warp lifts its rows' references to their new maxima, rescales O and l, and computes this block's P again from the scores,
which are still in registers. It costs nothing on ordinary data (two compares and a vote a block), one block's exponentials on a
block that jumps, and it is exact on all data: there is no overflow that the next instruction could not still undo.
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

from lmkit.kernels.hopper.exponentials import exp2_of_scores, exp2_of_scores_unfused
from lmkit.kernels.hopper.fragments import (
    keep_columns_up_to,
    pack_pairs,
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
KEYS = gl.constexpr(128)  # keys of a block
BOTH_CONSUMERS = gl.constexpr(256)  # threads
LOWEST_REFERENCE = gl.constexpr(-1.0e30)  # finite: a row whose first block is masked keeps 2^(-inf - reference) = 0
LN2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def rescue_above(dtype):
    """Limit of a thread's part of a block's row sum, as a PTX number: 2^60 leaves room for 2^60 blocks and for the
    polynomials, which saturate at 2^80; 2^12 keeps P within float16."""
    return "0f45800000" if dtype == gl.float16 else "0f5D800000"


@gluon.jit
def _producer(descriptors, buffers, barriers, problem, lse, scale_log2, D: gl.constexpr, STAGES: gl.constexpr,
              CAUSAL: gl.constexpr, TAIL: gl.constexpr, POLYNOMIAL: gl.constexpr, CONSUMERS: gl.constexpr):  # fmt: skip
    """The copying warp. Q has two slots a consumer, so that the next tile's is there when the last one's work ends."""
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
                    q_slot = 2 * c + turn % 2
                    mbarrier.wait(q_empty.index(q_slot), ((turn // 2) & 1) ^ 1)
                    mbarrier.expect(q_full.index(q_slot), ROWS * D * element_bytes)
                    tma.async_copy_global_to_shared(
                        q_desc, [batch, head, tile * TILE + c * ROWS, 0], q_full.index(q_slot), q_tiles.index(q_slot)
                    )
            mbarrier.wait(v_empty.index(slot), free)
            mbarrier.expect(v_full.index(slot), KEYS * D * element_bytes)
            tma.async_copy_global_to_shared(
                v_desc, [batch, key_head, first_key, 0], v_full.index(slot), v_tiles.index(slot)
            )
            block += 1


@gluon.jit
def _lift(scores, scale_log2, reference, sums, acc):
    """New references: the maxima so far. Returns P and its sums under them, and everything older rescaled."""
    highest = gl.maximum(gl.max(scores, 1) * scale_log2, reference)
    factor = gl.exp2(reference - highest)
    p = exp2_of_scores_unfused(scores, scale_log2, highest)
    return p, sum_within_threads(p), highest, scale_rows(sums, factor), scale_rows(acc, factor)


@gluon.jit
def _store_tile(acc, sums, reference, o_desc, o_tile, lse, flat_head, first_row, heads, num_queries):
    """O / l and the log-sum-exp of one consumer's 64 rows. O leaves through a tile of its own, at the copy engine's pace."""
    D: gl.constexpr = acc.shape[1]
    ROW: gl.constexpr = reference.type.layout
    row_sum = gl.convert_layout(gl.sum(sums, 1), ROW)
    rows = first_row + gl.arange(0, ROWS, ROW)
    row_lse = (reference + gl.log2(row_sum)) * LN2
    gl.store(lse + flat_head.to(gl.int64) * num_queries + rows, row_lse, mask=rows < num_queries)
    out = scale_rows(acc, 1.0 / row_sum).to(o_desc.dtype)
    tma.store_wait(0)  # the previous tile has left
    o_tile.reshape([ROWS, D]).store(out)
    fence_async_shared()
    partition_barrier()
    tma.async_copy_shared_to_global(o_desc, [flat_head // heads, flat_head % heads, first_row, 0], o_tile)


@gluon.jit
def _consumer(index: gl.constexpr, descriptors, buffers, barriers, problem, lse, scale_log2, D: gl.constexpr,
              STAGES: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr, POLYNOMIAL: gl.constexpr, CONSUMERS: gl.constexpr):  # fmt: skip
    """One warp group: 64 rows of every tile. `block` counts key blocks over all tiles: slot and phase follow from it."""
    q_desc, k_desc, v_desc, o_desc = descriptors
    q_tiles, k_tiles, v_tiles, o_tiles = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    num_queries, num_keys, heads, group, num_tiles, num_heads = problem
    TILE: gl.constexpr = ROWS * CONSUMERS
    DTYPE: gl.constexpr = q_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PROBABILITIES: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    PING_PONG: gl.constexpr = CONSUMERS == 2
    my_turn: gl.constexpr = FIRST_NAMED_BARRIER + index
    other_turn: gl.constexpr = FIRST_NAMED_BARRIER + 1 - index
    my_vote: gl.constexpr = FIRST_NAMED_BARRIER + CONSUMERS + index
    declare_vote(index)
    # What one tile leaves for the next one's first step: its last P, whose product with V is still to come.
    packed = pack_pairs(gl.zeros([ROWS, KEYS], gl.float32, SCORES), DTYPE)
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    reference = gl.zeros([ROWS], gl.float32, ROW)
    PARTIAL: gl.constexpr = sum_within_threads(gl.zeros([ROWS, KEYS], gl.float32, SCORES)).type.layout
    sums = gl.zeros([ROWS, 4], gl.float32, PARTIAL)
    old_v_slot = 0
    old_head = 0
    old_row = 0
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
            if own_blocks < blocks:  # one block is wholly above this consumer's diagonal: pass it on unread
                mbarrier.wait(k_full.index(block % STAGES), (block // STAGES) & 1)
                mbarrier.arrive(k_empty.index(block % STAGES), count=1)
                mbarrier.wait(v_full.index(block % STAGES), (block // STAGES) & 1)
                mbarrier.arrive(v_empty.index(block % STAGES), count=1)
                block += 1

        # First block: the only one that meets the diagonal or the end of the keys. Beside it runs the last product of the
        # previous tile (in the first turn, of zeros with whatever is there: nobody looks at it).
        q_slot = 2 * index + turn % 2
        mbarrier.wait(q_full.index(q_slot), (turn // 2) & 1)
        q = q_tiles.index(q_slot).reshape([ROWS, D])
        slot = block % STAGES
        phase = (block // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        k = k_tiles.index(slot).reshape([KEYS, D])
        v = v_tiles.index(old_v_slot).reshape([KEYS, D])
        probabilities = unpack_pairs(packed, DTYPE, PROBABILITIES)
        if PING_PONG:
            named_barrier_wait(my_turn, BOTH_CONSUMERS)
        score_job = issue_product(q, k.permute((1, 0)), SCORES)
        out_job = warpgroup_mma(probabilities, v, acc, is_async=True)
        if PING_PONG:
            named_barrier_arrive(other_turn, BOTH_CONSUMERS)
        scores = warpgroup_mma_wait(1, deps=[score_job])  # (64 rows, 128 keys)
        mbarrier.arrive(k_empty.index(slot), count=1)
        first_key = (own_blocks - 1) * KEYS
        rows = first_row + gl.arange(0, ROWS, ROW)
        if CAUSAL:
            scores = keep_columns_up_to(scores, gl.minimum(rows, num_keys - 1) - first_key, -float("inf"))
        elif TAIL:
            scores = keep_columns_up_to(scores, rows * 0 + (num_keys - 1 - first_key), -float("inf"))
        new_reference = gl.maximum(gl.max(scores, 1) * scale_log2, LOWEST_REFERENCE)
        p = exp2_of_scores_unfused(scores, scale_log2, new_reference)
        new_sums = sum_within_threads(p)
        # Waiting for the next operands HERE matters: the loop in it is a border between basic blocks, which keeps ptxas
        # from moving the wait for O += P V above the exponentials that should overlap with it.
        more = (own_blocks > 1) | (turn + 1 < turns)
        mbarrier.wait(k_full.index((block + 1) % STAGES), ((block + 1) // STAGES) & 1, pred=more)
        mbarrier.wait(v_full.index(slot), phase)
        # the softmax's results as dependencies: they are computed before this wait, not after
        acc, p, new_sums, new_reference = warpgroup_mma_wait(0, deps=[out_job, p, new_sums, new_reference])
        if turn > 0:
            mbarrier.arrive(v_empty.index(old_v_slot), count=1)
            _store_tile(acc, sums, reference, o_desc, o_tiles.index(index), lse, old_head, old_row, heads, num_queries)
        acc = gl.zeros([ROWS, D], gl.float32, OUT)
        sums = new_sums
        reference = new_reference
        packed = pack_pairs(p, DTYPE)
        old_v_slot = slot
        old_head = flat_head
        old_row = first_row
        block += 1

        for i in range(1, own_blocks):
            slot = block % STAGES
            # K of this block and V of the previous one were waited for at the end of the previous step
            probabilities = unpack_pairs(packed, DTYPE, PROBABILITIES)
            k = k_tiles.index(slot).reshape([KEYS, D])
            v = v_tiles.index(old_v_slot).reshape([KEYS, D])
            if PING_PONG:
                named_barrier_wait(my_turn, BOTH_CONSUMERS)
            score_job = issue_product(q, k.permute((1, 0)), SCORES)
            out_job = warpgroup_mma(probabilities, v, acc, is_async=True)
            if PING_PONG:
                named_barrier_arrive(other_turn, BOTH_CONSUMERS)
            scores = warpgroup_mma_wait(1, deps=[score_job])
            p = exp2_of_scores(scores, scale_log2, reference, POLYNOMIAL)
            block_sums = sum_within_threads(p)
            more = (i + 1 < own_blocks) | (turn + 1 < turns)
            mbarrier.wait(k_full.index((block + 1) % STAGES), ((block + 1) // STAGES) & 1, pred=more)
            mbarrier.wait(v_full.index(slot), (block // STAGES) & 1)
            acc, p, block_sums = warpgroup_mma_wait(0, deps=[out_job, p, block_sums])
            mbarrier.arrive(v_empty.index(old_v_slot), count=1)
            if any_exceeds(block_sums, rescue_above(DTYPE), my_vote, index) != 0:
                scores = warpgroup_mma_wait(0, deps=[issue_product(q, k.permute((1, 0)), SCORES)])
                p, block_sums, reference, sums, acc = _lift(scores, scale_log2, reference, sums, acc)
            mbarrier.arrive(k_empty.index(slot), count=1)
            sums = sums + block_sums
            packed = pack_pairs(p, DTYPE)
            old_v_slot = slot
            block += 1
        mbarrier.arrive(q_empty.index(q_slot), count=1)

    v = v_tiles.index(old_v_slot).reshape([KEYS, D])
    probabilities = unpack_pairs(packed, DTYPE, PROBABILITIES)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(probabilities, v, acc, is_async=True)])
    _store_tile(acc, sums, reference, o_desc, o_tiles.index(index), lse, old_head, old_row, heads, num_queries)
    tma.store_wait(0)
    if PING_PONG and index == 0:
        named_barrier_wait(my_turn, BOTH_CONSUMERS)  # takes the token that consumer 1 gave last


@gluon.jit(do_not_specialize=["num_queries", "num_keys", "heads", "group", "num_tiles", "num_heads"])
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse, num_queries, num_keys, heads, group, num_tiles, num_heads, scale_log2,
                   D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr,
                   POLYNOMIAL: gl.constexpr, CONSUMERS: gl.constexpr,
                   REGISTERS: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Allocates the slots and barriers and starts the three partitions.

    Descriptors are rank 4, (batch, heads, sequence, D): q and o in boxes of (1, 1, 64, D), k and v of (1, 1, 128, D).
    lse: float32 (num_heads, num_queries), natural logarithm. group: query heads per key head. num_heads: over the batch.
    scale_log2: scale * log2(e). TAIL: num_keys is no multiple of 128. POLYNOMIAL: eighths of the exponentials.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    o_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, D], o_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * CONSUMERS):
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
                (_consumer, (0, descriptors, buffers, barriers, problem, lse, scale_log2, D, STAGES, CAUSAL, TAIL, POLYNOMIAL, CONSUMERS)),
                (_consumer, (1, descriptors, buffers, barriers, problem, lse, scale_log2, D, STAGES, CAUSAL, TAIL, POLYNOMIAL, CONSUMERS)),
                (_producer, (descriptors, buffers, barriers, problem, lse, scale_log2, D, STAGES, CAUSAL, TAIL, POLYNOMIAL, CONSUMERS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, descriptors, buffers, barriers, problem, lse, scale_log2, D, STAGES, CAUSAL, TAIL, POLYNOMIAL, CONSUMERS)),
                (_consumer, (1, descriptors, buffers, barriers, problem, lse, scale_log2, D, STAGES, CAUSAL, TAIL, POLYNOMIAL, CONSUMERS)),
                (_consumer, (2, descriptors, buffers, barriers, problem, lse, scale_log2, D, STAGES, CAUSAL, TAIL, POLYNOMIAL, CONSUMERS)),
                (_producer, (descriptors, buffers, barriers, problem, lse, scale_log2, D, STAGES, CAUSAL, TAIL, POLYNOMIAL, CONSUMERS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
