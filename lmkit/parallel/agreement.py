"""What all ranks must do together is decided together: one small all-reduce of flags a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from lmkit.parallel.process_group import Ranks


@dataclass(frozen=True)
class Agreement:
    """What at least one rank reported."""

    stop: bool
    nonfinite: bool


def agree(ranks: Ranks, *, stop: bool = False, nonfinite: bool | torch.Tensor = False) -> Agreement:
    """Tell every rank whether any rank wants to stop, or saw a loss or gradient that is not finite.

    Call it once a step on every rank, before the optimizer step: every rank returns the same answer, so that
    all save the same step and no rank applies an update that another refuses.

    Args:
        nonfinite: a bool, or a tensor of one element on the rank's device. Reading it waits for the GPU. On
            GPUs the flags travel by NCCL if this is a tensor, else by gloo, which waits for no kernel.
    """
    if isinstance(nonfinite, torch.Tensor):
        flags = torch.zeros(2, dtype=torch.int32, device=nonfinite.device)
        flags[0] = int(stop)
        flags[1] = nonfinite
    else:
        flags = torch.tensor([int(stop), int(nonfinite)], dtype=torch.int32)
    if ranks.world_size > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    stop_anywhere, nonfinite_anywhere = flags.tolist()
    return Agreement(stop=bool(stop_anywhere), nonfinite=bool(nonfinite_anywhere))


def on_any_rank(ranks: Ranks, *facts: bool) -> tuple[bool, ...]:
    """Which of these hold on at least one rank. Every rank asks at the same point and gets the same answer."""
    flags = torch.tensor(facts, dtype=torch.int32)
    if ranks.world_size > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return tuple(bool(flag) for flag in flags.tolist())
