"""`lmkit bench model`: forward, forward + backward and whole steps over sizes, lengths, precisions and compilation.

The variants of one model (how much of a step x precision) share its weights and are timed in interleaved rounds, on
the wall clock: what a user waits for, dispatch included. What does not fit becomes a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lmkit.bench.harness import (
    Context,
    Shortcut,
    not_enough_memory,
    out_of_memory_is_a_row,
    ratio_fields,
    time_fields,
    time_what_fits,
)
from lmkit.bench.report import Summary, failures, pivot
from lmkit.errors import UsageError
from lmkit.measure.limits import Limits, model_flops_utilization
from lmkit.measure.memory import GB, available_memory, process_memory, release_memory, track_peak
from lmkit.measure.plots import grouped_bars, line_panels
from lmkit.measure.statistics import FEWEST_PAIRS, paired_ratio, spread
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.measure.timing import Work, clock_for, time_variants
from lmkit.recipe.tables import PRESETS, AttentionName, Count, ModelConfig, PositiveFloat, PositiveInt, Table
from lmkit.registry import BENCHES

if TYPE_CHECKING:
    from lmkit.training.setup import TrainingStep

Mode = Literal["forward", "fwd+bwd", "step"]
Variant = tuple[Any, str]  # mode, precision
MODES: tuple[Mode, ...] = ("forward", "fwd+bwd", "step")
STUDY_STEPS = 10
UPDATE_BYTES = 32
"""Least bytes that a step moves for each fp32 parameter: clipping reads the gradient (4); AdamW reads weight,
gradient and both moments (16) and writes all but the gradient (12)."""


class Options(Table):
    """`[bench.model]`: the product of sizes, lengths, precisions, compile and modes is measured."""

    sizes: tuple[Literal["tiny", "small", "medium", "large", "xl", "2.7b"], ...] = ("tiny",)
    """Presets of [model]."""
    lengths: tuple[PositiveInt, ...] = (256,)
    """Tokens per sequence."""
    precisions: Annotated[
        tuple[Literal["fp32", "bf16", "fp16"], ...],
        Shortcut("--compare-precision", ["fp32", "bf16"], "Measure fp32 and bf16 and compare them."),
    ] = ("fp32",)
    """Precisions of the matrix products; fp16 needs a GPU."""
    compile: tuple[Literal["none", "block", "whole"], ...] = ("none",)
    """What torch.compile compiles, as in [model]."""
    modes: tuple[Mode, ...] = MODES
    """Parts of a step; `step` is forward, backward, clipping and AdamW."""
    attention: AttentionName = "sdpa"
    """The attention kernel, one for all."""
    activation_checkpointing: bool = False
    """As in [model]."""
    tie_embeddings: bool = False
    """As in [model]."""
    vocab_size: PositiveInt = 10_000
    """Vocabulary of the random tokens."""
    batch_size: PositiveInt = 4
    """Sequences per step."""
    warmup: Count = 5
    """Untimed steps before the first sample."""
    iters: PositiveInt = 10
    """Timed steps, at most."""
    warmup_study: tuple[Count, ...] = (0, 1, 2, 5)
    """Numbers of warm-up steps to compare, on the first size and length; empty: no study."""
    max_seconds: PositiveFloat = 60.0
    """Seconds of timing per model; whole rounds only."""


def check(recipe: Any) -> None:
    """Refuse fp16 on a CPU before anything is measured."""
    options = recipe.bench.table("model")
    if "fp16" in options.precisions and recipe.run.device == "cpu":
        _refuse_fp16()


def _refuse_fp16() -> None:
    raise UsageError(
        "bench.precision_needs_gpu", 'bench.model.precisions: "fp16" needs a GPU', hint="use fp32 or bf16"
    )


@BENCHES.register(
    "model",
    order=2,
    help="Forward, backward and whole training steps of named sizes.",
    recipes=("bench_model", "bench_model_cpu"),
    example="lmkit bench model bench_model_cpu --compare-precision",
    row_keys=("size", "mode", "precision", "length"),
)
def model(context: Context) -> Rows:
    """Return a row per size, length, compile mode, mode and precision, and the rows of the warm-up study."""
    options, on_gpu = context.options, context.device.type == "cuda"
    if "fp16" in options.precisions and not on_gpu:
        _refuse_fp16()
    limits = context.limits(options.precisions)
    before = _memory_in_use(context)
    rows: Rows = []
    # The study comes first: a warm-up of zero steps is about a process that has run nothing.
    for compiled in options.compile if options.warmup_study else ():
        config = _config(options.sizes[0], options.lengths[0], compiled, options)
        rows += [_study_warmup(config, warmup, context) for warmup in options.warmup_study]
    context.keep(rows)
    models = [
        (size, length, how) for size in options.sizes for length in options.lengths for how in options.compile
    ]
    for done, case in enumerate(models):
        context.progress("models", done, len(models))
        found = _measure(_config(*case, options), context, limits, before)
        rows += found
        context.keep(found)
    context.progress("models", len(models), len(models))
    return rows


def _config(size: Any, length: int, compiled: Any, options: Options) -> ModelConfig:
    return ModelConfig(
        preset=size,
        **PRESETS[size],
        vocab_size=options.vocab_size,
        context_length=length,
        compile=compiled,
        attention=options.attention,
        activation_checkpointing=options.activation_checkpointing,
        tie_embeddings=options.tie_embeddings,
    )


def _case_fields(config: ModelConfig, options: Options) -> dict[str, Any]:
    from lmkit.model.accounting import count_parameters

    return {
        "size": config.preset,
        "length": config.context_length,
        "compile": config.compile,
        "attention": config.attention,
        "checkpointing": config.activation_checkpointing,
        "batch_size": options.batch_size,
        "parameters": count_parameters(config).total,
    }


def _build(config: ModelConfig, context: Context) -> TrainingStep:
    import torch

    from lmkit.data.batches import RandomTokens
    from lmkit.training.setup import TrainingStep

    torch.compiler.reset()
    assert config.vocab_size is not None
    options, seed = context.options, context.recipe.run.seed
    batches = RandomTokens(
        config.vocab_size, batch_size=options.batch_size, context_length=config.context_length, seed=seed
    )
    return TrainingStep(config, context.ranks, batches, precision=options.precisions[0], seed=seed)


def _measure(config: ModelConfig, context: Context, limits: Limits, before: int) -> Rows:
    """Return one row per mode and precision of one model."""
    options = context.options
    # Cheap modes first: the optimizer's state must not count in what a forward pass needs.
    variants = [
        (mode, precision) for mode in MODES if mode in options.modes for precision in options.precisions
    ]
    case = _case_fields(config, options)
    rows: dict[Variant, dict[str, Any]] = {
        (mode, precision): {
            "part": "model",
            **case,
            "mode": mode,
            "precision": precision,
            "status": "ok",
            "detail": "",
        }
        for mode, precision in variants
    }
    calls: dict[Variant, Work] = {}
    step: TrainingStep | None = None
    failure = _too_large_for_host(config, context)
    variant: Variant
    for variant in variants:
        if failure:
            rows[variant] |= not_enough_memory(failure)
            continue
        with out_of_memory_is_a_row(rows[variant], context.device):
            step = step or _build(config, context)
            call = partial(_call, step, *variant)
            call()  # compiles and autotunes, which takes memory of its own
            with track_peak(context.device) as peak:
                call()
            rows[variant]["peak_gb"] = (peak.peak_bytes - before) / GB
            calls[variant] = call
        if step is None:  # the weights alone do not fit
            failure = rows[variant]["detail"]
        elif variant not in calls:
            step.optimizer.zero_grad(set_to_none=True)
            release_memory(context.device)

    def time_together(left: dict[Variant, Work]) -> dict[Variant, tuple[float, ...]]:
        timings = time_variants(
            {" ".join(variant): call for variant, call in left.items()},
            device=context.device,
            kind="wall",
            repeats=options.iters,
            warmup=options.warmup,
            max_seconds=options.max_seconds,
            seed=context.recipe.run.seed,
        )
        return {variant: timings[" ".join(variant)].samples_ms for variant in left}

    for variant, samples_ms in time_what_fits(calls, rows, context.device, time_together).items():
        rows[variant] |= _speed_fields(samples_ms, config, variant, context, limits)
    for (mode, precision), row in rows.items():
        row |= versus_fp32(row, rows.get((mode, "fp32"))) if precision != "fp32" else {}
    calls.clear()
    step = None
    release_memory(context.device)
    return list(rows.values())


def _call(step: TrainingStep, mode: str, precision: str) -> object:
    step.set_precision(precision)
    return {"forward": step.forward, "fwd+bwd": step.forward_backward, "step": step.run}[mode]()


def _speed_fields(
    samples_ms: Sequence[float], config: ModelConfig, variant: Variant, context: Context, limits: Limits
) -> dict[str, Any]:
    from lmkit.model.accounting import count_parameters, flops_per_token, forward_flops_per_token

    mode, precision = variant
    fields = time_fields(samples_ms) | {"repeats": len(samples_ms)}
    tokens_per_s = context.options.batch_size * config.context_length / (fields["median_ms"] * 1e-3)
    flops = forward_flops_per_token if mode == "forward" else flops_per_token
    rate = tokens_per_s * flops(config, config.context_length)
    mfu = model_flops_utilization(rate, context.device, precision, limits)
    fields |= {
        "tokens_per_s": tokens_per_s,
        "tflops": rate / 1e12,
        "mfu": mfu.share,
        "mfu_basis": mfu.basis,
        "share_of_matmul": rate / limits.matmul_flops[precision],
    }
    if mode == "step":
        floor = count_parameters(config).total * UPDATE_BYTES / limits.copy_bytes_per_s
        fields["optimizer_floor_ms"] = floor * 1e3
    return fields


def versus_fp32(row: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> dict[str, Any]:
    """Compare with the same mode in fp32, timed in the same rounds; return nothing if either was not timed."""
    if baseline is None or not row.get("samples_ms") or not baseline.get("samples_ms"):
        return {}
    ratio = paired_ratio(row["samples_ms"], baseline["samples_ms"])
    return ratio_fields(ratio, "versus_fp32", "versus_fp32_verdict")


def _study_warmup(config: ModelConfig, warmup: int, context: Context) -> dict[str, Any]:
    """Time whole steps of a fresh model after `warmup` untimed ones."""
    row: dict[str, Any] = {
        "part": "warm-up",
        **_case_fields(config, context.options),
        "mode": "step",
        "precision": context.options.precisions[0],
        "warmup": warmup,
        "status": "ok",
        "detail": "",
    }
    if failure := _too_large_for_host(config, context):
        return row | not_enough_memory(failure)
    clock = clock_for(context.device, "wall")
    with out_of_memory_is_a_row(row, context.device):
        step = _build(config, context)
        for _ in range(warmup):
            step.run()
        samples = [clock.sample_ms(step.run, 1, before=()) for _ in range(STUDY_STEPS)]
        times = spread(samples)
        deviation = (sum((sample - times.mean) ** 2 for sample in samples) / max(1, len(samples) - 1)) ** 0.5
        row |= {"median_ms": times.median, "mean_ms": times.mean, "std_ms": deviation}
        row |= {"first_ms": samples[0], "samples_ms": samples}
    step = None  # type: ignore[assignment]
    release_memory(context.device)
    return row


def _too_large_for_host(config: ModelConfig, context: Context) -> str:
    """Return why a model does not fit on a CPU: Linux kills the process instead of raising, so bytes are added up."""
    from lmkit.model.accounting import training_memory

    if context.device.type == "cuda":
        return ""
    needed, free = training_memory(config).total, available_memory()
    if free is None or needed < 0.8 * free:
        return ""
    return f"weights, gradients and optimizer need {needed / GB:.1f} GB, {free / GB:.1f} GB free"


def _memory_in_use(context: Context) -> int:
    import torch

    on_gpu = context.device.type == "cuda"
    return torch.cuda.memory_allocated(context.device) if on_gpu else process_memory().rss_bytes


# Rows in words

COLUMNS = (
    Column("size", "size"),
    Column("length", "length", "d"),
    Column("precision", "prec."),
    Column("compile", "compile"),
    Column("mode", "mode"),
    Column("median_ms", "ms", ".2f", instead="status"),
    Column("mean_ms", "mean ms", ".2f"),
    Column("spread", "spread", ".0%"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("mfu", "MFU", ".1%"),
    Column("share_of_matmul", "matmul", ".1%"),
    Column("peak_gb", "GB", ".2f"),
)
PRECISION_COLUMNS = (
    *(Column(key, key) for key in ("size", "length", "compile", "mode", "precision")),
    Column("versus_fp32", "times as fast as fp32", ".2f"),
    Column("versus_fp32_low", "95% from", ".2f"),
    Column("versus_fp32_high", "to", ".2f"),
    Column("versus_fp32_verdict", "verdict"),
)
WARMUP_COLUMNS = (
    Column("size", "size"),
    Column("compile", "compile"),
    Column("warmup", "warm-up steps", "d"),
    Column("mean_ms", "mean ms", ".2f", instead="status"),
    Column("std_ms", "standard deviation ms", ".2f"),
    Column("median_ms", "median ms", ".2f"),
    Column("first_ms", "first step ms", ".2f"),
)


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: utilization, precision, length, the optimizer's share, warm-up, what did not fit."""
    models = [row for row in rows if row["part"] == "model"]
    study = [row for row in rows if row["part"] == "warm-up"]
    compared = [row for row in models if row.get("versus_fp32") is not None]
    failed = failures(
        rows, lambda row: f"{row['size']} at {row['length']}, {row['precision']}, {row['mode']}"
    )
    tables, details = {}, {}
    if models:
        tables["Median ms by length (in brackets: MFU)"] = pivot(
            models,
            lambda row: f"{_name(row)}, {row['mode']}",
            lambda row: row["length"],
            lambda row: (
                f"{row['median_ms']:.2f} ({row['mfu']:.0%})" if row.get("median_ms") else row["status"]
            ),
            corner="pass \\ length",
        )
        details["Models"] = markdown_table(models, COLUMNS)
    if compared:
        details["Precisions, paired"] = markdown_table(compared, PRECISION_COLUMNS)
    if study:
        tables["Warm-up: steps of a fresh model"] = markdown_table(study, WARMUP_COLUMNS)
    if failed:
        tables["Did not fit"] = "\n".join(f"- {line}" for line in failed)
    bases = dict.fromkeys(row["mfu_basis"] for row in rows if row.get("mfu_basis"))
    return Summary(
        "Model benchmark",
        COLUMNS,
        models or rows,
        about=f"Batch {rows[0]['batch_size']}, attention {rows[0]['attention']}"
        if "batch_size" in rows[0]
        else "",
        findings=tuple(findings(models, study)),
        tables=tables,
        details=details,
        notes=(
            *(f"MFU: share of the {basis}" for basis in bases),
            "matmul: share of the rate of large matrix products measured in this run",
            "ms: median of interleaved rounds, host included; spread: (p90 - p10) / median",
            "GB (10^9): peak over what was in use before the bench, weights included",
        ),
    )


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['size']}, {row['precision']}" + (
        f", compile {row['compile']}" if row["compile"] != "none" else ""
    )


