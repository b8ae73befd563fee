"""Synchronise warp groups with named barriers and votes, for which Gluon has no function, as inline PTX.

A named barrier (`bar.sync` waits, `bar.arrive` only announces) hands a token from one warp group to another without
the partition-wide barrier that Triton puts around `mbarrier.arrive`. Triton itself uses the lower numbers, at most
0 to 4 in these kernels; lmkit uses 9 to 15, and in `backward_dqdkdv_staggered` also 7 and 8.
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
def make_mbarriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Return (COUNT, 1) mbarriers in shared memory; so many arrivals complete a phase."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def make_mbarrier():
    """Return one mbarrier in shared memory; one arrival completes a phase."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def run_ptx(ptx: gl.constexpr, operand):
    """Run PTX that reads $1 and sets $0, unused. Callers name `ptx` first: Triton 3.6 takes an f-string as plain."""
    gl.inline_asm_elementwise(ptx, "=r,r", [gl.to_tensor(operand)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_wait(barrier, num_threads: gl.constexpr):
    """Wait until `num_threads` threads (the caller's own included) have reached this barrier."""
    PTX: gl.constexpr = f"bar.sync $1, {num_threads}; mov.b32 $0, 0;"
    run_ptx(PTX, barrier)


@gluon.jit
def named_barrier_wait_if(wanted, barrier, num_threads: gl.constexpr):
    """Wait like `named_barrier_wait` if `wanted`: without a branch, which would part products in flight."""
    PTX: gl.constexpr = (
        f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p bar.sync $1, {num_threads}; mov.b32 $0, 0; }}"
    )
    operands = [gl.to_tensor(barrier), gl.to_tensor(wanted).to(gl.int32)]
    gl.inline_asm_elementwise(PTX, "=r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_arrive(barrier, num_threads: gl.constexpr):
    """Count the caller's threads as arrived, without waiting."""
    PTX: gl.constexpr = f"bar.arrive $1, {num_threads}; mov.b32 $0, 0;"
    run_ptx(PTX, barrier)


@gluon.jit
def await_slot(first_barrier: gl.constexpr, step, SLOTS: gl.constexpr, LATE: gl.constexpr):
    """Wait, as the producer, until the slot of `step` may be filled (the first round finds all slots free).

    Two consumer warp groups arrive at named barrier first_barrier + slot to give back the slot of step s in step
    s + LATE. (With LATE = 1, step 0 gives back a slot that was not used yet.)
    """
    if step >= SLOTS - LATE:
        named_barrier_wait(first_barrier + step % SLOTS, SLOT_THREADS)


@gluon.jit
def await_last_slots(first_barrier: gl.constexpr, steps, SLOTS: gl.constexpr, LATE: gl.constexpr):
    """Wait, as the producer, after the last step, so that every arrival of the consumers finds its partner."""
    for i in gl.static_range(SLOTS - LATE):
        await_slot(first_barrier, steps + i, SLOTS, LATE)


@gluon.jit
def begin_turns(FIRST: gl.constexpr):
    """Begin to take turns: the two warp groups of the first partition (threads 0 to 255 of the CTA), group 0 first.

    A group waits for its turn at named barrier FIRST + group, where the other arrives when it passes the turn. Both
    must take and pass equally many turns, and end them.
    """
    PTX: gl.constexpr = f"@p bar.arrive {FIRST}, {TURN_THREADS};"
    _as_warp_group(PTX)


@gluon.jit
def take_turn(FIRST: gl.constexpr):
    """Wait until the other group has passed the turn."""
    PTX: gl.constexpr = f"add.u32 g, g, {FIRST}; bar.sync g, {TURN_THREADS};"
    _as_warp_group(PTX)


@gluon.jit
def pass_turn(FIRST: gl.constexpr):
    """Let the other group go on."""
    PTX: gl.constexpr = f"xor.b32 g, g, 1; add.u32 g, g, {FIRST}; bar.arrive g, {TURN_THREADS};"
    _as_warp_group(PTX)


@gluon.jit
def end_turns(FIRST: gl.constexpr):
    """Let group 0 take the turn that group 1 passed last, so that no barrier is left half full."""
    PTX: gl.constexpr = f"@!p bar.sync {FIRST}, {TURN_THREADS};"
    _as_warp_group(PTX)


@gluon.jit
def _as_warp_group(ptx: gl.constexpr):
    """Run PTX that finds its warp group's number in g, and in p whether that is not 0."""
    PTX: gl.constexpr = (
        "{ .reg .u32 g; .reg .pred p; mov.u32 g, %tid.x; shr.u32 g, g, 7; setp.ne.u32 p, g, 0; "
        f"{ptx} mov.b32 $0, 0; }}"
    )
    run_ptx(PTX, 0)


@gluon.jit
def declare_vote(name: gl.constexpr):
    """Declare the register that carries a partition's votes; once, outside of loops."""
    PTX: gl.constexpr = f".reg .b32 vote_{name}; mov.b32 vote_{name}, 0; mov.b32 $0, 0;"
    run_ptx(PTX, 0)


@gluon.jit
def any_exceeds(values, limit: gl.constexpr, barrier: gl.constexpr, name: gl.constexpr):
    """Return 1 in the whole warp group if one element of `values` is above `limit` (a PTX number) or NaN, else 0.

    One barrier that votes (`barrier.red`) does this, where Triton would reduce the tensor through shared memory and
    two barriers. Each of the 128 threads must hold exactly two elements.

    The second vote, of each warp, changes no outcome. It tells ptxas that a warp's threads agree, which it does not
    conclude from the barrier: otherwise it treats a loop that ends by the vote as one that threads leave one by one,
    keeps the loop's counters in each thread's registers and spills.
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
