"""The peak of a memory profile in words, made of its rows: for the profile's own report and for write-ups."""

from __future__ import annotations

from typing import Any

from lmkit.measure.tables import Rows
from lmkit.profiling.allocations import CATEGORIES, WHOLE_RUN

_HOLD_OTHERS = ("step", "pass", WHOLE_RUN)  # a phase that lies in one of these says more


def peak_row(rows: Rows) -> dict[str, Any]:
    """The row of the phase in which the run peaks."""
    return max(rows, key=lambda row: (float(row["peak_gib"]), row["phase"] not in _HOLD_OTHERS))


def memory_finding(rows: Rows) -> str:
    """What the memory is full of at the peak."""
    peak = peak_row(rows)
    if not peak["peak_gib"]:
        return "Nothing was allocated."
    where = "between phases" if peak["phase"] == WHOLE_RUN else f"in {peak['phase']}"
    shares = {name: float(peak[gib_key(name)]) / float(peak["peak_gib"]) for name in CATEGORIES}
    largest = max(shares, key=lambda name: shares[name])
    return (
        f"The peak, {peak['peak_gib']:.2f} GiB (2^30 bytes), is reached {where}; "
        f"the largest part of it is {largest}: {shares[largest]:.0%}."
    )


def gib_key(category: str) -> str:
    """The key under which a row has the size of a category."""
    return category.replace(" ", "_") + "_gib"
