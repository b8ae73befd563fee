"""`lmkit bench attention`: cases (tiers, head_dim x length grid) x variants (kernels, eager or compiled)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from lmkit.bench.attention_acceptance import run_acceptance
from lmkit.bench.attention_cases import DATA, DTYPES, TIERS, AttentionOptions, build_cases
from lmkit.bench.attention_report import columns_for, has_speedups, report_files
from lmkit.bench.attention_sweep import Rows, Sweep
from lmkit.bench.attention_variants import (
    CPU_KERNELS,
    GPU_GRID_KERNELS,
    GPU_KERNELS,
    GRID_KERNELS,
    check_kernel_name,
    precision_of,
)
from lmkit.bench.journal import Journal
from lmkit.bench.report import BenchResult
from lmkit.errors import UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import Limits, measure_limits
from lmkit.measure.progress import Progress


def run_bench(
    options: AttentionOptions,
    *,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> BenchResult:
    """Measure every case x variant; rows, the `attention_sweep_*` files and what they were measured on.

    With `options.suite` "acceptance", measure what `attention_acceptance` lists instead.

    Args:
        journal: where rows go as they come.

    Raises:
        UsageError: an unknown tier, kernel, dtype or kind of data, or heads that do not fit together.
    """
    if options.suite == "acceptance":
        return run_acceptance(options, progress=progress, journal=journal)
    cases = build_cases(options)
    on_gpu = options.device.startswith("cuda")
    kernels = options.kernels or (GPU_KERNELS if on_gpu else CPU_KERNELS)
    rivals = GPU_GRID_KERNELS if on_gpu else GRID_KERNELS
    grid_kernels = options.grid_kernels or tuple(dict.fromkeys((options.baseline, *rivals)))
    _check(options, (*kernels, *grid_kernels))
    precisions = dict.fromkeys(precision_of(name, options.dtype) for name in (*kernels, *grid_kernels))
    limits = measure_limits(options.device, precisions)
    environment = describe_environment() | {"limits": limits.as_dict()}
    sweep = Sweep(options, limits)
    rows: Rows = []
    for done, case in enumerate(cases):
        if progress is not None:
            progress("attention", done, len(cases))
        found = sweep.measure(case, grid_kernels if case.part == "grid" else kernels)
        rows += found
        if journal is not None:
            journal.add(found)
    rows += sweep.longest_that_fit(rows)
    if progress is not None:
        progress("attention", len(cases), len(cases))
    files = report_files(rows, asdict(options), environment, _notes(options, limits, rows))
    shown = [row for row in rows if row["part"] != "grid"]  # that one is a picture, and a table in the report
    notes = _notes(options, limits, shown)
    return BenchResult("attention", rows, columns_for(shown), files, environment, notes, shown)


def _notes(options: AttentionOptions, limits: Limits, rows: Rows) -> tuple[str, ...]:
    """What stands below a table of these rows."""
    peaks = ", ".join(f"{rate / 1e12:.3g} {name}" for name, rate in limits.matmul_flops.items())
    share = f"'% peak': of the matmul TFLOP/s measured here ({peaks})"
    speedup = f"speedup: {options.baseline} / variant, median of paired rounds; "
    return (
        speedup + share if has_speedups(rows) else share,
        "spread: (p90 - p10) / median; GB (10^9): peak on top of the inputs, output included",
        _tiers_note(options.tiers),
    )


def _tiers_note(tiers: Sequence[str]) -> str:
    """What stands in the first columns; lengths that have names, with their numbers."""
    named = ", ".join(f"{tier} {TIERS[tier]:,}" for tier in tiers if tier in TIERS and tier[0].isalpha())
    return f"D: head_dim; tier: tokens{f' ({named})' if named else ''}, or queries:keys"


def _check(options: AttentionOptions, kernels: Sequence[str]) -> None:
    for name in kernels:
        check_kernel_name(name)
    if options.dtype not in DTYPES:
        raise UsageError(
            f"bench.attention.dtype: there is no {options.dtype!r}", hint="one of " + ", ".join(DTYPES)
        )
    if options.data not in DATA:
        raise UsageError(
            f"bench.attention.data: there is no {options.data!r}", hint="one of " + ", ".join(DATA)
        )
    if options.heads % options.kv_heads:
        raise UsageError(
            f"bench.attention.heads: {options.heads} is no multiple of kv_heads, {options.kv_heads}",
            hint="give every key/value head the same number of query heads",
        )
