"""The pipeline of `lmkit run`: corpus -> tokenizer -> token files -> training -> evaluation -> stories.

`run` is one loop over `STAGES`: it does the stages that are not up to date. `Pipeline.refuse` raises before anything
is made if a training would be lost. `lmkit.cli.stage_record` tells which stages are up to date. A run that starts
over moves what lmkit made in its folder to `old-<time>` inside it, a run folder that every command takes.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmkit.cli.console import Result
from lmkit.cli.ranks import alone, follow, leading
from lmkit.cli.stage_record import FILES, NO_EFFECT, Outputs, StageRecord, paths_of
from lmkit.data.corpora import check_corpus, prepare_corpus
from lmkit.data.encoding import encode_chat, encode_corpus
from lmkit.data.token_files import open_tokens, parts_of, sidecar_path
from lmkit.errors import LmkitError, UsageError, some_of
from lmkit.measure.progress import Progress
from lmkit.measure.tables import size_of, statement
from lmkit.parallel.place import read_place
from lmkit.recipe.load import load_recipe, required, save_recipe
from lmkit.recipe.run_folder import (
    BESIDE_TOKENIZER,
    CHAT_TEMPLATE,
    CHECKPOINTS,
    METRICS,
    RECIPE,
    RUN_FILES,
    STORIES,
    TOKENIZER,
    is_run,
    refuse_foreign_files,
    save_record,
    token_file,
)
from lmkit.recipe.schema import Recipe, differences, is_under, refused, without_effect
from lmkit.storage import FolderLock, keep_damaged, remove_partials, write_atomic
from lmkit.storage.atomic import PARTIAL_SUFFIX
from lmkit.storage.inputs import read_input, read_object
from lmkit.storage.outputs import refuse_replacing, refuse_unwritable
from lmkit.tokenizer import Tokenizer, train_tokenizer
from lmkit.tokenizer.chat import read_template, template_for
from lmkit.tokenizer.vocabulary import end_of_text_of

log = logging.getLogger("lmkit")

LOCK = ".lock"
OLD = "old-"
"""Begins the name of the folder of a run that was set aside."""
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
        done: dict[str, str] = {}
        for stage in STAGES:
            done[stage] = pipeline.bring_up_to_date(stage)
        pipeline.record.save()
        return _summary(pipeline, done)


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
    kept = pipeline.checkpoints if pipeline.sets_aside else None
    if kept is not None:
        lines.append(f"  {kept} would be kept in {pipeline.folder / OLD}<time>")
    fields = {"folder": pipeline.folder, "stages": states, "set_aside": kept}
    return Result("\n".join(lines), fields)


class Pipeline:
    """One run: its recipe, its folder, and the record of its stages.

    Args:
        from_stage: redo this stage and all after it.
        skip_data: use corpus, tokenizer and token files as they are.
        force: start over. What lmkit made in the run folder is moved to a run folder of its own inside.

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
        refuse_foreign_files(self.folder, RUN_FILES)
        _refuse_to_move_sources(self.recipe, self._parts_to_move())
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
        if not (self.record.was_made("train") or any(self.checkpoints.glob("*"))):
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
        files = [] if self.skip_data else list(self.record.changed_content())
        if files and "train" not in self.redone:
            raise UsageError(
                "run.other_data",
                f"{self.folder}: changed since this run was trained: " + "; ".join(files),
                hint=OTHERWISE,
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

    @property
    def sets_aside(self) -> bool:
        """Whether this run starts over a training that has checkpoints."""
        return (self.force or "train" in self.redone) and any(self.checkpoints.glob("*"))

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the run folder, which is made, or checked for belonging to this recipe."""
        self.refuse()
        with self.lock:
            # Before a data stage replaces the tokenizer that the checkpoints need.
            if self.force or (self.sets_aside and self.redone[0] in DATA_STAGES):
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
        """Return what this run sets aside; of a folder that is a link, the link. [] of a folder that is no run."""
        names: Sequence[str] = (CHECKPOINTS, "tensorboard", *RUN_FILES) if self.force else (CHECKPOINTS,)
        parts = {}
        for name in names if (self.force or self.sets_aside) and is_run(self.folder) else ():
            top = self.folder / name.partition("/")[0]
            parts[top if top.is_symlink() else self.folder / name] = True
        return [path for path in parts if os.path.lexists(path)]

    def set_aside(self) -> None:
        """Move the training, with --force all that lmkit made, to a run folder of its own."""
        if parts := self._parts_to_move():
            self.aside = _set_aside(self.folder, parts)
            log.warning("the earlier run is kept in %s, a run folder itself", self.aside)

    def is_up_to_date(self, stage: str) -> bool:
        """Return whether a stage need not be done again."""
        if stage in DATA_STAGES:
            return self.skip_data or self.record.is_finished(stage)
        if not self.record.is_finished(stage) or self._was_trained_further():
            return False
        if stage != "train" or not self.record.is_finished("tokenizer"):  # else it will be made again
            return True
        return self._trained_with() in (None, Tokenizer.load(self.folder / TOKENIZER).sha256)

    def bring_up_to_date(self, stage: str) -> str:
        """Do a stage unless it is up to date; return "up to date" or the seconds that it took."""
        if self.is_up_to_date(stage):
            log.info("%s: up to date", stage)
            return "up to date"
        if damage := self.damage(stage):
            log.warning("%s: %s, so that this stage runs again", stage, damage)
            for path in self.record.damaged(stage) or ():
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
        if not {*keys} <= content.keys():
            raise LmkitError(
                "run.damaged_result",
                f"{path}: missing or damaged",
                hint="delete it and run again: only the stage that makes it is redone",
            )
        return content


# The stages


def _make_corpus(run: Pipeline) -> Outputs:
    _warn_of_repeated(run)
    files = prepare_corpus(run.corpus, run.folder / "corpus", mark=run.mark, progress=run.progress)
    return {"train": list(files.train), "valid": list(files.valid)}


def _warn_of_repeated(run: Pipeline) -> None:
    """Warn of files whose content would be both learned and held out."""
    key = "valid" if run.corpus.valid else "train"
    content, repeated = run.record.content, []
    learned = set(content["corpus.train"] if key == "valid" else ())
    for path, digest in zip(getattr(run.corpus, key), content[f"corpus.{key}"], strict=True):
        if digest in learned:
            repeated.append(str(path))
        elif key == "train":
            learned.add(digest)
    if repeated:
        message = (
            "corpus.%s: %s: has the content of a file in corpus.train: held-out text may have been learned"
        )
        log.warning(message, key, some_of(repeated))


def _make_tokenizer(run: Pipeline) -> Outputs:
    table = run.tokenizer
    if table.path is not None:
        tokenizer = Tokenizer.load(table.path, end_of_text=table.end_of_text).for_training()
    else:
        tokenizer = train_tokenizer(
            run.record.outputs("corpus")["train"],
            vocab_size=table.vocab_size,
            special_tokens=table.special_tokens,
            end_of_text=table.end_of_text,
            separator=run.mark,
            max_token_bytes=table.max_token_bytes,
            workers=table.workers,
            errors=run.corpus.errors,
            progress=run.progress,
        )
    run.refuse_to_replace_tokenizer(tokenizer)
    path = run.folder / TOKENIZER
    template = template_for(table, tokenizer, source=run.corpus.source)
    if template is not None:
        template.check(tokenizer, table.path or path)
    for name in BESIDE_TOKENIZER:  # of the tokenizer before
        (run.folder / name).unlink(missing_ok=True)
    if template is not None:
        template.save(run.folder / CHAT_TEMPLATE)
    tokenizer.save(path)
    return {
        "tokenizer": [path, *(run.folder / name for name in BESIDE_TOKENIZER if (run.folder / name).exists())]
    }


def _encode(run: Pipeline) -> Outputs:
    tokenizer = Tokenizer.load(run.folder / TOKENIZER)
    outputs = {}
    for part, sources in run.record.outputs("corpus").items():
        path = token_file(run.folder, part)
        workers, errors = run.recipe.data.workers, run.corpus.errors
        sidecar_path(path).unlink(missing_ok=True)  # a damaged one would not be replaced
        if run.corpus.source == "chat":
            template = read_template(run.folder / CHAT_TEMPLATE)
            encode_chat(sources, path, tokenizer, template, progress=run.progress)
        else:
            encode_corpus(
                sources,
                path,
                tokenizer,
                workers=workers,
                errors=errors,
                separator=run.mark,
                force=True,
                progress=run.progress,
            )
        outputs[part] = [part for part in parts_of(path) if part.exists()]
    return outputs


def _train(run: Pipeline) -> Outputs:
    from lmkit.generation import write_samples
    from lmkit.training.run_data import open_data
    from lmkit.training.session import train

    if run.sets_aside:  # --from train; otherwise `opened` did it
        open_data(run.recipe)  # refuses damaged token files while the checkpoints are in their place
        run.set_aside()
    run.record.begin("train")
    run.record.forget(("evaluate", "generate"))
    run.tell_ranks("train")
    parallel, is_alone = run.recipe.parallel, read_place().world_size == 1
    if run.nproc == 1 and is_alone and "strategy" in parallel.model_fields_set:
        log.info('parallel.strategy: "%s" has no effect on one rank (see --nproc)', parallel.strategy)
    result = train(
        run.recipe, nproc=run.nproc, lock=run.lock, write_samples=write_samples, checks_tokens=False
    )
    assert result is not None
    newest = [] if result.checkpoint is None else sorted(Path(result.checkpoint).iterdir())
    return {"training": [run.write("training", result)], "checkpoints": [run.checkpoints, *newest]}


def _evaluate(run: Pipeline) -> Outputs:
    from lmkit.training.checkpoint import saved_steps
    from lmkit.training.evaluation import EvaluateResult
    from lmkit.training.judging import evaluate_run

    # The training ends with an evaluation: use it if it is of the newest checkpoint.
    found = run.read("training", "step").get("evaluation")
    newest = saved_steps(run.checkpoints)[-1]
    if found is not None and found["checkpoint"] == str(newest.path) and run.redone[:1] != ["evaluate"]:
        return {"evaluation": [run.write("evaluation", EvaluateResult(**found))]}
    with alone():
        result = evaluate_run(run.folder, device=run.recipe.run.device)
    return {"evaluation": [run.write("evaluation", result)]}


def _generate(run: Pipeline) -> Outputs:
    from lmkit.cli.texts import continue_prompts

    with alone():
        result = continue_prompts(run.folder, device=run.recipe.run.device)
    path = run.folder / STORIES
    write_atomic(path, str(result))
    return {"stories": [path]}


STAGES: dict[str, Callable[[Pipeline], Outputs]] = {
    "corpus": _make_corpus,
    "tokenizer": _make_tokenizer,
    "encode": _encode,
    "train": _train,
    "evaluate": _evaluate,
    "generate": _generate,
}


def _summary(run: Pipeline, done: dict[str, str]) -> Result:
    """Collect what the stages left in the run folder; sizes in bytes, speeds in tokens per second."""
    evaluation = run.read("evaluation", "loss", "perplexity", "bits_per_byte")
    training = run.read("training", "parameters", "step")
    train, valid = (open_tokens(token_file(run.folder, part)).meta for part in ("train", "valid"))
    story = read_input(run.folder / STORIES).decode("utf-8", "replace")
    bits = evaluation["bits_per_byte"]
    held_out = [f"loss {evaluation['loss']:.4f}"]
    held_out += [f"perplexity {value:.2f}" for value in [evaluation["perplexity"]] if value is not None]
    held_out += [f"{value:.4f} bits per byte" for value in [bits] if value is not None]
    parameters, steps, speed = training["parameters"], training["step"], training.get("tokens_per_second")
    corpus_bytes = train.num_bytes + valid.num_bytes
    lines = [
        "",
        story.strip(),
        "",
        f"corpus      {size_of(corpus_bytes)} of text",
        f"tokenizer   {train.vocab_size:,} tokens",
        f"token files {train.num_tokens:,} to train on, {valid.num_tokens:,} held out",
        f"model       {parameters:,} parameters, {steps:,} steps"
        + ("" if speed is None else f", {speed:,.0f} tokens/s"),
        f"held out    {', '.join(held_out)}",
        f"run folder  {run.folder}",
        statement("another story", f"lmkit generate {shlex.quote(str(run.folder))} --seed 1"),
    ]
    fields = {
        "folder": run.folder,
        "stages": done,
        "corpus_bytes": corpus_bytes,
        "vocab_size": train.vocab_size,
        "train_tokens": train.num_tokens,
        "valid_tokens": valid.num_tokens,
        "parameters": parameters,
        "steps": steps,
        "tokens_per_second": speed,
        "loss": evaluation["loss"],
        "perplexity": evaluation["perplexity"],
        "bits_per_byte": bits,
        "files": {path.name: path for path in sorted(run.folder.iterdir()) if path.name != ".lock"},
        "story": story,
    }
    return Result("\n".join(lines), fields)


# Set a run aside


def _refuse_to_move_sources(recipe: Recipe, parts: Sequence[Path]) -> None:
    """Refuse a recipe that reads what would be moved.

    Raises:
        UsageError: names the file and the key ("run.reads_itself").
    """
    folder = recipe.run.path
    for key, path in _sources(recipe) if parts else ():
        places = (Path(os.path.abspath(path)), Path(os.path.realpath(path)))
        inside = any(place.is_relative_to(part.absolute()) for place in places for part in parts)
        if inside or os.path.realpath(path) == os.path.realpath(folder):
            raise UsageError(
                "run.reads_itself",
                f"{path} (key {key}): belongs to the run in {folder} that would start over",
                hint="copy it to another place and name that, or name a new run: --set run.name=...",
            )


def _sources(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """Yield the keys that name what a run reads, and the files or folders."""
    for dotted in FILES:
        for path in paths_of(recipe, dotted):
            yield dotted, path
    if recipe.checkpoint.resume not in ("auto", "never"):
        yield "checkpoint.resume", Path(recipe.checkpoint.resume)
    if recipe.train is not None and recipe.train.init_from is not None:
        yield "train.init_from", recipe.train.init_from
    for part in ("train", "valid"):
        path = getattr(recipe.data, part)
        if path is not None and path.absolute() != token_file(recipe.run.path, part).absolute():
            yield f"data.{part}", path  # the run's own token files are made again


def _set_aside(folder: Path, parts: Sequence[Path]) -> Path:
    """Move parts of a run to a new folder inside it, and return that. If one cannot be moved, all is as it was."""
    stem = f"{OLD}{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    aside = next(folder / name for name in names if not os.path.lexists(folder / name))
    moved: list[tuple[Path, Path]] = []
    try:
        save_record(aside, {})  # a run from the beginning, if the process is killed
        for path in (folder / name for name in (RECIPE, TOKENIZER, *BESIDE_TOKENIZER, METRICS)):
            if path.is_file() and path not in parts:  # what `lmkit generate` needs
                write_atomic(aside / path.name, read_input(path))
        for path in parts:
            place = aside / path.relative_to(folder)
            _move(path, place)
            moved.append((path, place))
    except BaseException:  # a full disk, Ctrl-C
        for path, place in reversed(moved):
            _move(place, path)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return aside


def _move(path: Path, place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    if path.is_symlink():  # a relative link would lead elsewhere
        place.unlink(missing_ok=True)
        place.symlink_to(os.path.realpath(path))
        path.unlink()
    else:
        os.replace(path, place)
