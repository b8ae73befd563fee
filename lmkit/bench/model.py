"""`lmkit bench model`: forward, forward + backward and whole steps over sizes, lengths, precisions and compilation.

The variants of one model (part of a step x precision) begin with the same weights and are timed in interleaved rounds
by the wall clock, dispatch included. A variant that does not fit, or is wrong (`training_gate`), becomes a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lmkit.bench.context import Context, failure_is_a_row, not_enough_memory
from lmkit.bench.harness import (
    grouped,
    mfu_notes,
    ratio_fields,
    time_fields,
    too_large_for_host,
    without_figures,
)
from lmkit.bench.summary import UNCHECKED, WRONG, Summary
from lmkit.bench.trainings import Memory, Variant, measure_figures, speed_fields
from lmkit.errors import UsageError
from lmkit.measure.limits import Limits
from lmkit.measure.memory import release_memory
from lmkit.measure.plots import grouped_bars, line_panels
from lmkit.measure.statistics import FEWEST_PAIRS, paired_ratio
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.measure.timing import clock_for
from lmkit.recipe.keys import Shortcut
from lmkit.recipe.tables import PRESETS, Checkpointing, Count, ModelConfig, PositiveFloat, PositiveInt, Table
from lmkit.recipe.values import AttentionName, OperationsName
from lmkit.registry import BENCHES

if TYPE_CHECKING:
    from lmkit.recipe.schema import Recipe
    from lmkit.training.setup import TrainingStep

Mode = Literal["forward", "fwd+bwd", "step"]
MODES: tuple[Mode, ...] = ("forward", "fwd+bwd", "step")
STUDY_STEPS = 10


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
    """Parts of a step; `step` is forward, backward, clipping and [optimizer], at a constant rate of 3e-4."""
    attention: AttentionName = "sdpa"
    """The attention kernel of all variants."""
    operations: OperationsName = "auto"
    """As in [model]."""
    activation_checkpointing: Checkpointing = "none"
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
    options = recipe.bench_table("model")
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
    rows: Rows = []
    # The study comes first: a warm-up of zero steps needs a process that has run nothing.
    for compiled in options.compile if options.warmup_study else ():
        config = _config(options.sizes[0], options.lengths[0], compiled, options)
        rows += [_study_warmup(config, warmup, context) for warmup in options.warmup_study]
    context.keep(rows)
    models = [
        (size, length, how) for size in options.sizes for length in options.lengths for how in options.compile
    ]
    for case in context.each("models", models):
        found = _measure(_config(*case, options), context, limits)
        rows += found
        context.keep(found)
    return [_with_its_fault(row, rows) if row["part"] == "warm-up" else row for row in rows]


def _with_its_fault(study: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """Return a row of the study, which ran before anything was checked; without figures if its model is wrong."""
    same = ("size", "length", "compile", "precision")
    for row in rows:
        if row["status"] in (*WRONG, "failed") and all(row[key] == study[key] for key in same):
            return without_figures(study) | {key: row[key] for key in ("status", "detail")}
    return study


def _config(size: Any, length: int, compiled: Any, options: Options) -> ModelConfig:
    sizes: dict[str, Any] = PRESETS[size]
    return ModelConfig(
        preset=size,
        **sizes,
        vocab_size=options.vocab_size,
        context_length=length,
        compile=compiled,
        attention=options.attention,
        operations=options.operations,
        activation_checkpointing=options.activation_checkpointing,
        tie_embeddings=options.tie_embeddings,
    )


def _row(config: ModelConfig, context: Context, part: str, mode: str, precision: str) -> dict[str, Any]:
    from lmkit.model.accounting import count_parameters

    options = context.options
    return {
        **context.optimizer_field,
        "part": part,
        "size": config.preset,
        "length": config.context_length,
        "compile": config.compile,
        "attention": config.attention,
        "checkpointing": config.activation_checkpointing,
        "batch_size": options.batch_size,
        "parameters": count_parameters(config).total,
        "mode": mode,
        "precision": precision,
        "status": "ok",
        "detail": "",
    }


def _build(config: ModelConfig, precision: str, context: Context) -> TrainingStep:
    import torch

    from lmkit.training.setup import TrainingStep

    torch.compiler.reset()
    return TrainingStep(_recipe(config, precision, context), context.ranks)


def _recipe(config: ModelConfig, precision: str, context: Context) -> Recipe:
    return context.recipe_of(config, batch_size=context.options.batch_size, precision=precision)


def _judged(config: ModelConfig, precision: str, context: Context) -> dict[str, Any]:
    """Return fields of the rows of a precision: whether a training of its own is right.

    It is not one that is measured: the memory of a forward pass must not include the optimizer's state.
    """
    from lmkit.bench.training_gate import budget_of, judge, of_pytorch, reference

    theirs = reference(of_pytorch(_recipe(config, precision, context)), context.device)
    found: dict[str, Any] = {"status": "ok"}
    with failure_is_a_row(found, context.device):
        training = _build(config, precision, context)
        found |= judge(training, theirs, budget_of(precision), forward="forward" in context.options.modes)[0]
    training = None  # type: ignore[assignment]
    release_memory(context.device)
    return {UNCHECKED: "no room for a training"} if found["status"] == "out of memory" else found


def _measure(config: ModelConfig, context: Context, limits: Limits) -> Rows:
    """Return one row per mode and precision of one model; the modes of a precision share a training."""
    from lmkit.bench.training_gate import after_timing, budget_of

    options = context.options
    trainings: dict[str, TrainingStep] = {}
    memory = Memory(context.device)
    check = cache(partial(after_timing, forward="forward" in options.modes))

    def make(precision: str) -> TrainingStep:
        for training in trainings.values():
            training.optimizer.zero_grad(set_to_none=True)  # a variant that did not fit left some
        memory.begin(precision)
        if precision not in trainings:
            trainings[precision] = _build(config, precision, context)
        return trainings[precision]

    def more(mode: str, precision: str, training: TrainingStep) -> dict[str, Any]:
        run = partial(_call, mode, training)
        run()  # compiles and autotunes, which takes memory of its own
        found = {"peak_gb": memory.peak_gb(precision, training, run)}
        for _ in range(options.warmup):
            run()
        training.optimizer.zero_grad(set_to_none=True)
        return found

    variants: dict[str, Variant] = {}
    precisions: dict[str, dict[str, Any]] = {}
    too_large = too_large_for_host(config, context)
    for mode in filter(options.modes.__contains__, MODES):  # cheap modes first
        for precision in options.precisions:
            if precision not in precisions:
                precisions[precision] = (
                    not_enough_memory(too_large) if too_large else _judged(config, precision, context)
                )
            variants[f"{mode} {precision}"] = Variant(
                row=_row(config, context, "model", mode, precision) | precisions[precision],
                make=partial(make, precision),
                check=partial(check, budget=budget_of(precision)),
                more=partial(more, mode, precision),
                run=partial(_call, mode),
            )
    clock = clock_for(context.device, "wall")
    turns = {"rounds": options.iters, "max_seconds": options.max_seconds}
    figures = partial(_figures, config, context, limits)
    rows, believed = measure_figures(variants, context, limits, figures, clock=clock, **turns)
    check.cache_clear()
    trainings.clear()
    for name, samples_ms in believed.items():
        mode, _, precision = name.rpartition(" ")
        if precision != "fp32" and (wide := believed.get(f"{mode} fp32")):
            rows[name] |= ratio_fields(paired_ratio(samples_ms, wide), "versus_fp32", "versus_fp32_verdict")
    release_memory(context.device)
    return list(rows.values())


def _call(mode: str, training: TrainingStep) -> object:
    return {"forward": training.forward, "fwd+bwd": training.forward_backward, "step": training.run}[mode]()


def _figures(
    config: ModelConfig, context: Context, limits: Limits, name: str, samples_ms: list[float]
) -> dict[str, Any]:
    from lmkit.model.accounting import (
        count_parameters,
        flops_per_token,
        forward_flops_per_token,
        update_bytes,
    )

    mode, _, precision = name.rpartition(" ")
    length, options = config.context_length, context.options
    flops = (forward_flops_per_token if mode == "forward" else flops_per_token)(config, length)
    work = {"tokens": options.batch_size * length, "flops": flops, "precision": precision}
    fields = speed_fields(samples_ms, context, limits, **work) | {"repeats": len(samples_ms)}
    rate = fields["tokens_per_s"] * flops
    fields |= {"tflops": rate / 1e12, "share_of_matmul": rate / limits.matmul_flops[precision]}
    if mode == "step" and not context.optimizer_field:
        floor = count_parameters(config).total * update_bytes(4) / limits.copy_bytes_per_s
        fields["optimizer_floor_ms"] = floor * 1e3
    return fields


def _study_warmup(config: ModelConfig, warmup: int, context: Context) -> dict[str, Any]:
    """Time whole steps of a fresh model after `warmup` untimed ones."""
    row = _row(config, context, "warm-up", "step", context.options.precisions[0]) | {"warmup": warmup}
    if too_large := too_large_for_host(config, context):
        return row | not_enough_memory(too_large)
    clock = clock_for(context.device, "wall")
    with failure_is_a_row(row, context.device):
        step = _build(config, context.options.precisions[0], context)
        for _ in range(warmup):
            step.run()
        samples = [clock.sample_ms(step.run, 1, before=()) for _ in range(STUDY_STEPS)]
        row |= time_fields(samples) | {"first_ms": samples[0]}
    step = None  # type: ignore[assignment]
    release_memory(context.device)
    return row


# Rows in words

TIME = Column("median_ms", "ms", ".2f", instead="status", axis="time, ms")
THROUGHPUT = Column("tokens_per_s", "tokens/s", ",.0f", axis="tokens per second")
MEMORY = Column("peak_gb", "GB", ".2f", axis="peak memory (GB = 10^9 bytes)")
COLUMNS = (
    Column("size", "size"),
    Column("length", "length", "d"),
    Column("precision", "prec."),
    Column("compile", "compile"),
    Column("mode", "mode"),
    TIME,
    Column("spread", "spread", ".0%"),
    THROUGHPUT,
    Column("mfu", "MFU", ".1%"),
    MEMORY,
    Column("versus_fp32", "x fp32", ".2f"),
)
WIDE = (
    Column("versus_fp32_low", "95% from", ".2f"),
    Column("versus_fp32_high", "to", ".2f"),
    Column("share_of_matmul", "matmul", ".1%"),
    Column("optimizer_floor_ms", "least optimizer ms", ".2f"),
)
MEAN = Column("mean_ms", "mean ms", ".2f", instead="status", axis="mean time of a step, ms")
WARMUP_COLUMNS = (
    Column("size", "size"),
    Column("compile", "compile"),
    Column("warmup", "warm-up steps", "d"),
    MEAN,
    Column("median_ms", "median ms", ".2f"),
    Column("first_ms", "first step ms", ".2f"),
)


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: the best utilization of each precision."""
    models = [row for row in rows if row["part"] == "model"]
    study = [row for row in rows if row["part"] == "warm-up"]
    first = rows[0]
    return Summary(
        "Model benchmark",
        COLUMNS,
        models or rows,
        about=f"Batch {first['batch_size']}, attention {first['attention']}" if "batch_size" in first else "",
        findings=findings(models),
        tables={"Warm-up: steps of a fresh model": markdown_table(study, WARMUP_COLUMNS)} if study else {},
        notes=(
            *mfu_notes(rows),
            "ms: median of interleaved rounds, host included; spread: (p90 - p10) / median; GB (10^9): peak over "
            "what was in use before the bench, weights included",
        ),
        wide=WIDE,
    )


