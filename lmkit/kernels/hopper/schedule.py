"""Deal tiles out to CTAs: which tiles a CTA works on, and how many key blocks each tile meets.

A causal tile costs more the further down it is. Persistent CTAs stay in step when every unit of work costs the
same, so a causal unit is the PAIR of tiles (last - u, u) of one head: always num_tiles + 1 key blocks. With an odd
number of tiles the middle ones are left over; they are dealt out singly after all pairs.

Where `first` hides keys, tiles cost what documents make of them. A unit is one tile, the last tiles of all heads
first (backward: `locate_uneven`), and CTAs draw units as they become free (`draw_unit`): a CTA loads the next one's
operands while it ends one. Only the producer draws; it announces the unit to the consumers in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lmkit.kernels.hopper.barriers import partition_barrier

LAST_TOGETHER = gl.constexpr(24)  # tiles of a head, see `locate_uneven`


@gluon.jit
def count_turns(num_tiles, num_heads, CAUSAL: gl.constexpr):
    """Return (tiles of this CTA, whole pairs among its units); num_heads counts all heads of the batch."""
    blocks = gl.num_programs(0)
    if CAUSAL:
        all_pairs = num_heads * (num_tiles // 2)
        units = all_pairs + num_heads * (num_tiles % 2)
        pairs = gl.cdiv(gl.maximum(all_pairs - gl.program_id(0), 0), blocks)
        tiles = pairs + gl.cdiv(gl.maximum(units - gl.program_id(0), 0), blocks)
    else:
        tiles = gl.cdiv(gl.maximum(num_tiles * num_heads - gl.program_id(0), 0), blocks)
        pairs = tiles
    return tiles, pairs


@gluon.jit
def locate_tile(turn, num_tiles, num_heads, pairs, CAUSAL: gl.constexpr):
    """Return (tile, head) of this CTA's `turn`-th tile; `pairs` as from `count_turns`."""
    if CAUSAL:
        pairs_per_head = num_tiles // 2
        unit = gl.program_id(0) + (turn // 2) * gl.num_programs(0)
        head = unit // gl.maximum(pairs_per_head, 1)
        near = unit % gl.maximum(pairs_per_head, 1)
        tile = num_tiles - 1 - near
        if turn % 2 == 1:
            tile = near
        if turn >= 2 * pairs:
            head = gl.program_id(0) + (turn - pairs) * gl.num_programs(0) - num_heads * pairs_per_head
            tile = pairs_per_head
    else:
        unit = gl.program_id(0) + turn * gl.num_programs(0)
        head = unit // num_tiles
        tile = unit % num_tiles
    return tile, head


@gluon.jit
def count_key_blocks(tile, num_keys, TILE: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """Return how many key blocks a tile of TILE queries meets: all, or (causal) those up to its last query."""
    blocks = gl.cdiv(num_keys, KEYS)
    if CAUSAL:
        blocks = gl.minimum(blocks, gl.cdiv((tile + 1) * TILE, KEYS))
    return blocks


@gluon.jit
def load_bound(bounds, batch, place, length):
    """Return `first` of a query or `last` of a key, of (batches, length) int32 that never fall; past the end that of
    the last one. Query i sees no key before first[i], key j is seen by no query after last[j]."""
    return gl.load(bounds + batch.to(gl.int64) * length + gl.minimum(place, length - 1))


@gluon.jit
def load_bounds(bounds, batch, places, length, wanted=True):
    """Return `first` of these queries or `last` of these keys; 0 past the end, and if not `wanted`."""
    return gl.load(bounds + batch.to(gl.int64) * length + places, mask=(places < length) & wanted, other=0)


@gluon.jit
def locate_longest_first(unit, num_tiles, num_heads, together):
    """Return (place, head) of this CTA: place 0, the longest work, of `together` heads, then place 1 of these...

    CTAs start in the order of their numbers. Head by head, the last head's longest CTA would start late, and the
    SMs that have nothing else left would wait for it; over all heads at once, CTAs that run together would no
    longer share Q and dO in the L2 cache. The last group of heads may be smaller than `together`.
    """
    first_head = unit // (together * num_tiles) * together
    heads = gl.minimum(together, num_heads - first_head)
    turn = unit - first_head * num_tiles
    return turn // heads, first_head + turn % heads


@gluon.jit
def locate_uneven(unit, num_tiles, num_heads, together):
    """Return (place, head) as `locate_longest_first`, for work that windows and documents make. The LAST_TOGETHER
    last places of all heads come at the end, the shortest last, so that all SMs end at about the same time."""
    early = gl.maximum(num_tiles - LAST_TOGETHER, 0)
    is_late = unit >= early * num_heads
    first_head = gl.where(is_late, 0, unit // gl.maximum(together * early, 1) * together)
    heads = gl.where(is_late, num_heads, gl.minimum(together, num_heads - first_head))
    turn = unit - gl.where(is_late, num_heads, first_head) * early
    return gl.where(is_late, early, 0) + turn // heads, first_head + turn % heads


UNIT_PTX = gl.constexpr(
    "{ .reg .pred first, last; .reg .b32 lane, number; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
    "mov.b32 number, 0; @first atom.global.relaxed.gpu.add.u32 number, [$1], 1; "
    "setp.eq.and.u32 last, number, $2, first; @last st.global.b32 [$1], 0; "
    "shfl.sync.idx.b32 $0, number, 0, 31, 0xffffffff; }"
)


@gluon.jit
def draw_unit(drawn, units):
    """Return the next unit that no CTA has drawn yet, as a warp; `units` or more if there is none. Every CTA begins
    with the unit of its own number. drawn: int32, 0 before the kernel; the CTA that draws last makes it 0 again."""
    number = gl.inline_asm_elementwise(
        UNIT_PTX, "=r,l,r", [drawn.to(gl.int64), units - 1], dtype=gl.int32, is_pure=False, pack=1
    )
    return gl.num_programs(0) + number


@gluon.jit
def locate_unit(unit, num_tiles, num_heads):
    """Return (tile, head): the last tiles of all heads first."""
    return num_tiles - 1 - unit // num_heads, unit % num_heads


@gluon.jit
def allocate_units(COUNT: gl.constexpr):
    """Return shared memory for COUNT numbers of units."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def announce_unit(place, unit):
    """Write a unit into shared memory, as one warp, in front of an arrival that its readers wait for."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place.store(gl.full([1], unit, gl.int32, layout))
    partition_barrier()


@gluon.jit
def read_unit(place, WARPS: gl.constexpr):
    """Read a unit from shared memory, as a partition of so many warps."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return agreed(gl.max(place.load(layout), 0))


@gluon.jit
def agreed(number):
    """Return a number that all threads of a warp have. This tells ptxas to keep what follows from the number in a
    register of the warp instead of each thread's: a branch on it parts no threads."""
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )
