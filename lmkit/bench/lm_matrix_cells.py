"""The cells of the lm-matrix: one kernel's trainings, a strategy each, alive at once and measured in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmkit.bench.journal import Journal
from lmkit.data.batches import TokenBatches
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.memory import GB, claim_workspaces, release_memory, track_peak
from lmkit.measure.statistics import paired_ratio, spread
from lmkit.model.accounting import count_parameters, flops_per_token
from lmkit.parallel.failures import StepWatch
from lmkit.parallel.ranks import Ranks, release_collectives
from lmkit.recipe.tables import ModelConfig, ParallelConfig
from lmkit.recipe.vocabulary import NUM_BYTES
from lmkit.training.setup import TrainingStep


@dataclass(frozen=True)
class LmMatrixOptions:
    """What `lmkit bench lm-matrix` trains.

    Attributes:
        backend, timeout_s: of `process_group`.
        kernels: names of the attention registry.
        strategies: names of `STRATEGIES`; with one rank they communicate nothing, so "none" is the one that counts.
        nproc: ranks; under torchrun its world size counts instead.
        num_layers ... tie_embeddings: the model; its vocabulary must hold the tokens' ids.
        batch_size: sequences per step, over all ranks.
        steps_per_epoch, warmup_epochs, timed_epochs: an epoch is what a sample times.
        tokens: a token file; None trains on the bytes of built-in stories.
        lr: constant.
        threads: of torch, in every rank; 0 shares the CPUs out.
    """

    device: str = "cpu"
    backend: str | None = None
    timeout_s: float = 600.0
    kernels: tuple[str, ...] = ("vectorized", "flash_torch", "sdpa")
    strategies: tuple[str, ...] = ("none",)
    nproc: int = 1
    num_layers: int = 2
    d_model: int = 64
    d_ff: int = 192
    num_heads: int = 4
    context_length: int = 64
    vocab_size: int = NUM_BYTES
    tie_embeddings: bool = False
    compile: str = "none"
    activation_checkpointing: bool = False
    precision: str = "fp32"
    batch_size: int = 8
    steps_per_epoch: int = 5
    warmup_epochs: int = 1
    timed_epochs: int = 6
    bucket_mb: float = 50.0
    tokens: Path | None = None
    lr: float = 3e-4
    seed: int = 0
    threads: int = 0
    deterministic: bool = False


class CellOutOfMemory(LmkitError):
    """A rank ran out of memory in one cell of the matrix; the cell's row is in the journal."""


def train_kernel(
    kernel: str,
    strategies: Sequence[str],
    options: LmMatrixOptions,
    tokens: np.ndarray,
    ranks: Ranks,
    journal: Journal | None,
) -> list[dict[str, Any]]:
    """One row per strategy. Their epochs are interleaved, in an order that turns from round to round.

    Raises:
        CellOutOfMemory: on several ranks (its row is in the journal then).
    """
    config = _config(kernel, options)
    claim_workspaces(ranks.device)
    rows = {
        strategy: {
            "kernel": kernel,
            "strategy": strategy,
            "ranks": ranks.world_size,
            "precision": options.precision,
            "compile": options.compile,
            "parameters": count_parameters(config).total,
            "status": "ok",
            "detail": "",
        }
        for strategy in strategies
    }
    trainings: dict[str, _Training] = {}

    def give_up(strategy: str, error: torch.OutOfMemoryError) -> None:
        trainings.pop(strategy, None)
        beside = f", beside {len(trainings)} other trainings" if trainings else ""
        rows[strategy] |= {"status": "out of memory", "detail": str(error).split(". ")[0] + beside}
        if ranks.world_size > 1:
            if journal is not None:
                journal.add([rows[strategy]])
            raise CellOutOfMemory(
                f"{kernel} x {strategy}: out of memory on rank {ranks.rank}",
                hint="lower batch_size, leave it out, or let --nproc start the ranks",
            ) from error

    with StepWatch(ranks) as watch:  # a rank whose neighbour gave up says that it lost it
        for strategy in strategies:
            try:
                with watch.step(0):
                    trainings[strategy] = _Training(strategy, options, config, tokens, ranks)
            except torch.OutOfMemoryError as error:
                give_up(strategy, error)
            except UsageError as error:
                rows[strategy] |= {"status": "unsupported", "detail": error.message}
            if strategy not in trainings:
                release_memory(ranks.device)
        order = list(trainings)
        for epoch in range(options.warmup_epochs + options.timed_epochs):
            for strategy in order:
                try:
                    with watch.step(epoch + 1):
                        trainings[strategy].run_epoch(timed=epoch >= options.warmup_epochs)
                except torch.OutOfMemoryError as error:
                    give_up(strategy, error)
                if strategy not in trainings:
                    release_memory(ranks.device)
            order = [name for name in (*order[1:], *order[:1]) if name in trainings]  # the same on every rank
    for strategy, training in trainings.items():
        training.wait_for_weights()  # or their memory is given back only while the next kernel's is being measured
        rows[strategy] |= _measured_fields(training, trainings.get(options.strategies[0]), config, options)
    return list(rows.values())


