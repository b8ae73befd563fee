"""`lmkit bench attention`: cases (tiers, head_dim x length grid) x variants (kernels, eager or compiled).

Every variant is checked (`attention_gate`) before it is timed, and again afterwards on other numbers at the same
addresses. Attention that does not see all keys has nothing to be compared with, and its row says so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import model_validator

from lmkit.bench.attention_sweep import (
    Case,
    Sweep,
    Tier,
    check_kernel,
    default_kernels,
    parse_tier,
    precision_of,
)
from lmkit.bench.context import Context
from lmkit.bench.trainings import SPREAD, interval
from lmkit.measure.plots import grouped_bars, heat_map, line_panels
from lmkit.measure.tables import Column, Rows, grouped, markdown_table
from lmkit.recipe.keys import Empties, FlagNames
from lmkit.recipe.tables import Count, PositiveFloat, PositiveInt, Table
from lmkit.recipe.values import AttentionVariant
from lmkit.registry import ATTENTION, BENCHES

CUSTOM_TIERS = FlagNames(("--custom-tiers", "--custom_tiers"))
NO_GRID = Empties(("grid_head_dims", "grid_lengths"))


class Options(Table):
    """`[bench.attention]`."""

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
    """Return a row per case, variant and direction."""
    options: Options = context.options
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
    sweep = Sweep(context, limits)

    def measure(case: Case) -> Rows:
        of_case = grid_kernels if case.part == "grid" else kernels
        found = sweep.measure(case, of_case)
        if options.backward:
            found += sweep.measure(case, of_case, ("fwd+bwd", "backward"))
        return found

    return context.rows_of("attention", build_cases(options), measure)


TITLE, EACH = "Attention", "direction"
ABOUT = ("batch", "heads", "kv_heads", "causal", "dtype", "layout", "data")
TIME = Column("median_ms", "ms", ".3g", instead="status", axis="time, ms")
COLUMNS = (
    Column("tier", "tier"),
    Column("head_dim", "D", "d"),
    Column("direction", "direction"),
    Column("kernel", "kernel"),
    TIME,
    SPREAD,
    Column("tflops", "TFLOP/s", ".3g", better="higher"),
    Column("share_of_matmul", "% peak", ".1%", note="of the matmul TFLOP/s measured in the same run"),
    Column("peak_gb", "GB", ".3g", note="10^9 bytes, peak on top of the inputs, output included"),
    Column("speedup", "speedup", ".2f", note="baseline / variant, median of paired rounds"),
    Column("causal", "causal", wide=True),
    Column("versus_sdpa", "x PyTorch", ".3f", wide=True),
    *interval("versus_sdpa", ".3f"),
    Column("best_sdpa", "that is", wide=True),
)
NOTES = ("D: head_dim; tier: tokens, or queries:keys",)


def shown(rows: Rows) -> Rows:
    return [row for row in rows if row.get("part") != "grid"]


def tables(rows: Rows) -> dict[str, str]:
    grid = [row for row in rows if row.get("part") == "grid"]
    return {"Head dimension x length": markdown_table(grid, COLUMNS)} if grid else {}


def findings(rows: Rows) -> list[str]:
    """Compare our fastest kernel with PyTorch's best, for each direction."""
    found = []
    compared = [row for row in rows if row.get("versus_sdpa") and row.get("tflops")]
    for direction, members in grouped(compared, lambda row: str(row["direction"])).items():
        top = max(members, key=lambda row: row["tflops"])
        ratios = [row["versus_sdpa"] for row in members if row["kernel"] == top["kernel"]]
        found.append(
            f"{direction}: {top['kernel']} is {min(ratios):.2f} to {max(ratios):.2f} times as fast as the best "
            f"PyTorch backend (cases: {len(ratios)}); its highest rate is {top['tflops']:.3g} TFLOP/s, "
            f"{top['share_of_matmul']:.0%} of the matrix product's in the same run."
        )
    return found


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw forward and backward bars, scaling, and the grid (or the square tiers, as one line)."""
    tiers = [row for row in rows if row["part"] == "tiers"]
    square = [row for row in tiers if row["num_queries"] == row["num_keys"] and row["direction"] == "forward"]
    grid = [row for row in rows if row["part"] == "grid" and row["direction"] == "forward"]
    axis: dict[str, Any] = {
        "x_label": "sequence length (tokens; queries:keys where they differ)",
        "log_y": True,
    }
    title = _title(square, "forward")
    scaling = line_panels(square, "num_keys", TIME, group="kernel", title=title, **axis)
    files = {"heatmap": _heat_map(grid or square), "scaling": scaling}
    for direction in ("forward", "backward"):
        if chosen := [row for row in tiers if row["direction"] == direction]:
            title = _title(chosen, direction) + " (median, whiskers p10 to p90)"
            files[direction] = grouped_bars(chosen, TIME, group="tier", series="kernel", title=title, **axis)
    return {f"attention_sweep_{name}.png": picture for name, picture in files.items()}


def _title(rows: Rows, what: str) -> str:
    shape = "".join(f": batch {row['batch']}, {row['heads']} heads, {row['dtype']}" for row in rows[:1])
    return f"Attention {what}{shape}"


def _heat_map(rows: Rows) -> bytes:
    """Draw our last kernel's speedup over the baseline; TFLOP/s if there is no other kernel."""
    timed = {row["kernel"] for row in rows if row.get("median_ms")}
    baseline = next((row["kernel"] for row in rows if row.get("speedup") == 1.0), None)
    kernel = next((name for name in reversed(ATTENTION.names) if name in timed and name != "sdpa"), baseline)
    as_ratio = baseline is not None and kernel != baseline
    lengths, head_dims = (sorted({row[key] for row in rows}) for key in ("num_keys", "head_dim"))
    key = "speedup" if as_ratio else "tflops"
    found = {(row["head_dim"], row["num_keys"]): row.get(key) for row in rows if row["kernel"] == kernel}
    return heat_map(
        [str(length) for length in lengths],
        [str(head_dim) for head_dim in head_dims],
        [[found.get((head_dim, length)) for length in lengths] for head_dim in head_dims],
        title=_title(rows, f"forward, {kernel}"),
        x_label="sequence length (tokens)",
        y_label="head_dim",
        value_label=f"times as fast as {baseline}" if as_ratio else "TFLOP/s",
        center=1.0 if as_ratio else None,
    )
