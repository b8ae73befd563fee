"""`lmkit bench step`: compare the whole training step with rivals, and show which kernels take its time.

It times the step that `lmkit train` runs. All variants of a size are alive at once and take turns. A sample is a few
steps of a loop in steady state. Variants of lmkit are checked first, beside PyTorch's operations (`training_gate`). A
variant whose loss is not finite or does not fall is not timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, get_args

from lmkit.bench.context import Context, not_enough_memory, wrong_result
from lmkit.bench.harness import grouped, mfu_notes, too_large_for_host
from lmkit.bench.summary import Summary
from lmkit.bench.trainings import (
    SPREAD,
    VERDICT,
    Memory,
    Variant,
    compare_with_first,
    comparison,
    comparison_column,
    host_ms,
    measure_figures,
    speed_fields,
    with_verdicts,
)
from lmkit.measure.limits import Limits
from lmkit.measure.memory import claim_workspaces, release_memory
from lmkit.measure.plots import grouped_bars
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.measure.trace import CLASSES, class_times
from lmkit.recipe.tables import Count, ModelConfig, PositiveFloat, PositiveInt, Table
from lmkit.recipe.values import AttentionName
from lmkit.registry import BENCHES

if TYPE_CHECKING:
    from lmkit.bench.step_variants import Ablated, RivalStep
    from lmkit.bench.training_gate import Reference
    from lmkit.core.batches import Batch
    from lmkit.training.setup import TrainingStep

    Training = TrainingStep | Ablated | RivalStep

FIELDS = ("num_layers", "d_model", "num_heads", "d_ff", "vocab_size", "context_length")
SIZES = {
    "tiny": (4, (2, 64, 4, 192, 256, 32)),
    "quickstart": (16, (4, 128, 4, 352, 2048, 128)),
    "matrix": (8, (24, 512, 16, 4096, 10_000, 256)),
    "162M": (32, (12, 768, 12, 2048, 50_304, 1024)),
    "1.3B": (8, (24, 2048, 16, 5504, 50_304, 2048)),
    "8B": (1, (32, 4096, 32, 14_336, 128_256, 2048)),
}
"""Name -> (sequences per step, `FIELDS` of [model]): one for tests, those of the recipes quickstart and lm_matrix,
one as large as GPT-2, one in which matrix products dominate, and one that only `bench generate` measures."""

COMPILED: dict[str, Literal["none", "block", "whole"]] = {
    "lmkit": "none",
    "lmkit_block": "block",
    "lmkit_whole": "whole",
    "lmkit_fp8": "none",
}
"""Variant of lmkit -> its `model.compile`."""
Ablation = Literal[
    "lmkit:no_graph",
    "lmkit:plain",
    "lmkit:plain_embedding",
    "lmkit:plain_norm",
    "lmkit:plain_rope",
    "lmkit:plain_swiglu",
    "lmkit:plain_loss",
    "lmkit:sdpa",
    "lmkit:waits",
    "lmkit:autocast",
    "lmkit:none",
]
"""See `lmkit.bench.step_variants`."""
ABLATIONS: tuple[str, ...] = get_args(Ablation)

BATCHES = 4


class Options(Table):
    """`[bench.step]`."""

    sizes: tuple[Literal["tiny", "quickstart", "matrix", "162M", "1.3B"], ...] = ("tiny",)
    """Models with their batches: quickstart 16 x 128 tokens, matrix 8 x 256, 162M 32 x 1024, 1.3B 8 x 2048."""
    variants: tuple[
        Literal["lmkit", "lmkit_block", "lmkit_whole", "lmkit_fp8", "nanogpt", "plain", "plain_eager"]
        | Ablation,
        ...,
    ] = ("lmkit", "nanogpt", "plain", "plain_eager")
    """lmkit's step (eager, compiled, or eager with fp8 products), nanoGPT's model compiled, and our architecture in
    PyTorch's modules compiled and eager. `lmkit:NAME` is lmkit's step without one idea: the CUDA graph, fused
    operations (all or one), our attention, working ahead, or bf16 weights; or with none of them. All are compared
    with the first."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Of lmkit, as in [train]; of the rivals, by autocast."""
    attention: AttentionName = "sdpa"
    """The attention kernel of lmkit; the rivals run PyTorch's."""
    rounds: PositiveInt = 12
    """Interleaved samples of each variant; fewer than 6 give no interval."""
    steps_per_sample: PositiveInt = 10
    """Timed training steps of a sample; half as many untimed steps precede them."""
    profiled_steps: Count = 3
    """Steps that are recorded for the table of kernel classes; 0: no table."""
    max_seconds: PositiveFloat = 120.0
    """Seconds of timing per size; whole rounds only."""


