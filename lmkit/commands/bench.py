"""`lmkit bench ...`: run one benchmark and store what it found: rows, tables, plots, and what it was measured on."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lmkit.bench.journal import Journal
from lmkit.bench.report import BenchResult
from lmkit.errors import UsageError
from lmkit.measure.progress import Progress
from lmkit.measure.tables import wrote
from lmkit.parallel.failures import losses_named
from lmkit.parallel.launch import relayed, spawn_ranks
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import recipe_to_toml, required
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import ModelConfig
from lmkit.storage import FolderLock, write_atomic
from lmkit.storage.outputs import refuse_unwritable
from lmkit.training.process import backend_of, numerics, ranks_of

log = logging.getLogger("lmkit")
JOURNAL = "rows.jsonl.partial"
RECIPE = "recipe.toml"
T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a bench; its text says where the rows of finished rounds are."""


@dataclass(frozen=True)
class BenchStored:
    """A benchmark's rows and the files that hold them; `measured`: whether the table shows any measurement."""

    bench: str
    folder: str
    files: tuple[str, ...]
    rows: list[dict[str, Any]]
    table: str
    measured: bool

    def __str__(self) -> str:
        nothing = "" if self.measured else "nothing in this table could be measured\n"
        return f"{self.table}{nothing}\n{wrote(self.folder, self.files)}"


def attention(recipe: Recipe, output: Path | None, progress: Progress) -> BenchStored:
    """Attention kernels over lengths and head sizes."""
    from lmkit.bench.attention import AttentionOptions, run_bench

    table = _table(recipe.bench.attention, "attention")
    with _place(recipe, "attention", output) as journal, _ranks(recipe) as ranks:
        options = AttentionOptions(device=ranks.device.type, seed=recipe.run.seed, **table.model_dump())
        result = run_bench(options, progress=progress, journal=journal)
        return _store(result, recipe, output)


def model(recipe: Recipe, output: Path | None, progress: Progress) -> BenchStored:
    """Forward, backward and whole steps of the named sizes."""
    from lmkit.bench.model import ModelOptions, run_bench

    table = _table(recipe.bench.model, "model")
    with _place(recipe, "model", output) as journal, _ranks(recipe) as ranks:
        options = ModelOptions(device=ranks.device.type, seed=recipe.run.seed, **table.model_dump())
        result = run_bench(options, progress=progress, journal=journal)
        return _store(result, recipe, output)


def lm_matrix(recipe: Recipe, output: Path | None, nproc: int, progress: Progress) -> BenchStored | None:
    """Short real trainings over kernels x strategies; None on ranks other than the first."""
    from lmkit.bench.lm_matrix import run_bench
    from lmkit.bench.lm_matrix_cells import LmMatrixOptions

    table = _table(recipe.bench.lm_matrix, "lm_matrix")
    run = recipe.run
    options = LmMatrixOptions(
        device=run.device,
        backend=backend_of(recipe),
        timeout_s=recipe.parallel.timeout_s,
        nproc=nproc,
        seed=run.seed,
        threads=run.threads,
        deterministic=run.deterministic,
        **table.model_dump(),
    )
    with _place(recipe, "lm-matrix", output) as journal:
        result = run_bench(options, progress=progress, journal=journal)
        return None if result is None else _store(result, recipe, output)


def tokenizer(recipe: Recipe, output: Path | None, progress: Progress) -> BenchStored:
    """Training and encoding beside Hugging Face tokenizers, tiktoken and rustbpe where they are installed."""
    from lmkit.bench.tokenizer import Case, bench_tokenizer
    from lmkit.bench.tokenizer_contenders import CONTENDERS
    from lmkit.data.synth import write_stories

    table = _table(recipe.bench.tokenizer, "tokenizer")
    with (
        _place(recipe, "tokenizer", output),
        tempfile.TemporaryDirectory(prefix="lmkit-bench-") as folder,
    ):
        texts = [(path, path.stem) for path in table.texts]
        twice = [name for _, name in texts if [other for _, other in texts].count(name) > 1]
        if twice:
            raise UsageError(
                f"bench.tokenizer.texts: two are called {twice[0]}, and rows are named so",
                hint="rename one, or link to it under another name",
            )
        if not texts:
            stories = Path(folder) / "stories.txt"
            write_stories(stories, size_mb=table.synth_mb, seed=recipe.run.seed, progress=progress)
            texts = [(stories, "stories")]
        cases = [
            Case(task, text, name, workers, vocab_size, tuple(n for t, n in CONTENDERS if t == task))
            for text, name in texts
            for task in table.tasks
            for vocab_size in table.vocab_sizes
            for workers in table.workers
        ]
        result = bench_tokenizer(cases, rounds=table.rounds, report=log.info)
        return _store(result, recipe, output)


