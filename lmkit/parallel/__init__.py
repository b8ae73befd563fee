"""Ranks, and how they keep their models equal: gradient synchronisation, ZeRO-1, launching, failures."""
