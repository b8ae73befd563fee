"""The tile sizes that are tried, and those that ship because we measured them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkit.kernels.tuning import Case

CANDIDATES_VERSION = 1  # raise it when a kernel changes so that old choices no longer hold


@dataclass(frozen=True)
class Tiling:
    """One way to run a kernel.

    rows: queries of a tile; columns: keys of a tile; warps: per program; stages: tiles in flight.
    descriptors: tiles come through the copy engine (TMA); specialize: a warp of its own issues the copies.
    split: a head_dim that is no power of two is held as two parts instead of being padded.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    descriptors: bool = False
    specialize: bool = False
    split: bool = False


def candidate_tilings(case: Case, capability: tuple[int, int]) -> list[Tiling]:
    """At most six tilings worth trying; the first is a safe default."""
    return [Tiling(64, 64, 4, 2)]


def shipped_tiling(case: Case, capability: tuple[int, int]) -> Tiling | None:
    """The measured choice for this chip, if there is one."""
    return None