def ddp(recipe: Recipe, output: Path | None, nproc: int, progress: Progress) -> BenchStored | None:
    """Gradient synchronisation: every strategy on [model]; None on ranks other than the first."""
    _table(recipe.bench.ddp, "ddp")
    _model_with_vocabulary(recipe, "bench ddp")
    with _place(recipe, "ddp", output) as journal:
        return _on_ranks(partial(_ddp_rank, journal), recipe, output, nproc, progress)


def all_reduce(recipe: Recipe, output: Path | None, nproc: int, progress: Progress) -> BenchStored | None:
    """Collectives over message sizes; None on ranks other than the first."""
    _table(recipe.bench.all_reduce, "all_reduce")
    with _place(recipe, "all_reduce", output) as journal:
        return _on_ranks(partial(_all_reduce_rank, journal), recipe, output, nproc, progress)


def optimizer(recipe: Recipe, output: Path | None, nproc: int, progress: Progress) -> BenchStored | None:
    """Plain against sharded optimizer state, on [model]; None on ranks other than the first."""
    _table(recipe.bench.optimizer, "optimizer")
    _model_with_vocabulary(recipe, "bench optimizer")
    with _place(recipe, "optimizer", output) as journal:
        return _on_ranks(partial(_optimizer_rank, journal), recipe, output, nproc, progress)


def check_place(recipe: Recipe, output: Path | None, *, force: bool) -> None:
    """Refuse a folder that cannot be written to, and one that was asked for and has results already: they took
    minutes, or a machine that is gone.

    Raises:
        UsageError: nothing can be written there, or it has results and `force` is false.
    """
    if output is not None and (output / RECIPE).exists() and not force:
        raise UsageError(f"{output}: holds results already", hint="name another folder, or add --force")
    refuse_unwritable(output or _benches(recipe))


@contextmanager
def _ranks(recipe: Recipe) -> Iterator[Ranks]:
    """This process's place among the ranks, with the threads and the determinism that the recipe asks for; a rank
    that is lost meanwhile is named."""
    with ranks_of(recipe) as ranks, losses_named(ranks, "in the bench"), numerics(recipe.run, ranks):
        yield ranks


def _table(table: T | None, name: str) -> T:
    return required(table, f"bench.{name}", command=f"bench {name.replace('_', '-')}")


def _model_with_vocabulary(recipe: Recipe, command: str) -> ModelConfig:
    config = required(recipe.model, "model", command=command)
    if config.vocab_size is None:
        raise UsageError(
            f"model.vocab_size: `lmkit {command}` has no tokenizer to take it from",
            hint="for example --set model.vocab_size=10000",
        )
    return config


def _on_ranks(
    target: Callable[[Recipe, Progress], BenchResult | None],
    recipe: Recipe,
    output: Path | None,
    nproc: int,
    progress: Progress,
) -> BenchStored | None:
    """Run a bench on several ranks: those of torchrun, or `nproc` of our own."""
    if nproc > 1:
        with relayed(progress) as from_ranks:
            result = spawn_ranks(nproc, target, (recipe, from_ranks))
    else:
        result = target(recipe, progress)
    return None if result is None else _store(result, recipe, output)


def _ddp_rank(journal: Journal, recipe: Recipe, progress: Progress) -> BenchResult | None:
    from lmkit.bench.ddp import LADDER, RIVALS, ddp_rows
    from lmkit.bench.ddp_contenders import DdpCase
    from lmkit.bench.ddp_overlap import record_step
    from lmkit.bench.ddp_report import ddp_result

    table = _table(recipe.bench.ddp, "ddp")
    config = _model_with_vocabulary(recipe, "bench ddp")
    with _ranks(recipe) as ranks:
        _need_ranks(ranks, "bench ddp")
        case = DdpCase(recipe.run.name, config, table.rows, table.precision)
        sweep = [f"bucketed {mb:.12g} MB" for mb in table.bucket_sweep_mb]
        rows = ddp_rows(
            case,
            table.contenders or (*LADDER, *RIVALS),
            ranks,
            rounds=table.rounds,
            steps_per_sample=table.steps_per_sample,
            max_seconds=table.max_seconds,
            progress=progress,
            journal=journal,
        )
        swept = (
            ddp_rows(
                case,
                ("one rank", "none", *sweep),
                ranks,
                rounds=table.rounds,
                steps_per_sample=table.steps_per_sample,
                max_seconds=table.max_seconds,
                progress=lambda stage, done, total: progress(f"bucket sizes, {stage}", done, total),
            )
            if sweep
            else []
        )
        fits = any(row["contender"] == "bucketed" and row["status"] == "ok" for row in rows)
        overlap = record_step("bucketed", case, ranks) if fits and ranks.device.type == "cuda" else None
        return ddp_result(rows, swept, ranks, overlap, rounds=table.rounds) if ranks.is_first else None


