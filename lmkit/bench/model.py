"""`lmkit bench model`: forward, forward + backward and whole steps over sizes, lengths, precisions and compilation.

The variants of one model (precision x how much of a step) share its weights and are timed in interleaved rounds,
on the wall clock: what a user waits for, dispatch included. What does not fit becomes a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lmkit.bench.journal import Journal
from lmkit.bench.model_report import COLUMNS, report_files
from lmkit.bench.report import BenchResult
from lmkit.data.batches import RandomTokens
from lmkit.errors import UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import Limits, measure_limits, model_flops_utilization
from lmkit.measure.memory import GB, available_memory, process_memory, release_memory, track_peak
from lmkit.measure.progress import Progress
from lmkit.measure.statistics import paired_ratio, spread
from lmkit.measure.timing import WallClock, Work, clock_for, time_variants
from lmkit.model.accounting import (
    count_parameters,
    flops_per_token,
    forward_flops_per_token,
    preset_config,
    training_memory,
)
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ModelConfig
from lmkit.training.setup import TrainingStep

Variant = tuple[str, str]  # mode, precision
STUDY_STEPS = 10
UPDATE_BYTES = 32
"""Of a parameter in fp32, at least: clipping reads the gradient (4); AdamW reads weight, gradient and both moments
(16) and writes all but the gradient (12)."""
MODES = ("forward", "fwd+bwd", "step")
PRECISIONS = ("fp32", "bf16", "fp16")
COMPILE = ("none", "block", "whole")


@dataclass(frozen=True)
class ModelOptions:
    """What `lmkit bench model` measures: the product of the tuples.

    Attributes:
        sizes: presets (`lmkit.model.accounting.PRESETS`).
        lengths: tokens per sequence.
        precisions: "fp32", "bf16", "fp16" (GPU only); more than one is `--compare-precision`.
        compile: "none", "block", "whole".
        modes: "forward", "fwd+bwd", "step" (with clipping and AdamW).
        batch_size: sequences per step.
        warmup_study: numbers of warm-up steps to compare, on the first model of every compile mode; () for none.
        max_seconds: of timing per model; whole rounds only.
    """

    device: str = "cpu"
    sizes: tuple[str, ...] = ("tiny",)
    lengths: tuple[int, ...] = (256,)
    precisions: tuple[str, ...] = ("fp32",)
    compile: tuple[str, ...] = ("none",)
    modes: tuple[str, ...] = MODES
    attention: str = "sdpa"
    activation_checkpointing: bool = False
    tie_embeddings: bool = False
    vocab_size: int = 10_000
    batch_size: int = 4
    warmup: int = 5
    iters: int = 10
    warmup_study: tuple[int, ...] = (0, 1, 2, 5)
    max_seconds: float = 60.0
    seed: int = 0


def run_bench(
    options: ModelOptions, *, progress: Progress | None = None, journal: Journal | None = None
) -> BenchResult:
    """Measure everything; rows, the `model_*` files and what they were measured on.

    Args:
        journal: where rows go as they come.

    Raises:
        UsageError: an unknown size, precision, mode or compile mode.
    """
    _check(options)
    limits = measure_limits(options.device, options.precisions)
    environment = describe_environment() | {"limits": limits.as_dict()}
    before = _memory_now(options.device)
    models = [
        (size, length, how) for size in options.sizes for length in options.lengths for how in options.compile
    ]
    rows: list[dict[str, Any]] = []
    # First of all: a process that has run nothing yet is what a warm-up of zero steps is about.
    for how in options.compile if options.warmup_study else ():
        config = _config(options.sizes[0], options.lengths[0], how, options)
        for warmup in options.warmup_study:
            rows.append(_study_warmup(config, options.sizes[0], warmup, options))
    if journal is not None:
        journal.add(rows)
    for done, (size, length, how) in enumerate(models):
        if progress is not None:
            progress("models", done, len(models))
        found = _measure_model(_config(size, length, how, options), size, options, limits, before)
        rows += found
        if journal is not None:
            journal.add(found)
    if progress is not None:
        progress("models", len(models), len(models))
    bases = dict.fromkeys(row["mfu_basis"] for row in rows if "mfu_basis" in row)
    notes = (
        *(f"MFU: share of the {basis}" for basis in bases),
        "matmul: share of the rate of large matrix products measured in this run",
        "ms: median of interleaved rounds, host included; spread: (p90 - p10) / median",
        "GB (10^9): peak over what was in use before the bench, weights included",
    )
    files = report_files(rows, asdict(options), environment, notes)
    shown = [row for row in rows if row["part"] == "model"]
    return BenchResult("model", rows, COLUMNS, files, environment, notes, shown)


def _check(options: ModelOptions) -> None:
    for name, allowed in (("precisions", PRECISIONS), ("compile", COMPILE), ("modes", MODES)):
        for value in getattr(options, name):
            if value not in allowed:
                raise UsageError(
                    f"bench.model.{name}: there is no {value!r}", hint="one of " + ", ".join(allowed)
                )
    if "fp16" in options.precisions and not options.device.startswith("cuda"):
        raise UsageError('bench.model.precisions: "fp16" needs a GPU', hint="use fp32 or bf16")
    for size in options.sizes:
        preset_config(size, vocab_size=options.vocab_size, context_length=max(options.lengths))


def _config(size: str, length: int, how: str, options: ModelOptions) -> ModelConfig:
    return preset_config(
        size,
        vocab_size=options.vocab_size,
        context_length=length,
        compile=how,
        attention=options.attention,
        activation_checkpointing=options.activation_checkpointing,
        tie_embeddings=options.tie_embeddings,
    )


def _shared_fields(config: ModelConfig, size: str, options: ModelOptions) -> dict[str, Any]:
    return {
        "size": size,
        "length": config.context_length,
        "compile": config.compile,
        "attention": config.attention,
        "checkpointing": config.activation_checkpointing,
        "batch_size": options.batch_size,
        "parameters": count_parameters(config).total,
    }


def _build(config: ModelConfig, options: ModelOptions) -> TrainingStep:
    torch.compiler.reset()
    assert config.vocab_size is not None
    batches = RandomTokens(
        config.vocab_size,
        batch_size=options.batch_size,
        context_length=config.context_length,
        seed=options.seed,
    )
    ranks = Ranks(device=torch.device(options.device))
    return TrainingStep(config, ranks, batches, precision=options.precisions[0], seed=options.seed)


def _measure_model(
    config: ModelConfig, size: str, options: ModelOptions, limits: Limits, before: int
) -> list[dict[str, Any]]:
    """One row per mode and precision of one model."""
    # Cheap modes first: the optimizer's state must not count in what a forward pass needs.
    variants = [
        (mode, precision) for mode in MODES if mode in options.modes for precision in options.precisions
    ]
    rows = {
        variant: {
            "part": "model",
            **_shared_fields(config, size, options),
            "mode": variant[0],
            "precision": variant[1],
            "status": "ok",
            "detail": "",
        }
        for variant in variants
    }
    calls: dict[Variant, Work] = {}
    step: TrainingStep | None = None
    failure = _does_not_fit(config, options)
    for variant in variants:
        if failure:
            rows[variant] |= {"status": "out of memory", "detail": failure}
            continue
        try:
            step = step or _build(config, options)
            call = _call(step, *variant)
            call()  # compiles and autotunes, which takes memory of its own
            with track_peak(options.device) as peak:
                call()
        except torch.OutOfMemoryError as error:
            rows[variant] |= {"status": "out of memory", "detail": str(error).split(". ")[0]}
            if step is None:  # not even the weights: nothing larger will
                failure = rows[variant]["detail"]
            else:
                step.optimizer.zero_grad(set_to_none=True)
            release_memory(options.device)
        else:
            rows[variant]["peak_gb"] = (peak.peak_bytes - before) / GB
            calls[variant] = call
    for variant, samples_ms in _time_in_turns(calls, rows, options).items():
        rows[variant] |= _time_fields(samples_ms, config, variant, options, limits)
    for (mode, precision), row in rows.items():
        row |= versus_fp32(row, rows.get((mode, "fp32"))) if precision != "fp32" else {}
    calls.clear()
    step = None
    release_memory(options.device)
    return list(rows.values())


def _time_in_turns(
    calls: dict[Variant, Work], rows: Mapping[Variant, dict[str, Any]], options: ModelOptions
) -> dict[Variant, tuple[float, ...]]:
    """Samples in ms. What fits alone may not fit in turns: then the largest variant, the last one, gives way."""
    while calls:
        try:
            timings = time_variants(
                {" ".join(variant): call for variant, call in calls.items()},
                device=options.device,
                kind="wall",
                repeats=options.iters,
                warmup=options.warmup,
                max_seconds=options.max_seconds,
                seed=options.seed,
            )
        except torch.OutOfMemoryError as error:
            last = list(calls)[-1]
            rows[last] |= {
                "status": "out of memory",
                "detail": f"in turns with {len(calls) - 1} other modes: {str(error).split('. ')[0]}",
            }
            del calls[last]
        else:
            return {variant: timings[" ".join(variant)].samples_ms for variant in calls}
        release_memory(options.device)
    return {}


def _call(step: TrainingStep, mode: str, precision: str) -> Work:
    run = {"forward": step.forward, "fwd+bwd": step.forward_backward, "step": step.run}[mode]

    def call() -> object:
        step.set_precision(precision)
        return run()

    return call


def _time_fields(
    samples_ms: tuple[float, ...],
    config: ModelConfig,
    variant: tuple[str, str],
    options: ModelOptions,
    limits: Limits,
) -> dict[str, Any]:
    mode, precision = variant
    times = spread(samples_ms)
    tokens_per_s = options.batch_size * config.context_length / (times.median * 1e-3)
    count = forward_flops_per_token if mode == "forward" else flops_per_token
    rate = tokens_per_s * count(config, config.context_length)
    mfu = model_flops_utilization(rate, options.device, precision, limits)
    floor = (
        {"optimizer_floor_ms": count_parameters(config).total * UPDATE_BYTES / limits.copy_bytes_per_s * 1e3}
        if mode == "step"
        else {}
    )
    return {
        "median_ms": times.median,
        "mean_ms": times.mean,
        "p10_ms": times.p10,
        "p90_ms": times.p90,
        "spread": times.relative if times.count > 1 else None,
        "repeats": times.count,
        "tokens_per_s": tokens_per_s,
        "tflops": rate / 1e12,
        "mfu": mfu.share,
        "mfu_basis": mfu.basis,
        "share_of_matmul": rate / limits.matmul_flops[precision],
        **floor,
        "samples_ms": list(samples_ms),
    }


def versus_fp32(row: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> dict[str, Any]:
    """The paired comparison with the same mode in fp32, which took part in the same rounds; nothing without both."""
    if baseline is None or not row.get("samples_ms") or not baseline.get("samples_ms"):
        return {}
    ratio = paired_ratio(row["samples_ms"], baseline["samples_ms"])
    return {
        "versus_fp32": ratio.speedup,
        "versus_fp32_low": ratio.low,
        "versus_fp32_high": ratio.high,
        "versus_fp32_verdict": ratio.verdict,
    }


def _study_warmup(config: ModelConfig, size: str, warmup: int, options: ModelOptions) -> dict[str, Any]:
    """Whole steps of a fresh model after `warmup` unmeasured ones: what too little warm-up does to a mean."""
    row = {
        "part": "warm-up",
        **_shared_fields(config, size, options),
        "mode": "step",
        "precision": options.precisions[0],
        "warmup": warmup,
        "status": "ok",
        "detail": _does_not_fit(config, options),
    }
    if row["detail"]:
        return row | {"status": "out of memory"}
    clock = clock_for(options.device, "wall")
    assert isinstance(clock, WallClock)
    try:
        step = _build(config, options)
        for _ in range(warmup):
            step.run()
        samples = [clock.sample_ms(step.run, 1, before=()) for _ in range(STUDY_STEPS)]
    except torch.OutOfMemoryError as error:
        return row | {"status": "out of memory", "detail": str(error).split(". ")[0]}
    finally:
        step = None  # type: ignore[assignment]
        release_memory(options.device)
    times = spread(samples)
    deviation = (sum((sample - times.mean) ** 2 for sample in samples) / max(1, len(samples) - 1)) ** 0.5
    return row | {
        "median_ms": times.median,
        "mean_ms": times.mean,
        "std_ms": deviation,
        "first_ms": samples[0],
        "samples_ms": samples,
    }


def _does_not_fit(config: ModelConfig, options: ModelOptions) -> str:
    """On a CPU Linux kills the process instead of raising, so weights, gradients and optimizer are added up first."""
    if options.device.startswith("cuda"):
        return ""
    needed, free = training_memory(config).total, available_memory()
    if free is None or needed < 0.8 * free:
        return ""
    return f"weights, gradients and optimizer need {needed / GB:.1f} GB, {free / GB:.1f} GB free"


def _memory_now(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(device)
    return process_memory().rss_bytes
