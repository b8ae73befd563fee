"""`lmkit bench attention`: cases (tiers, head_dim x length grid) x variants (kernels, eager or compiled).

Every variant is checked (`attention_gate`) before it is timed, and again afterwards on other numbers at the same
addresses. Variants of a case are timed in interleaved rounds. A variant that does not fit, is not supported, fails,
or gives wrong results becomes a row that says so. Attention that does not see all keys has nothing to be compared
with, and its row says so.
"""

from __future__ import annotations

import logging
from typing import Annotated, Literal

from pydantic import model_validator

from lmkit.bench.attention_summary import pictures as pictures
from lmkit.bench.attention_summary import summarize as summarize
from lmkit.bench.attention_sweep import Sweep
from lmkit.bench.attention_variants import (
    Case,
    Tier,
    check_kernel,
    default_kernels,
    parse_tier,
    precision_of,
)
from lmkit.bench.context import Context
from lmkit.measure.tables import Rows
from lmkit.recipe.keys import Empties, FlagNames
from lmkit.recipe.tables import Count, PositiveFloat, PositiveInt, Table
from lmkit.recipe.values import AttentionVariant
from lmkit.registry import BENCHES

log = logging.getLogger("lmkit")
CUSTOM_TIERS = FlagNames(("--custom-tiers", "--custom_tiers"))
NO_GRID = Empties(("grid_head_dims", "grid_lengths"))


class Options(Table):
    """`[bench.attention]`."""

    suite: Literal["sweep", "acceptance"] = "sweep"
    """Ignored. The acceptance suite is a test now: nox -s acceptance."""
    dtype: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Dtype of q, k and v; tf32: fp32 inputs, multiplied in tf32."""
    batch: PositiveInt = 4
    """Sequences."""
    heads: PositiveInt = 12
    """Heads of the queries."""
    kv_heads: PositiveInt = 12
    """Heads of keys and values; fewer than heads: grouped-query attention."""
    head_dim: Annotated[PositiveInt, NO_GRID] = 64
    """Dimensions of a head, in the tiers; the flag leaves the recipe's sweep out."""
    causal: bool = True
    """Query i sees keys j <= i; false: all keys."""
    backward: bool = False
    """Also time forward + backward, and backward alone."""
    tiers: Annotated[tuple[Tier, ...], CUSTOM_TIERS, NO_GRID] = ("Small", "Medium", "Large", "XL")
    """Names (Small 128 ... XXL 2048, 4k ... 128k), lengths, or rectangles queries:keys; the flag leaves the recipe's
    sweep out."""
    kernels: Annotated[tuple[AttentionVariant, ...], Empties(("grid_kernels",))] = ()
    """Kernels that `lmkit env` lists, KERNEL:VARIANT such as flash_triton:deterministic, sdpa:cudnn|flash|efficient,
    each with an optional `+compile`; empty: all that run on the device."""
    grid_head_dims: tuple[PositiveInt, ...] = ()
    """Head sizes of the head_dim x length sweep; empty: no sweep."""
    grid_lengths: tuple[PositiveInt, ...] = ()
    """Lengths of the head_dim x length sweep; empty: no sweep."""
    grid_kernels: tuple[AttentionVariant, ...] = ()
    """Kernels of the sweep; empty: `kernels`, or without these the baseline (also compiled), ours and PyTorch's."""
    baseline: AttentionVariant = "vectorized"
    """The kernel that speedups are relative to."""
    projection_layout: bool = False
    """q, k and v as strided views of one tensor, as a model's projection makes them."""
    data: Literal["normal", "logits x 8", "sink", "late sink", "ramp up", "ramp down"] = "normal"
    """Random numbers, or scores as trained models have them: large, one dominant key, growing or falling maxima."""
    warmup: Count = 10
    """Untimed calls before the first sample."""
    iters: PositiveInt = 50
    """Timed calls, at most."""
    cold_cache: bool = False
    """Overwrite the L2 cache before every sample."""
    max_seconds: PositiveFloat = 2.0
    """Seconds of timing per case and direction, shared by the kernels."""
    longest_call_seconds: PositiveFloat = 0.5
    """Skip a kernel if a shorter case predicts that one call takes longer than this."""

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Options:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        return self


def build_cases(options: Options) -> list[Case]:
    """Return the tiers in the order given, then the grid."""
    cases = [Case("tiers", tier, *parse_tier(tier), options.head_dim) for tier in options.tiers]
    for head_dim in options.grid_head_dims:
        cases += [Case("grid", str(length), length, length, head_dim) for length in options.grid_lengths]
    return cases


@BENCHES.register(
    "attention",
    order=1,
    help="Attention kernels over lengths: checked, then timed.",
    recipes=("bench_attention", "bench_attention_cpu"),
    stem="attention_sweep",
    example="lmkit bench attention bench_attention --tiers 128:64,XXL --backward",
    row_keys=("kernel", "direction", "num_queries", "num_keys"),
)
def attention(context: Context) -> Rows:
    """Return a row per case, variant and direction, and the longest sequences that fit.

    Raises:
        UsageError: an unknown kernel.
    """
    options: Options = context.options
    if options.suite == "acceptance":
        log.warning("bench.attention.suite: the targets are tests now (nox -s acceptance); this is the sweep")
    on_gpu = context.device.type == "cuda"
    kernels = options.kernels or default_kernels(on_gpu=on_gpu)
    rivals = ("flash_triton", "sdpa:cudnn") if on_gpu else ("flash_torch", "sdpa")
    compiled = options.baseline.removesuffix("+compile") + "+compile"
    grid_kernels = (
        options.grid_kernels or options.kernels or tuple(dict.fromkeys((options.baseline, compiled, *rivals)))
    )
    for name in (*kernels, *grid_kernels):
        check_kernel(name)
    limits = context.limits([precision_of(name, options.dtype) for name in (*kernels, *grid_kernels)])
    sweep = Sweep(options, limits, device=context.device, seed=context.recipe.run.seed)
    cases = build_cases(options)
    rows: Rows = []
    for done, case in enumerate(cases):
        context.progress("attention", done, len(cases))
        of_case = grid_kernels if case.part == "grid" else kernels
        found = sweep.measure(case, of_case)
        if options.backward:
            found += sweep.measure(case, of_case, ("fwd+bwd", "backward"))
        rows += found
        context.keep(found)
    rows += sweep.longest_that_fit(rows)
    context.progress("attention", len(cases), len(cases))
    return rows
