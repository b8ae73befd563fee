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
        UsageError: the rank variables are incomplete or inconsistent ("parallel.environment").
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Place(0, 1, 0)
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        given = next(name for name in ("RANK", "WORLD_SIZE") if name in os.environ)
        raise _wrong_environment(
            f"{given} is set without {', '.join(missing)}",
            hint="use torchrun (or --nproc N), which set all of them, or unset RANK and WORLD_SIZE",
        )
    rank, world_size = _integer("RANK"), _integer("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise _wrong_environment(f"RANK={rank} does not fit WORLD_SIZE={world_size}")
    if not 0 <= _integer("MASTER_PORT") < 1 << 16:
        raise _wrong_environment(f"MASTER_PORT={os.environ['MASTER_PORT']} is not a port")
    return Place(rank, world_size, _integer("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank)


def _integer(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise _wrong_environment(f"{name}={text!r} is not a number")
    return int(text)


def _wrong_environment(mistake: str, hint: str = "use torchrun (or --nproc N), which sets it") -> UsageError:
    return UsageError("parallel.environment", f"environment: {mistake}", hint=hint)
