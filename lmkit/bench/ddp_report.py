"""Rows of the parallel benches -> tables, plots and a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmkit.bench.ddp import SETTLE_S, compare
from lmkit.bench.ddp_overlap import StepTimeline, overlap_picture
from lmkit.bench.report import BenchResult
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import Limits, limits_sentence, model_flops_utilization
from lmkit.measure.plots import grouped_bars, line_plot, of_rate, of_samples, of_time
from lmkit.measure.statistics import FEWEST_PAIRS, spread
from lmkit.measure.tables import Column, Rows, markdown_table, picture_lines, row_files
from lmkit.parallel.ranks import Ranks

DDP_COLUMNS = (
    Column("contender", "contender", instead="status"),
    Column("step_ms", "ms/step", ".2f", "status"),
    Column("spread", "spread", ".1%"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("scaling", "scaling", ".1%"),
    Column("exposed_ms", "exposed ms", ".2f"),
    Column("peak_overhead", "memory", "+.1%"),
    Column("calls_per_step", "calls", ",d"),
    Column("link_mb", "MB sent", ",.1f"),
    Column("expected_mb", "formula", ",.1f"),
)
LADDER_COLUMNS = (
    Column("contender", "contender", instead="status"),
    Column("step_ms", "ms/step", ".2f", "status"),
    Column("middle", "p10-p90"),
    Column("host_ms", "host ms", ".1f"),
    Column("ahead_ms", "ahead ms", ".1f"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("scaling_interval", "scaling [95%]"),
    Column("exposed_ms", "exposed ms", ".2f"),
    Column("communication_alone_ms", "alone ms", ".2f"),
    Column("alone_gb_per_s", "alone GB/s", ".3g"),
    Column("hidden", "hidden", ".0%"),
    Column("peak_gb", "peak GB", ".2f"),
    Column("peak_overhead", "memory", "+.1%"),
    Column("calls_per_step", "calls", ",d"),
    Column("link_mb", "MB sent", ",.1f"),
    Column("expected_mb", "formula", ",.1f"),
)
RIVALS_OF = {
    "bucketed": ("torch_ddp", "torch_ddp default", "torch_ddp static", "torch_ddp 50 MB"),
    "flat": ("torch_ddp", "torch_ddp default", "torch_ddp static"),
    "zero1": ("torch_ddp + ZeRO",),
}
"""Strategy -> the rivals in PyTorch that it is compared with."""
_SPREAD_NOTE = "spread: (p90 - p10) / median"
_SCALING_NOTE = "scaling: one rank's step time over this one's, same rows per rank"
_NOTES = (
    (
        "middle",
        "ms/step: the median of samples of the slowest rank; half as many untimed steps lead into each, and on GPUs "
        f"{SETTLE_S:g} s of steps into the first and into one after a sample of one rank (the others rested through "
        "it)",
    ),
    ("spread", _SPREAD_NOTE),
    ("host_ms", "host ms: how long the CPU is busy with a step on an idle GPU"),
    (
        "ahead_ms",
        "ahead ms: how long the GPU still worked when its host had handed over a sample's last step, on the rank "
        "with the least; near 0 the host is what was measured: more steps a sample let it get ahead, and where it "
        "cannot, more rounds of fewer steps say more",
    ),
    ("scaling", _SCALING_NOTE),
    ("scaling_interval", _SCALING_NOTE),
    ("exposed_ms", "exposed: step time over that of the same step without communication (none)"),
    (
        "communication_alone_ms",
        "alone: a step's reduction with nothing beside it; alone GB/s: what a rank sends, over that time",
    ),
    (
        "hidden",
        "hidden: the share of the reduction that does not lengthen the step (below 0: what it costs the compute "
        "beside it)",
    ),
    ("peak_overhead", "memory: peak over one rank's"),
    ("link_mb", "MB sent: 10^6 bytes, of a rank in a step"),
    (
        "expected_mb",
        "formula: 2 (W-1)/W of the gradients; PyTorch's ZeRO then broadcasts the weights, (W-1)/W of their bytes "
        "more",
    ),
)
"""Column -> what its figures are."""
_OF_GPUS = ("host_ms", "ahead_ms", "peak_gb", "peak_overhead", "init_mb", "before_mb", "after_mb")
"""Columns that no CPU fills."""
_NO_INTERVAL: dict[str, Any] = {"low": None, "high": None}
COMPARISON_COLUMNS = (
    Column("candidate", "ours"),
    Column("baseline", "against"),
    Column("ratio", "times as fast", ".3f"),
    Column("low", "95% from", ".3f"),
    Column("high", "to", ".3f"),
)
ALL_REDUCE_COLUMNS = (
    Column("operation", "operation"),
    Column("dtype", "dtype"),
    Column("bytes", "bytes", ",d"),
    Column("median_us", "us", ",.1f"),
    Column("spread", "spread", ".1%"),
    Column("bus_gb_per_s", "bus GB/s", ".2f"),
)
ALL_REDUCE_NOTES = (
    "bus GB/s (10^9 bytes): what a rank must send, all-reduce 2 (W-1)/W and the others (W-1)/W of the buffer, / time",
)
OPTIMIZER_COLUMNS = (
    Column("contender", "contender"),
    Column("step_ms", "ms/step", ".2f"),
    Column("spread", "spread", ".1%"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("mfu", "MFU", ".1%"),
    Column("state_mb", "state MB", ",.1f"),
    Column("state_share", "of plain", ".1%"),
    Column("init_mb", "init MB", ",.0f"),
    Column("before_mb", "before MB", ",.0f"),
    Column("after_mb", "after MB", ",.0f"),
)
_STATE_NOTE = "state: what the optimizer holds on this rank, MB (10^6 bytes)"
OPTIMIZER_NOTES = (
    f"{_STATE_NOTE}; init, before, after: what the CUDA allocator holds when all is built, before an optimizer step "
    "and after it",
    _SPREAD_NOTE,
)


UPDATE_COLUMNS = (
    Column("way", "AdamW"),
    Column("update_ms", "update ms", ".3f"),
    Column("spread", "spread", ".1%"),
    Column("gb_per_s", "GB/s", ",.1f"),
    Column("share_of_copy", "of copy", ".0%"),
    Column("host_ms", "host ms", ".3f"),
    Column("times_as_fast", "times torch fused", ".3f"),
    Column("low", "95% from", ".3f"),
    Column("high", "to", ".3f"),
)
UPDATE_NOTES = (
    "update: of all the model's fp32 parameters, alone; GB/s (10^9 bytes): the 28 bytes a parameter that an update "
    "must move, over its time; of copy: the share of a large copy's GB/s in this run (a small model fits the caches, "
    "and an update reads more than it writes); host: how long the CPU is busy with it",
)


def ddp_result(
    rows: Rows,
    sweep: Rows,
    ranks: Ranks,
    overlap: StepTimeline | None = None,
    *,
    rounds: int | None = None,
) -> BenchResult:
    """The ladder, the bucket sweep beside it, and a picture of a step of `bucketed` where one was traced.

    Args:
        rounds: how many were asked for; where time was up before, the notes say so.
    """
    environment = describe_environment() | {"world_size": ranks.world_size}
    everything = [row | {"part": "ladder"} for row in rows] + [
        row | {"part": "bucket sweep"} for row in sweep
    ]
    timed = [row for row in rows if "step_ms" in row]
    names = [row["contender"] for row in timed]
    files: dict[str, bytes | str] = {
        **row_files("ddp_results", everything),
        "ddp_throughput.png": grouped_bars(
            names,
            {"tokens/s": [row["tokens_per_s"] for row in timed]},
            errors={"tokens/s": [of_rate(row, "step_ms") for row in timed]},
            title=f"{_cases(rows)}: training throughput on {ranks.world_size} ranks (whiskers p10 to p90)",
            x_label="contender",
            y_label="tokens per second",
            spec=",.0f",
        ),
    }
    exposed = [row for row in timed if "exposed_ms" in row]
    if exposed:  # `none` was among the contenders
        files["ddp_exposed.png"] = _exposed_picture(
            exposed, next(row for row in timed if row["contender"] == "none")
        )
    swept = [row for row in sweep if str(row["contender"]).startswith("bucketed")]
    if any("step_ms" in row for row in swept):
        files["ddp_bucket_sweep.png"] = sweep_picture([row for row in swept if "step_ms" in row])
    if overlap is not None:
        files["ddp_overlap.png"] = overlap_picture(overlap, "bucketed")
    pictures = picture_lines(files)
    few_rounds = _rounds_notes(everything, rounds)
    files["ddp_report.md"] = (
        "\n\n".join(
            [
                "# Data parallelism",
                ladder_markdown(everything),
                "\n".join(f"- {note}" for note in (*few_rounds, *ladder_notes(everything))),
                *pictures,
            ]
        )
        + "\n"
    )
    shown = [with_units(row) for row in [*rows, *swept]]  # not what the sweep measured again to compare with
    # Empty columns would take the names' room.
    columns = [column for column in DDP_COLUMNS if column.instead or _any(shown, column.key)]
    notes = (*few_rounds, *ladder_notes(everything, columns))
    return BenchResult("ddp", everything, columns, files, environment, notes, shown)


def ladder_notes(rows: Rows, columns: Sequence[Column] = LADDER_COLUMNS) -> tuple[str, ...]:
    """What the figures are in those of the columns that some row fills."""
    shown = [with_units(row) for row in rows]
    filled = {column.key for column in columns if _any(shown, column.key)}
    return tuple(note for key, note in _NOTES if key in filled)


def _rounds_notes(rows: Rows, asked: int | None) -> tuple[str, ...]:
    """What few rounds mean for the numbers, where they are few."""
    made = min((len(row["samples_ms"]) for row in rows if row.get("samples_ms")), default=FEWEST_PAIRS)
    notes = []
    if asked is not None and made < asked:
        notes.append(f"{made} of {asked} rounds: then bench.ddp.max_seconds was over")
    if made < FEWEST_PAIRS:
        notes.append(
            f"fewer than {FEWEST_PAIRS} rounds have no 95% interval: what differs here may be chance"
        )
    return tuple(notes)


def _filled(columns: Sequence[Column], rows: Rows) -> list[Column]:
    """Without what only GPUs have where no row has it."""
    return [column for column in columns if column.key not in _OF_GPUS or _any(rows, column.key)]


def _any(rows: Rows, key: str) -> bool:
    """Whether some row has a value there."""
    return any(row.get(key) is not None for row in rows)


def ladder_markdown(rows: Rows) -> str:
    """Every case of rows of `ddp_rows` as a table, with our strategies against their rivals in PyTorch below it.

    Rows with a `part` (which reading or sweep they are of) are kept apart by it: only rows of one part took turns.
    """
    cases: dict[tuple[str, str], Rows] = {}
    for row in rows:
        cases.setdefault((str(row.get("part", "")), row["case"]), []).append(with_units(row))
    paragraphs = []
    for (part, case), members in cases.items():
        rounds = max((len(row.get("samples_ms", ())) for row in members), default=0)
        world_size = max(row["world_size"] for row in members)
        taken = "1 round" if rounds == 1 else f"{rounds} rounds"
        paragraphs.append(f"### {case}, {world_size} ranks{f': {part}' if part else ''} ({taken})")
        paragraphs.append(markdown_table(members, _filled(LADDER_COLUMNS, members)).rstrip())
        alone = next((row["rank_ms"] for row in members if row.get("rank_ms")), None)
        if alone:
            each = ", ".join(f"{ms:.2f}" for ms in alone)
            paragraphs.append(f"Without communication the ranks take {each} ms a step, each by itself.")
        compared = comparisons(members)
        if compared:
            paragraphs.append(markdown_table(compared, COMPARISON_COLUMNS).rstrip())
    return "\n\n".join(paragraphs)


def comparisons(rows: Rows) -> Rows:
    """How many times as fast our strategies are as their rivals, by the ratios of the same rounds; without an
    interval where the rounds are too few for one."""
    by_name = {row["contender"]: row for row in rows}
    timed = [row["contender"] for row in rows if "samples_ms" in row]
    return [
        found if _enough_rounds(by_name[ours]) else found | _NO_INTERVAL
        for ours in timed
        for rival in RIVALS_OF.get(ours.partition(" ")[0], ())
        if rival in timed
        for found in (compare(rows, ours, rival),)
    ]


def _exposed_picture(rows: Rows, bare: dict[str, Any]) -> bytes:
    """What the rows take longer than `bare`, the same step without communication, round by round (a PNG)."""
    whiskers = [
        of_samples([mine - alone for mine, alone in zip(row["samples_ms"], bare["samples_ms"], strict=True)])
        for row in rows
    ]
    return grouped_bars(
        [row["contender"] for row in rows],
        {"exposed": [row["exposed_ms"] for row in rows]},
        errors={"exposed": whiskers},
        title=f"{_cases(rows)}: communication that compute does not hide (whiskers p10 to p90)",
        x_label="contender",
        y_label="ms per step",
    )


def _cases(rows: Rows) -> str:
    """What was trained: the recipe's name."""
    return ", ".join(dict.fromkeys(str(row["case"]) for row in rows))


