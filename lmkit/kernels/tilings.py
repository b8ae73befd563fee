"""The tile sizes that are worth trying for a case, and those that ship because they were measured.

What the candidates follow from (compiled for sm_90 and looked at, then measured; see `artifacts/h200/attention`): 64
query rows to 4 warps or 128 to 8 keep the accumulators in registers; three tiles in flight hide the loads, and more
than 113 KiB of shared memory leaves one program to a multiprocessor instead of two; the copy engine (descriptors)
saves the registers of the addresses and needs 16-byte alignment and 16-bit values; splitting a head of 80 as 64 + 16
saves products, padding it to 128 lets the copy engine work. Triton 3.6's automatic warp specialisation hung in these
kernels on an H200, so none asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lmkit.kernels.tuning import Case

CANDIDATES_VERSION = 2  # raise it when a kernel changes so that old choices no longer hold


@dataclass(frozen=True)
class Tiling:
    """One way to run a kernel.

    rows: queries of a tile; columns: keys of a tile; warps: per program; stages: tiles in flight.
    descriptors: tiles come through the copy engine (TMA).
    split: a head_dim that is no power of two is held as two parts instead of being padded.
    registers: the tiles that a program keeps are read from registers, not from shared memory.
    apart: dK and dV come from two kernels, each with half the accumulators, for one more product.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    descriptors: bool = False
    split: bool = False
    registers: bool = False
    apart: bool = False


T = Tiling


def copied(rows: int, columns: int, warps: int, stages: int, **options: bool) -> Tiling:
    """A tiling whose tiles come through the copy engine."""
    return Tiling(rows, columns, warps, stages, descriptors=True, **options)


C = copied

# (kernel, largest head_dim) -> candidates for 16-bit inputs that the copy engine can reach; the first is the default.
ALIGNED: dict[tuple[str, int], tuple[Tiling, ...]] = {
    ("flash_forward", 64): (
        C(64, 128, 4, 2), C(64, 64, 4, 3, registers=True), C(64, 64, 4, 3), C(128, 64, 4, 3),
    ),
    ("flash_forward", 128): (
        C(64, 64, 4, 3), C(64, 64, 4, 3, registers=True), C(128, 64, 4, 2), C(128, 128, 8, 3), C(64, 64, 4, 2),
    ),
    ("flash_forward", 256): (C(128, 64, 8, 2), C(128, 32, 8, 3), C(64, 32, 4, 2)),
    ("query_gradient", 64): (
        C(64, 64, 4, 3), C(64, 64, 4, 3, registers=True), C(128, 64, 8, 3), C(64, 64, 4, 2),
    ),
    ("query_gradient", 128): (
        C(64, 64, 4, 2), C(128, 64, 8, 3), C(128, 64, 8, 3, registers=True), C(64, 32, 4, 3),
        C(64, 64, 4, 3, registers=True),
    ),
    ("query_gradient", 256): (C(128, 32, 8, 3), C(64, 32, 4, 3), C(64, 32, 4, 2)),
    ("key_gradients", 64): (
        C(64, 64, 4, 3), C(32, 128, 4, 3), C(64, 64, 4, 2), C(32, 128, 8, 3), C(64, 128, 8, 3),
    ),
    ("key_gradients", 128): (
        C(32, 64, 4, 3), C(32, 64, 4, 2), C(64, 128, 8, 3), C(64, 128, 8, 2),
    ),
    ("key_gradients", 256): (
        C(32, 128, 8, 3, apart=True), C(32, 128, 8, 2, apart=True), C(64, 64, 4, 2, apart=True), C(32, 64, 8, 2),
    ),
}  # fmt: skip

# The same for heads that are worth splitting (see `head_parts`); used in place of the above.
SPLIT: dict[str, tuple[Tiling, ...]] = {
    "flash_forward": (
        T(64, 64, 4, 3, split=True), C(64, 64, 4, 3), T(128, 64, 8, 3, split=True), C(64, 64, 4, 3, registers=True),
    ),
    "query_gradient": (
        T(64, 32, 4, 3, split=True), T(64, 64, 4, 2, split=True), T(128, 32, 8, 3, split=True), C(64, 64, 4, 2),
        C(64, 64, 4, 3, registers=True),
    ),
    "key_gradients": (
        T(64, 64, 4, 2, split=True), T(32, 64, 4, 3, split=True), C(64, 128, 8, 3), T(64, 128, 8, 2, split=True),
    ),
}  # fmt: skip

