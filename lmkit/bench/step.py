"""`lmkit bench step`: compare the whole training step with rivals, and show which kernels take its time.

It times the step that `lmkit train` runs. Variants of lmkit are checked first, beside PyTorch's operations
(`training_gate`). A variant whose loss is not finite or does not fall is not timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from lmkit.bench.context import Context
from lmkit.bench.failures import wrong_result
from lmkit.bench.harness import too_large_for_host
from lmkit.bench.trainings import COMPARISON, SPREAD, Variant, host_fields, measure_figures, speed_fields
from lmkit.measure.limits import Limits
from lmkit.measure.memory import claim_workspaces
from lmkit.measure.tables import Column, Rows, grouped, markdown_table
from lmkit.measure.trace import CLASSES, class_times
from lmkit.recipe.tables import Count, ModelConfig, PositiveFloat, PositiveInt, Table
from lmkit.recipe.values import AttentionName
from lmkit.registry import BENCHES

if TYPE_CHECKING:
    from lmkit.bench.step_rivals import RivalStep
    from lmkit.bench.training_gate import Reference
    from lmkit.core.batches import Batch
    from lmkit.training.setup import TrainingStep

    Training: TypeAlias = TrainingStep | RivalStep

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

COMPILED: dict[str, Literal["block", "whole"]] = {"lmkit_block": "block", "lmkit_whole": "whole"}
BATCHES = 4


class Options(Table):
    """`[bench.step]`."""

    sizes: tuple[Literal["tiny", "quickstart", "matrix", "162M", "1.3B"], ...] = ("tiny",)
    """Models with their batches: quickstart 16 x 128 tokens, matrix 8 x 256, 162M 32 x 1024, 1.3B 8 x 2048."""
    variants: tuple[
        Literal["lmkit", "lmkit_block", "lmkit_whole", "lmkit_fp8", "nanogpt", "plain", "plain_eager"], ...
    ] = ("lmkit", "nanogpt", "plain", "plain_eager")
    """lmkit's step (eager, compiled, or eager with fp8 products), nanoGPT's model compiled, and our architecture in
    PyTorch's modules compiled and eager. All are compared with the first."""
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
    limits = context.limits([context.options.precision])
    claim_workspaces(context.device)
    return context.rows_of("sizes", context.options.sizes, lambda size: _measure(size, context, limits))


def config_of(size: str, variant: str, attention: str) -> ModelConfig:
    sizes: dict[str, Any] = dict(zip(FIELDS, SIZES[size][1], strict=True))
    return ModelConfig(**sizes, attention=attention, compile=COMPILED.get(variant, "none"))


def _measure(size: str, context: Context, limits: Limits) -> Rows:
    """Return one row per variant of one size."""
    import torch

    from lmkit.bench.step_rivals import wrong_by_now
    from lmkit.bench.training_gate import budget_of, judge
    from lmkit.measure.trace import profile_work
    from lmkit.model.accounting import flops_per_token, step_work

    options, device = context.options, context.device
    torch.compiler.reset()
    too_large = too_large_for_host(config_of(size, "", options.attention), context)
    references = {} if too_large else _references(size, context)

    def first_steps(variant: str, training: Training) -> dict[str, Any]:
        found: dict[str, Any] = {"parameters": sum(p.numel() for p in training.model.parameters())}
        precision = _precision(variant, options)
        if is_own(variant):
            found |= judge(cast("TrainingStep", training), references[precision], budget_of(precision))[0]
            if found["status"] != "ok":
                return found
        losses = [training.run().item() for _ in range(2 * BATCHES)]
        first, second = fmean(losses[:BATCHES]), fmean(losses[BATCHES:])
        if not second < first:  # also NaN
            why = f"the loss over {BATCHES} batches does not fall: {first:.4f}, then {second:.4f}"
            return found | wrong_result(why)
        return found | {"first_loss": losses[0], "last_loss": losses[-1]}

    def more(training: Training, _: object) -> dict[str, Any]:
        found: dict[str, Any] = {**host_fields(training.run, device)}
        if steps := options.profiled_steps:
            trace, _ = profile_work(training.run, steps, device=device, source="bench step", ranges=False)
            found["class_ms"] = class_times(trace, steps)
        return found

    variants = {
        variant: Variant(
            row=_row(size, variant, context) | too_large,
            make=partial(_build, size, variant, context),
            judge=partial(first_steps, variant),
            fill=lambda training: training.run(),
            more=more,
            check=partial(wrong_by_now, budget=budget_of(_precision(variant, options))),
        )
        for variant in options.variants
    }
    config = config_of(size, "", "sdpa")
    work = {
        "tokens": SIZES[size][0] * config.context_length,
        "flops": flops_per_token(config, config.context_length, causal=True),
        "precision": options.precision,
    }
    parts = step_work(config, SIZES[size][0], element_bytes=4 if options.precision == "fp32" else 2)

    def figures(variant: str, samples_ms: list[float]) -> dict[str, Any]:
        rate, speed = limits.matmul_flops[options.precision], limits.copy_bytes_per_s
        floors = {name: 1e3 * max(part.flops / rate, part.num_bytes / speed) for name, part in parts.items()}
        return speed_fields(samples_ms, context, limits, **work) | {"floor_ms": floors}

    measure_figures(variants, context, limits, figures)
    return [variant.row for variant in variants.values()]


