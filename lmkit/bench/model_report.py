"""The model bench's rows as files: CSV, JSON lines, pictures and the Markdown report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lmkit.measure.limits import limits_sentence
from lmkit.measure.plots import grouped_bars, line_panels
from lmkit.measure.statistics import FEWEST_PAIRS
from lmkit.measure.tables import Column, Rows, markdown_table, picture_lines, row_files

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
    Column("size", "size"),
    Column("length", "length", "d"),
    Column("compile", "compile"),
    Column("mode", "mode"),
    Column("precision", "precision"),
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


def report_files(
    rows: Rows, options: dict[str, Any], environment: dict[str, Any], notes: Sequence[str]
) -> dict[str, bytes | str]:
    """name -> content of every file of the bench."""
    files = row_files("model_results", list(rows))
    files["model_time.png"] = _panels(rows, "median_ms", "Time of a pass", "time (ms, log scale)")
    files["model_memory.png"] = _panels(
        rows, "peak_gb", "Peak memory", "peak memory (GB = 10^9 bytes)", log_y=False
    )
    files["model_throughput.png"] = _panels(
        rows, "tokens_per_s", "Throughput", "tokens per second (log scale)"
    )
    if options["warmup_study"]:
        files["model_warmup.png"] = _warmup_bars(rows)
    files["model_report.md"] = _report(rows, options, environment, notes, sorted(files))
    return files


def _models(rows: Rows) -> Rows:
    return [row for row in rows if row["part"] == "model"]


def _panels(rows: Rows, key: str, title: str, y_label: str, *, log_y: bool = True) -> bytes:
    """A panel per mode; what does not fit leaves a gap."""
    panels: dict[str, dict[tuple[str, str], list[tuple[float, float]]]] = {}
    notes: dict[str, str] = {}
    for row in _models(rows):
        kind = row["precision"] + (f", compile {row['compile']}" if row["compile"] != "none" else "")
        points = panels.setdefault(row["mode"], {}).setdefault((row["size"], kind), [])
        if row.get(key) is not None:
            points.append((row["length"], row[key]))
        elif row["status"] != "ok":
            why = f"{row['status']}: {row['size']} at {row['length']}, {kind}"
            notes[row["mode"]] = "\n".join([*notes.get(row["mode"], "").splitlines(), why])
    return line_panels(
        panels, title=title, x_label="sequence length (tokens)", y_label=y_label, log_y=log_y, notes=notes
    )


def _warmup_bars(rows: Rows) -> bytes:
    chosen = [row for row in rows if row["part"] == "warm-up"]
    groups = list(dict.fromkeys(str(row["warmup"]) for row in chosen))
    series: dict[str, list[float | None]] = {}
    errors: dict[str, list[tuple[float, float] | None]] = {}
    for row in chosen:
        name = f"{row['size']}, compile {row['compile']}"
        place = groups.index(str(row["warmup"]))
        series.setdefault(name, [None] * len(groups))[place] = row.get("mean_ms")
        if row.get("mean_ms") is not None:
            mean, samples = row["mean_ms"], row["samples_ms"]
            # Not the standard deviation: it is larger than the mean where the first step compiles.
            reach = (mean - min(samples), max(samples) - mean)
            errors.setdefault(name, [None] * len(groups))[place] = reach
    whom = f" to {next(iter(series))}" if len(series) == 1 else ""  # several have a legend
    return grouped_bars(
        groups,
        series,
        errors={name: errors.get(name, [None] * len(groups)) for name in series},
        title=f"What too little warm-up does{whom} (whiskers: fastest and slowest step)",
        x_label="unmeasured steps before the measured ones",
        y_label="mean time of a step (ms, log scale)",
        log_y=True,
    )


def _report(
    rows: Rows,
    options: dict[str, Any],
    environment: dict[str, Any],
    notes: Sequence[str],
    files: Sequence[str],
) -> str:
    limits = environment["limits"]
    lines = [
        "# Model benchmark",
        "",
        f"Batch {options['batch_size']}, vocabulary {options['vocab_size']}, attention {options['attention']}, on "
        f"{limits['device']}, torch {environment['packages']['torch']}, {environment['time_utc']}.",
        "",
        f"{limits_sentence(limits)}.",
        "",
        "## What was found",
        "",
        *(f"- {finding}" for finding in findings(rows)),
        "",
        "## Models",
        "",
        markdown_table(_models(rows), COLUMNS),
    ]
    compared = [row for row in _models(rows) if row.get("versus_fp32") is not None]
    if compared:
        lines += [
            "## Precisions, paired",
            "",
            "Medians of the ratios within a round; six rounds are the fewest that make a verdict.",
            "",
            markdown_table(compared, PRECISION_COLUMNS),
        ]
    study = [row for row in rows if row["part"] == "warm-up"]
    if study:
        lines += [
            "## Warm-up",
            "",
            "Whole steps of a fresh model after so many unmeasured ones; the first line is the first thing that this "
            "process ran.",
            "",
            markdown_table(study, WARMUP_COLUMNS),
        ]
    failed = [row for row in rows if row["status"] != "ok"]
    if failed:
        lines += ["## Did not fit", ""]
        lines += [
            f"- {row['size']} at {row['length']}, {row['precision']}, {row['mode']}: {row['detail']}"
            for row in failed
        ]
        lines.append("")
    lines += [*notes, ""]
    lines += picture_lines(files)
    return "\n".join(lines) + "\n"


def findings(rows: Rows) -> list[str]:
    """The sentences that the rows support."""
    found = []
    timed = [row for row in _models(rows) if row.get("median_ms")]
    for precision in dict.fromkeys(row["precision"] for row in timed):
        best = max((row for row in timed if row["precision"] == precision), key=lambda row: row["mfu"])
        found.append(
            f"Best utilisation in {precision}: {best['size']} at {best['length']}, compile {best['compile']}, "
            f"{best['mode']}: {best['mfu']:.1%} MFU ({best['mfu_basis']}), {best['tokens_per_s']:,.0f} tokens/s."
        )
    times = {
        (row["mode"], row["precision"], row["compile"], row["size"], row["length"]): row["median_ms"]
        for row in timed
    }
    floors = {
        (row["size"], row["length"]): row["optimizer_floor_ms"] for row in timed if row["mode"] == "step"
    }
    found += _precision_findings(timed) + _length_findings(times) + _optimizer_findings(times, floors)
    found += _sample_findings(timed)
    study = [row for row in rows if row["part"] == "warm-up" and row.get("mean_ms")]
    if len(study) > 1:
        ratio = study[0]["mean_ms"] / study[-1]["median_ms"]
        found.append(
            f"Warm-up: with {study[0]['warmup']} unmeasured steps the mean is {ratio:.2f} times the median after "
            f"{study[-1]['warmup']}."
        )
    unfit = sorted({(row["size"], row["length"]) for row in rows if row["status"] == "out of memory"})
    found += [
        f"{size} at {length} tokens does not fit in memory in at least one mode." for size, length in unfit
    ]
    return found


Times = dict[tuple[str, str, str, str, int], float]  # (mode, precision, compile, size, length) -> ms


def _precision_findings(timed: Rows) -> list[str]:
    """What 16 bits save in a step, from the most to the least, and how sure that is."""
    found = []
    steps = [row for row in timed if row["mode"] == "step" and row.get("versus_fp32") is not None]
    for precision in dict.fromkeys(row["precision"] for row in steps):
        own = sorted(
            (row for row in steps if row["precision"] == precision), key=lambda row: -row["versus_fp32"]
        )
        most, least = own[0], own[-1]
        verdicts = Counter(row["versus_fp32_verdict"] for row in own)
        found.append(
            f"A step in {precision} is {most['versus_fp32']:.2f} ({most['size']} at {most['length']}) to "
            f"{least['versus_fp32']:.2f} ({least['size']} at {least['length']}) times as fast as in fp32; verdicts "
            f"of the paired rounds: {', '.join(f'{verdict} {count}' for verdict, count in verdicts.most_common())}."
        )
    return found


def _length_findings(times: Times) -> list[str]:
    """Time that does not grow with the work is not the device's."""
    found = []
    for precision, how in dict.fromkeys(key[1:3] for key in times if key[0] == "step"):
        growths = []
        for size in dict.fromkeys(key[3] for key in times if key[:3] == ("step", precision, how)):
            lengths = sorted(key[4] for key in times if key[:4] == ("step", precision, how, size))
            first, last = (
                times["step", precision, how, size, length] for length in (lengths[0], lengths[-1])
            )
            if lengths[-1] > lengths[0] and last / first < 0.5 * lengths[-1] / lengths[0]:
                growths.append(f"{last / first:.2f} ({size}, {lengths[0]} to {lengths[-1]})")
        if growths:
            found.append(
                f"Steps in {precision}, compile {how}, that grow far less than their tokens: {', '.join(growths)} "
                "times as long. At their short end something else takes the time: the CPU's dispatch, or the "
                "optimizer."
            )
    return found


