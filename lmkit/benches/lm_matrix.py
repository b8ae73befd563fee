"""`lmkit bench lm-matrix`: short real trainings over attention kernels x gradient strategies.

All strategies of a kernel are alive at once and take turns, one epoch each per round, so that their epochs pair.
Every training starts from the same weights and sees the same batches: their loss curves are comparable too.

A training that does not fit in memory becomes a row. On several ranks the others of its kind may wait inside a
collective for the rank that ran out, so all ranks are ended and started again without that cell; rows of finished
kernels are kept in the journal.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmkit.attention import ATTENTION
from lmkit.benches.journal import Journal
from lmkit.benches.lm_matrix_report import COLUMNS, report_files
from lmkit.benches.training_step import TrainingStep
from lmkit.data.batches import TokenBatches
from lmkit.data.synth import generate_stories
from lmkit.data.token_files import open_tokens
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import Limits, measure_limits, model_flops_utilization
from lmkit.measure.memory import GB, track_peak
from lmkit.measure.results import BenchResult
from lmkit.measure.statistics import paired_ratio, spread
from lmkit.model.accounting import count_parameters, flops_per_token
from lmkit.parallel.failures import StepWatch
from lmkit.parallel.launch import spawn_ranks
from lmkit.parallel.process_group import Ranks, process_group
from lmkit.parallel.strategies import STRATEGIES, SyncOptions
from lmkit.recipe.model import ModelConfig
from lmkit.recipe.run import RunConfig
from lmkit.training.numerics import numerics

Progress = Callable[[str, int, int], None]
STORY_BYTES = 500_000
BYTE_VOCABULARY = 256


@dataclass(frozen=True)
class LmMatrixOptions:
    """What `lmkit bench lm-matrix` trains.

    Attributes:
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
    kernels: tuple[str, ...] = ("vectorized", "flash_torch", "sdpa")
    strategies: tuple[str, ...] = ("none",)
    nproc: int = 1
    num_layers: int = 2
    d_model: int = 64
    d_ff: int = 192
    num_heads: int = 4
    context_length: int = 64
    vocab_size: int = BYTE_VOCABULARY
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


Outcome = tuple[list[dict[str, Any]], dict[str, Any]]  # rows, limits


class CellOutOfMemory(LmkitError):
    """A rank ran out of memory in one cell of the matrix; the cell's row is in the journal."""


def run_bench(
    options: LmMatrixOptions, *, progress: Progress | None = None, journal: Journal | None = None
) -> BenchResult | None:
    """Train the matrix; rows, the `lm_matrix_*` files and what they were measured on.

    With `nproc` > 1 it starts its own ranks; under torchrun it is one of them, and only rank 0 gets a result.

    Args:
        journal: where the rows of finished kernels go as they come.

    Raises:
        UsageError: an unknown kernel or strategy, a batch that the ranks do not divide, a vocabulary too small.
        CellOutOfMemory: under torchrun, which starts no ranks again: leave that cell out, or use `nproc`.
        LmkitError: a training failed on several ranks in another way.
    """
    _check(options)
    if options.nproc > 1 and "WORLD_SIZE" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="lmkit-matrix-") as folder:
            outcome: Outcome | None = _run_own_ranks(
                options, journal or Journal(Path(folder) / "rows.partial")
            )
    else:
        outcome = _run_rank(options, progress, journal)
    if outcome is None:
        return None
    rows, limits = outcome
    environment = describe_environment() | {"limits": limits}
    bases = dict.fromkeys(row["mfu_basis"] for row in rows if "mfu_basis" in row)
    notes = (
        *(f"MFU: share of the {basis}" for basis in bases),
        f"speedup: {options.strategies[0]} / strategy of the same kernel, paired epochs of "
        f"{options.steps_per_epoch} steps; kernels are compared by their medians",
        "GB (10^9): peak of one rank, weights and optimizer included",
    )
    files = report_files(rows, _jsonable(options), environment, notes)
    return BenchResult("lm-matrix", rows, COLUMNS, files, environment, notes)


def _jsonable(options: LmMatrixOptions) -> dict[str, Any]:
    return {**asdict(options), "tokens": options.tokens.name if options.tokens else None}


def _check(options: LmMatrixOptions) -> None:
    for name, known in (("kernels", ATTENTION), ("strategies", STRATEGIES)):
        for value in getattr(options, name):
            if value not in known:
                raise UsageError(
                    f"bench.lm_matrix.{name}: there is no {value!r}", hint="there are: " + ", ".join(known)
                )
    if options.tokens is None and options.vocab_size < BYTE_VOCABULARY:
        raise UsageError(
            f"bench.lm_matrix.vocab_size: {options.vocab_size} is smaller than the {BYTE_VOCABULARY} byte values",
            hint=f"give {BYTE_VOCABULARY} or more, or a token file",
        )


