"""Numbers as people read them, units named."""

from __future__ import annotations


def count(number: int) -> str:
    """`1234567` -> `1,234,567`."""
    return f"{number:,}"


def megabytes(num_bytes: int) -> str:
    """Bytes as MB (10^6), less than a tenth of one as kB (10^3)."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