@dataclass(frozen=True)
class FewBatches:
    """Repeat a few batches, so that the loss must fall."""

    batches: tuple[Batch, ...]

    def batch(self, step: int) -> Batch:
        """Return (inputs, targets), int64 (1, rows, seq)."""
        return self.batches[step % len(self.batches)]


@BENCHES.register(
    "step",
    order=2,
    help="The whole training step beside nanoGPT's model and plain PyTorch.",
    recipes=("bench_step", "bench_step_cpu"),
    example="lmkit bench step bench_step_cpu",
    row_keys=("size", "variant", "context_length"),
)
def step(context: Context) -> Rows:
    """Return a row per size and variant."""
    options = context.options
    limits = context.limits([options.precision])
    claim_workspaces(context.device)
    rows: Rows = []
    for size in context.each("sizes", options.sizes):
        found = _measure(size, context, limits)
        context.keep(found)
        rows += found
    return rows


def config_of(size: str, variant: str, attention: str) -> ModelConfig:
    """Return the table [model] of a variant."""
    sizes: dict[str, Any] = dict(zip(FIELDS, SIZES[size][1], strict=True))
    return ModelConfig(**sizes, attention=attention, compile=COMPILED.get(variant, "none"))


def _measure(size: str, context: Context, limits: Limits) -> Rows:
    """Return one row per variant of one size."""
    import torch

    from lmkit.bench.step_variants import wrong_by_now
    from lmkit.bench.training_gate import budget_of, judge

    options, device = context.options, context.device
    torch.compiler.reset()
    references = _references(size, context)
    shared: dict[str, TrainingStep] = {}
    judged: set[str] = set()
    memory = Memory(device)

    def weights_of(variant: str) -> str:
        return _precision(variant, options) if variant in ABLATIONS else variant

    def make(variant: str) -> Training:
        memory.begin(weights_of(variant))
        return _build(size, variant, context, shared)

    def first_steps(variant: str, training: Training) -> dict[str, Any]:
        found: dict[str, Any] = {"parameters": sum(p.numel() for p in training.model.parameters())}
        precision = _precision(variant, options)
        if is_own(variant) and weights_of(variant) not in judged:
            own: Any = shared[precision] if variant in ABLATIONS else training
            found |= judge(own, references[precision], budget_of(precision))[0]
            if found["status"] != "ok":
                shared.pop(precision, None)
                return found
            judged.add(weights_of(variant))
        losses = [training.run().item() for _ in range(2 * BATCHES)]
        if wrong := _why_wrong(losses, falls=variant not in ABLATIONS):
            return found | wrong_result(wrong)
        return found | {"first_loss": losses[0], "last_loss": losses[-1]}

    def more(variant: str, training: Training) -> dict[str, Any]:
        found: dict[str, Any] = {"peak_gb": memory.peak_gb(weights_of(variant), training, training.run)}
        if device.type == "cuda":
            found["host_ms"] = host_ms(training.run, device)
        if options.profiled_steps:
            found["class_ms"] = _class_ms(training, context)
        return found

    too_large = too_large_for_host(config_of(size, "", options.attention), context)
    variants = {
        variant: Variant(
            row=_row(size, variant, context) | (not_enough_memory(too_large) if too_large else {}),
            make=partial(make, variant),
            judge=partial(first_steps, variant),
            more=partial(more, variant),
            check=partial(wrong_by_now, budget=budget_of(_precision(variant, options))),
        )
        for variant in options.variants
    }
    figures = partial(_figures, size, context, limits)
    rows, believed = measure_figures(
        variants, context, limits, figures, rounds=options.rounds, max_seconds=options.max_seconds
    )
    shared.clear()
    compare_with_first(rows, believed, options.variants[0])
    release_memory(device)
    return list(rows.values())


