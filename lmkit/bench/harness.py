"""Run a bench: its place on disk, its ranks, its rows, and the files made from them.

A bench is one file of this package that registers a function `bench(context) -> rows` and defines its table
`Options`:

    class Options(Table):
        sizes: tuple[PositiveInt, ...] = (1024,)
        \"\"\"Elements of the buffers.\"\"\"

    @BENCHES.register("copy", help="Copy bandwidth over buffer sizes.")
    def copy(context: Context) -> Rows:
        ...

From these come `lmkit bench copy --sizes 1,2`, the recipe's [bench.copy], the folder, the journal and the report.
The functions below are what benches share: out-of-memory errors as rows, variants in turns, fields of times.

Importing this module is cheap: torch loads when a bench runs.
"""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmkit.bench.report import (
    Summary,
    bench_module,
    has_measurement,
    read_rows,
    report_text,
    summarize,
    terminal_text,
)
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import Limits, measure_limits
from lmkit.measure.memory import is_out_of_memory, release_memory
from lmkit.measure.progress import Progress
from lmkit.measure.statistics import PairedRatio, spread
from lmkit.measure.tables import Rows, json_lines, row_files, wrote
from lmkit.registry import BENCHES
from lmkit.storage import FolderLock, write_atomic
from lmkit.storage.outputs import refuse_unwritable

if TYPE_CHECKING:
    import torch

    from lmkit.parallel.ranks import Ranks
    from lmkit.recipe.schema import Recipe

JOURNAL = "rows.jsonl.partial"
RECIPE = "recipe.toml"
Key = TypeVar("Key")
Result = TypeVar("Result")


@dataclass(frozen=True)
class FlagNames:
    """Metadata of a key: other names of its flag."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Shortcut:
    """Metadata of a key: a flag without a value that stands for one value of the key."""

    name: str
    value: Any
    help: str


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a bench; its text says where the rows of finished rounds are."""


class RankOutOfMemory(LmkitError):
    """A rank ran out of memory; the journal has the row.

    Other ranks may wait for it inside a collective, so all ranks end. Those that `--nproc` started are started again
    and measure what the journal does not have.
    """


@dataclass(frozen=True)
class Journal:
    """JSON lines that grow while a bench runs: a killed bench loses no finished row. Several processes may append."""

    path: Path

    def start(self) -> None:
        """Delete what an earlier, killed run left."""
        self.path.unlink(missing_ok=True)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json_lines(rows))  # one write: lines of several processes do not mix

    def replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep these rows only, for a bench whose rows grow from round to round; one process at a time."""
        write_atomic(self.path, json_lines(rows))

    def rows(self) -> Rows:
        """Return the rows so far."""
        return read_rows(self.path) if self.path.exists() else []


@dataclass
class Context:
    """What a bench gets.

    Attributes:
        options: its table, [bench.NAME] of the recipe.
        ranks: this process's rank and device.
        environment: written to `environment.json`; the bench adds facts of its own.
    """

    recipe: Recipe
    options: Any
    ranks: Ranks
    report: Progress
    journal: Journal
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report progress; only the first rank does."""
        if self.ranks.is_first:
            self.report(stage, done, total)

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to the journal; only the first rank does."""
        if self.ranks.is_first:
            self.journal.add(rows)

    def limits(self, dtypes: Sequence[str]) -> Limits:
        """Measure what the device can do and note it in the environment."""
        limits = measure_limits(self.device, dict.fromkeys(dtypes))
        self.environment["limits"] = limits.as_dict()
        return limits


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
        LmkitError: another bench is at work in this folder.
        Interrupted: in place of KeyboardInterrupt, on the first rank.
    """
    if check := getattr(bench_module(name), "check", None):
        check(recipe)
    folder = output or default_folder(recipe) / _folder_name(name)
    with _place(folder) as journal:
        measured = _measure(name, recipe, journal, progress, nproc)
        return None if measured is None else _store(name, recipe, folder, *measured)


def check_place(recipe: Recipe, output: Path | None, *, force: bool) -> None:
    """Refuse a folder that cannot be written to, or that was asked for and holds results.

    Raises:
        UsageError: nothing can be written there, or it has results and `force` is false.
    """
    if output is not None and (output / RECIPE).exists() and not force:
        raise UsageError(
            "bench.output_exists", f"{output}: holds results", hint="choose another folder, or add --force"
        )
    refuse_unwritable(output or default_folder(recipe))


def default_folder(recipe: Recipe) -> Path:
    """Return the parent of the folders of a recipe's benches."""
    return recipe.run.folder.parent / "benches" / recipe.run.name


def _folder_name(name: str) -> str:
    return BENCHES.facts(name).folder or name