def _run_own_ranks(options: LmMatrixOptions, journal: Journal) -> Outcome:
    """Start ranks until no further cell runs out of memory: at most once per cell."""
    while True:
        known = len(journal.rows())
        try:
            return spawn_ranks(options.nproc, _run_rank, (options, None, journal))
        except CellOutOfMemory:
            if len(journal.rows()) == known:  # nothing learnt: it would only happen again
                raise


def _run_rank(options: LmMatrixOptions, progress: Progress | None, journal: Journal | None) -> Outcome | None:
    """(rows, limits) on rank 0, None elsewhere. What the journal holds already is not trained again."""
    run = RunConfig(seed=options.seed, threads=options.threads, deterministic=options.deterministic)
    with process_group(options.device) as ranks, numerics(run, ranks):
        tokens = _load_tokens(options)
        # Rank 0 measures while the others wait for it at the first collective.
        limits = measure_limits(ranks.device, [options.precision]) if ranks.is_first else None
        known = {(row["kernel"], row["strategy"]): row for row in (journal.rows() if journal else ())}
        for done, kernel in enumerate(options.kernels):
            if progress is not None and ranks.is_first:
                progress(f"kernel {kernel}", done, len(options.kernels))
            missing = [strategy for strategy in options.strategies if (kernel, strategy) not in known]
            rows = _train_kernel(kernel, missing, options, tokens, ranks, journal) if missing else []
            torch.compiler.reset()
            _release_memory(ranks)
            if limits is not None:
                for row in rows:
                    row |= _utilization(row, options, ranks, limits)
                if journal is not None:
                    journal.add(rows)
            known |= {(kernel, row["strategy"]): row for row in rows}
        if progress is not None and ranks.is_first:
            progress("kernels", len(options.kernels), len(options.kernels))
        if limits is None:
            return None
        ordered = [known[kernel, name] for kernel in options.kernels for name in options.strategies]
        return ordered, limits.as_dict()


def _utilization(
    row: dict[str, Any], options: LmMatrixOptions, ranks: Ranks, limits: Limits
) -> dict[str, Any]:
    if row["status"] != "ok":
        return {}
    rate = row["tokens_per_s"] / ranks.world_size * row.pop("flops_per_token")
    mfu = model_flops_utilization(rate, ranks.device, options.precision, limits)
    return {"mfu": mfu.share, "mfu_basis": mfu.basis}


def _load_tokens(options: LmMatrixOptions) -> np.ndarray:
    """The token file, memory-mapped, or the bytes of stories: real text with something to learn, offline."""
    if options.tokens is not None:
        return open_tokens(options.tokens).tokens
    text, length = [], 0
    for story in islice(generate_stories(options.seed), STORY_BYTES):
        text.append(story.encode())
        length += len(text[-1])
        if length >= STORY_BYTES:
            break
    return np.frombuffer(b"\n".join(text), dtype=np.uint8).astype(np.uint16)


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
        attention=kernel,  # type: ignore[arg-type]  # checked in _check
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
            strategy=strategy,
            options=SyncOptions(bucket_mb=options.bucket_mb),
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


def _train_kernel(
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
                _release_memory(ranks)
        order = list(trainings)
        for epoch in range(options.warmup_epochs + options.timed_epochs):
            for strategy in order:
                try:
                    with watch.step(epoch + 1):
                        trainings[strategy].run_epoch(timed=epoch >= options.warmup_epochs)
                except torch.OutOfMemoryError as error:
                    give_up(strategy, error)
                if strategy not in trainings:
                    _release_memory(ranks)
            order = [name for name in (*order[1:], *order[:1]) if name in trainings]  # the same on every rank
    for strategy, training in trainings.items():
        training.wait_for_weights()  # or their memory is given back only while the next kernel's is being measured
        rows[strategy] |= _measured_fields(training, trainings.get(options.strategies[0]), config, options)
    return list(rows.values())


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
    """Wait, and let the allocator see that the wait is over: what a communication stream has used is counted as
    allocated until the next allocation after its end, and would be put down to another training."""
    _synchronize(ranks)
    if ranks.device.type == "cuda":
        torch.empty(1, device=ranks.device)


def _synchronize(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)


def _release_memory(ranks: Ranks) -> None:
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
