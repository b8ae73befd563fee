"""The ranks that a recipe asks for."""

from __future__ import annotations

from contextlib import AbstractContextManager

from lmkit.errors import UsageError
from lmkit.parallel.process_group import Ranks, local_device, process_group
from lmkit.recipe.schema import Recipe


def ranks_of(recipe: Recipe) -> AbstractContextManager[Ranks]:
    """This process's place among the ranks, with the device of [run], the backend and the patience of [parallel].

    Raises:
        UsageError: as `process_group` and `backend_of`.
    """
    return process_group(recipe.run.device, backend=backend_of(recipe), timeout_s=recipe.parallel.timeout_s)


def backend_of(recipe: Recipe) -> str | None:
    """What `parallel.backend` is to `process_group`; None: what the group takes by itself.

    Raises:
        UsageError: NCCL is asked for between CPUs.
    """
    backend = recipe.parallel.backend
    if backend == "nccl" and local_device(recipe.run.device, local_rank=0).type != "cuda":
        raise UsageError(
            'parallel.backend: "nccl" works between GPUs, and the device is a CPU', hint='leave it at "auto"'
        )
    # What the group takes by itself on GPUs is NCCL, with gloo for tensors that are on the CPU.
    return None if backend in ("auto", "nccl") else backend