def sweep_picture(rows: Rows) -> bytes:
    """Step time over bucket size of "bucketed N MB" rows (a PNG)."""
    sized = {float(row["contender"].split()[1]): row for row in rows if row["contender"].endswith(" MB")}
    whiskers = {size: whisker for size, row in sized.items() if (whisker := of_time(row, "step_ms"))}
    return line_plot(
        {"bucketed": [(size, row["step_ms"]) for size, row in sized.items()]},
        errors={"bucketed": whiskers},
        title=f"{_cases(list(sized.values()))}: step time over bucket size (whiskers p10 to p90)",
        x_label="bucket size (MiB)",
        y_label="ms per step",
        log_x=True,
        from_zero=True,  # sizes differ by percents, and should look it
    )


def with_units(row: dict[str, Any]) -> dict[str, Any]:
    """The row with what only people need: megabytes, intervals as text.

    Not for storage: by text, `lmkit compare` tells what a row measured.
    """
    shown = dict(row)
    for key, source, unit in (
        ("link_mb", "link_bytes", 1e6),
        ("expected_mb", "expected_link_bytes", 1e6),
        ("peak_gb", "peak_bytes", 1e9),
    ):
        if row.get(source) is not None:
            shown[key] = row[source] / unit
    if row.get("step_ms"):
        shown["spread"] = (row["p90_ms"] - row["p10_ms"]) / row["step_ms"]
        shown["middle"] = f"{row['p10_ms']:.2f}-{row['p90_ms']:.2f}"
    if row.get("scaling"):
        interval = f" [{row['scaling_low']:.1%}, {row['scaling_high']:.1%}]" if _enough_rounds(row) else ""
        shown["scaling_interval"] = f"{row['scaling']:.1%}{interval}"
    if row.get("communication_alone_ms") and row.get("exposed_ms") is not None:
        shown["hidden"] = 1.0 - row["exposed_ms"] / row["communication_alone_ms"]
        shown["alone_gb_per_s"] = row["link_bytes"] / row["communication_alone_ms"] / 1e6
    return shown


