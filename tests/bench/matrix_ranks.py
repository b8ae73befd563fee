"""What the ranks of `test_lm_matrix` run: spawned processes see no monkeypatch of their parent's."""

from typing import Any

import planted_kernels
import torch

from lmkit.bench import harness
from lmkit.training import setup

on_rank = harness._on_rank


def planted_rank(*arguments: Any) -> Any:
    """The planted kernels are registered in this rank, too."""
    planted_kernels.register()
    return on_rank(*arguments)


def crowded_rank(*arguments: Any) -> Any:
    """Rank 1 alone runs out of memory in reference x flat, while rank 0 waits for its gradients."""

    class Crowded(setup.TrainingStep):
        def __init__(self, recipe: Any, ranks: Any, batches: Any, *, parallel: Any) -> None:
            super().__init__(recipe, ranks, batches, parallel=parallel)
            full = (recipe.model.attention, parallel.strategy) == ("reference", "flat")
            self._is_full = ranks.rank == 1 and full

        def run(self, **options: Any) -> torch.Tensor:
            if self._is_full:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            return super().run(**options)

    setup.TrainingStep = Crowded  # type: ignore[misc]  # this process is ours alone
    return on_rank(*arguments)