# float32 by precision. Never split: Triton 3.6 compiled such a kernel (head_dim 96) to one that read out of bounds.
# "bf16x6" spills at most 64 bytes up to head_dim 64, 136 to 160 up to 128, 680 to 976 up to 256, and is two to eight
# times as fast as "ieee" all the same, which spills too and whose unrolled products compile slowly.
FLOAT32: dict[tuple[str, str, int], tuple[Tiling, ...]] = {
    ("bf16x6", "flash_forward", 64): (T(128, 64, 8, 2), T(64, 64, 4, 2), T(64, 32, 4, 2), T(128, 32, 8, 2)),
    ("bf16x6", "flash_forward", 128): (T(128, 32, 8, 1), T(64, 32, 4, 2), T(64, 16, 4, 2)),
    ("bf16x6", "flash_forward", 256): (T(128, 16, 8, 1), T(64, 32, 8, 1), T(64, 16, 4, 1)),
    ("bf16x6", "query_gradient", 64): (T(64, 32, 4, 1), T(64, 32, 4, 2), T(128, 32, 8, 2)),
    ("bf16x6", "query_gradient", 128): (T(128, 32, 8, 1), T(64, 16, 4, 1)),
    ("bf16x6", "query_gradient", 256): (T(64, 16, 8, 1),),
    ("bf16x6", "key_gradients", 64): (T(32, 64, 4, 2), T(32, 128, 8, 2)),
    ("bf16x6", "key_gradients", 128): (T(32, 128, 8, 1, apart=True), T(16, 64, 4, 1, apart=True)),
    ("bf16x6", "key_gradients", 256): (T(16, 64, 4, 1, apart=True), T(16, 64, 8, 1, apart=True)),
    ("ieee", "flash_forward", 64): (T(64, 32, 8, 2), T(128, 32, 16, 2), T(64, 64, 16, 2), T(32, 32, 4, 2)),
    ("ieee", "query_gradient", 64): (T(64, 32, 8, 2), T(32, 32, 8, 2)),
    ("ieee", "key_gradients", 64): (T(32, 64, 8, 2), T(32, 32, 8, 2)),
    ("ieee", "flash_forward", 256): (T(64, 64, 16, 2),),
    ("ieee", "query_gradient", 256): (T(32, 32, 8, 2),),
    ("ieee", "key_gradients", 256): (T(32, 32, 8, 2),),
    ("tf32", "flash_forward", 256): (T(128, 64, 8, 2), T(128, 32, 8, 2), T(64, 32, 4, 3), T(64, 64, 4, 2)),
    ("tf32", "query_gradient", 256): (T(128, 32, 8, 2), T(64, 32, 4, 2), T(64, 64, 8, 2)),
    ("tf32", "key_gradients", 256): (T(32, 128, 8, 2), T(32, 64, 4, 2), T(32, 64, 8, 2)),
}

# Where no candidate fits: 16 to 64 KiB of shared memory with any head_dim and dtype.
LAST_RESORT = T(16, 16, 4, 1)

