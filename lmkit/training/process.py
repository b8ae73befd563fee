"""Set up the process of a run: its place among the ranks, its seed, its threads, deterministic kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lmkit.errors import UsageError
from lmkit.measure.environment import usable_cpus
from lmkit.parallel.ranks import Ranks, local_device, process_group
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import RunConfig

_DETERMINISTIC: Any = torch.utils.deterministic  # its settings are properties, unknown to type checkers


_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def numerics(config: RunConfig, ranks: Ranks) -> Iterator[None]:
    """Seed torch, and set threads and determinism as the recipe says, while the block runs.

    With several ranks on CPUs and no `run.threads`, the CPUs are shared out evenly: torch would otherwise give
    all of them to every rank.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = _DETERMINISTIC.fill_uninitialized_memory
    if config.threads:
        torch.set_num_threads(config.threads)
    elif ranks.world_size > 1 and ranks.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cpus() // ranks.world_size))
    if config.deterministic:
        if ranks.device.type == "cuda":
            # cuBLAS is repeatable only with a fixed workspace, which it reads when its first handle is made.
            os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling would only cost time: nothing reads such memory.
        _DETERMINISTIC.fill_uninitialized_memory = False
    torch.manual_seed(config.seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        _DETERMINISTIC.fill_uninitialized_memory = fill


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
