"""What makes a run repeatable: seed, CPU threads, deterministic kernels. Put back as it was afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lmkit.measure.environment import usable_cpus
from lmkit.parallel.process_group import Ranks
from lmkit.recipe.run import RunConfig

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