def is_own(variant: str) -> bool:
    """Return whether a variant is lmkit's, not a rival."""
    return variant.startswith("lmkit")


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
    }


def _precision(variant: str, options: Options) -> str:
    return "fp8" if variant == "lmkit_fp8" else options.precision


def _references(size: str, context: Context) -> dict[str, Reference]:
    """Return precision of a variant of lmkit -> the steps of PyTorch's operations."""
    from lmkit.bench.training_gate import of_pytorch, reference

    config, found = config_of(size, "", context.options.attention), {}
    for variant in context.options.variants:
        precision = _precision(variant, context.options)
        if is_own(variant) and precision not in found:
            recipe = of_pytorch(context.recipe_of(config, precision=precision))
            found[precision] = reference(recipe, context.ranks, _batches(size, context))
    return found


def _batches(size: str, context: Context) -> FewBatches:
    from lmkit.core.batches import RandomTokens

    config = config_of(size, "", "sdpa")
    assert config.vocab_size is not None
    rows, seed = SIZES[size][0], context.recipe.run.seed
    random = RandomTokens(config.vocab_size, batch_size=rows, context_length=config.context_length, seed=seed)
    return FewBatches(tuple(random.batch(number) for number in range(BATCHES)))


def _build(size: str, variant: str, context: Context) -> Training:
    import torch

    from lmkit.bench.step_rivals import RivalStep
    from lmkit.model.fp8 import check_fp8
    from lmkit.training.setup import TrainingStep

    options, device = context.options, context.device
    config, batches = config_of(size, variant, options.attention), _batches(size, context)
    precision = _precision(variant, options)
    if not is_own(variant):
        torch.manual_seed(context.recipe.run.seed)
        return RivalStep(variant, config, device, batches, precision)
    if precision == "fp8":
        check_fp8(device)
    return TrainingStep(context.recipe_of(config, precision=precision), context.ranks, batches)


TITLE, EACH = "Training step", "size"
ABOUT = ("optimizer",)
_COUNTED = (
    "counts 6 N + 6 L d T operations a token (causal attention by half), the same for all variants of a size"
)
FLOOR = """
Floor: the least operations at the measured matmul rate, or bytes at the measured copy bandwidth, of lmkit's model. A
compiled kernel counts in the first class that one of its operations is of; on a CPU, operators count.
"""
COLUMNS = (
    Column("size", "size"),
    Column("variant", "variant"),
    Column("median_ms", "ms", ".2f", instead="status"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("mfu", "MFU", ".1%", note=_COUNTED, better="higher"),
    Column("host_ms", "host ms", ".2f", note="until a step returns, its waits included"),
    Column("peak_gb", "GB", ".2f", note="10^9 bytes, the peak of a step"),
    Column("precision", "precision", wide=True),
    Column("attention", "attention", wide=True),
    SPREAD,
    Column("p10_ms", "p10 ms", ".2f", wide=True),
    Column("p90_ms", "p90 ms", ".2f", wide=True),
    *COMPARISON,
)


def tables(rows: Rows) -> dict[str, str]:
    """Return the ms per step that each class of kernels takes, beside its floor, a table for each size."""
    found = {}
    profiled = [row for row in rows if row.get("class_ms")]
    for size, members in grouped(profiled, lambda row: row["size"]).items():
        columns = [Column("class", "ms"), Column("floor", "floor", ".2f")]
        columns += [Column(row["variant"], row["variant"], ".2f") for row in members]
        floors: dict[str, float] = next((row["floor_ms"] for row in members if row.get("floor_ms")), {})
        lines: Rows = [
            {"class": name, "floor": floors.get(name)}
            | {row["variant"]: row["class_ms"][name] for row in members}
            for name in CLASSES
        ]
        sums = {row["variant"]: sum(row["class_ms"].values()) for row in members}
        lines.append({"class": "sum", "floor": sum(floors.values()), **sums})
        lines.append({"class": "step", **{row["variant"]: row.get("median_ms") for row in members}})
        found[f"Where the milliseconds of {size} go"] = markdown_table(lines, columns) + FLOOR
    return found