def _all_reduce_rank(journal: Journal, recipe: Recipe, progress: Progress) -> BenchResult | None:
    from lmkit.bench.all_reduce import all_reduce_rows
    from lmkit.bench.ddp_report import all_reduce_result

    table = _table(recipe.bench.all_reduce, "all_reduce")
    with _ranks(recipe) as ranks:
        _need_ranks(ranks, "bench all-reduce")
        rows = all_reduce_rows(
            ranks,
            sizes_mb=table.sizes_mb,
            dtypes=table.dtypes,
            repeats=table.repeats,
            progress=progress,
            journal=journal,
        )
        return all_reduce_result(rows, ranks) if ranks.is_first else None


def _optimizer_rank(journal: Journal, recipe: Recipe, progress: Progress) -> BenchResult | None:
    from lmkit.bench.adamw_update import update_rows
    from lmkit.bench.ddp_contenders import DdpCase
    from lmkit.bench.ddp_report import optimizer_result
    from lmkit.bench.optimizer import CONTENDERS, optimizer_rows
    from lmkit.measure.limits import measure_limits

    table = _table(recipe.bench.optimizer, "optimizer")
    config = _model_with_vocabulary(recipe, "bench optimizer")
    with _ranks(recipe) as ranks:
        _need_ranks(ranks, "bench optimizer")
        # Rank 0 measures while the others wait for it at the first collective.
        limits = measure_limits(ranks.device, [table.precision]) if ranks.is_first else None
        rows = optimizer_rows(
            DdpCase(recipe.run.name, config, table.rows, table.precision),
            ranks,
            names=table.contenders or CONTENDERS,
            rounds=table.rounds,
            steps_per_sample=table.steps_per_sample,
            progress=progress,
            journal=journal,
        )
        updates = update_rows(config, ranks, rounds=table.rounds, progress=progress)
        return None if limits is None else optimizer_result(rows, updates, ranks, limits)


def _need_ranks(ranks: Ranks, command: str) -> None:
    if ranks.world_size < 2:
        raise UsageError(
            f"lmkit {command}: there is one process, and nothing to synchronise",
            hint=f"start ranks: lmkit {command} RECIPE --nproc 2, or torchrun --nproc-per-node 2 -m lmkit ...",
        )


def _folder(recipe: Recipe, bench: str, output: Path | None) -> Path:
    return output or _benches(recipe) / bench


def _benches(recipe: Recipe) -> Path:
    """Where the benches of a recipe lie, unless another folder is named."""
    return recipe.run.folder.parent / "benches" / recipe.run.name


@contextmanager
def _place(recipe: Recipe, bench: str, output: Path | None) -> Iterator[Journal]:
    """Hold a bench's folder until its files are stored; yield where a long one keeps its rows until then: what a
    killed one had measured is not lost.

    Raises:
        LmkitError: another bench is at work in this folder.
        Interrupted: in place of a KeyboardInterrupt, on the first rank.
    """
    folder = _folder(recipe, bench, output)
    journal = Journal(folder / JOURNAL)
    if os.environ.get("RANK", "0") != "0":  # the first rank writes, and holds the folder for all
        yield journal
        return
    with FolderLock(folder):
        journal.start()
        try:
            yield journal
        except KeyboardInterrupt:
            found = f"the rows so far are in {journal.path}, until a bench is started there again"
            raise Interrupted(
                f"interrupted: {found if journal.has_rows() else 'no rows were kept'}"
            ) from None


def _store(result: BenchResult, recipe: Recipe, output: Path | None) -> BenchStored:
    """Write a result's files, its environment and the recipe that makes it again."""
    folder = _folder(recipe, result.name, output)
    files = {
        **result.files,
        "environment.json": json.dumps(result.environment, indent=1) + "\n",
        RECIPE: recipe_to_toml(recipe),
    }
    for name, content in files.items():
        write_atomic(folder / name, content)
    (folder / JOURNAL).unlink(missing_ok=True)
    return BenchStored(result.name, str(folder), tuple(files), result.rows, result.table(), result.measured)