def is_own(variant: str) -> bool:
    """Return whether a variant is lmkit's, not a rival."""
    return variant in (*COMPILED, *ABLATIONS)


def _row(size: str, variant: str, context: Context) -> dict[str, Any]:
    options = context.options
    return {
        **(context.optimizer_field if is_own(variant) else {}),
        "size": size,
        "variant": variant,
        "versus": options.variants[0],
        "context_length": config_of(size, variant, options.attention).context_length,
        "batch_size": SIZES[size][0],
        "precision": _precision(variant, options),
        "attention": options.attention if is_own(variant) else "PyTorch's",
        "status": "ok",
        "detail": "",
    }


def _precision(variant: str, options: Options) -> str:
    autocast = ("lmkit:autocast", "lmkit:none")
    return "bf16-autocast" if variant in autocast else "fp8" if variant == "lmkit_fp8" else options.precision


def _references(size: str, context: Context) -> dict[str, Reference]:
    """Return precision of a variant of lmkit -> the steps of PyTorch's operations, where they fit."""
    from lmkit.bench.training_gate import of_pytorch, reference

    config, found = config_of(size, "", context.options.attention), {}
    for variant in () if too_large_for_host(config, context) else context.options.variants:
        precision = _precision(variant, context.options)
        if is_own(variant) and precision not in found:
            recipe = of_pytorch(context.recipe_of(config, precision=precision))
            found[precision] = reference(recipe, context.device, _batches(size, context))
    return found


def _batches(size: str, context: Context) -> FewBatches:
    from lmkit.core.batches import RandomTokens

    config = config_of(size, "", "sdpa")
    assert config.vocab_size is not None
    rows, seed = SIZES[size][0], context.recipe.run.seed
    random = RandomTokens(config.vocab_size, batch_size=rows, context_length=config.context_length, seed=seed)
    return FewBatches(tuple(random.batch(number) for number in range(BATCHES)))


def _build(size: str, variant: str, context: Context, shared: dict[str, TrainingStep]) -> Training:
    """Build a variant.

    Args:
        shared: precision -> the training of its ablations; a missing one is made.
    """
    from lmkit.bench.step_variants import Ablated, RivalStep
    from lmkit.model.fp8 import check_fp8
    from lmkit.training.setup import TrainingStep

    options, device = context.options, context.device
    config, batches = config_of(size, variant, options.attention), _batches(size, context)
    precision = _precision(variant, options)
    if not is_own(variant):
        seed = context.recipe.run.seed
        return RivalStep(variant, config, device, batches, precision=options.precision, seed=seed)
    if variant in ABLATIONS and precision in shared:
        return Ablated(variant, shared[precision])
    if precision == "fp8":
        check_fp8(device)
    graph: dict[str, Any] = {"cuda_graph": "off"} if variant in ABLATIONS else {}
    training = TrainingStep(context.recipe_of(config, precision=precision, **graph), context.ranks, batches)
    if variant not in ABLATIONS:
        return training
    shared[precision] = training
    return Ablated(variant, training)


def _why_wrong(losses: list[float], *, falls: bool) -> str:
    """Return what is wrong with the losses of two passes over the same batches, or "".

    Args:
        falls: require that the losses fall; False for weights that other variants have trained: only finite.
    """
    first, second = fmean(losses[:BATCHES]), fmean(losses[BATCHES:])
    if second < (first if falls else math.inf):  # false for NaN
        return ""
    return f"the loss over {BATCHES} batches does not fall: {first:.4f}, then {second:.4f}"


def _class_ms(training: Training, context: Context) -> dict[str, float]:
    from lmkit.measure.trace import profile_work

    steps = context.options.profiled_steps
    trace, _ = profile_work(
        training.run, steps=steps, warmup=0, device=context.device, source="bench step", ranges=False
    )
    return class_times(trace, steps)


