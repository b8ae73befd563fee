"""Compute attention forward on Hopper: O = softmax(Q K^T scale) V and the log-sum-exp, in one persistent kernel.

Warp specialisation and the overlap of products and softmax follow FlashAttention-3 (Shah et al. 2024, sections 3.1
and 3.2). One CTA runs on each SM and works through the tiles that `schedule` deals out to it. Its warps are split:

* one **producer** warp loads Q, K and V tiles into shared memory with TMA, as far ahead as there are free slots;
* two or three **consumer** warp groups own 64 query rows each and keep O and P in registers.

A tile of queries meets its key blocks from the last that it sees back to the first, so the masked one comes first. K
and V go round in STAGES slots: `block` counts key blocks over all tiles, block % STAGES is its slot, block //
STAGES its round.

Timeline of two consumers in the steady state. S = Q K^T and PV are asynchronous wgmmas on the tensor cores; a
consumer issues both of a step together and computes its softmax while the other's products run (ping-pong). Three
consumers do not take turns.

    producer    | TMA K(j+1)         | TMA V(j+1)         | TMA K(j+2)         | TMA V(j+2)         |
    consumer 0  | issue S(j), PV(j-1)| softmax(j)         | issue S(j+1), PV(j)| softmax(j+1)       |
    consumer 1  | softmax(j-1)       | issue S(j), PV(j-1)| softmax(j)         | issue S(j+1), PV(j)|
    tensor cores| S(j) PV(j-1) of 0  | S(j) PV(j-1) of 1  | S(j+1) PV(j) of 0  | S(j+1) PV(j) of 1  |

One step of a consumer, in order: take the turn; issue S(j) and O += P(j-1) V(j-1); pass the turn; wait for S(j);
exponentials and row sums; vote; wait for K(j+1), V(j) and PV(j-1); give the slots of V(j-1) and K(j) back.

Barriers. A `full` mbarrier completes a phase when TMA has delivered the bytes of a tile, an `empty` one when every
consumer has given the slot back. Phases are numbered 0, 1, 0, 1...: consumers wait for the parity of their round,
the producer for the opposite one, which lets its first round through.

| barrier | who arrives | who waits, for which phase |
|-|-|-|
| k_full, v_full [slot] | the producer's `expect`, then TMA's bytes | every consumer, round & 1 |
| k_empty, v_empty [slot] | every consumer, when it is done with the tile | the producer, (round & 1) ^ 1 |
| q_full [consumer] | the producer's `expect`, then TMA's bytes | that consumer, turn & 1 |
| q_empty [consumer] | that consumer, after its last S; without OWN_O, after O | the producer, (turn & 1) ^ 1 |
| named, 9 + consumer | the other of two consumers (`bar.arrive`) | that consumer, before it issues products |
| named, 9 + CONSUMERS + consumer | the 128 threads of that consumer, at each of its votes | the same threads |

Cost of the variants (sm_90, Triton 3.6). Registers: a thread at launch, then of a consumer, which takes over most of
the producer's; the producer keeps 24.

| variant | queries x keys of a block | registers | shared memory, of 227 KiB | spills |
|-|-|-|-|-|
| D = 64 (`forward.HEAD_DIM_64`) | 3 x 64 x 128, 3 stages | 128, 160 | 144 KiB | 0 |
| D = 64, short (`HEAD_DIM_64_SHORT`) | 2 x 64 x 128, 4 stages | 168, 240 | 160 KiB | 0 |
| D = 128 | 2 x 64 x 128, 2 stages | 168, 240 | 192 KiB | 0 |
| D = 256 | 2 x 64 x 64, 2 stages, O through Q's tiles | 168, 240 | 192 KiB | 0 |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lmkit.kernels.hopper import barriers as sync
from lmkit.kernels.hopper import schedule
from lmkit.kernels.hopper.barriers import partition_barrier
from lmkit.kernels.hopper.forward_tile import (
    ROWS,
    Barriers,
    Descriptors,
    Problem,
    Shape,
    Tiles,
    attend,
    pass_turn,
    take_turn,
)
from lmkit.kernels.hopper.tma import allocate_slots, fetch_tile


@gluon.jit
def _producer(call, shape):
    """Load tiles with TMA. K comes before Q in the first turn: the consumers' last step with the old Q hides
    both."""
    _, tiles, barriers, problem, _, _, _, drawn = call
    block = 0
    if shape.FIRST:
        units = problem.num_tiles * problem.num_heads
        unit = gl.program_id(0)
        turn = 0
        while unit < units:
            next_unit = schedule.draw_unit(drawn, units)
            tile, flat_head = schedule.locate_unit(unit, problem.num_tiles, problem.num_heads)
            block = _load_tile(call, shape, turn, unit, tile, flat_head, block)
            unit = next_unit
            turn += 1
        for c in gl.static_range(shape.CONSUMERS):
            mbarrier.wait(barriers.q_empty.index(c), (turn & 1) ^ 1)
            schedule.announce_unit(tiles.units.index(c), -1)
            mbarrier.arrive(barriers.q_full.index(c), count=1)
    else:
        turns, pairs = schedule.count_turns(problem.num_tiles, problem.num_heads, shape.CAUSAL)
        for turn in range(turns):
            tile, flat_head = schedule.locate_tile(
                turn, problem.num_tiles, problem.num_heads, pairs, shape.CAUSAL
            )
            block = _load_tile(call, shape, turn, 0, tile, flat_head, block)


@gluon.jit
def _load_tile(call, shape, turn, unit, tile, flat_head, block):
    """Load Q of a tile, and K and V of the blocks that it meets; return the number of the next block. FIRST: tell the
    consumers the unit, too."""
    descriptors, tiles, barriers, problem, _, _, first, _ = call
    TILE: gl.constexpr = ROWS * shape.CONSUMERS
    batch = flat_head // problem.heads
    head = flat_head % problem.heads
    key_head = head // problem.group
    blocks = schedule.count_key_blocks(tile, problem.num_keys, TILE, shape.KEYS, shape.CAUSAL)
    hidden = 0
    if shape.FIRST:
        hidden = schedule.load_bound(first, batch, tile * TILE, problem.num_queries) // shape.KEYS
    for i in range(blocks - hidden):
        first_key = (blocks - 1 - i) * shape.KEYS  # from the diagonal back: the masked block comes first
        slot = block % shape.STAGES
        free = ((block // shape.STAGES) & 1) ^ 1
        mbarrier.wait(barriers.k_empty.index(slot), free)
        fetch_tile(descriptors.k, batch, key_head, first_key, barriers.k_full, tiles.k, slot)
        if i == 0:
            for c in gl.static_range(shape.CONSUMERS):
                mbarrier.wait(barriers.q_empty.index(c), (turn & 1) ^ 1)
                if shape.FIRST:
                    schedule.announce_unit(tiles.units.index(c), unit)
                first_row = tile * TILE + c * ROWS
                fetch_tile(descriptors.q, batch, head, first_row, barriers.q_full, tiles.q, c)
        mbarrier.wait(barriers.v_empty.index(slot), free)
        fetch_tile(descriptors.v, batch, key_head, first_key, barriers.v_full, tiles.v, slot)
        block += 1
    return block


@gluon.jit
def _consumer(index: gl.constexpr, call, shape):
    """Compute 64 rows of every tile, as one warp group. `block` counts key blocks over all tiles."""
    _, tiles, barriers, problem, _, _, _, _ = call
    sync.declare_vote(index)
    block = 0
    if index == 1:
        pass_turn(index, shape.CONSUMERS)  # consumer 0 goes first
    if shape.FIRST:
        turn = 0
        mbarrier.wait(barriers.q_full.index(index), 0)
        unit = schedule.read_unit(tiles.units.index(index), 4)
        while unit >= 0:
            tile, flat_head = schedule.locate_unit(unit, problem.num_tiles, problem.num_heads)
            block = attend(index, call, shape, turn, tile, flat_head, block)
            turn += 1
            mbarrier.wait(barriers.q_full.index(index), turn & 1)
            unit = schedule.read_unit(tiles.units.index(index), 4)
    else:
        turns, pairs = schedule.count_turns(problem.num_tiles, problem.num_heads, shape.CAUSAL)
        for turn in range(turns):
            tile, flat_head = schedule.locate_tile(
                turn, problem.num_tiles, problem.num_heads, pairs, shape.CAUSAL
            )
            block = attend(index, call, shape, turn, tile, flat_head, block)
    tma.store_wait(0)
    if index == 0:
        take_turn(index, shape.CONSUMERS)  # takes the token that consumer 1 gave last


@gluon.jit(do_not_specialize=list(Problem._fields))
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse, first, drawn, num_queries, num_keys, heads, group, num_tiles,
                   num_heads, scale_log2,
                   D: gl.constexpr, USED: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
                   CAUSAL: gl.constexpr, TAIL: gl.constexpr, CONSUMERS: gl.constexpr, OWN_O: gl.constexpr,
                   REGISTERS: gl.constexpr, FIRST: gl.constexpr):  # fmt: skip
    """Allocate the slots and barriers and start the partitions.

    Descriptors are rank 4, (batch, heads, sequence, at most D): q and o in boxes of (1, 1, 64, D), k and v of (1, 1,
    KEYS, D), zeros beyond the head. lse: float32 (num_heads, num_queries), natural. first: for FIRST, see `schedule`.
    drawn: for FIRST, see `schedule.draw_unit`. group: query heads per key head. num_heads: over the batch.
    scale_log2: scale * log2(e). TAIL: num_keys is no multiple of KEYS. OWN_O: O leaves through tiles of its own,
    otherwise through Q's. REGISTERS: a consumer's, after it took the producer's share. USED: of the D columns S = Q
    K^T takes these (see issue_scores).
    """
    gdc_wait()  # for what the kernel before this one wrote
    gdc_launch_dependents()  # the next kernel may start, and waits in its turn
    q_tiles = allocate_slots(q_desc, CONSUMERS)
    o_tiles = q_tiles
    if OWN_O:
        o_tiles = allocate_slots(o_desc, CONSUMERS)
    units = q_tiles
    if FIRST:
        units = schedule.allocate_units(CONSUMERS)
    tiles = Tiles(q_tiles, allocate_slots(k_desc, STAGES), allocate_slots(v_desc, STAGES), o_tiles, units)
    q_full = sync.allocate_mbarriers(CONSUMERS)
    q_empty = sync.allocate_mbarriers(CONSUMERS)
    k_full = sync.allocate_mbarriers(STAGES)
    k_empty = sync.allocate_mbarriers(STAGES)
    v_full = sync.allocate_mbarriers(STAGES)
    v_empty = sync.allocate_mbarriers(STAGES)
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
    descriptors = Descriptors(q_desc, k_desc, v_desc, o_desc)
    barriers = Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)
    problem = Problem(num_queries, num_keys, heads, group, num_tiles, num_heads)
    call = (descriptors, tiles, barriers, problem, lse, scale_log2, first, drawn)
    shape: gl.constexpr = Shape(D, USED, KEYS, STAGES, CAUSAL, TAIL, CONSUMERS, OWN_O, FIRST)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (0, call, shape)), (_consumer, (1, call, shape)), (_producer, (call, shape))],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, call, shape)),
                (_consumer, (1, call, shape)),
                (_consumer, (2, call, shape)),
                (_producer, (call, shape)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