def _optimizer_findings(times: Times, floors: dict[tuple[str, int], float]) -> list[str]:
    """A step less forward and backward: clipping and the optimizer, against what moving their bytes takes."""
    extra = {
        key: time_ms - times["fwd+bwd", key[1], key[2], key[3], key[4]]
        for key, time_ms in times.items()
        if key[0] == "step" and ("fwd+bwd", *key[1:]) in times
    }
    most = max(extra, key=lambda key: extra[key] / times[key], default=None)
    if most is None or extra[most] <= 0:
        return []
    _, precision, _, size, length = most
    return [
        f"Clipping and the optimizer take up to {extra[most] / times[most]:.0%} of a step ({size} at {length}, "
        f"{precision}), {extra[most]:.2f} ms; moving their bytes takes {floors[size, length]:.2f} ms at the copy "
        "bandwidth measured in this run."
    ]


def _sample_findings(timed: Rows) -> list[str]:
    """Whether the rows can be told from one another."""
    few = [row for row in timed if row["repeats"] < FEWEST_PAIRS]
    if not few:
        return []
    return [
        f"{len(few)} of {len(timed)} rows have fewer than {FEWEST_PAIRS} samples, the fewest "
        f"{min(row['repeats'] for row in few)}: their seconds were used up, and small differences mean nothing."
    ]
