"""The tile sizes that are worth trying for a case, and those that ship because they were measured.

What the candidates follow from (compiled for sm_90 and looked at; see `artifacts/h200/attention`): 64 query rows to
4 warps or 128 to 8 keep the accumulators in registers; the copy engine (descriptors) saves the registers of the
addresses and needs 16-byte alignment and 16-bit values; splitting a head of 80 as 64 + 16 saves products, padding
it to 128 lets the copy engine work. Tilings that spill more than a little were left out. Triton 3.6's automatic
warp specialisation hung in these kernels on an H200, so none asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lmkit.kernels.tuning import Case

CANDIDATES_VERSION = 1  # raise it when a kernel changes so that old choices no longer hold


@dataclass(frozen=True)
class Tiling:
    """One way to run a kernel.

    rows: queries of a tile; columns: keys of a tile; warps: per program; stages: tiles in flight.
    descriptors: tiles come through the copy engine (TMA).
    split: a head_dim that is no power of two is held as two parts instead of being padded.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    descriptors: bool = False
    split: bool = False


T = Tiling

# (kernel, largest head_dim) -> candidates for 16-bit inputs that the copy engine can reach; the first is the default.
ALIGNED: dict[tuple[str, int], tuple[Tiling, ...]] = {
    ("flash_forward", 64): (
        T(64, 128, 4, 2, True), T(64, 64, 4, 3, True), T(128, 64, 4, 3, True), T(128, 64, 8, 3, True),
        T(64, 64, 4, 3), T(128, 128, 8, 3, True),
    ),
    ("flash_forward", 128): (
        T(128, 128, 8, 2, True), T(128, 64, 8, 3, True), T(64, 64, 4, 3, True), T(64, 128, 4, 2, True),
        T(128, 128, 8, 3, True), T(128, 64, 8, 2, True),
    ),
    ("flash_forward", 256): (
        T(128, 64, 8, 2, True), T(64, 32, 4, 2, True), T(64, 64, 4, 2, True), T(64, 64, 8, 2, True),
    ),
    ("query_gradient", 64): (
        T(64, 64, 4, 3, True), T(64, 128, 4, 2, True), T(128, 64, 8, 3, True), T(64, 64, 4, 2, True),
        T(128, 64, 4, 2, True), T(128, 128, 8, 2, True),
    ),
    ("query_gradient", 128): (
        T(64, 64, 4, 2, True), T(64, 32, 4, 3, True), T(128, 64, 8, 2, True), T(128, 64, 8, 3, True),
        T(128, 128, 8, 2, True),
    ),
    ("query_gradient", 256): (T(64, 32, 4, 3, True), T(64, 32, 4, 2, True), T(64, 64, 8, 2, True)),
    ("key_gradients", 64): (
        T(64, 128, 8, 3, True), T(64, 64, 4, 3, True), T(64, 128, 8, 2, True),
        T(32, 128, 4, 3, True), T(32, 128, 8, 3, True),
    ),
    ("key_gradients", 128): (
        T(32, 128, 8, 3, True), T(64, 128, 8, 3, True), T(32, 64, 4, 3, True), T(64, 128, 8, 2, True),
        T(32, 64, 4, 2, True),
    ),
    ("key_gradients", 256): (T(32, 64, 8, 2, True), T(32, 64, 8, 2)),
}  # fmt: skip

# The same for heads that are worth splitting (see `head_parts`); used in place of the above.
SPLIT: dict[str, tuple[Tiling, ...]] = {
    "flash_forward": (
        T(64, 64, 4, 3, True), T(64, 64, 4, 2, split=True), T(64, 64, 4, 3, split=True),
        T(128, 64, 8, 3, split=True), T(128, 128, 8, 2, True), T(128, 64, 8, 3, True),
    ),
    "query_gradient": (
        T(64, 32, 4, 3, split=True), T(64, 64, 4, 2, True), T(128, 32, 8, 3, split=True),
        T(64, 64, 4, 2, split=True), T(64, 32, 4, 3, True),
    ),
    "key_gradients": (
        T(64, 64, 4, 2, split=True), T(32, 64, 4, 3, split=True), T(64, 128, 8, 2, split=True),
        T(32, 128, 8, 3, split=True), T(64, 128, 8, 3, True), T(32, 128, 8, 3, True),
    ),
}  # fmt: skip

# float32 on the plain FMA units: few, because the unrolled products take seconds to compile.
FLOAT32_EXACT: dict[tuple[str, int], tuple[Tiling, ...]] = {
    ("flash_forward", 64): (T(64, 32, 8, 2), T(128, 32, 16, 2), T(64, 64, 16, 2), T(32, 32, 4, 2)),
    ("query_gradient", 64): (T(64, 32, 8, 2), T(32, 32, 8, 2)),
    ("key_gradients", 64): (T(32, 64, 8, 2), T(32, 32, 8, 2)),
    ("flash_forward", 256): (T(64, 64, 16, 2),),
    ("query_gradient", 256): (T(32, 32, 8, 2),),
    ("key_gradients", 256): (T(32, 32, 8, 2),),
}

FLOAT32_TENSOR_CORES: dict[str, tuple[Tiling, ...]] = {
    "flash_forward": (T(64, 64, 4, 2), T(128, 64, 8, 2), T(128, 32, 8, 2), T(64, 32, 4, 2), T(64, 32, 4, 3)),
    "query_gradient": (T(64, 32, 4, 2), T(128, 32, 8, 2), T(64, 64, 8, 2)),
    "key_gradients": (T(32, 64, 4, 2), T(32, 64, 8, 2), T(32, 128, 8, 2)),
}


# Where no candidate fits: 16 to 64 KiB of shared memory with any head_dim and dtype.
LAST_RESORT = T(16, 16, 4, 1)

# Compute capability -> case (`Case.name`) -> the measured choice. An entry of the cache file can move here.
SHIPPED: dict[tuple[int, int], dict[str, Tiling]] = {
    (9, 0): {"flash_forward/bfloat16/D64/causal/8192/aligned": T(64, 128, 4, 2, True)},
}


def candidate_tilings(case: Case, capability: tuple[int, int]) -> tuple[Tiling, ...]:
    """At most six tilings worth trying; the first is a safe default."""
    if case.dtype == torch.float32:
        if case.precision == "ieee":
            return FLOAT32_EXACT[case.kernel, 64 if case.head_dim <= 64 else 256]
        return FLOAT32_TENSOR_CORES[case.kernel]
    if 64 < case.head_dim <= 96 or 128 < case.head_dim <= 192:
        candidates = SPLIT[case.kernel]
    else:
        size = next(size for size in (64, 128, 256) if case.head_dim <= size)
        candidates = ALIGNED[case.kernel, size]
    if case.aligned and capability >= (9, 0):
        return candidates
    # Without the copy engine: the same tiles through pointers.
    return tuple(dict.fromkeys(replace(tiling, descriptors=False) for tiling in candidates))