@contextmanager
def _place(folder: Path) -> Iterator[Journal]:
    """Hold a bench's folder until its files are stored; yield the journal of its rows."""
    journal = Journal(folder / JOURNAL)
    if os.environ.get("RANK", "0") != "0":  # the first rank holds the folder for all
        yield journal
        return
    with FolderLock(folder):
        journal.start()
        try:
            yield journal
        except KeyboardInterrupt:
            has_rows = journal.path.exists() and journal.path.stat().st_size > 0
            found = f"the rows so far are in {journal.path}, until a bench is started there again"
            raise Interrupted(f"interrupted: {found if has_rows else 'no rows were kept'}") from None


def _measure(
    name: str, recipe: Recipe, journal: Journal, progress: Progress, nproc: int
) -> tuple[Rows, dict[str, Any]] | None:
    """Return rows and environment; None on ranks other than the first."""
    if nproc == 1:
        return _on_rank(name, recipe, journal, progress)
    from lmkit.parallel.launch import relayed, spawn_ranks

    while True:
        known = len(journal.rows())
        try:
            with relayed(progress) as from_ranks:
                return spawn_ranks(nproc, _on_rank, (name, recipe, journal, from_ranks))
        except RankOutOfMemory:
            if len(journal.rows()) == known:  # it would happen again
                raise


def _on_rank(
    name: str, recipe: Recipe, journal: Journal, progress: Progress
) -> tuple[Rows, dict[str, Any]] | None:
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


def _store(name: str, recipe: Recipe, folder: Path, rows: Rows, environment: dict[str, Any]) -> BenchStored:
    """Write the files of a result."""
    from lmkit.recipe.load import recipe_to_toml  # it imports the tables of all benches

    summary, files = result_files(name, rows, environment)
    files |= {"environment.json": json.dumps(environment, indent=1) + "\n", RECIPE: recipe_to_toml(recipe)}
    for file, content in files.items():
        write_atomic(folder / file, content)
    (folder / JOURNAL).unlink(missing_ok=True)
    return BenchStored(
        _folder_name(name), str(folder), tuple(files), rows, terminal_text(summary), has_measurement(summary)
    )


def result_files(
    name: str, rows: Rows, environment: Mapping[str, Any]
) -> tuple[Summary, dict[str, bytes | str]]:
    """Return the summary of a bench's rows, and name -> content of their files: rows, pictures, report."""
    stem = BENCHES.facts(name).stem
    prefix = f"{name}_" if stem is None else f"{stem}_" if stem else ""
    summary = summarize(name, rows)
    draw = getattr(bench_module(name), "pictures", None)
    pictures: dict[str, bytes] = {} if draw is None else draw(rows)
    shown = {picture: file for file, picture in reversed(pictures.items())}  # some have several names
    report = report_text(summary, environment, tuple(reversed(shown.values())))
    return summary, {**row_files(f"{prefix}results", rows), **pictures, f"{prefix}report.md": report}


# What benches share.


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
    """Return the status of what does not fit; of an error, its first sentence."""
    return {"status": "out of memory", "detail": str(reason).split(". ")[0].partition("\n")[0]}


def time_what_fits(
    calls: Mapping[Key, Callable[[], object]],
    rows: Mapping[Key, dict[str, Any]],
    device: torch.device | str,
    time_together: Callable[[dict[Key, Callable[[], object]]], dict[Key, Result]],
) -> dict[Key, Result]:
    """Time variants in turns. What fits alone may not fit with the others: then the largest becomes a row.

    Args:
        rows: of all variants; `peak_gb` is what each needs.
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


def time_fields(samples_ms: Sequence[float]) -> dict[str, Any]:
    """Return the fields of a row that say what its samples are."""
    times = spread(samples_ms)
    return {
        "median_ms": times.median,
        "mean_ms": times.mean,
        "p10_ms": times.p10,
        "p90_ms": times.p90,
        "spread": times.relative if times.count > 1 else None,
        "samples_ms": list(samples_ms),
    }


def ratio_fields(ratio: PairedRatio, name: str = "speedup", verdict: str = "verdict") -> dict[str, Any]:
    """Return the fields of a row that say how a variant compares with another."""
    return {name: ratio.speedup, f"{name}_low": ratio.low, f"{name}_high": ratio.high, verdict: ratio.verdict}


def slowest_rank(samples_ms: Sequence[float], ranks: Ranks) -> list[float]:
    """Return, round by round, the longest of all ranks' samples. Collective; the same on every rank."""
    import torch
    import torch.distributed as dist

    slowest = torch.tensor(samples_ms, dtype=torch.float64)
    if ranks.world_size > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Switch Python's collector off: with many models alive, a pause takes longer than what is compared."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
