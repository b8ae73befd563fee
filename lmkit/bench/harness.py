"""Run a bench: cases x variants -> rows -> tables, pictures and a report.

A bench is one file of this package, such as `all_reduce.py`: it registers a function `bench(context) -> rows` and
defines its table `Options`. From these come its command with flags, the recipe's [bench.NAME], the folder, the
journal and the report. The file may also declare its columns (`summary.summary_of`) and define `check(recipe)`,
`pictures(rows)`, and `in_worlds(recipe, nproc, start)`, which calls `start(recipe, nproc) -> (rows, environment)` for
every world size and joins what they return.

Importing this module is cheap: torch loads when a bench runs.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.bench.context import Context, Journal, storable
from lmkit.bench.failures import RankGaveUp, not_enough_memory, wrong_result
from lmkit.bench.summary import MEASURED, WRONG, Summary, picture_of, report_text, summary_of, terminal_text
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import Limits
from lmkit.measure.memory import GB, available_memory
from lmkit.measure.plots import decorate
from lmkit.measure.statistics import PairedRatio, spread
from lmkit.measure.tables import Rows, enumeration, finite, row_files
from lmkit.recipe.run_folder import ENVIRONMENT, RECIPE, refuse_results
from lmkit.registry import BENCHES
from lmkit.storage.atomic import FolderLock, write_atomic
from lmkit.storage.outputs import refuse_unwritable
from lmkit.streams import Progress

if TYPE_CHECKING:
    from lmkit.recipe.recipe import Recipe
    from lmkit.recipe.tables import ModelConfig

log = logging.getLogger("lmkit")
JOURNAL = "rows.jsonl.partial"
MOST = {"mfu": 1.25, "share_of_matmul": 1.25, "share": 1.5}
"""Field of a row that is a share of a limit -> the largest that is believed. Other shapes, clocks that rise, and the
peak of a data sheet leave 25%; a copy also reads the lines that it overwrites: reads are up to 1.5 times as fast."""
Measured = tuple[Rows, dict[str, Any]]
"""Rows, and what `environment.json` says."""


@dataclass(frozen=True)
class BenchStored:
    """The rows of a bench and the files that hold them.

    Attributes:
        measured: whether any row of the table has a measurement.
        wrong: sentences on variants that compute something else, or whose figures cannot be true.
        failed: whether a variant raised an error that is no refusal.
    """

    bench: str
    folder: str
    files: tuple[str, ...]
    rows: Rows
    table: str
    measured: bool
    wrong: tuple[str, ...] = ()
    failed: bool = False

    @property
    def is_fine(self) -> bool:
        """Whether something was measured, and nothing is wrong or failed; otherwise the exit code is 1."""
        return self.measured and not self.wrong and not self.failed

    def __str__(self) -> str:
        nothing = "" if self.measured else "nothing in this table could be measured\n"
        return f"{self.table}{nothing}\n{enumeration(f'wrote {self.folder}', self.files)}"


def run_bench(
    name: str, recipe: Recipe, output: Path | None, *, nproc: int = 1, progress: Progress
) -> BenchStored | None:
    """Run one bench and store its rows, tables, pictures, environment and recipe; None on ranks other than the first.

    Args:
        output: the folder; by default `artifacts/benches/<run.name>/<bench>`.
        nproc: ranks to start on this machine; under torchrun leave it at 1.
    """
    from lmkit.recipe.load import recipe_to_toml  # it imports the tables of all benches

    module = bench_module(name)
    if check := getattr(module, "check", None):
        check(recipe)
    bench = BENCHES.facts(name).folder or name
    folder = output or default_folder(recipe) / bench
    if output is None:
        refuse_results(folder, force=True)
    with _place(folder) as journal:

        def start(recipe: Recipe, nproc: int) -> Measured | None:
            given = (name, recipe, journal, progress)
            return _on_rank(*given) if nproc == 1 else _on_several_ranks(*given, nproc)

        in_worlds = getattr(module, "in_worlds", None)
        measured = in_worlds(recipe, nproc, start) if in_worlds else start(recipe, nproc)
        if measured is None:
            return None
        rows, environment = [believed(storable(row)) for row in measured[0]], measured[1]
        summary, files = result_files(name, rows, environment)
        written = write_results(folder, files | {RECIPE: recipe_to_toml(recipe)}, environment)
        journal.path.unlink(missing_ok=True)
    table, wrong = terminal_text(summary), tuple(summary.wrong)
    failed = any(row.get("status") == "failed" for row in rows)
    return BenchStored(bench, str(folder), written, rows, table, summary.measured, wrong, failed)


def write_results(
    folder: Path, files: Mapping[str, bytes | str], environment: Mapping[str, Any]
) -> tuple[str, ...]:
    """Write the files of a bench or a profile; first the environment, which says whose folder it is. Return names."""
    write_atomic(folder / ENVIRONMENT, json.dumps(environment, indent=1) + "\n")
    for name, content in files.items():
        write_atomic(folder / name, content)
    return *files, ENVIRONMENT


def check_place(recipe: Recipe, output: Path | None, *, force: bool) -> None:
    """Refuse a folder that cannot be written to, or, without `force`, an `output` that holds results."""
    if output is not None:
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
        except BaseException as error:
            found = f"the rows so far are in {journal.path}, until a bench is started there again"
            kept = bool(journal.rows())
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"interrupted: {found if kept else 'no rows were kept'}") from None
            if kept:
                log.error(found)
            raise


def _on_several_ranks(
    name: str, recipe: Recipe, journal: Journal, progress: Progress, nproc: int
) -> Measured | None:
    """Start ranks; start them again after a variant failed on one of them, unless the journal gained no row."""
    from lmkit.parallel.launch import relayed, spawn_ranks

    while True:
        known = len(journal.rows())
        try:
            with relayed(progress) as from_ranks:
                return spawn_ranks(nproc, _on_rank, (name, recipe, journal, from_ranks))
        except RankGaveUp:
            if len(journal.rows()) == known:  # a new start would fail at the same row
                raise


def _on_rank(name: str, recipe: Recipe, journal: Journal, progress: Progress) -> Measured | None:
    """Return rows and environment; None on ranks other than the first."""
    from lmkit.parallel.ranks import losses_named
    from lmkit.training.process import numerics, ranks_of

    with ranks_of(recipe) as ranks, losses_named(ranks, "in the bench"), numerics(recipe.run, ranks):
        if BENCHES.facts(name).ranks == "required" and ranks.world_size < 2:
            command = f"lmkit bench {name.replace('_', '-')}"
            message = f"{command}: there is one process, and nothing to synchronize"
            hint = f"start ranks: {command} RECIPE --nproc 2, or torchrun --nproc-per-node 2 -m lmkit ..."
            raise UsageError("bench.needs_ranks", message, hint=hint)
        context = Context(recipe, recipe.bench_table(name), ranks, progress, journal)
        rows = BENCHES.load(name)(context)
        if not isinstance(rows, list):
            found = f"bench {name!r} of {bench_module(name).__file__}: returned a {type(rows).__name__}"
            raise LmkitError("bench.no_rows", found, hint="return its rows, a list of dicts")
        if not ranks.is_first:
            return None
        size = {"world_size": ranks.world_size} if ranks.world_size > 1 else {}
        return rows, describe_environment() | size | context.facts()


def bench_module(name: str) -> Any:
    return sys.modules[BENCHES.load(name).__module__]


def result_files(
    name: str, rows: Rows, environment: Mapping[str, Any]
) -> tuple[Summary, dict[str, bytes | str]]:
    """Return the summary of a bench's rows, and name -> content of their files: rows, pictures, report."""
    prefix, module = BENCHES.facts(name).prefix(name), bench_module(name)
    summary = summary_of(module, rows)

    def draw() -> dict[str, bytes]:
        if hasattr(module, "pictures"):
            return module.pictures(rows)
        return {f"{prefix}{key}.png": picture for key, picture in picture_of(summary).items()}

    pictures = decorate(f"pictures of bench {name}", draw) or {}
    report = report_text(summary, environment, tuple(pictures))
    return summary, {**row_files(f"{prefix}results", rows), **pictures, f"{prefix}report.md": report}


