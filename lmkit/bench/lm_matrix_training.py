"""One cell of `lmkit bench lm-matrix` while it trains."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lmkit.bench.context import Context
from lmkit.bench.harness import time_fields
from lmkit.bench.lm_matrix_summary import ONE_RANK
from lmkit.measure.memory import GB, track_peak
from lmkit.recipe.tables import ModelConfig, ParallelConfig

if TYPE_CHECKING:
    import numpy as np

    from lmkit.parallel.ranks import Ranks
    from lmkit.training.setup import TrainingStep

EVAL_BATCHES = 20


class Training:
    """Train one kernel with one strategy, an epoch at a time.

    Attributes:
        step: None on ranks that wait for the training of one rank.
    """

    def __init__(self, strategy: str, context: Context, config: ModelConfig, tokens: np.ndarray) -> None:
        from lmkit.data.batches import TokenBatches
        from lmkit.parallel.ranks import Ranks
        from lmkit.training.setup import TrainingStep

        self._options, seed = context.options, context.recipe.run.seed
        self._all_ranks = context.ranks
        self._ranks = ranks = Ranks(device=context.device) if strategy == ONE_RANK else context.ranks
        self.step: TrainingStep | None = None
        self.samples_ms: list[float] = []
        self._losses: list[float] = []
        self._valid_loss: float | None = None
        self._graph = ""
        self._own_bytes = self._peak_bytes = 0
        if strategy == ONE_RANK and not context.ranks.is_first:
            return
        batches = TokenBatches(
            tokens,
            batch_size=self._options.batch_size,
            context_length=self._options.context_length,
            seed=seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        _settle(ranks)
        before = _allocated(ranks)
        self.step = TrainingStep(
            config,
            ranks,
            batches,
            precision=self._options.precision,
            parallel=ParallelConfig(
                strategy="none" if strategy == ONE_RANK else strategy, bucket_mb=self._options.bucket_mb
            ),
            seed=seed,
            lr=self._options.lr,
            cuda_graph=self._options.cuda_graph,
        )
        self._losses.append(self.step.run().item())  # the optimizer's state exists from here on
        _settle(ranks)
        self._own_bytes = _kept_bytes(self.step, ranks, before)

    def run_epoch(self, *, timed: bool) -> None:
        """Run `steps_per_epoch` steps; if `timed`, their ms per step become a sample. Collective."""
        from lmkit.parallel.collectives import agree

        num_steps = self._options.steps_per_epoch
        _settle(self._ranks)
        agree(self._all_ranks)  # the other ranks are idle while one rank trains
        if self.step is None:
            return
        with track_peak(self._ranks.device) as peak:
            losses = [self.step.run() for _ in range(self._options.untimed_steps)]
            _synchronize(self._ranks)
            began = time.perf_counter()
            losses += [self.step.run() for _ in range(num_steps)]
            _synchronize(self._ranks)
            elapsed_ms = (time.perf_counter() - began) * 1e3
        # Leave out what the other trainings keep on the device.
        self._peak_bytes = max(self._peak_bytes, self._own_bytes + peak.extra_bytes)
        self._losses += [loss.item() for loss in losses]
        if timed:
            self.samples_ms.append(elapsed_ms / num_steps)

    def end(self, held_out: np.ndarray) -> None:
        """Evaluate, and average the losses over the ranks. Collective."""
        import torch
        import torch.distributed as dist

        from lmkit.training.evaluation import HeldOut, evaluate

        if self.step is None:
            return
        if (graph := self.step.step.graph) is not None:
            self._graph, self.step.step.graph = graph.note, None
        # Otherwise their memory would be freed while the next kernel is measured.
        self.step.wait_for_weights()
        if self._ranks.world_size > 1:
            losses = torch.tensor(self._losses, dtype=torch.float64)
            dist.all_reduce(losses)
            self._losses = (losses / self._ranks.world_size).tolist()
        rows = self._options.batch_size // self._all_ranks.world_size  # the same batches for all
        data = HeldOut(held_out, None, self._options.context_length, rows)
        found = evaluate(
            self.step.model, data, self._ranks, precision=self.step.step.precision, max_batches=EVAL_BATCHES
        )
        self._valid_loss = None if found is None else found.loss

    def fields(self, config: ModelConfig) -> dict[str, Any]:
        """Return the measured fields of the row."""
        from lmkit.model.accounting import flops_per_token

        length = self._options.context_length
        fields = time_fields(self.samples_ms)
        return fields | {
            "graph": self._graph,
            "epochs": len(self.samples_ms),
            "epoch_s": fields["median_ms"] * self._options.steps_per_epoch / 1e3,
            "tokens_per_s": self._options.batch_size * length / (fields["median_ms"] * 1e-3),
            "flops_per_token": flops_per_token(config, length),
            "peak_gb": self._peak_bytes / GB,
            "first_loss": self._losses[0],
            "final_loss": self._losses[-1],
            "valid_loss": self._valid_loss,
            "losses": self._losses,
        }


def _allocated(ranks: Ranks) -> int:
    import torch

    return torch.cuda.memory_allocated(ranks.device) if ranks.device.type == "cuda" else 0


def _kept_bytes(step: TrainingStep, ranks: Ranks, before: int) -> int:
    """Return the bytes that a training keeps from step to step.

    On a CPU the resident set would count what earlier trainings left in the allocator, so weights and optimizer state
    are added up instead; a strategy's own buffers are missing there.
    """
    import torch

    if ranks.device.type == "cuda":
        return _allocated(ranks) - before
    state = [value for slots in step.optimizer.state.values() for value in slots.values()]
    tensors = [*step.model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    return sum(tensor.nbytes for tensor in tensors)


def _settle(ranks: Ranks) -> None:
    """Wait until buffers of finished collectives are freed, which would count as memory of another training."""
    import torch

    from lmkit.parallel.ranks import release_collectives

    _synchronize(ranks)
    release_collectives(ranks)
    if ranks.device.type == "cuda":
        torch.empty(1, device=ranks.device)


def _synchronize(ranks: Ranks) -> None:
    import torch

    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