def findings(models: Rows, study: Rows) -> list[str]:
    """Return the sentences that the rows support."""
    found = []
    timed = [row for row in models if row.get("median_ms")]
    for precision in dict.fromkeys(row["precision"] for row in timed):
        best = max((row for row in timed if row["precision"] == precision), key=lambda row: row["mfu"])
        found.append(
            f"Best utilization in {precision}: {best['size']} at {best['length']}, compile {best['compile']}, "
            f"{best['mode']}: {best['mfu']:.1%} MFU ({best['mfu_basis']}), {best['tokens_per_s']:,.0f} tokens/s."
        )
    found += [*_precision_findings(timed), *_length_findings(timed), *_optimizer_findings(timed)]
    if few := [row for row in timed if row["repeats"] < FEWEST_PAIRS]:
        found.append(
            f"{len(few)} of {len(timed)} rows have fewer than {FEWEST_PAIRS} samples, the fewest "
            f"{min(row['repeats'] for row in few)}: their time was up, and small differences mean nothing."
        )
    measured = [row for row in study if row.get("mean_ms")]
    if len(measured) > 1:
        ratio = measured[0]["mean_ms"] / measured[-1]["median_ms"]
        found.append(
            f"Warm-up: with {measured[0]['warmup']} untimed steps the mean is {ratio:.2f} times the median after "
            f"{measured[-1]['warmup']}."
        )
    unfit = sorted(
        {(row["size"], row["length"]) for row in models + study if row["status"] == "out of memory"}
    )
    found += [
        f"{size} at {length} tokens does not fit in memory in at least one mode." for size, length in unfit
    ]
    return found