def _config(kernel: str, options: LmMatrixOptions) -> ModelConfig:
    return ModelConfig(
        vocab_size=options.vocab_size,
        context_length=options.context_length,
        d_model=options.d_model,
        d_ff=options.d_ff,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        tie_embeddings=options.tie_embeddings,
        activation_checkpointing=options.activation_checkpointing,
        attention=kernel,  # checked in _check
        compile=options.compile,  # type: ignore[arg-type]  # pydantic refuses others
    )


class _Training:
    """One cell of the matrix while it runs."""

    def __init__(
        self, strategy: str, options: LmMatrixOptions, config: ModelConfig, tokens: np.ndarray, ranks: Ranks
    ):
        batches = TokenBatches(
            tokens,
            batch_size=options.batch_size,
            context_length=options.context_length,
            seed=options.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        _settle(ranks)
        before = _allocated(ranks)
        self._ranks = ranks
        self._steps = options.steps_per_epoch
        self._step = TrainingStep(
            config,
            ranks,
            batches,
            precision=options.precision,
            parallel=ParallelConfig(strategy=strategy, bucket_mb=options.bucket_mb),
            seed=options.seed,
            lr=options.lr,
        )
        self.losses: list[float] = []
        self.samples_ms: list[float] = []
        self._step_once()  # the optimizer's state exists from here on
        _settle(ranks)
        self._own_bytes = _kept_bytes(self._step, ranks, before)
        self._peak_bytes = 0

    def run_epoch(self, *, timed: bool) -> None:
        """`steps_per_epoch` steps; ms per step becomes a sample if `timed`."""
        _settle(self._ranks)
        with track_peak(self._ranks.device) as peak:
            began = time.perf_counter()
            losses = [self._step.run() for _ in range(self._steps)]
            _synchronize(self._ranks)
            elapsed_ms = (time.perf_counter() - began) * 1e3
        # What the other trainings keep on the device is not this one's.
        self._peak_bytes = max(self._peak_bytes, self._own_bytes + peak.extra_bytes)
        self.losses += [loss.item() for loss in losses]
        if timed:
            self.samples_ms.append(elapsed_ms / self._steps)

    def wait_for_weights(self) -> None:
        self._step.wait_for_weights()

    def _step_once(self) -> None:
        self.losses.append(self._step.run().item())

    @property
    def peak_gb(self) -> float:
        return self._peak_bytes / GB


def _measured_fields(
    training: _Training, baseline: _Training | None, config: ModelConfig, options: LmMatrixOptions
) -> dict[str, Any]:
    times = spread(training.samples_ms)
    fields: dict[str, Any] = {
        "median_ms": times.median,
        "mean_ms": times.mean,
        "p10_ms": times.p10,
        "p90_ms": times.p90,
        "spread": times.relative,
        "epochs": times.count,
        "tokens_per_s": options.batch_size * options.context_length / (times.median * 1e-3),
        "flops_per_token": flops_per_token(config, options.context_length),
        "peak_gb": training.peak_gb,
        "first_loss": training.losses[0],
        "final_loss": training.losses[-1],
    }
    if baseline is not None:
        ratio = paired_ratio(training.samples_ms, baseline.samples_ms)
        fields |= {
            "speedup": ratio.speedup,
            "speedup_low": ratio.low,
            "speedup_high": ratio.high,
            "verdict": ratio.verdict,
        }
    return fields | {"samples_ms": training.samples_ms, "losses": training.losses}


def _allocated(ranks: Ranks) -> int:
    return torch.cuda.memory_allocated(ranks.device) if ranks.device.type == "cuda" else 0


def _kept_bytes(step: TrainingStep, ranks: Ranks, before: int) -> int:
    """What a training keeps from step to step.

    On a CPU the resident set would also tell what earlier trainings left in the allocator, so weights and
    optimizer state are added up instead; a strategy's own buffers are missing there.
    """
    if ranks.device.type == "cuda":
        return _allocated(ranks) - before
    state = [value for slots in step.optimizer.state.values() for value in slots.values()]
    tensors = [*step.model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    return sum(tensor.nbytes for tensor in tensors)


def _settle(ranks: Ranks) -> None:
    """Wait, and let the backend and the allocator see that the wait is over: what a collective has used is counted as
    allocated until they have, and would be put down to another training."""
    _synchronize(ranks)
    release_collectives(ranks)
    if ranks.device.type == "cuda":
        torch.empty(1, device=ranks.device)


def _synchronize(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