def _figures(
    size: str, context: Context, limits: Limits, variant: str, samples_ms: list[float]
) -> dict[str, Any]:
    from lmkit.model.accounting import flops_per_token, step_work

    config, precision = config_of(size, "", "sdpa"), context.options.precision
    rows, length = SIZES[size][0], config.context_length
    flops = flops_per_token(config, length, causal=True)
    work = step_work(config, rows, element_bytes=4 if precision == "fp32" else 2)
    floors = {
        name: max(part.flops / limits.matmul_flops[precision], part.num_bytes / limits.copy_bytes_per_s) * 1e3
        for name, part in work.items()
    }
    of_step = {"tokens": rows * length, "flops": flops, "precision": precision}
    return speed_fields(samples_ms, context, limits, **of_step) | {"floor_ms": floors}


# Rows in words

_COUNTED = (
    "counts 6 N + 6 L d T operations a token (causal attention by half), the same for all variants of a size"
)
MFU = Column("mfu", "MFU", ".1%", note=_COUNTED)
COLUMNS = (
    Column("size", "size"),
    Column("variant", "variant"),
    Column("median_ms", "ms", ".2f", instead="status"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    MFU,
    Column("host_ms", "host ms", ".2f", note="until a step returns, its waits included"),
    Column("peak_gb", "GB", ".2f", note="10^9 bytes, the peak of a step"),
)
WIDE = (
    SPREAD,
    Column("p10_ms", "p10 ms", ".2f"),
    Column("p90_ms", "p90 ms", ".2f"),
    VERDICT,
)


def _optimizers(rows: Rows) -> list[str]:
    return [*dict.fromkeys(row["optimizer"] for row in rows if "optimizer" in row)]


def summarize(rows: Rows) -> Summary:
    """Say how much faster the first variant is than each rival, and where the milliseconds go."""
    first = rows[0]
    return Summary(
        "Training step",
        (
            *COLUMNS,
            comparison_column(rows, ".3f"),
            Column("first_is_low", "95% from", ".3f"),
            Column("first_is_high", "to", ".3f"),
        ),
        with_verdicts(rows),
        about=f"{first['precision']}, attention of lmkit: {first['attention']}"
        + "".join(f", optimizer of lmkit: {name}, of rivals: AdamW" for name in _optimizers(rows)),
        findings=findings(rows),
        tables={
            f"Where the milliseconds of {size} go": table
            for size, members in grouped(rows, lambda row: str(row["size"])).items()
            if (table := class_table(members))
        },
        notes=mfu_notes(rows),
        wide=WIDE,
    )


def findings(rows: Rows) -> list[str]:
    """Return a sentence for each comparison."""
    return [f"{row['size']}: {comparison(row, 3)}" for row in rows if row.get("first_is") is not None]


def class_table(rows: Rows) -> str:
    """Return Markdown of the ms per step that each class of kernels takes, beside its floor; "" without a profile."""
    recorded = [row for row in rows if row.get("class_ms")]
    if not recorded:
        return ""
    floors: dict[str, float] = next((row["floor_ms"] for row in rows if row.get("floor_ms")), {})
    of_variant = {row["variant"]: row["class_ms"] for row in recorded}
    lines: Rows = [
        {"class": name, "floor": floors.get(name), **{key: of[name] for key, of in of_variant.items()}}
        for name in CLASSES
    ]
    sums = {key: sum(of.values()) for key, of in of_variant.items()}
    lines.append({"class": "sum", "floor": sum(floors.values()), **sums})
    lines.append({"class": "step", **{row["variant"]: row.get("median_ms") for row in recorded}})
    columns = [Column("class", "ms"), Column("floor", "floor", ".2f")]
    columns += [Column(variant, variant, ".2f") for variant in of_variant]
    return markdown_table(lines, columns) + (
        "\nFloor: the least operations at the measured matmul rate, or bytes at the measured copy bandwidth, of our "
        "architecture with weights and activations of the precision's width. A compiled kernel counts in the "
        "first class that one of its operations is of; on a CPU, operators count.\n"
    )


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw the utilization of each variant."""
    title = "Model FLOPs utilization of a training step"
    picture = grouped_bars(rows, MFU, group="size", series="variant", title=title, x_label="model")
    return {"step_mfu.png": picture}