def scaling_in_words(row: dict[str, Any]) -> str:
    """`95.1% of linear scaling (95% interval 94.0% to 96.2%)`, of a row that has it."""
    low, high = row["scaling_low"], row["scaling_high"]
    interval = (
        f"95% interval {low:.1%} to {high:.1%}" if _enough_rounds(row) else "too few rounds for an interval"
    )
    return f"{row['scaling']:.1%} of linear scaling ({interval})"


def _honest(row: dict[str, Any]) -> dict[str, Any]:
    """The row, without its interval where its rounds are too few for one."""
    return row if _enough_rounds(row) else row | _NO_INTERVAL


def _enough_rounds(row: dict[str, Any]) -> bool:
    """Whether the row's rounds are enough for a 95% interval."""
    return len(row.get("samples_ms", ())) >= FEWEST_PAIRS


def megabytes(num_bytes: int) -> float:
    """To a tenth, below 1 to two digits: buffers that are cut into equal shares may be some bytes short."""
    size = num_bytes / 1e6
    return round(size, 1) if size >= 1 else float(f"{size:.2g}")


def all_reduce_result(rows: Rows, ranks: Ranks) -> BenchResult:
    """Bandwidth over message size."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        row["spread"] = (row["p90_us"] - row["p10_us"]) / row["median_us"]
        series.setdefault(f"{row['operation']} {row['dtype']}", []).append(
            (megabytes(row["bytes"]), row["bus_gb_per_s"])
        )
    files: dict[str, bytes | str] = {
        **row_files("all_reduce_results", rows),
        "all_reduce_bandwidth.png": line_plot(
            series,
            title=f"Collectives on {ranks.world_size} ranks",
            x_label="buffer (MB, 10^6 bytes)",
            y_label="bus bandwidth (GB/s, 10^9 bytes)",
            log_x=True,
        ),
    }
    files["all_reduce_report.md"] = _report("Collectives", rows, ALL_REDUCE_COLUMNS, ALL_REDUCE_NOTES, files)
    environment = describe_environment() | {"world_size": ranks.world_size}
    return BenchResult("all_reduce", rows, ALL_REDUCE_COLUMNS, files, environment, ALL_REDUCE_NOTES)


def optimizer_result(rows: Rows, updates: Rows, ranks: Ranks, limits: Limits) -> BenchResult:
    """Memory and speed of sharded optimizer state, and of the update alone (`adamw_update.update_rows`)."""
    bases: set[str] = set()
    for row in rows:
        rate = row["tokens_per_s"] / row["world_size"] * row["flops_per_token"]
        mfu = model_flops_utilization(rate, ranks.device, row["precision"], limits)
        row["mfu"] = mfu.share
        bases.add(mfu.basis)
        row["state_mb"] = row["state_bytes"] / 1e6
        for key, source in (
            ("init_mb", "init_bytes"),
            ("before_mb", "before_step_bytes"),
            ("after_mb", "after_step_bytes"),
        ):
            row[key] = None if row.get(source) is None else row[source] / 1e6
    for row in updates:
        row["spread"] = spread(row["samples_ms"]).relative
        row["share_of_copy"] = row["gb_per_s"] * 1e9 / limits.copy_bytes_per_s
    environment = describe_environment() | {"world_size": ranks.world_size, "limits": limits.as_dict()}
    what_is_what = OPTIMIZER_NOTES if _any(rows, "init_mb") else (_STATE_NOTE, _SPREAD_NOTE)
    of_state = (*what_is_what, *(f"MFU: share of the {basis}" for basis in bases))
    shown = [with_units(row) for row in rows]
    columns = _filled(OPTIMIZER_COLUMNS, shown)
    files: dict[str, bytes | str] = {
        **row_files("optimizer_results", rows),
        "optimizer_state.png": grouped_bars(
            [row["contender"] for row in rows],
            {"state per rank": [row["state_mb"] for row in rows]},
            title=f"Optimizer state on each of {ranks.world_size} ranks",
            x_label="contender",
            y_label="MB (10^6 bytes)",
            spec=",.1f",
        ),
    }
    files |= row_files("adamw_update_results", updates)
    files["optimizer_report.md"] = (
        _report(
            "Optimizer state sharding",
            shown,
            columns,
            (f"{limits_sentence(environment['limits'])}.", *of_state),
            files,
        )
        + "\n"
        + _report("AdamW's update alone", [_honest(row) for row in updates], UPDATE_COLUMNS, UPDATE_NOTES, {})
    )
    notes = (*of_state, "AdamW's update alone: " + "; ".join(map(_in_words, updates)))
    return BenchResult("optimizer", rows, columns, files, environment, notes, shown)


def _in_words(update: dict[str, Any]) -> str:
    rate = f"{update['gb_per_s']:,.1f} GB/s, {update['share_of_copy']:.0%} of a copy's"
    return f"{update['way']} {update['update_ms']:.3f} ms ({rate})"


def _report(
    title: str, rows: Rows, columns: Sequence[Column], notes: Sequence[str], files: dict[str, bytes | str]
) -> str:
    pictures = picture_lines(files)
    return "\n\n".join([f"# {title}", markdown_table(rows, columns).rstrip(), *notes, *pictures]) + "\n"
