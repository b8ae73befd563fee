"""The pipeline of `lmkit run`: does the stages that are not up to date, and refuses what would lose a training.

`lmkit.cli.stages` has the stages, `lmkit.cli.stage_record` tells which are up to date.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmkit.cli.console import Result
from lmkit.cli.ranks import follow, leading
from lmkit.cli.set_aside import OLD, delete_replaced, parts_of, refuse_to_move_sources, set_aside
from lmkit.cli.stage_record import FILES, NO_EFFECT, PIPE, StageRecord
from lmkit.cli.stages import STAGES, summary
from lmkit.data.corpora import check_corpus
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.progress import Progress
from lmkit.parallel.place import read_place
from lmkit.recipe.changes import differences, is_under, refused, without_effect
from lmkit.recipe.load import load_recipe, required, save_recipe
from lmkit.recipe.run_folder import (
    CHECKPOINTS,
    RECIPE,
    RUN_FILES,
    TOKENIZER,
    is_run,
    refuse_foreign_files,
)
from lmkit.recipe.schema import Recipe
from lmkit.storage import FolderLock, keep_damaged, remove_partials, write_atomic
from lmkit.storage.atomic import PARTIAL_SUFFIX
from lmkit.storage.json_files import read_object
from lmkit.storage.outputs import refuse_replacing, refuse_unwritable
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.chat import template_for
from lmkit.tokenizer.vocabulary import end_of_text_of

log = logging.getLogger("lmkit")

LOCK = ".lock"
DATA_STAGES = ("corpus", "tokenizer", "encode")
# These may change under the same run name: no stage before `generate` depends on them.
FREE = ("generate", "wandb", "checkpoint.resume", *NO_EFFECT)
OTHERWISE = "name a new run: --set run.name=...; or --force: it keeps the old one in a folder old-<time>"


def run(recipe: Recipe, *, progress: Progress, nproc: int = 1, **options: Any) -> Result | None:
    """Bring a run up to date and summarise it.

    Under torchrun every rank calls this: rank 0 makes the data while the others wait, all ranks train, and rank 0
    evaluates and generates.

    Args:
        nproc: ranks to start for the training; 1 under torchrun.
        options: `from_stage`, `skip_data`, `force` of `Pipeline`.

    Returns:
        The summary; None on ranks other than 0.

    Raises:
        UsageError: a table is missing, the options exclude each other, or another recipe made the run folder.
        LmkitError: a stage failed.
    """
    if nproc > 1:
        from lmkit.parallel.launch import refuse_torchrun

        refuse_torchrun()  # not after the data stages
    rank, ranks, _ = read_place()
    if rank > 0:
        if follow() == "train":
            from lmkit.generation import write_samples
            from lmkit.training.session import train

            train(recipe, write_samples=write_samples, checks_tokens=False)
        return None
    pipeline = Pipeline(recipe, progress=progress, nproc=nproc, **options)
    with leading() if ranks > 1 else nullcontext(lambda word: None) as pipeline.tell_ranks, pipeline.opened():
        if not pipeline.record.is_finished("train"):
            from lmkit.training.plan import misfit

            if no_fit := misfit(recipe, ranks=max(ranks, nproc)):
                log.warning(no_fit)  # before hours of making data
        done = {stage: pipeline.bring_up_to_date(stage) for stage in STAGES}
        pipeline.record.save()
        return summary(pipeline, done)


def plan(recipe: Recipe, **options: Any) -> Result:
    """Say which stages `run` would do; touches nothing.

    Raises:
        UsageError: `run` would refuse this folder.
    """
    pipeline = Pipeline(recipe, progress=lambda stage, done, total: None, **options)
    pipeline.refuse()
    redone = STAGES if pipeline.force else pipeline.redone
    states = {
        stage: "would run" if stage in redone or not pipeline.is_up_to_date(stage) else "up to date"
        for stage in STAGES
    }
    lines = [str(pipeline.folder), *([f"  {damage}"] if (damage := pipeline.record.damage) else [])]
    for stage, state in states.items():
        damage = pipeline.damage(stage) if state == "would run" and stage not in redone else None
        lines.append(f"  {stage:<10}{state}" + (f": {damage}" if damage else ""))
    set_aside = pipeline.checkpoints if pipeline.would_set_aside() else None
    if set_aside is not None:
        lines.append(f"  {set_aside} would be kept in {pipeline.folder / OLD}<time>")
    fields = {"folder": pipeline.folder, "stages": states, "set_aside": set_aside}
    return Result("\n".join(lines), fields)


class Pipeline:
    """One run: its recipe, its folder, and the record of its stages.

    Args:
        from_stage: redo this stage and all after it.
        skip_data: use corpus, tokenizer and token files as they are.
        force: start over. What lmkit made in the run folder is moved to a run folder of its own inside; when the
            new run stands, data files of the old one are deleted.

    Raises:
        UsageError: a table or a file is missing, or there is no such stage.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        progress: Progress,
        nproc: int = 1,
        from_stage: str | None = None,
        skip_data: bool = False,
        force: bool = False,
    ) -> None:
        self.recipe = recipe
        self.corpus = required(recipe.corpus, "corpus", recipe, command="run")
        self.tokenizer = required(recipe.tokenizer, "tokenizer", recipe, command="run")
        required(recipe.model, "model", recipe, command="run")
        required(recipe.train, "train", recipe, command="run")
        if self.tokenizer.path is None and end_of_text_of(recipe) is None:  # noticed before the work
            raise UsageError(
                "tokenizer.no_end_of_text",
                f"{recipe.origin}: tokenizer.special_tokens has no token that ends a document",
                hint="name one of them: tokenizer.end_of_text, or add <|endoftext|>",
            )
        names = list(STAGES)
        if from_stage is not None and from_stage not in names:
            message, hint = f"--from: {from_stage!r} is not a stage", "stages: " + ", ".join(names)
            raise UsageError("run.unknown_stage", message, hint=hint)
        self.progress, self.nproc = progress, nproc
        self.skip_data, self.force = skip_data, force
        self.redone = names[names.index(from_stage) :] if from_stage is not None else []
        self.folder = recipe.run.path
        self.checkpoints = self.folder / CHECKPOINTS
        self.record = StageRecord(self.folder, recipe, reads_sources=not skip_data)
        self.mark = self.record.mark
        """What ends a document in text files."""
        self.aside: Path | None = None
        self.tell_ranks: Callable[[str], None] = lambda word: None
        self.lock = FolderLock(self.folder)

    def refuse(self) -> None:
        """Refuse options and folders with which the run would lose or lack something; changes nothing."""
        if self.skip_data:
            self._refuse_to_skip()
        if self.force:
            self._refuse_to_start_over()
        else:
            self._refuse_another_recipe()
            self._refuse_to_read_a_pipe_again()
        refuse_foreign_files(self.folder, RUN_FILES)
        refuse_to_move_sources(self.recipe, self._parts_to_move())
        if self.force or self.redone or not self.record.is_finished("train"):
            from lmkit.training.setup import check_before_data

            check_before_data(self.recipe, nproc=self.nproc)
            if self.recipe.generate.weights == "fp8":
                from lmkit.generation.decoder import check_fp8_of
                from lmkit.parallel.ranks import local_device

                check_fp8_of(self.recipe, local_device(self.recipe.run.device, local_rank=0))
        refuse_unwritable(self.folder, option="--set run.folder=...")
        is_made = self.skip_data or ("corpus" not in self.redone and self.record.is_finished("corpus"))
        if self.force or not is_made:
            written = (self.folder / name for name in RUN_FILES if name.startswith("corpus/"))
            refuse_replacing(written, (*self.corpus.train, *self.corpus.valid))
            check_corpus(self.corpus, self.folder / "corpus")

    def _refuse_to_skip(self) -> None:
        redone = [stage for stage in self.redone if stage in DATA_STAGES]
        if self.force or redone:
            other = "--force sets aside" if self.force else f"--from {redone[0]} makes again"
            message = f"--skip-data uses the data that {other}"
            raise UsageError("run.options_exclude", message, hint="leave out one of them")
        for stage in DATA_STAGES:
            if not self.record.was_made(stage):
                message = f"--skip-data: {self.folder} has no finished {stage} stage"
                raise UsageError("run.no_data", message, hint="run once without --skip-data")

    def _refuse_another_recipe(self) -> None:
        """Refuse a folder with the training of another recipe, or of the same on other data.

        Before there is a checkpoint nothing is lost: stages that are out of date are redone.
        """
        if not (self.record.was_made("train") or self._has_checkpoints()):
            return
        path = self.folder / RECIPE
        if path.exists():
            known = [dotted for dotted in FILES if self.record.knows(dotted)]  # their content counts
            changed = differences(load_recipe(path), self.recipe, ignore=(*FREE, *known))
            hint = f"to continue it: lmkit run {shlex.quote(str(path))}; or {OTHERWISE}"
            trained = self._trained_steps()
            table = required(self.recipe.train, "train", self.recipe, command="run")
            wrong = refused(changed) + [line for line in changed if is_under(line, ("corpus", "tokenizer"))]
            if trained is None:  # the checkpoints are gone: what they were made with is all that is left
                wrong = list(changed)
            if wrong:
                message = f"{path}: another recipe made this run: " + "; ".join(wrong)
                raise UsageError("run.other_recipe", message, hint=hint)
            ends = math.inf if table.epochs else table.steps  # training knows how long an epoch is
            if lost := without_effect(changed, step=trained or 0, steps=ends):
                raise UsageError(
                    "run.no_effect",
                    f"{path}: the training ended at step {trained}, and no step would use " + "; ".join(lost),
                    hint=f"to train on: --set train.steps=N, N above {trained}; {hint}",
                )
        files = [] if self.skip_data else list(self.record.changed_content(self.recipe))
        if files and "train" not in self.redone:
            raise UsageError(
                "run.other_data",
                f"{self.folder}: changed since this run was trained: " + "; ".join(files),
                hint=OTHERWISE,
            )

    def _refuse_to_read_a_pipe_again(self) -> None:
        damage = self.damage("corpus")
        if damage is not None and self._came_from_a_pipe() and not self.is_up_to_date("corpus"):
            raise UsageError(
                "run.damaged_corpus",
                f"{damage}: it came from a pipe, which cannot be read again",
                hint="use it as it is: --skip-data; or read the pipe anew: --set run.name=...",
            )

    def _refuse_to_start_over(self) -> None:
        """Refuse `--force` in a folder of somebody else's files, and with a tokenizer that cannot be used."""
        if self.folder.is_dir() and not is_run(self.folder):
            # One look: another process may be making a run of it.
            names = sorted(path.name for path in self.folder.iterdir())
            others = [name for name in names if name != LOCK and not name.endswith(PARTIAL_SUFFIX)]
            if others:
                raise UsageError(
                    "run.not_a_run_folder",
                    f"{self.folder}: --force starts a run over, and this folder, with {others[0]!r}, is not a run",
                    hint="leave out --force, or choose another folder with --set run.folder=...",
                )
        if self.tokenizer.path is not None:
            made = Tokenizer.load(self.tokenizer.path, end_of_text=self.tokenizer.end_of_text)
            if (template := template_for(self.tokenizer, made, source=self.corpus.source)) is not None:
                template.check(made, self.tokenizer.path)

    def _came_from_a_pipe(self) -> bool:
        return any(PIPE in hashes for hashes in self.record.content.values())

    def _has_checkpoints(self) -> bool:
        return any(self.checkpoints.glob("*"))

    def _trained_steps(self) -> int | None:
        """Return the step of the newest checkpoint; reads none."""
        names = [path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*")]
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def _was_trained_further(self) -> bool:
        """Return whether `lmkit train` has gone on since the last `lmkit run`."""
        if not self.record.was_made("train"):
            return False
        try:
            step = self.read("training", "step")["step"]
        except LmkitError:  # damaged: the stage is redone
            return False
        return (self._trained_steps() or 0) > step

    def _trained_with(self) -> str | None:
        """Return the hash of the tokenizer of the newest checkpoint; None if there is none, or it is damaged."""
        try:
            state = self.checkpoints / f"step-{self._trained_steps():08d}" / "state.json"
            return read_object(state)["data"]["tokenizer_sha256"]
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _has_tokenizer_of_training(self) -> bool:
        """Return whether the run's tokenizer is the one with which the finished training was done."""
        if not self.record.is_finished("tokenizer"):  # it will be made again
            return True
        return self._trained_with() in (None, Tokenizer.load(self.folder / TOKENIZER).sha256)

    def refuse_to_replace_tokenizer(self, made: Tokenizer) -> None:
        """Refuse a tokenizer other than that of the checkpoints, where no record told that the text changed."""
        if self._trained_with() not in (None, made.sha256):
            self.record.forget(("corpus", "tokenizer"))  # with the old corpus, the run goes on
            raise UsageError(
                "run.other_data",
                f"{self.folder / TOKENIZER}: the checkpoints need it, and this corpus makes another one",
                hint=OTHERWISE,
            )

    def damage(self, stage: str) -> str | None:
        """Return what is wrong with the outputs of a finished stage; None if nothing is."""
        damaged = self.record.damaged(stage)
        if not damaged:
            return None
        if stage == "train" and self._was_trained_further():
            return None  # `lmkit train` has deleted the recorded checkpoint
        return f"{damaged[0]} {'was changed or damaged' if damaged[0].exists() else 'is missing'}"

    def would_set_aside(self) -> bool:
        """Return whether this run starts over a training that has checkpoints."""
        return (self.force or "train" in self.redone) and self._has_checkpoints()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the run folder, which is made, or checked for belonging to this recipe."""
        self.refuse()
        with self.lock:
            # Before a data stage replaces the tokenizer that the checkpoints need.
            if self.force or (self.would_set_aside() and self.redone[0] in DATA_STAGES):
                self.set_aside()
            try:
                self.record.load()
                self._refuse_another_recipe()  # another process may have made it a moment ago
                if self.record.damage:
                    log.warning("%s", self.record.damage)
                remove_partials(self.folder)
                recipe = self._with_trained_steps()
                self.record.forget(self.redone)  # the folder is a run from now on
                save_recipe(recipe)
                yield
            except BaseException:
                if self.aside is not None:
                    log.warning(
                        "the earlier run is whole in %s; to go back, move that folder out", self.aside
                    )
                raise
            if self.aside is not None:
                delete_replaced(self.aside)

    def _with_trained_steps(self) -> Recipe:
        """Return the recipe with the steps of a longer training of this run, whose model is kept."""
        path, trained, table = self.folder / RECIPE, self._trained_steps(), self.recipe.train
        assert table is not None
        if trained is None or trained <= table.steps or table.epochs or self.redone or not path.exists():
            return self.recipe
        before = load_recipe(path)
        longer = required(before.train, "train", before, command="run").steps
        log.warning("train.steps = %d: the run was trained to step %d, which it keeps", table.steps, trained)
        return self.recipe.changed(train={"steps": max(longer, trained)})

    def _parts_to_move(self) -> list[Path]:
        if not self.force and not self.would_set_aside():
            return []
        return parts_of(self.folder, checkpoints_only=not self.force)

    def set_aside(self) -> None:
        """Move the training, with --force all that lmkit made, to a run folder of its own."""
        if parts := self._parts_to_move():
            self.aside = set_aside(self.folder, parts)
            log.warning("the earlier run is kept in %s, a run folder itself", self.aside)

    def is_up_to_date(self, stage: str) -> bool:
        if stage in DATA_STAGES:
            return self.skip_data or self.record.is_finished(stage)
        if not self.record.is_finished(stage) or self._was_trained_further():
            return False
        return stage != "train" or self._has_tokenizer_of_training()

    def bring_up_to_date(self, stage: str) -> str:
        """Do a stage unless it is up to date; return "up to date" or the seconds that it took."""
        if self.is_up_to_date(stage):
            log.info("%s: up to date", stage)
            if stage == "corpus" and self._came_from_a_pipe():
                log.warning(
                    "the corpus came from a pipe and is not read again; to read another: --set run.name=..."
                )
            return "up to date"
        if damage := self.damage(stage):
            log.warning("%s: %s, so that this stage runs again", stage, damage)
            for path in self.record.damaged(stage):
                if path.exists() and not path.is_relative_to(self.checkpoints):  # a training keeps whole ones
                    log.warning("%s: kept as %s", stage, keep_damaged(path))
        started = time.perf_counter()
        if stage in DATA_STAGES:
            self.record.begin(stage)
        outputs = STAGES[stage](self)
        self.record.finish(stage, outputs)
        seconds = time.perf_counter() - started
        log.info("%s: done in %.1f s", stage, seconds)
        return f"{seconds:.1f} s"

    def write(self, name: str, result: Any) -> Path:
        """Write what a stage says about itself."""
        path = self.folder / f"{name}.json"
        write_atomic(path, json.dumps(asdict(result), default=str) + "\n")
        return path

    def read(self, name: str, *keys: str) -> dict[str, Any]:
        """Read what a stage wrote about itself."""
        path = self.folder / f"{name}.json"
        try:
            content = read_object(path)
        except (OSError, ValueError):
            content = {}
        if not all(key in content for key in keys):
            raise LmkitError(
                "run.damaged_result",
                f"{path}: missing or damaged",
                hint="delete it and run again: only the stage that makes it is redone",
            )
        return content
