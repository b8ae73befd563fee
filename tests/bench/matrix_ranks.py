"""What the ranks of `test_lm_matrix` run: spawned processes see no monkeypatch of their parent's."""

from __future__ import annotations

from typing import Any

import torch

from lmkit.bench import lm_matrix as bench
from lmkit.bench import lm_matrix_cells as cells
from lmkit.bench.journal import Journal
from lmkit.parallel.ranks import Ranks

run_rank = bench._run_rank


def crowded_rank(options: cells.LmMatrixOptions, progress: Any, journal: Journal) -> Any:
    """Rank 1 alone runs out of memory in reference x flat, while rank 0 waits for its gradients."""
    real = cells.TrainingStep

    class Crowded(real):
        def __init__(self, config, ranks: Ranks, batches, **options) -> None:
            super().__init__(config, ranks, batches, **options)
            self._is_full = ranks.rank == 1 and (config.attention, options["parallel"].strategy) == (
                "reference",
                "flat",
            )

        def run(self) -> torch.Tensor:
            if self._is_full:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            return super().run()

    cells.TrainingStep = Crowded  # this process is ours alone
    return run_rank(options, progress, journal)
