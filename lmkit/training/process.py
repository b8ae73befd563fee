"""Set up the process of a run: ranks, seed, threads, deterministic kernels, decisions of rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from lmkit.errors import LmkitError, UsageError
from lmkit.measure.environment import usable_cpus
from lmkit.parallel.ranks import Ranks, local_device, process_group
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import RunConfig

T = TypeVar("T")
_DETERMINISTIC: Any = torch.utils.deterministic  # its settings are properties, unknown to type checkers
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def ranks_of(recipe: Recipe) -> AbstractContextManager[Ranks]:
    """Join the ranks with the device of [run], the backend and the timeout of [parallel].

    Raises:
        UsageError: as `process_group` and `backend_of`.
    """
    return process_group(recipe.run.device, backend=backend_of(recipe), timeout_s=recipe.parallel.timeout_s)


def backend_of(recipe: Recipe) -> str | None:
    """Return the backend for `process_group`; None lets it choose.

    Raises:
        UsageError: NCCL is asked for between CPUs.
    """
    backend = recipe.parallel.backend
    if backend == "nccl" and local_device(recipe.run.device, local_rank=0).type != "cuda":
        raise UsageError(
            "ranks.backend",
            'parallel.backend: "nccl" works between GPUs, and the device is a CPU',
            hint='leave it at "auto"',
        )
    # On GPUs the group's own choice is NCCL, with gloo for CPU tensors.
    return None if backend in ("auto", "nccl") else backend


@contextmanager
def numerics(config: RunConfig, ranks: Ranks) -> Iterator[None]:
    """Seed torch and set threads and determinism as the recipe says; restore them afterwards.

    Several ranks on CPUs without `run.threads` share the CPUs evenly; torch would give all CPUs to every rank.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = _DETERMINISTIC.fill_uninitialized_memory
    if config.threads:
        torch.set_num_threads(config.threads)
    elif ranks.world_size > 1 and ranks.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cpus() // ranks.world_size))
    if config.deterministic:
        if ranks.device.type == "cuda":
            # cuBLAS is repeatable only with a fixed workspace; it reads this when it makes its first handle.
            os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling would only cost time: nothing reads uninitialised memory.
        _DETERMINISTIC.fill_uninitialized_memory = False
    torch.manual_seed(config.seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        _DETERMINISTIC.fill_uninitialized_memory = fill


def decided_by_first(ranks: Ranks, decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0 only, and return its answer on every rank.

    The answer travels by a collective: the ranks that wait notice at once if rank 0 dies.

    Raises:
        LmkitError: what `decide` raised, on every rank.
    """
    outcome: list[T | LmkitError | None] = [None]
    if ranks.is_first:
        try:
            outcome = [decide()]
        except LmkitError as error:
            outcome = [error]
    if ranks.world_size > 1:
        dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    (answer,) = outcome
    if isinstance(answer, LmkitError):
        raise answer
    return cast(T, answer)
