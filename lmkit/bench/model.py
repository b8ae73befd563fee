"""`lmkit bench model`: forward, forward + backward and whole steps over sizes, lengths, precisions and compilation.

The variants of one model (part of a step x precision) are timed by the wall clock, dispatch included.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from itertools import product
from operator import methodcaller
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lmkit.bench.context import Context
from lmkit.bench.failures import failure_is_a_row
from lmkit.bench.harness import ratio_fields, time_fields, too_large_for_host, without_figures
from lmkit.bench.summary import UNCHECKED, WRONG
from lmkit.bench.trainings import SPREAD, Variant, interval, measure_figures, speed_fields
from lmkit.errors import UsageError
from lmkit.measure.limits import Limits
from lmkit.measure.memory import release_memory
from lmkit.measure.plots import line_panels
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.tables import Column, Rows
from lmkit.measure.timing import wall_clock
from lmkit.recipe.keys import Shortcut
from lmkit.recipe.tables import PRESETS, Checkpointing, Count, ModelConfig, PositiveFloat, PositiveInt, Table
from lmkit.recipe.values import AttentionName, OperationsName
from lmkit.registry import BENCHES

if TYPE_CHECKING:
    from lmkit.recipe.recipe import Recipe
    from lmkit.training.setup import TrainingStep

Mode = Literal["forward", "fwd+bwd", "step"]
METHODS: dict[Mode, str] = {"forward": "forward", "fwd+bwd": "forward_backward", "step": "run"}
"""Mode -> the method of `TrainingStep`."""
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
    modes: tuple[Mode, ...] = tuple(METHODS)
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
    options = context.options
    if "fp16" in options.precisions and context.device.type == "cpu":
        message = 'bench.model.precisions: "fp16" needs a GPU'
        raise UsageError("bench.precision_needs_gpu", message, hint="use fp32 or bf16")
    limits = context.limits(options.precisions)
    rows: Rows = []
    # The study comes first: a warm-up of zero steps needs a process that has run nothing.
    for compiled in options.compile if options.warmup_study else ():
        config = _config(options.sizes[0], options.lengths[0], compiled, options)
        rows += [_study_warmup(config, warmup, context) for warmup in options.warmup_study]
    context.keep(rows)
    models = list(product(options.sizes, options.lengths, options.compile))
    rows += context.rows_of("models", models, lambda case: _measure(_config(*case, options), context, limits))
    return [_with_its_fault(row, rows) if row["part"] == "warm-up" else row for row in rows]


def _with_its_fault(study: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """Return a row of the study, which ran before anything was checked; without figures if its model is wrong."""
    same = ("size", "length", "compile", "precision")
    for row in rows:
        if row["status"] in (*WRONG, "failed") and all(row[key] == study[key] for key in same):
            return without_figures(study) | {key: row[key] for key in ("status", "detail")}
    return study


def _config(size: Any, length: int, compiled: Any, options: Options) -> ModelConfig:
    sizes: dict[str, Any] = dict(PRESETS[size])
    keys = ("vocab_size", "attention", "operations", "activation_checkpointing", "tie_embeddings")
    sizes |= {key: getattr(options, key) for key in keys}
    return ModelConfig(preset=size, context_length=length, compile=compiled, **sizes)


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

    theirs = reference(of_pytorch(_recipe(config, precision, context)), context.ranks)
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
    from lmkit.model.accounting import flops_per_token, forward_flops_per_token

    options = context.options
    trainings: dict[str, TrainingStep] = {}
    check = cache(partial(after_timing, forward="forward" in options.modes))

    def make(precision: str) -> TrainingStep:
        if precision not in trainings:
            trainings[precision] = _build(config, precision, context)
        return trainings[precision]

    def run(mode: Mode, times: int, training: TrainingStep, *making: object) -> dict[str, Any]:
        try:
            for _ in range(times):
                getattr(training, METHODS[mode])()
        finally:  # what does not fit leaves gradients
            training.optimizer.zero_grad(set_to_none=True)
        return {}

    def figures(name: str, samples_ms: list[float]) -> dict[str, Any]:
        mode, _, precision = name.rpartition(" ")
        length = config.context_length
        flops = (forward_flops_per_token if mode == "forward" else flops_per_token)(config, length)
        work = {"tokens": options.batch_size * length, "flops": flops, "precision": precision}
        return speed_fields(samples_ms, context, limits, **work) | {"repeats": len(samples_ms)}

    too_large = too_large_for_host(config, context)
    judged = {name: too_large or _judged(config, name, context) for name in options.precisions}
    variants = {
        f"{mode} {precision}": Variant(
            row=_row(config, context, "model", mode, precision) | judged[precision],
            make=partial(make, precision),
            check=partial(check, budget=budget_of(precision)),
            judge=partial(run, mode, 1),  # compiles and autotunes, which takes memory of its own
            fill=partial(run, mode, 1),
            weights=precision,
            more=partial(run, mode, options.warmup),
            run=methodcaller(METHODS[mode]),
        )
        for mode in METHODS  # cheap modes first
        if mode in options.modes
        for precision in options.precisions
    }
    turns: dict[str, Any] = {"rounds": options.iters, "max_seconds": options.max_seconds}
    turns["clock"] = wall_clock(context.device)
    believed = measure_figures(variants, context, limits, figures, **turns)
    check.cache_clear()
    trainings.clear()
    for name, samples_ms in believed.items():
        mode, _, precision = name.rpartition(" ")
        if precision != "fp32" and (wide := believed.get(f"{mode} fp32")):
            ratio = paired_ratio(samples_ms, wide)
            variants[name].row |= ratio_fields(ratio, "versus_fp32", "versus_fp32_verdict")
    release_memory(context.device)
    return [variant.row for variant in variants.values()]


def _study_warmup(config: ModelConfig, warmup: int, context: Context) -> dict[str, Any]:
    """Time whole steps of a fresh model after `warmup` untimed ones."""
    precision = context.options.precisions[0]

    def warm_up(training: TrainingStep) -> dict[str, Any]:
        for _ in range(warmup):
            training.run()
        return {}

    def figures(_: str, samples_ms: list[float]) -> dict[str, Any]:
        return time_fields(samples_ms) | {"first_ms": samples_ms[0]}

    row = _row(config, context, "warm-up", "step", precision) | {"warmup": warmup}
    row |= too_large_for_host(config, context)
    study = {"study": Variant(row, make=partial(_build, config, precision, context), judge=warm_up)}
    clock = wall_clock(context.device)
    measure_figures(study, context, None, figures, rounds=STUDY_STEPS, clock=clock)
    return row


TITLE, EACH = "Model benchmark", "precision"
ABOUT = ("batch_size", "attention")
TIME = Column("median_ms", "ms", ".2f", instead="status", axis="time, ms")
COLUMNS = (
    Column("size", "size"),
    Column("length", "length", "d"),
    Column("precision", "prec."),
    Column("compile", "compile"),
    Column("mode", "mode"),
    Column("warmup", "warm-up", "d", note="of the rows that study it: untimed steps of a fresh model"),
    TIME,
    SPREAD,
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("mfu", "MFU", ".1%", better="higher"),
    Column("peak_gb", "GB", ".2f"),
    Column("versus_fp32", "x fp32", ".2f"),
    Column("mean_ms", "mean ms", ".2f", wide=True),
    Column("first_ms", "first ms", ".2f", wide=True),
    *interval("versus_fp32", ".2f"),
)
NOTES = (
    "ms: median of interleaved rounds, host included; GB (10^9): peak over what was in use before the bench, weights "
    "included",
)


def pictures(rows: Rows) -> dict[str, bytes]:
    def kind(row: Mapping[str, Any]) -> str:
        return row["precision"] + (f", compile {row['compile']}" if row["compile"] != "none" else "")

    models = [row for row in rows if row["part"] == "model"]
    where: dict[str, Any] = {"panel": "mode", "group": "size", "kind": kind, "log_y": True}
    where |= {"title": "Time of a pass", "x_label": "sequence length (tokens)"}
    return {"model_time.png": line_panels(models, "length", TIME, **where)}