# Compute capability -> kernel/dtype/head_dim/mask -> the winner on an H200 over 1024 and 4096 keys together (never
# more than 4.4% behind the winner at either alone). bfloat16 stands for float16 too, float32 for its default
# precision. bfloat16 spills at most 40 bytes, but for dK and dV of D96/causal (120, and the fastest all the same).
SHIPPED: dict[tuple[int, int], dict[str, Tiling]] = {
    (9, 0): {
        "flash_forward/bfloat16/D32/causal": C(64, 64, 4, 3),
        "flash_forward/bfloat16/D32/full": C(64, 64, 4, 3),
        "query_gradient/bfloat16/D32/causal": C(64, 64, 4, 3),
        "query_gradient/bfloat16/D32/full": C(64, 64, 4, 3, registers=True),
        "key_gradients/bfloat16/D32/causal": C(64, 64, 4, 2),
        "key_gradients/bfloat16/D32/full": C(32, 128, 4, 3),
        "flash_forward/float32/D32/causal": T(64, 32, 4, 2),
        "flash_forward/float32/D32/full": T(64, 32, 4, 2),
        "query_gradient/float32/D32/causal": T(64, 32, 4, 1),
        "query_gradient/float32/D32/full": T(64, 32, 4, 1),
        "key_gradients/float32/D32/causal": T(32, 64, 4, 2),
        "key_gradients/float32/D32/full": T(32, 64, 4, 2),
        "flash_forward/bfloat16/D64/causal": C(64, 64, 4, 3, registers=True),
        "flash_forward/bfloat16/D64/full": C(64, 128, 4, 2),
        "query_gradient/bfloat16/D64/causal": C(64, 64, 4, 3),
        "query_gradient/bfloat16/D64/full": C(128, 64, 8, 3),
        "key_gradients/bfloat16/D64/causal": C(64, 64, 4, 2),
        "key_gradients/bfloat16/D64/full": C(32, 128, 4, 3),
        "flash_forward/float32/D64/causal": T(64, 64, 4, 2),
        "flash_forward/float32/D64/full": T(64, 64, 4, 2),
        "query_gradient/float32/D64/causal": T(64, 32, 4, 1),
        "query_gradient/float32/D64/full": T(64, 32, 4, 1),
        "key_gradients/float32/D64/causal": T(32, 64, 4, 2),
        "key_gradients/float32/D64/full": T(32, 64, 4, 2),
        "flash_forward/bfloat16/D80/causal": T(64, 64, 4, 3, split=True),
        "flash_forward/bfloat16/D80/full": T(64, 64, 4, 3, split=True),
        "query_gradient/bfloat16/D80/causal": T(64, 32, 4, 3, split=True),
        "query_gradient/bfloat16/D80/full": T(64, 32, 4, 3, split=True),
        "key_gradients/bfloat16/D80/causal": T(64, 64, 4, 2, split=True),
        "key_gradients/bfloat16/D80/full": T(64, 64, 4, 2, split=True),
        "flash_forward/float32/D80/causal": T(64, 32, 4, 2),
        "flash_forward/float32/D80/full": T(128, 32, 8, 1),
        "query_gradient/float32/D80/causal": T(128, 32, 8, 1),
        "query_gradient/float32/D80/full": T(128, 32, 8, 1),
        "key_gradients/float32/D80/causal": T(32, 128, 8, 1, apart=True),
        "key_gradients/float32/D80/full": T(32, 128, 8, 1, apart=True),
        "flash_forward/bfloat16/D96/causal": C(64, 64, 4, 3, registers=True),
        "flash_forward/bfloat16/D96/full": C(64, 64, 4, 3),
        "query_gradient/bfloat16/D96/causal": C(64, 64, 4, 3, registers=True),
        "query_gradient/bfloat16/D96/full": T(64, 64, 4, 2, split=True),
        "key_gradients/bfloat16/D96/causal": T(64, 64, 4, 2, split=True),
        "key_gradients/bfloat16/D96/full": C(64, 128, 8, 3),
        "flash_forward/float32/D96/causal": T(64, 32, 4, 2),
        "flash_forward/float32/D96/full": T(128, 32, 8, 1),
        "query_gradient/float32/D96/causal": T(128, 32, 8, 1),
        "query_gradient/float32/D96/full": T(128, 32, 8, 1),
        "key_gradients/float32/D96/causal": T(32, 128, 8, 1, apart=True),
        "key_gradients/float32/D96/full": T(32, 128, 8, 1, apart=True),
        "flash_forward/bfloat16/D128/causal": C(64, 64, 4, 3, registers=True),
        "flash_forward/bfloat16/D128/full": C(64, 64, 4, 3),
        "query_gradient/bfloat16/D128/causal": C(64, 64, 4, 3, registers=True),
        "query_gradient/bfloat16/D128/full": C(128, 64, 8, 3),
        "key_gradients/bfloat16/D128/causal": C(32, 64, 4, 2),
        "key_gradients/bfloat16/D128/full": C(64, 128, 8, 3),
        "flash_forward/float32/D128/causal": T(64, 32, 4, 2),
        "flash_forward/float32/D128/full": T(128, 32, 8, 1),
        "query_gradient/float32/D128/causal": T(128, 32, 8, 1),
        "query_gradient/float32/D128/full": T(128, 32, 8, 1),
        "key_gradients/float32/D128/causal": T(32, 128, 8, 1, apart=True),
        "key_gradients/float32/D128/full": T(32, 128, 8, 1, apart=True),
        "flash_forward/bfloat16/D256/causal": C(128, 64, 8, 2),
        "flash_forward/bfloat16/D256/full": C(128, 64, 8, 2),
        "query_gradient/bfloat16/D256/causal": C(128, 32, 8, 3),
        "query_gradient/bfloat16/D256/full": C(128, 32, 8, 3),
        "key_gradients/bfloat16/D256/causal": C(32, 128, 8, 2, apart=True),
        "key_gradients/bfloat16/D256/full": C(32, 128, 8, 3, apart=True),
        "flash_forward/float32/D256/causal": T(128, 16, 8, 1),
        "flash_forward/float32/D256/full": T(128, 16, 8, 1),
        "query_gradient/float32/D256/causal": T(64, 16, 8, 1),
        "query_gradient/float32/D256/full": T(64, 16, 8, 1),
        "key_gradients/float32/D256/causal": T(16, 64, 4, 1, apart=True),
        "key_gradients/float32/D256/full": T(16, 64, 4, 1, apart=True),
    },
}  # fmt: skip


def shipped_tiling(case: Case, capability: tuple[int, int]) -> Tiling | None:
    """The measured choice for this case, if there is one: any length, inputs that the copy engine can reach."""
    if case.dtype == torch.float32:
        dtype = "float32" if case.precision == "bf16x6" else None
    else:
        dtype = "bfloat16" if case.aligned else None
    mask = "causal" if case.causal else "full"
    return SHIPPED.get(capability, {}).get(f"{case.kernel}/{dtype}/D{case.head_dim}/{mask}")


def candidate_tilings(case: Case, capability: tuple[int, int]) -> tuple[Tiling, ...]:
    """At most six tilings worth trying; the first is a safe default."""
    if case.dtype == torch.float32:
        return next(
            FLOAT32[case.precision, case.kernel, size]
            for size in (64, 128, 256)
            if case.head_dim <= size and (case.precision, case.kernel, size) in FLOAT32
        )
    if 64 < case.head_dim <= 96 or 128 < case.head_dim <= 192:
        candidates = SPLIT[case.kernel]
    else:
        size = next(size for size in (64, 128, 256) if case.head_dim <= size)
        candidates = ALIGNED[case.kernel, size]
    if case.aligned and capability >= (9, 0):
        return candidates
    # Without the copy engine: the same tiles through pointers.
    return tuple(dict.fromkeys(replace(tiling, descriptors=False, registers=False) for tiling in candidates))