def findings(models: Rows) -> list[str]:
    """Return the sentences that the rows support."""
    found = []
    timed = [row for row in models if row.get("median_ms")]
    for precision, members in grouped(timed, lambda row: str(row["precision"])).items():
        best = max(members, key=lambda row: row["mfu"])
        found.append(
            f"Best utilization in {precision}: {best['size']} at {best['length']}, compile {best['compile']}, "
            f"{best['mode']}: {best['mfu']:.1%} MFU ({best['mfu_basis']}), {best['tokens_per_s']:,.0f} tokens/s."
        )

    if few := [row for row in timed if row["repeats"] < FEWEST_PAIRS]:
        found.append(
            f"{len(few)} of {len(timed)} rows have fewer than {FEWEST_PAIRS} samples: small differences mean nothing."
        )
    return found


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw time, memory and throughput over length, and the warm-up study."""
    models = [row for row in rows if row["part"] == "model"]
    study = [row for row in rows if row["part"] == "warm-up"]

    def kind(row: Mapping[str, Any]) -> str:
        return row["precision"] + (f", compile {row['compile']}" if row["compile"] != "none" else "")

    where: dict[str, Any] = {"panel": "mode", "group": "size", "kind": kind}
    where |= {"x_label": "sequence length (tokens)"}
    files = {
        "model_time.png": line_panels(models, "length", TIME, title="Time of a pass", log_y=True, **where),
        "model_memory.png": line_panels(models, "length", MEMORY, title="Peak memory", **where),
        "model_throughput.png": line_panels(
            models, "length", THROUGHPUT, title="Throughput", log_y=True, **where
        ),
    }
    if study:
        files["model_warmup.png"] = grouped_bars(
            study,
            MEAN,
            group="warmup",
            series=lambda row: f"{row['size']}, compile {row['compile']}",
            # Not the standard deviation: it is larger than the mean where the first step compiles.
            whisker=lambda row: (
                row["mean_ms"] - min(row["samples_ms"]),
                max(row["samples_ms"]) - row["mean_ms"],
            ),
            title="Mean step time by number of warm-up steps (whiskers: fastest and slowest step)",
            x_label="untimed steps before the timed ones",
            log_y=True,
        )
    return files
