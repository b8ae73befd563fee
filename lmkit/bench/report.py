"""Turn rows into words: a terminal's table, a bench's report, and the write-ups of `lmkit report`.

A bench's file defines `summarize(rows) -> Summary`. Everything that people read is made from summaries.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.measure.limits import limits_sentence
from lmkit.measure.tables import TERMINAL_WIDTH, Column, Rows, markdown_table, picture_lines, terminal_table
from lmkit.registry import BENCHES
from lmkit.storage import write_atomic

Group = TypeVar("Group")
NOT_MEASURED = ("unsupported", "out of memory", "skipped", "failed", "wrong result")
"""The `status` of a row without a measurement; its `detail` says why."""
REASONS_SHOWN = 3


@dataclass(frozen=True)
class Summary:
    """What the rows of a bench say.

    Attributes:
        columns: of the table that a terminal shows.
        shown: its rows.
        about: one line on the case: sizes, dtype.
        findings: sentences that the rows support, the most important first.
        tables: heading -> Markdown, for the bench's report and for write-ups.
        details: further tables, for the bench's report.
        notes: what the columns mean.
    """

    title: str
    columns: Sequence[Column]
    shown: Rows
    about: str = ""
    findings: tuple[str, ...] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


Summarize = Callable[[Rows], Summary]


SideBySide = Callable[["Sequence[Results]"], Mapping[str, str]]


def bench_module(name: str) -> Any:
    """Import and return the module that registers a bench."""
    return sys.modules[BENCHES.load(name).__module__]


def summarize(name: str, rows: Rows) -> Summary:
    """Summarize rows as their bench does; if it does not, show all keys but the raw samples."""
    own: Summarize | None = getattr(bench_module(name), "summarize", None)
    if own is not None:
        return own(rows)
    keys = {key: None for row in rows for key, value in row.items() if not isinstance(value, list | dict)}
    return Summary(name, [Column(key, key, ".4g") for key in keys], rows)


# One bench


def has_measurement(summary: Summary) -> bool:
    """Return whether any row of the table has a measurement; also true of a table without rows."""
    rows = summary.shown
    return not rows or any(row.get("status") not in NOT_MEASURED for row in rows)


def terminal_text(summary: Summary) -> str:
    """Return the table, below it why rows have no measurement, and the notes; at most 100 columns."""
    reasons = failures(summary.shown)
    more = len(reasons) - REASONS_SHOWN
    reasons = reasons[:REASONS_SHOWN] + ([f"and {more} more of these: see the report"] if more > 0 else [])
    below = "".join(f"{textwrap.fill(line, TERMINAL_WIDTH)}\n" for line in (*reasons, *summary.notes))
    return terminal_table(summary.shown, summary.columns) + below


def failures(rows: Rows, name: Callable[[dict[str, Any]], str] | None = None) -> list[str]:
    """Return `status: detail` of the rows without a measurement, each once.

    Args:
        name: what to call a row; the sentences then begin with it.
    """
    found: dict[str, None] = {}
    for row in rows:
        if row.get("status") in NOT_MEASURED and (row.get("detail") or name is not None):
            prefix = f"{name(row)}: " if name is not None else ""
            found[f"{prefix}{row['status']}: {row.get('detail') or 'no reason given'}"] = None
    return list(found)


def report_text(summary: Summary, environment: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """Return the Markdown report of one bench."""
    details = summary.details or ({} if summary.tables else {"Results": _own_table(summary)})
    return document(
        f"# {summary.title}",
        *_body(summary, environment),
        *(text for title, table in details.items() for text in (f"## {title}", table)),
        *summary.notes,
        *picture_lines(pictures),
    )


def _body(summary: Summary, environment: Mapping[str, Any], level: int = 2) -> list[str]:
    heading = "#" * level
    about = f"{summary.about}. " if summary.about else ""
    parts = [f"{about}Measured on {machine(environment)}."]
    if limits := environment.get("limits"):
        parts.append(f"{limits_sentence(limits)}.")
    if summary.findings:
        parts += [f"{heading} What was found", bullets(summary.findings)]
    for title, table in summary.tables.items():
        parts += [f"{heading} {title}", table]
    return parts


def _own_table(summary: Summary) -> str:
    return markdown_table(summary.shown, summary.columns)


def machine(environment: Mapping[str, Any]) -> str:
    """Return one line on what was measured on, as far as `environment.json` says."""
    gpus = [gpu.get("name", "") for gpu in environment.get("gpus", ())]
    cpu = environment.get("cpu", {}).get("name", "")
    parts = [f"{len(gpus)} x {gpus[0]}" if gpus else f"a CPU ({cpu})" if cpu else "an unnamed machine"]
    if version := environment.get("packages", {}).get("torch"):
        parts.append(f"torch {version}")
    if time := environment.get("time_utc"):
        parts.append(time[:10])
    return ", ".join(parts)


# Rows on disk


@dataclass(frozen=True)
class Results:
    """The rows of one kind in one file.

    Attributes:
        kind: the bench, or "profile" or "memory".
        path: the file, below the folder that was searched.
        environment: content of the `environment.json` in its folder; {} without one.
        pictures: names of the PNG files in its folder.
    """

    kind: str
    path: Path
    rows: Rows
    environment: dict[str, Any]
    pictures: tuple[str, ...] = ()


PROFILE_KEYS = {"profile": ("engine", "window", "ranges", "top_kernels"), "memory": ("phase", "peak_gib")}


def kind_of(row: Mapping[str, Any]) -> str | None:
    """Return the bench or the kind of profile that wrote a row; None if it is of neither."""
    keys = {name: BENCHES.facts(name).row_keys for name in BENCHES.names} | PROFILE_KEYS
    fitting = [name for name, needed in keys.items() if needed and row.keys() >= set(needed)]
    return max(fitting, key=lambda name: len(keys[name]), default=None)


def read_rows(path: Path) -> Rows:
    """Return the objects of a file of JSON lines, or of one JSON object. Rows of older versions get today's keys.

    Raises:
        UsageError: the file cannot be read.
        LmkitError: a line is not a JSON object.
    """
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            json.dumps(row, ensure_ascii=False, allow_nan=False).encode()  # refuses NaN and half characters
        except (ValueError, RecursionError) as error:
            raise LmkitError(
                "rows.damaged",
                f"{path}: line {number} is not a JSON object ({error})",
                hint="results are JSON lines; run the command that wrote the file again",
            ) from None
        if "contender" in row:
            row["variant"] = row.pop("contender")
        rows.append(row)
    return rows


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError("rows.unreadable", f"{path}: {reason(error)}", hint="check the path") from None
    except UnicodeDecodeError:
        raise LmkitError("rows.damaged", f"{path}: not UTF-8 text", hint="results are JSON lines") from None
    return [" ".join(text.splitlines())] if path.suffix == ".json" else text.splitlines()


def find_results(root: Path, parts: Sequence[str] = ("",)) -> list[Results]:
    """Return every file of rows below a folder, in the order of their paths. Rows of no bench are passed over.

    Args:
        parts: folders in `root` to look in; not all need exist.

    Raises:
        UsageError: there is no folder, or no result in it.
        LmkitError: a file is damaged.
    """
    folders = [root / part for part in parts if (root / part).is_dir()]
    searched = " and ".join(str(root / part) for part in parts)
    hint = "name a folder with results, or run a bench: lmkit bench attention bench_attention_cpu"
    if not folders:
        raise UsageError("report.no_folder", f"{searched}: not a folder", hint=hint)
    found = [results for folder in folders for path in _row_files(folder) for results in _read(path, root)]
    if not found:
        raise UsageError("report.no_results", f"{searched}: no results of a bench or a profile", hint=hint)
    return found


def _row_files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort(key=_natural)
        for name in sorted(names, key=_natural):
            if name.endswith(".jsonl") or name == "profile_summary.json":
                yield Path(parent) / name


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort numbers in names by value: step_512 before step_2048."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _read(path: Path, root: Path) -> Iterator[Results]:
    by_kind = grouped([row for row in read_rows(path) if kind_of(row) is not None], kind_of)
    facts = path.parent / "environment.json"
    environment = read_rows(facts)[0] if by_kind and facts.is_file() else {}
    pictures = tuple(sorted(picture.name for picture in path.parent.glob("*.png")))
    for kind, rows in by_kind.items():
        yield Results(str(kind), path.relative_to(root), rows, environment, pictures)


# `lmkit report`

ARTIFACTS, PARTS = Path("artifacts"), ("benches", "profiles")
"""Where benches and profiles write by default."""


@dataclass(frozen=True)
class WriteUp:
    """One document of `lmkit report`.

    Attributes:
        sections: kind of rows -> the function of its module that summarizes them.
    """

    title: str
    introduction: str
    sections: Mapping[str, str]


WRITE_UPS = {
    "attention.md": WriteUp(
        "FlashAttention",
        "Naive attention stores a length x length matrix of scores: time and memory grow with the square of the "
        "length, and most of the time goes into moving the matrix. FlashAttention computes the same result tile by "
        "tile with a running softmax: memory grows linearly, and the time is that of the matrix products. The limit "
        "is the rate of a large matrix product, measured in the same run.",
        {"attention": "summarize"},
    ),
    "data_parallelism.md": WriteUp(
        "Data parallelism",
        "Every rank computes the gradients of its rows of the batch; before the optimizer step they are averaged "
        "over the ranks. Strategies differ in how many calls they make (one per parameter, one for everything, one "
        "per bucket) and when: after the backward pass or during it. An all-reduce of n bytes over W ranks makes "
        "each rank send at least 2 (W-1)/W n bytes: the tables compare what was sent with that formula.",
        {"ddp": "summarize", "all_reduce": "summarize"},
    ),
    "optimizer_sharding.md": WriteUp(
        "Optimizer state sharding (ZeRO-1)",
        "AdamW keeps two fp32 numbers per parameter, and every data-parallel rank keeps the same ones. ZeRO-1 gives "
        "each of W ranks 1/W of them: gradients are reduce-scattered, each rank updates its shard, and the new "
        "weights are gathered. A reduce-scatter and an all-gather move the bytes of one all-reduce, and the "
        "optimizer's own time is divided by W. With bf16 weights and fp32 master weights in the shard, half the "
        "bytes travel.",
        {"optimizer": "summarize", "ddp": "summarize_sharding"},
    ),
    "profiling.md": WriteUp(
        "Profiling",
        "First whole passes of models, timed from outside; then, inside a step, how long the CPU is busy dispatching "
        "work to the GPU, how long it waits for it, and how long the GPU is busy. If the GPU's work fills less than "
        "the step and the CPU never waits, larger batches, compilation or CUDA graphs help more than faster kernels. "
        "Last, what fills the memory at its peak.",
        {"model": "summarize", "lm_matrix": "summarize", "profile": "summarize", "memory": "summarize"},
    ),
}


@dataclass(frozen=True)
class Reported:
    """What `lmkit report` did.

    Attributes:
        written: paths of the write-ups; none with `--check`.
        without_results: write-ups that no row is about.
    """

    folder: str
    sources: tuple[str, ...]
    written: tuple[str, ...]
    without_results: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"read {len(self.sources)} results below {self.folder}"]
        lines += [f"wrote {name}" for name in self.written]
        lines += [f"no rows for {name}" for name in self.without_results]
        return "\n".join(lines)


def write_reports(
    folder: Path | None,
    output: Path | None,
    *,
    check: bool = False,
    profiles: Mapping[str, Summarize],
    side_by_side: SideBySide,
) -> Reported:
    """Write every write-up that the rows below a folder support.

    Args:
        folder: by default artifacts/benches and artifacts/profiles, as far as they exist.
        output: by default `reports` in the folder, or in artifacts/benches.
        check: write nothing, and compare the files with what would be written.
        profiles: how to summarize rows of kind "profile" and "memory".
        side_by_side: compares several of them.

    Raises:
        UsageError: no folder, or no result in it.
        LmkitError: a result is damaged, or (`check`) a write-up is stale.
    """
    root, parts = (ARTIFACTS, PARTS) if folder is None else (folder, ("",))
    found = find_results(root, parts)
    searched = " and ".join(str(root / part) for part in parts)
    target = output or root / parts[0] / "reports"
    written, missing, stale = [], [], []
    for name, write_up in WRITE_UPS.items():
        chosen = [results for results in found if results.kind in write_up.sections]
        tables = _or_damaged(root, partial(side_by_side, chosen)) if chosen else {}
        text = _write_up(write_up, chosen, profiles, tables, root.resolve(), target.resolve())
        path = target / name
        if text is None:
            missing.append(name)
        elif not check:
            write_atomic(path, text)
            written.append(str(path))
        elif not path.is_file() or path.read_text("utf-8") != text:
            stale.append(str(path))
    if stale:
        words = [] if folder is None else [str(folder)]
        words += [] if output is None else ["--output", str(output)]
        raise LmkitError(
            "report.stale",
            f"{', '.join(stale)}: does not say what the rows below {searched} say",
            hint=f"write it again: {shlex.join(['lmkit', 'report', *words])}",
        )
    sources = tuple(results.path.as_posix() for results in found)
    return Reported(searched, sources, tuple(written), tuple(missing))


def _write_up(
    write_up: WriteUp,
    found: Sequence[Results],
    profiles: Mapping[str, Summarize],
    tables: Mapping[str, str],
    root: Path,
    output: Path,
) -> str | None:
    """Return the document; None if there are no rows for it."""
    short: list[str] = []
    parts: list[str] = []
    notes: dict[str, None] = {}
    for kind, function in write_up.sections.items():
        for results in found:
            if results.kind != kind:
                continue
            summarize = profiles[kind] if kind in profiles else getattr(bench_module(kind), function)
            summary = _or_damaged(root / results.path, partial(summarize, results.rows))
            if not summary.shown:
                continue
            alone = results.path.stem.endswith(("_results", "_summary", "_peaks"))
            title = (results.path.parent if alone else results.path.with_suffix("")).as_posix()
            source = Path(os.path.relpath(root / results.path, output)).as_posix()
            if summary.findings:
                short.append(f"**{title}**: {summary.findings[0]}")
            parts += [
                f"## {summary.title}: {title}",
                f"Rows with raw samples: [{results.path.as_posix()}]({source}).",
            ]
            facts = root / results.path.parent / "environment.json"
            parts += _or_damaged(facts, partial(_body, summary, results.environment, level=3))
            notes |= dict.fromkeys(summary.notes)
            parts += [
                f"![{name[:-4].replace('_', ' ')}]({Path(source).parent.as_posix()}/{name})"
                for name in results.pictures
            ]
    if not parts:
        return None
    compared = [text for title, table in tables.items() for text in (f"## {title}", table)]
    explained = ["## What the columns mean", bullets(notes)] if notes else []
    head = (f"# {write_up.title}", write_up.introduction, bullets(short))
    return document(*head, *compared, *parts, *explained)


def _or_damaged(where: object, read: Callable[[], Group]) -> Group:
    """Return what `read` makes of rows that were read from files.

    Raises:
        LmkitError: a row lacks a key or has a value of another type.
    """
    try:
        return read()
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        ArithmeticError,
        StopIteration,
    ) as error:
        raise LmkitError(
            "rows.damaged",
            f"{where}: not what `lmkit bench` writes ({type(error).__name__}: {error})",
            hint="run the command that wrote the file again",
        ) from None


# Markdown


def bullets(sentences: Iterable[str]) -> str:
    """Return a list, or nothing."""
    return "\n".join(f"- {sentence}" for sentence in sentences)


def document(*paragraphs: str) -> str:
    """Join paragraphs by empty lines."""
    return "\n\n".join(text.strip("\n") for text in paragraphs if text.strip()) + "\n"


def grouped(rows: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], Group]) -> dict[Group, Rows]:
    """Return the rows by key, both in the order in which they came."""
    groups: dict[Group, Rows] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def pivot(
    rows: Rows,
    row_key: Callable[[dict[str, Any]], str],
    column_key: Callable[[dict[str, Any]], Any],
    cell: Callable[[dict[str, Any]], str],
    *,
    corner: str = "",
) -> str:
    """Return a Markdown table: a line per `row_key`, a column per `column_key`, `cell` where they meet.

    Columns that are numbers ascend; others come in the order of the rows.
    """
    columns = list(dict.fromkeys(map(column_key, rows)))
    if all(isinstance(column, int | float) for column in columns):
        columns.sort()
    lines = [[corner, *map(str, columns)], [":-"] + ["-:"] * len(columns)]
    for name, members in grouped(rows, row_key).items():
        cells = {column_key(row): cell(row) for row in members}
        lines.append([name, *(cells.get(column, "-") for column in columns)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
