"""`lmkit bench lm-matrix`: short real trainings over attention kernels x gradient strategies.

All strategies of a kernel are alive at once and take turns, one epoch each per round, so that their epochs pair.
Every training starts from the same weights and sees the same batches: their loss curves are comparable too.

A training that does not fit in memory becomes a row. On several ranks the others of its kind may wait inside a
collective for the rank that ran out, so all ranks are ended and started again without that cell; rows of finished
kernels are kept in the journal.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmkit.bench.journal import Journal
from lmkit.bench.lm_matrix_cells import (
    CellOutOfMemory,
    LmMatrixOptions,
    train_kernel,
)
from lmkit.bench.lm_matrix_report import COLUMNS, report_files
from lmkit.bench.report import BenchResult
from lmkit.data.synth import generate_stories
from lmkit.data.token_files import open_tokens
from lmkit.errors import UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import Limits, measure_limits, model_flops_utilization
from lmkit.measure.memory import release_memory
from lmkit.measure.progress import Progress
from lmkit.parallel.launch import relayed, spawn_ranks
from lmkit.parallel.ranks import Ranks, process_group
from lmkit.recipe.tables import RunConfig
from lmkit.recipe.vocabulary import NUM_BYTES
from lmkit.registry import ATTENTION, STRATEGIES
from lmkit.training.process import numerics

STORY_BYTES = 500_000
Outcome = tuple[list[dict[str, Any]], dict[str, Any]]  # rows, limits


def run_bench(
    options: LmMatrixOptions, *, progress: Progress | None = None, journal: Journal | None = None
) -> BenchResult | None:
    """Train the matrix; rows, the `lm_matrix_*` files and what they were measured on.

    With `nproc` > 1 it starts its own ranks; under torchrun it is one of them, and only rank 0 gets a result.

    Args:
        journal: where the rows of finished kernels go as they come.

    Raises:
        UsageError: an unknown kernel or strategy, a batch that the ranks do not divide, a context longer than the
            text, a vocabulary too small.
        CellOutOfMemory: under torchrun, which starts no ranks again: leave that cell out, or use `nproc`.
        LmkitError: a training failed on several ranks in another way.
    """
    _check(options)
    if options.nproc > 1 and "WORLD_SIZE" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="lmkit-matrix-") as folder:
            kept = journal or Journal(Path(folder) / "rows.partial")
            outcome: Outcome | None = _run_own_ranks(options, progress, kept)
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
    for name, known in (("kernels", ATTENTION.names), ("strategies", STRATEGIES.names)):
        for value in getattr(options, name):
            if value not in known:
                raise UsageError(
                    f"bench.lm_matrix.{name}: there is no {value!r}", hint="there are: " + ", ".join(known)
                )
    if options.tokens is None and options.vocab_size < NUM_BYTES:
        raise UsageError(
            f"bench.lm_matrix.vocab_size: {options.vocab_size} is smaller than the {NUM_BYTES} byte values",
            hint=f"give {NUM_BYTES} or more, or a token file",
        )


def _check_batches(options: LmMatrixOptions, tokens: np.ndarray, ranks: Ranks) -> None:
    if options.batch_size % ranks.world_size:
        raise UsageError(
            f"bench.lm_matrix.batch_size: {options.batch_size} sequences are not divisible by "
            f"{ranks.world_size} ranks",
            hint=f"give a multiple of {ranks.world_size}",
        )
    if len(tokens) <= options.context_length:
        raise UsageError(
            f"bench.lm_matrix.context_length: {options.context_length} + 1 tokens are more than the text has, "
            f"{len(tokens)}",
            hint="give a shorter context" + ("" if options.tokens is None else ", or a longer token file"),
        )


def _run_own_ranks(options: LmMatrixOptions, progress: Progress | None, journal: Journal) -> Outcome:
    """Start ranks until no further cell runs out of memory: at most once per cell."""
    while True:
        known = len(journal.rows())
        try:
            with nullcontext() if progress is None else relayed(progress) as from_ranks:
                return spawn_ranks(options.nproc, _run_rank, (options, from_ranks, journal))
        except CellOutOfMemory:
            if len(journal.rows()) == known:  # nothing learnt: it would only happen again
                raise


def _run_rank(options: LmMatrixOptions, progress: Progress | None, journal: Journal | None) -> Outcome | None:
    """(rows, limits) on rank 0, None elsewhere. What the journal holds already is not trained again."""
    run = RunConfig(seed=options.seed, threads=options.threads, deterministic=options.deterministic)
    group = process_group(options.device, backend=options.backend, timeout_s=options.timeout_s)
    with group as ranks, numerics(run, ranks):
        tokens = _load_tokens(options)
        _check_batches(options, tokens, ranks)
        # Rank 0 measures while the others wait for it at the first collective.
        limits = measure_limits(ranks.device, [options.precision]) if ranks.is_first else None
        known = {(row["kernel"], row["strategy"]): row for row in (journal.rows() if journal else ())}
        for done, kernel in enumerate(options.kernels):
            if progress is not None and ranks.is_first:
                progress("kernels", done, len(options.kernels))
            missing = [strategy for strategy in options.strategies if (kernel, strategy) not in known]
            rows = train_kernel(kernel, missing, options, tokens, ranks, journal) if missing else []
            torch.compiler.reset()
            release_memory(ranks.device)
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