def believed(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row; without its figures, and with a status of `WRONG`, if one of them cannot be true."""
    why: dict[str, Any] = {}
    for key, value in row.items() if row.get("status") in MEASURED else ():
        if finite(value) != value:
            why = wrong_result(f"{key} is not finite")
        elif key in MOST and value is not None and value > MOST[key]:
            bases = {"share_of_matmul": "measured matmul rate", "share": "measured copy bandwidth"}
            basis = bases.get(key) or row.get("mfu_basis")
            detail = f"{value:.1%} of the {basis}, at most {MOST[key]:.0%} is believed"
            why = {"status": "impossible rate", "detail": detail}
    return without_figures(row) | why if why else row


def without_figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identifies a row: text, whole numbers and switches."""
    return {key: value for key, value in row.items() if not isinstance(value, float | list | dict)}


def add_figures(row: dict[str, Any], limits: Limits | None, make: Callable[[], dict[str, Any]]) -> bool:
    """Add the fields that `make` returns to a row, if they are `believed`; return whether they were.

    If a rate is above the limits, which `make` reads, they are measured again: another program may have disturbed
    them.
    """
    found = believed(row | make())
    if found["status"] == "impossible rate" and limits is not None:
        limits.measure_again()
        found = believed(row | make())
    row.clear()
    row |= found
    return row["status"] not in WRONG


def too_large_for_host(config: ModelConfig, context: Context) -> dict[str, Any]:
    """Return status and detail of a model that does not fit on a CPU, else {}. Linux kills instead of raising."""
    from lmkit.model.memory import training_memory

    needed, free = training_memory(config).total, available_memory()
    if context.device.type == "cuda" or free is None or needed < 0.8 * free:
        return {}
    why = f"weights, gradients and optimizer need {needed / GB:.1f} GB, {free / GB:.1f} GB free"
    return not_enough_memory(why)


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