def _precision_findings(timed: Rows) -> list[str]:
    """Say what 16 bits save in a step, and how certain that is."""
    found = []
    steps = [row for row in timed if row["mode"] == "step" and row.get("versus_fp32") is not None]
    for precision in dict.fromkeys(row["precision"] for row in steps):
        own = sorted(
            (row for row in steps if row["precision"] == precision), key=lambda row: -row["versus_fp32"]
        )
        verdicts = Counter(row["versus_fp32_verdict"] for row in own).most_common()
        most, least = (
            f"{row['versus_fp32']:.2f} ({row['size']} at {row['length']})" for row in (own[0], own[-1])
        )
        found.append(
            f"A step in {precision} is {most} to {least} times as fast as in fp32; verdicts of the paired rounds: "
            f"{', '.join(f'{verdict} {count}' for verdict, count in verdicts)}."
        )
    return found


def _length_findings(timed: Rows) -> list[str]:
    """Name the models whose time grows far less than their work: it is not the device's."""
    by_model: dict[str, dict[int, float]] = {}
    for row in timed:
        if row["mode"] == "step":
            by_model.setdefault(_name(row), {})[row["length"]] = row["median_ms"]
    growths = []
    for name, times in by_model.items():
        short, long = min(times), max(times)
        growth = times[long] / times[short]
        if long > short and growth < 0.5 * long / short:
            growths.append(f"{growth:.2f} ({name}, {short} to {long})")
    if not growths:
        return []
    return [
        f"Steps that grow far less than their tokens: {', '.join(growths)} times as long. At the short end the time "
        "goes elsewhere: into the CPU's dispatch, or the optimizer."
    ]


