"""Barriers between partitions: named barriers and votes, for which Gluon has no function, as inline PTX.

Named barriers (`bar.sync` waits, `bar.arrive` only announces) hand a token from one warp group to another
without the partition-wide barrier that Triton puts around `mbarrier.arrive`. Triton itself uses the lower
numbers, at most 0 to 4 in these kernels; 9 to 15 are ours, and in `dqdkdv_d64_kernel` 7 and 8, too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lmkit.kernels.versions import gluon_operations

partition_barrier = gluon_operations().partition_barrier  # waits for all warps of the partition that calls it

FIRST_NAMED_BARRIER = gl.constexpr(9)
SLOT_THREADS = gl.constexpr(288)  # two consumer warp groups, which give a slot back, and the producer
TURN_THREADS = gl.constexpr(256)  # the two warp groups that take turns


@gluon.jit
def allocate_mbarriers(COUNT: gl.constexpr):
    """(COUNT, 1) mbarriers in shared memory, to be initialised."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def named_barrier_wait(barrier, num_threads: gl.constexpr):
    """Waits until `num_threads` threads (the caller's own included) have reached this barrier."""
    _named_barrier("bar.sync", barrier, num_threads)


@gluon.jit
def named_barrier_arrive(barrier, num_threads: gl.constexpr):
    """Counts the caller's threads in and goes on at once."""
    _named_barrier("bar.arrive", barrier, num_threads)


@gluon.jit
def _named_barrier(instruction: gl.constexpr, barrier, num_threads: gl.constexpr):
    gl.inline_asm_elementwise(
        f"{instruction} $1, {num_threads}; mov.b32 $0, 0;",
        "=r,r",
        [gl.to_tensor(barrier)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_slot(first_barrier: gl.constexpr, step, SLOTS: gl.constexpr, LATE: gl.constexpr):
    """The producer's wait until the slot of `step` may be filled (the first round finds all of them free).

    Two consumer warp groups give slots back by arriving at named barrier first_barrier + slot: that of step s in
    step s + LATE. (LATE = 1: step 0 gives back a slot that was not used yet, so the producer waits one step
    earlier.)
    """
    if step >= SLOTS - LATE:
        named_barrier_wait(first_barrier + step % SLOTS, SLOT_THREADS)


@gluon.jit
def await_last_slots(first_barrier: gl.constexpr, steps, SLOTS: gl.constexpr, LATE: gl.constexpr):
    """The producer's waits after its last step: every arrival of the consumers finds its partner before it
    leaves."""
    for i in gl.static_range(SLOTS - LATE):
        await_slot(first_barrier, steps + i, SLOTS, LATE)


@gluon.jit
def begin_turns(FIRST: gl.constexpr):
    """From here on the two warp groups of the first partition (the block's threads 0 to 255) take turns, 0 first.

    Named barrier FIRST + group is a group's turn: it waits there, and the other arrives there when it passes. Both
    run the same code, so a group is told by its threads' numbers. Each must take and pass as many turns as the
    other, and end them.
    """
    ptx: gl.constexpr = f"@p bar.arrive {FIRST}, {TURN_THREADS};"
    _as_warp_group(ptx)


@gluon.jit
def take_turn(FIRST: gl.constexpr):
    """Waits until the other group has passed."""
    ptx: gl.constexpr = f"add.u32 g, g, {FIRST}; bar.sync g, {TURN_THREADS};"
    _as_warp_group(ptx)


@gluon.jit
def pass_turn(FIRST: gl.constexpr):
    """Lets the other group go on."""
    ptx: gl.constexpr = f"xor.b32 g, g, 1; add.u32 g, g, {FIRST}; bar.arrive g, {TURN_THREADS};"
    _as_warp_group(ptx)


@gluon.jit
def end_turns(FIRST: gl.constexpr):
    """Group 0 picks up what group 1 passed last: no barrier is left half full."""
    ptx: gl.constexpr = f"@!p bar.sync {FIRST}, {TURN_THREADS};"
    _as_warp_group(ptx)


@gluon.jit
def _as_warp_group(ptx: gl.constexpr):
    """PTX that finds its warp group's number in g, and in p whether that is not 0."""
    gl.inline_asm_elementwise(
        "{ .reg .u32 g; .reg .pred p; mov.u32 g, %tid.x; shr.u32 g, g, 7; setp.ne.u32 p, g, 0; "
        f"{ptx} mov.b32 $0, 0; }}",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def declare_vote(name: gl.constexpr):
    """Declares the register that carries a partition's votes; once, outside of loops."""
    gl.inline_asm_elementwise(
        f".reg .b32 vote_{name}; mov.b32 vote_{name}, 0; mov.b32 $0, 0;",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def any_exceeds(values, limit: gl.constexpr, barrier: gl.constexpr, name: gl.constexpr):
    """1 for the whole warp group where one element of `values` is above `limit` (a PTX number) or NaN, else 0.

    One barrier that votes (`barrier.red`), where Triton would reduce the tensor through shared memory and
    two barriers. Each of the 128 threads must hold exactly two elements.

    The second vote, of each warp, changes no outcome. It tells ptxas that a warp's threads agree, which it does not
    conclude from the barrier: a loop that ends by the first alone counts as one that threads leave one by one. (The
    forward's loops then kept their counters in each thread's registers and spilled 44 to 72 bytes at D = 64.)
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred a, b;"
        f" setp.gtu.f32 a, $1, {limit}; setp.gtu.f32 b, $2, {limit}; or.pred a, a, b;"
        f" barrier.cta.red.or.pred a, {barrier}, 128, a; vote.sync.any.pred a, a, 0xffffffff;"
        f" selp.b32 vote_{name}, 1, 0, a; mov.b32 $0, 0; }}",
        "=r,f,f",
        [values],
        dtype=gl.int16,
        is_pure=False,
        pack=2,
    )
    return gl.inline_asm_elementwise(
        f"mov.b32 $0, vote_{name};", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )
