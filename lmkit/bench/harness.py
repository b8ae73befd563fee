"""Run a bench: cases x variants -> rows -> tables, pictures and a report.

A bench is one file of this package that registers a function `bench(context) -> rows` and defines its table
`Options`:

    class Options(Table):
        sizes: tuple[PositiveInt, ...] = (1024,)
        \"\"\"Elements of the buffers.\"\"\"

    @BENCHES.register("copy", help="Copy bandwidth over buffer sizes.")
    def copy(context: Context) -> Rows:
        ...

From these come `lmkit bench copy --sizes 1,2`, the recipe's [bench.copy], the folder, the journal and the report. A
file may also define `check(recipe)`, `summarize(rows) -> Summary` and `pictures(rows)`, and `in_worlds(recipe, nproc,
start)`, which calls `start(recipe, nproc) -> (rows, environment)` for every world size and joins what they return.

Importing this module is cheap: torch loads when a bench runs.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmkit.bench.context import Context, Journal, RankOutOfMemory
from lmkit.errors import UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import Limits, limits_sentence, model_flops_utilization
from lmkit.measure.memory import is_out_of_memory, release_memory
from lmkit.measure.progress import Progress
from lmkit.measure.statistics import PairedRatio, spread
from lmkit.measure.tables import (
    TERMINAL_WIDTH,
    Column,
    Rows,
    markdown_table,
    picture_lines,
    row_files,
    terminal_table,
    wrote,
)
from lmkit.recipe.run_folder import ENVIRONMENT, RECIPE
from lmkit.registry import BENCHES
from lmkit.storage import FolderLock, write_atomic
from lmkit.storage.outputs import refuse_results, refuse_unwritable

if TYPE_CHECKING:
    import torch

    from lmkit.recipe.schema import Recipe

JOURNAL = "rows.jsonl.partial"
NOT_MEASURED = ("unsupported", "out of memory", "skipped", "failed", "wrong result")
"""Values of `status` in rows without a measurement; `detail` says why."""
REASONS_SHOWN = 3
Measured = tuple[Rows, dict[str, Any]]
"""Rows, and what `environment.json` says."""
Key = TypeVar("Key")
Result = TypeVar("Result")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a bench; the message says where the rows of finished rounds are."""


@dataclass(frozen=True)
class BenchStored:
    """The rows of a bench and the files that hold them.

    Attributes:
        measured: whether any row of the table has a measurement.
    """

    bench: str
    folder: str
    files: tuple[str, ...]
    rows: Rows
    table: str
    measured: bool

    def __str__(self) -> str:
        nothing = "" if self.measured else "nothing in this table could be measured\n"
        return f"{self.table}{nothing}\n{wrote(self.folder, self.files)}"


def run_bench(
    name: str, recipe: Recipe, output: Path | None, *, nproc: int = 1, progress: Progress
) -> BenchStored | None:
    """Run one bench and store its rows, tables, pictures, environment and recipe.

    Args:
        output: the folder; by default `artifacts/benches/<run.name>/<bench>`.
        nproc: ranks to start on this machine; under torchrun leave it at 1.

    Returns:
        None on ranks other than the first.

    Raises:
        UsageError: the recipe asks for something that does not exist, or the bench needs several ranks.
        LmkitError: another bench is running in this folder.
        Interrupted: in place of KeyboardInterrupt, on the first rank.
    """
    from lmkit.recipe.load import recipe_to_toml  # it imports the tables of all benches

    module = bench_module(name)
    if check := getattr(module, "check", None):
        check(recipe)
    bench = BENCHES.facts(name).folder or name
    folder = output or default_folder(recipe) / bench
    with _place(folder) as journal:

        def start(recipe: Recipe, nproc: int) -> Measured | None:
            given = (name, recipe, journal, progress)
            return _on_rank(*given) if nproc == 1 else _on_several_ranks(*given, nproc)

        in_worlds = getattr(module, "in_worlds", None)
        measured = in_worlds(recipe, nproc, start) if in_worlds else start(recipe, nproc)
        if measured is None:
            return None
        rows, environment = measured
        summary, files = result_files(name, rows, environment)
        files |= {ENVIRONMENT: json.dumps(environment, indent=1) + "\n", RECIPE: recipe_to_toml(recipe)}
        for file, content in files.items():
            write_atomic(folder / file, content)
        journal.path.unlink(missing_ok=True)
    return BenchStored(bench, str(folder), tuple(files), rows, terminal_text(summary), summary.measured)


def check_place(recipe: Recipe, output: Path | None, *, force: bool) -> None:
    """Refuse a folder that cannot be written to, or an `output` that already holds results.

    Raises:
        UsageError: nothing can be written there, or it has results and `force` is false.
    """
    refuse_results(output, force=force)
    refuse_unwritable(output or default_folder(recipe))


def default_folder(recipe: Recipe) -> Path:
    """Return the parent of the folders of a recipe's benches."""
    return recipe.run.folder.parent / "benches" / recipe.run.name


@contextmanager
def _place(folder: Path) -> Iterator[Journal]:
    """Hold a bench's folder until its files are stored; yield the journal of its rows."""
    journal = Journal(folder / JOURNAL)
    if os.environ.get("RANK", "0") != "0":  # the first rank holds the folder for all
        yield journal
        return
    with FolderLock(folder):
        journal.path.unlink(missing_ok=True)  # of a run that was killed
        try:
            yield journal
        except KeyboardInterrupt:
            found = f"the rows so far are in {journal.path}, until a bench is started there again"
            raise Interrupted(f"interrupted: {found if journal.rows() else 'no rows were kept'}") from None


def _on_several_ranks(
    name: str, recipe: Recipe, journal: Journal, progress: Progress, nproc: int
) -> Measured | None:
    """Start ranks; start them again after one ran out of memory, unless the journal gained no row."""
    from lmkit.parallel.launch import relayed, spawn_ranks

    while True:
        known = len(journal.rows())
        try:
            with relayed(progress) as from_ranks:
                return spawn_ranks(nproc, _on_rank, (name, recipe, journal, from_ranks))
        except RankOutOfMemory:
            if len(journal.rows()) == known:  # a new start would run out of memory at the same row
                raise


def _on_rank(name: str, recipe: Recipe, journal: Journal, progress: Progress) -> Measured | None:
    """Return rows and environment; None on ranks other than the first."""
    from lmkit.parallel.failures import losses_named
    from lmkit.training.process import numerics, ranks_of

    with ranks_of(recipe) as ranks, losses_named(ranks, "in the bench"), numerics(recipe.run, ranks):
        if BENCHES.facts(name).ranks == "required" and ranks.world_size < 2:
            command = f"lmkit bench {name.replace('_', '-')}"
            raise UsageError(
                "bench.needs_ranks",
                f"{command}: there is one process, and nothing to synchronize",
                hint=f"start ranks: {command} RECIPE --nproc 2, or torchrun --nproc-per-node 2 -m lmkit ...",
            )
        context = Context(recipe, recipe.bench.table(name), ranks, progress, journal)
        rows = BENCHES.load(name)(context)
        if not ranks.is_first:
            return None
        size = {"world_size": ranks.world_size} if ranks.world_size > 1 else {}
        return rows, describe_environment() | size | context.environment


def bench_module(name: str) -> Any:
    """Import and return the module that registers a bench."""
    return sys.modules[BENCHES.load(name).__module__]


# Rows in words


@dataclass(frozen=True)
class Summary:
    """The table and the sentences of a terminal, a report or a document of `lmkit report`.

    Attributes:
        columns: columns of the table; a column without any value is left out.
        rows: rows of the table.
        about: one line on the case: sizes, dtype.
        findings: sentences that the rows support, the most important first.
        tables: heading -> further Markdown for reports.
        notes: what the table does not say; the columns' own notes come after them.
        wide: further columns for reports; a terminal has no room for them.
    """

    title: str
    columns: Sequence[Column]
    rows: Rows
    about: str = ""
    findings: Sequence[str] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    wide: Sequence[Column] = ()

    @property
    def measured(self) -> bool:
        """Whether any row has a measurement, or there is none."""
        return not self.rows or any(row.get("status") not in NOT_MEASURED for row in self.rows)

    def filled(self, columns: Sequence[Column]) -> list[Column]:
        """Return the columns for which some row has something to show."""
        keys = {key for row in self.rows for key, value in row.items() if value is not None}
        return [column for column in columns if column.key in keys or column.instead in keys]

    def explained(self, shown: Sequence[Column]) -> list[str]:
        """Return the notes below a table of these columns."""
        meanings = "; ".join(f"{column.header}: {column.note}" for column in shown if column.note)
        return [*self.notes, *([meanings] if meanings else [])]

    def reasons(self) -> dict[str, list[str]]:
        """Return `status: detail` -> the rows without a measurement that have it, named by their first columns."""
        named = [column.instead for column in self.columns]
        names = self.columns[: named.index("status")] if "status" in named else ()
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row.get("status") in NOT_MEASURED:
                reason = ": ".join(str(row[key]) for key in ("status", "detail") if row.get(key))
                found.setdefault(reason, []).append(" ".join(column.text(row) for column in names))
        return found


def result_files(
    name: str, rows: Rows, environment: Mapping[str, Any]
) -> tuple[Summary, dict[str, bytes | str]]:
    """Return the summary of a bench's rows, and name -> content of their files: rows, pictures, report."""
    prefix = BENCHES.facts(name).prefix(name)
    module = bench_module(name)
    summary = module.summarize(rows) if hasattr(module, "summarize") else _all_keys(name, rows)
    pictures: dict[str, bytes] = module.pictures(rows) if hasattr(module, "pictures") else {}
    shown = {picture: file for file, picture in reversed(pictures.items())}  # some have several names
    report = report_text(summary, environment, tuple(reversed(shown.values())))
    return summary, {**row_files(f"{prefix}results", rows), **pictures, f"{prefix}report.md": report}


def _all_keys(name: str, rows: Rows) -> Summary:
    keys = {key: None for row in rows for key, value in row.items() if not isinstance(value, list | dict)}
    return Summary(name, [Column(key, key, ".4g") for key in keys], rows)


def terminal_text(summary: Summary) -> str:
    """Return the table, the reasons of rows without a measurement, and the notes; at most 100 characters wide."""
    reasons = list(summary.reasons())
    more = len(reasons) - REASONS_SHOWN
    reasons = reasons[:REASONS_SHOWN] + ([f"and {more} more of these: see the report"] if more > 0 else [])
    shown = summary.filled(summary.columns)
    below = (*reasons, *summary.explained(shown))
    lines = "".join(f"{textwrap.fill(line, TERMINAL_WIDTH)}\n" for line in below)
    return terminal_table(summary.rows, shown) + lines


def report_text(summary: Summary, environment: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """Return the Markdown report of one bench."""
    return document(f"# {summary.title}", *report_body(summary, environment), *picture_lines(pictures))


def report_body(summary: Summary, environment: Mapping[str, Any], level: int = 2) -> list[str]:
    """Return the paragraphs of a report below its title; `level` is that of their headings."""
    heading = "#" * level
    about = f"{summary.about}. " if summary.about else ""
    parts = [f"{about}Measured on {machine(environment)}."]
    if limits := environment.get("limits"):
        parts.append(f"{limits_sentence(limits)}.")
    if summary.findings:
        parts += [f"{heading} What was found", bullets(summary.findings)]
    if columns := summary.filled((*summary.columns, *summary.wide)):
        parts += [
            f"{heading} Results",
            markdown_table(summary.rows, columns),
            bullets(summary.explained(columns)),
        ]
    for title, table in summary.tables.items():
        parts += [f"{heading} {title}", table]
    if reasons := summary.reasons():
        lines = (f"{reason} ({'; '.join(names)})" for reason, names in reasons.items())
        parts += [f"{heading} Not measured", bullets(lines)]
    return parts


def machine(environment: Mapping[str, Any]) -> str:
    """Return one line that names the machine, as far as `environment.json` does."""
    gpus = [gpu.get("name", "") for gpu in environment.get("gpus", ())]
    cpu = environment.get("cpu", {}).get("name", "")
    parts = [f"{len(gpus)} x {gpus[0]}" if gpus else f"a CPU ({cpu})" if cpu else "an unnamed machine"]
    if version := environment.get("packages", {}).get("torch"):
        parts.append(f"torch {version}")
    if time := environment.get("time_utc"):
        parts.append(time[:10])
    return ", ".join(parts)


def bullets(sentences: Iterable[str]) -> str:
    """Return a Markdown list, or nothing."""
    return "\n".join(f"- {sentence}" for sentence in sentences)


def document(*paragraphs: str) -> str:
    """Join paragraphs by empty lines."""
    return "\n\n".join(text.strip("\n") for text in paragraphs if text.strip()) + "\n"


# What benches share


def grouped(rows: Rows, key: Callable[[dict[str, Any]], Key]) -> dict[Key, Rows]:
    """Return the rows by key, both in the order in which they came."""
    groups: dict[Key, Rows] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


@contextmanager
def out_of_memory_is_a_row(row: dict[str, Any], device: torch.device | str) -> Iterator[None]:
    """Turn an out-of-memory error of the block into the row's status, and give the memory back.

    Other errors pass.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        row |= not_enough_memory(error)
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the calls that ended
        release_memory(device)


def not_enough_memory(reason: BaseException | str) -> dict[str, Any]:
    """Return the status and detail of a row that does not fit; the detail of an error is its first sentence."""
    return {"status": "out of memory", "detail": str(reason).split(". ")[0].partition("\n")[0]}


def build_what_fits(
    rows: Mapping[Key, dict[str, Any]],
    build: Callable[[Key, dict[str, Any]], Result | None],
    device: torch.device | str,
) -> dict[Key, Result]:
    """Return variant -> result of `build(variant, row)`, without variants that returned None or ran out of memory."""
    built: dict[Key, Result] = {}
    for name, row in rows.items():
        with out_of_memory_is_a_row(row, device):
            if (made := build(name, row)) is not None:
                built[name] = made
    return built


def time_what_fits(
    calls: Mapping[Key, Callable[..., object]],
    rows: Mapping[Key, dict[str, Any]],
    device: torch.device | str,
    time_together: Callable[[dict[Key, Callable[..., Any]]], dict[Key, Result]],
) -> dict[Key, Result]:
    """Time variants in turns. If they do not fit together, the largest becomes an out-of-memory row.

    Args:
        rows: rows of all variants; `peak_gb` is the memory that a variant needs.
        time_together: times some of the calls.
    """
    left = dict(calls)
    while left:
        trouble: dict[str, Any] = {"status": "ok"}
        with out_of_memory_is_a_row(trouble, device):
            return time_together(left)
        largest = max(left, key=lambda name: rows[name].get("peak_gb") or 0.0)
        del left[largest]
        rows[largest] |= trouble | {"detail": f"in turns with {len(left)} others: {trouble['detail']}"}
    return {}


def time_fields(samples_ms: Sequence[float], name: str = "median_ms") -> dict[str, Any]:
    """Return the fields of a row that describe its samples; `name` is the key of the median."""
    times = spread(samples_ms)
    return {
        name: times.median,
        "mean_ms": times.mean,
        "p10_ms": times.p10,
        "p90_ms": times.p90,
        "spread": times.relative if times.count > 1 else None,
        "samples_ms": list(samples_ms),
    }


def ratio_fields(ratio: PairedRatio, name: str = "speedup", verdict: str = "verdict") -> dict[str, Any]:
    """Return the fields of a row that say how a variant compares with another."""
    return {name: ratio.speedup, f"{name}_low": ratio.low, f"{name}_high": ratio.high, verdict: ratio.verdict}


def mfu_fields(
    flops_per_s: float, device: torch.device, precision: str, limits: Limits | None
) -> dict[str, Any]:
    """Return the MFU of one device and the peak that it is a share of; {} on ranks that measured no limits."""
    if limits is None:
        return {}
    mfu = model_flops_utilization(flops_per_s, device, precision, limits)
    return {"mfu": mfu.share, "mfu_basis": mfu.basis}


def mfu_notes(rows: Rows) -> list[str]:
    """Return sentences that name the peaks of which the MFU is a share."""
    bases = dict.fromkeys(row["mfu_basis"] for row in rows if row.get("mfu_basis"))
    return [f"MFU: share of the {basis}" for basis in bases]