def _optimizer_findings(timed: Rows) -> list[str]:
    """Compare clipping and the optimizer, a step minus forward and backward, with the time that their bytes take."""
    passes = {(_name(row), row["length"]): row["median_ms"] for row in timed if row["mode"] == "fwd+bwd"}
    steps = [row for row in timed if row["mode"] == "step" and (_name(row), row["length"]) in passes]
    extra = {id(row): row["median_ms"] - passes[_name(row), row["length"]] for row in steps}
    row = max(steps, key=lambda row: extra[id(row)] / row["median_ms"], default=None)
    if row is None or extra[id(row)] <= 0:
        return []
    return [
        f"Clipping and the optimizer take up to {extra[id(row)] / row['median_ms']:.0%} of a step ({row['size']} at "
        f"{row['length']}, {row['precision']}), {extra[id(row)]:.2f} ms; moving their bytes takes "
        f"{row['optimizer_floor_ms']:.2f} ms at the measured copy bandwidth."
    ]


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw time, memory and throughput over length, and the warm-up study."""
    models = [row for row in rows if row["part"] == "model"]
    study = [row for row in rows if row["part"] == "warm-up"]
    files = {
        "model_time.png": _panels(models, "median_ms", "Time of a pass", "time (ms, log scale)"),
        "model_memory.png": _panels(
            models, "peak_gb", "Peak memory", "peak memory (GB = 10^9 bytes)", log_y=False
        ),
        "model_throughput.png": _panels(
            models, "tokens_per_s", "Throughput", "tokens per second (log scale)"
        ),
    }
    return files | ({"model_warmup.png": _warmup_bars(study)} if study else {})


def _panels(models: Rows, key: str, title: str, y_label: str, *, log_y: bool = True) -> bytes:
    """Draw a panel per mode; what does not fit leaves a gap."""
    panels: dict[str, dict[tuple[str, str], list[tuple[float, float]]]] = {}
    notes: dict[str, list[str]] = {}
    for row in models:
        kind = row["precision"] + (f", compile {row['compile']}" if row["compile"] != "none" else "")
        points = panels.setdefault(row["mode"], {}).setdefault((row["size"], kind), [])
        if row.get(key) is not None:
            points.append((row["length"], row[key]))
        elif row["status"] != "ok":
            notes.setdefault(row["mode"], []).append(
                f"{row['status']}: {row['size']} at {row['length']}, {kind}"
            )
    return line_panels(
        panels,
        title=title,
        x_label="sequence length (tokens)",
        y_label=y_label,
        log_y=log_y,
        notes={mode: "\n".join(lines) for mode, lines in notes.items()},
    )


def _warmup_bars(study: Rows) -> bytes:
    groups = list(dict.fromkeys(str(row["warmup"]) for row in study))
    series: dict[str, list[float | None]] = {}
    errors: dict[str, list[tuple[float, float] | None]] = {}
    for row in study:
        name, place = f"{row['size']}, compile {row['compile']}", groups.index(str(row["warmup"]))
        values = series.setdefault(name, [None] * len(groups))
        reaches = errors.setdefault(name, [None] * len(groups))
        if row.get("mean_ms") is not None:
            mean, samples = row["mean_ms"], row["samples_ms"]
            values[place] = mean
            # Not the standard deviation: it is larger than the mean where the first step compiles.
            reaches[place] = (mean - min(samples), max(samples) - mean)
    of = f" of {next(iter(series))}" if len(series) == 1 else ""  # several have a legend
    return grouped_bars(
        groups,
        series,
        errors=errors,
        title=f"Mean step time{of} by number of warm-up steps (whiskers: fastest and slowest step)",
        x_label="untimed steps before the timed ones",
        y_label="mean time of a step (ms, log scale)",
        log_y=True,
    )
