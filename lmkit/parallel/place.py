"""The place of a process among ranks, as torchrun or `--nproc` tell it in the environment. Imports no torch."""

from __future__ import annotations

import os
from typing import NamedTuple

from lmkit.errors import UsageError


class Place(NamedTuple):
    """`rank` of `world_size`, and `local_rank` on this machine."""

    rank: int
    world_size: int
    local_rank: int


def read_place() -> Place:
    """Return this process's place; that of a single rank for a process that no launcher started.

    Raises:
        UsageError: the variables describe no rank ("parallel.environment").
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Place(0, 1, 0)
    given = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    given["LOCAL_RANK"] = os.environ.get("LOCAL_RANK", given["RANK"])
    numbers = [text for name, text in given.items() if name != "MASTER_ADDR"]
    if given["MASTER_ADDR"] and all(map(str.isdecimal, numbers)):
        rank, world_size, port, local_rank = map(int, numbers)
        if rank < world_size and port < 1 << 16:
            return Place(rank, world_size, local_rank)
    raise UsageError(
        "parallel.environment",
        f"environment: {' '.join(map('='.join, given.items()))} describe no rank",
        hint="use torchrun (or --nproc N), which set all of them, or unset RANK and WORLD_SIZE",
    )
