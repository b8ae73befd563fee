"""The pipeline of `lmkit run`: corpus -> tokenizer -> token files -> training -> evaluation -> stories.

`run` is one loop over `STAGES`: it does the stages that are not up to date, as `StageRecord` knows. `Pipeline.check`
raises before anything is made if a training would be lost. A run that trains anew first moves the earlier training to
`old-<time>` inside its folder, a run folder that every command takes. Data files are made again from their sources:
they are replaced.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain, count, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any

from lmkit.cli.console import Result
from lmkit.cli.ranks import alone, follow, leading
from lmkit.data.corpora import check_corpus, mark_of, prepare_corpus, refuse_directory, with_files
from lmkit.data.encoding import encode_chat, encode_corpus
from lmkit.data.overlap import OVERLAP, Overlap, overlap_of
from lmkit.data.shards import open_tokens, read_meta, shard_paths
from lmkit.data.token_files import PARTS, SIDECAR
from lmkit.errors import UsageError, some_of
from lmkit.measure.tables import size_of, statement
from lmkit.parallel.place import read_place
from lmkit.recipe import END_OF_TEXT, run_folder
from lmkit.recipe.load import load_recipe, required, save_recipe, shipped_recipes
from lmkit.recipe.recipe import Recipe, differences, is_under, refused
from lmkit.storage.atomic import FolderLock, keep_damaged, noted_digest, remove_partials, write_atomic
from lmkit.storage.inputs import read_input, read_object
from lmkit.storage.outputs import refuse_unwritable
from lmkit.streams import Progress
from lmkit.tokenizer import Tokenizer, train_tokenizer
from lmkit.tokenizer.vocabulary import end_of_text_of, template_for

log = logging.getLogger("lmkit")

Outputs = dict[str, list[Path]]
"""What a stage made: role -> files."""
# Tables that a stage reads besides the results of the stages before it, in the order of the stages.
READS = {
    "corpus": ("corpus",),
    "tokenizer": ("tokenizer",),
    "encode": (),
    "train": ("run", "data", "model", "optimizer", "train", "parallel"),
    "evaluate": (),
    "generate": ("generate",),
}
FILES = ("corpus.train", "corpus.valid", "tokenizer.path")  # keys that name files which a stage reads
BESIDE = (*run_folder.BESIDE_TOKENIZER, run_folder.SPECIAL_TOKENS_MAP, run_folder.ADDED_TOKENS)
"""Files beside `tokenizer.path` that say more about the tokenizer."""
# Keys on which no result depends.
NO_EFFECT = (
    *("tokenizer.workers", "data.workers", "corpus.folder", "run.folder", "run.name"),
    *("train.tensorboard", "train.sample_interval"),
)
_INSIDE = "./"  # begins a path in the record that is relative to the run folder
OLD = "old-"
"""Begins the name of the folder of a training that was set aside."""
DATA_STAGES = ("corpus", "tokenizer", "encode")
OF_DATA = (*run_folder.DATA_FILES, run_folder.TOKENIZER, *run_folder.BESIDE_TOKENIZER)
OF_TRAINING = (
    *(run_folder.CHECKPOINTS, "tensorboard"),
    *sorted({*run_folder.RUN_FILES} - {*OF_DATA, run_folder.RECORD}),
)
"""What is set aside."""
# These may change under the same run name: no stage before `generate` depends on them, or their content counts.
FREE = ("generate", "wandb", "checkpoint.resume", *NO_EFFECT, *FILES)
OTHERWISE = "name a new run: --set run.name=...; or --force: it keeps the old training in a folder old-<time>"


def run(recipe: Recipe, *, progress: Progress, nproc: int = 1, **options: Any) -> Result | None:
    """Bring a run up to date and summarise it; None on ranks other than 0.

    Under torchrun every rank calls this: rank 0 makes the data while the others wait, all ranks train, and rank 0
    evaluates and generates.

    Args:
        nproc: ranks to start for the training; 1 under torchrun.
        options: `from_stage`, `skip_data`, `force`, `strict` of `Pipeline`.
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
    with leading() if ranks > 1 else nullcontext() as pipeline.tell_ranks, pipeline.lock:
        pipeline.check()
        remove_partials(pipeline.folder)
        if earlier := pipeline.to_set_aside():
            pipeline.set_aside(earlier)
        pipeline.record.save()  # the folder is a run from now on
        if pipeline.newest is None:  # else after the training, which may refuse the recipe
            pipeline.save_recipe()
        done: dict[str, str] = {}
        for stage in STAGES:
            done[stage] = pipeline.bring_up_to_date(stage)
            if stage == "encode":
                pipeline.compare_texts()
            if stage == "train":
                pipeline.save_recipe()
        pipeline.record.save()  # the hashes of files that were read
        return _summary(pipeline, done)


def plan(recipe: Recipe, **options: Any) -> Result:
    """Say which stages `run` would do; touches nothing."""
    pipeline = Pipeline(recipe, progress=lambda stage, done, total: None, **options)
    pipeline.check()
    lines, states = [str(pipeline.folder)], {}
    for stage in STAGES:
        damage = pipeline.why(stage)
        states[stage] = "up to date" if damage is None else "would run"
        lines.append(f"  {stage:<10}{states[stage]}" + (f": {damage}" if damage else ""))
    kept = pipeline.checkpoints if pipeline.to_set_aside() else None
    if kept is not None:
        lines.append(f"  {kept} would be kept in {pipeline.folder / OLD}<time>")
    return Result("\n".join(lines), {"folder": pipeline.folder, "stages": states, "set_aside": kept})


class StageRecord:
    """Which stages of a run are up to date, on disk.

    The record of a finished stage holds the values of the recipe and the content of the files on which its result
    depends, and the content of its outputs. A stage is up to date if all three are still the same. Neither the place
    of a file nor its times count: a run folder may be moved, and a corpus copied. A key that is newer than the record
    counts with its default: a newer lmkit does not redo the stages of an older one.

    Attributes:
        entries: stage -> its entry in the record.
        sources, content: key of the recipe -> the files that it names now; their hashes.
        mark: ends a document in text files; None: nothing does.
        damage: says that the record is damaged; None if it is not.
    """

    def __init__(self, folder: Path, recipe: Recipe, *, reads_sources: bool = True) -> None:
        self.folder, self.mark = folder, _mark_of(recipe)
        record = run_folder.read_record(folder)
        self.entries: dict[str, Any] = {}
        lost = [] if record or not (folder / run_folder.RECORD).exists() else ["every stage"]
        for stage in READS:
            if run_folder.is_entry(record.get(stage)):
                self.entries[stage] = record[stage]
            elif stage in record:
                lost.append(stage)
        self.damage = None
        if lost:
            self.damage = f"{folder / run_folder.RECORD}: damaged, so that {', '.join(lost)} may run again"
        noted = record.get("files")
        self._noted: dict[str, Any] = noted if isinstance(noted, dict) else {}
        self.sources: dict[str, list[Path]] = {}
        self.content: dict[str, list[str]] = {}
        for key in FILES:
            named = attrgetter(key)(recipe)
            if isinstance(named, Path):
                named = (named, *filter(Path.is_file, map(named.parent.joinpath, BESIDE)))
            self.sources[key] = list(named or ())
            if reads_sources:
                _check_files(self.sources[key], key)
                self.content[key] = list(map(self._digest, self.sources[key]))
                continue
            noted_content = (entry.get("content", {}) for entry in self.entries.values())
            self.content[key] = next((content[key] for content in noted_content if key in content), [])
        # A stage reads its tables and those of the stages before it.
        self._reads: dict[str, dict[str, Any]] = {}
        self._defaults: dict[str, Any] = {}
        values: dict[str, Any] = {}
        content: dict[str, list[str]] = {}
        for stage, tables in READS.items():
            for name in tables:
                table = getattr(recipe, name)
                for into, source in ((values, table), (self._defaults, type(table)())):
                    for key, value in source.model_dump(mode="json").items():
                        into[f"{name}.{key}"] = value
            values["corpus.separator"], self._defaults["corpus.separator"] = self.mark, END_OF_TEXT
            content |= {key: self.content[key] for key in FILES if key in values}
            for key in (*NO_EFFECT, *FILES):
                values.pop(key, None)
            self._reads[stage] = {"values": dict(values), "content": dict(content)}

    def _digest(self, path: Path) -> str:
        """Return the hash of a file's content; the file is not read if it is as it was at the last time."""
        name = str(path.absolute())
        self._noted[name] = noted = noted_digest(path, self._noted.get(name))
        return noted[-1]

    def changed_content(self) -> Iterator[str]:
        """Yield `FILE (key KEY)` for the files whose content is not the one that the stages before training read."""
        for key, new in self.content.items():
            olds = [entry.get("content", {}).get(key, new) for entry in self.entries.values()]
            for old in [old for old in olds if old != new][:1]:
                triples = zip_longest(self.sources[key], old, new)
                paths = [str(path) for path, before, now in triples if path and before != now]
                yield f"{', '.join(paths) or 'no file'} (key {key})"

    def damaged(self, stage: str) -> list[Path] | None:
        """Return the outputs that are missing or not as the stage left them; None if the stage is out of date."""
        now, entry = self._reads[stage], self.entries.get(stage, {})
        if entry.get("done") is not True or "values" not in entry or entry.get("content") != now["content"]:
            return None
        values = self._defaults | entry["values"]
        if values | now["values"] != values:
            return None
        made, damaged = entry.get("made", {}), []
        for path in chain.from_iterable(self.outputs(stage).values()):
            digest = made.get(self._name(path))
            is_whole = path.exists() if digest is None else path.is_file() and self._digest(path) == digest
            damaged += [] if is_whole else [path]
        return damaged

    def outputs(self, stage: str) -> Outputs:
        """Return what a finished stage made."""
        outputs: Outputs = {}
        for role, names in self.entries[stage]["outputs"].items():
            outputs[role] = [self.folder / name if name.startswith(_INSIDE) else Path(name) for name in names]
        return outputs

    def _name(self, path: Path) -> str:
        inside = path.is_relative_to(self.folder)
        return _INSIDE + path.relative_to(self.folder).as_posix() if inside else str(path)

    def begin(self, stage: str) -> None:
        """Note that work on a stage starts."""
        self.entries[stage] = self._reads[stage] | {"done": False, "outputs": {}}
        self.save()

    def finish(self, stage: str, outputs: Outputs) -> None:
        """Note that a stage is done."""
        sources = set(chain.from_iterable(self.sources.values()))
        self.entries[stage] = entry = self._reads[stage] | {"done": True, "outputs": {}, "made": {}}
        for role, paths in outputs.items():
            entry["outputs"][role] = list(map(self._name, paths))
            for path in paths:
                # A corpus that is used where it lies is not the run's.
                if path.is_relative_to(self.folder) and path not in sources and path.is_file():
                    entry["made"][self._name(path)] = self._digest(path)
        self.save()

    def forget(self, stages: Iterable[str]) -> None:
        """Drop stages: they are out of date from now on."""
        for stage in stages:
            self.entries.pop(stage, None)

    def save(self) -> None:
        """Write the record, with the hashes of files that were read."""
        run_folder.save_record(self.folder, self.entries | {"files": self._noted})


class Pipeline:
    """One run: its recipe, its folder, and, after `check`, the record of its stages.

    Args:
        from_stage: redo this stage and all after it.
        skip_data: use corpus, tokenizer and token files as they are.
        force: redo all stages, whichever recipe made the folder.
        strict: raise an error if held-out text stands in the training text, see `overlap_of`.
    """

    record: StageRecord
    overlap: Overlap | None
    tell_ranks: Callable[[str], None] | None

    def __init__(
        self,
        recipe: Recipe,
        *,
        progress: Progress,
        nproc: int = 1,
        from_stage: str | None = None,
        skip_data: bool = False,
        force: bool = False,
        strict: bool = False,
    ) -> None:
        self.recipe, self.strict = recipe, strict
        corpus = required(recipe.corpus, "corpus", recipe, command="run")
        self.corpus = corpus if skip_data else with_files(corpus)
        self.tokenizer = required(recipe.tokenizer, "tokenizer", recipe, command="run")
        required(recipe.model, "model", recipe, command="run")
        self.train = required(recipe.train, "train", recipe, command="run")
        if self.tokenizer.path is None and end_of_text_of(recipe) is None:  # noticed before the work
            message = f"{recipe.origin}: tokenizer.special_tokens has no token that ends a document"
            hint = "name one of them: tokenizer.end_of_text, or add <|endoftext|>"
            raise UsageError("tokenizer.no_end_of_text", message, hint=hint)
        names = list(STAGES)
        if from_stage is not None and from_stage not in names:
            message, hint = f"--from: {from_stage!r} is not a stage", "stages: " + ", ".join(names)
            raise UsageError("run.unknown_stage", message, hint=hint)
        self.progress, self.nproc = progress, nproc
        self.skip_data, self.force = skip_data, force
        begin = len(names) if from_stage is None else names.index(from_stage)
        self.redone = names[0 if force else begin :]
        if skip_data and (redone := [stage for stage in self.redone if stage in DATA_STAGES]):
            other = "--force" if force else f"--from {redone[0]}"
            message = f"--skip-data uses the data that {other} makes again"
            raise UsageError("run.options_exclude", message, hint="leave out one of them")
        self.folder = recipe.run.path
        self.checkpoints = self.folder / run_folder.CHECKPOINTS
        run_folder.refuse_foreign_files(self.folder, run_folder.RUN_FILES)
        refuse_unwritable(self.folder, option="--set run.folder=...")
        self.lock = FolderLock(self.folder)

    def check(self) -> None:
        """Read the record; refuse options, files and folders with which the run would lose or lack something."""
        recipe = self.recipe.model_copy(update={"corpus": self.corpus})
        self.record = record = StageRecord(self.folder, recipe, reads_sources=not self.skip_data)
        if record.damage:
            log.warning("%s", record.damage)
        for stage in DATA_STAGES if self.skip_data else ():
            if record.entries.get(stage, {}).get("done") is not True:
                message = f"--skip-data: {self.folder} has no finished {stage} stage"
                raise UsageError("run.no_data", message, hint="run once without --skip-data")
        has_trained = record.entries.get("train", {}).get("done") is True or any(self.checkpoints.glob("*"))
        if has_trained and not self.force:  # else nothing is lost: stages that are out of date are redone
            self._refuse_another_recipe()
        record.forget(self.redone)
        makes_corpus = self.why("corpus") is not None
        if makes_corpus or "train" in self.redone:
            self._refuse_own_sources()
        if record.damaged("train") != []:
            from lmkit.training.session import misfit
            from lmkit.training.setup import check_before_data

            check_before_data(self.recipe, nproc=self.nproc)
            if no_fit := misfit(self.recipe, ranks=max(read_place().world_size, self.nproc)):
                log.warning(no_fit)  # before hours of making data
        if self.tokenizer.path is not None and not self.skip_data:
            Tokenizer.load(self.tokenizer.path, end_of_text=self.tokenizer.end_of_text)
        if self.skip_data:
            from lmkit.training.run_data import open_data

            open_data(self.recipe)  # before a training is set aside for damaged files
        if makes_corpus:
            check_corpus(self.corpus, self.folder / "corpus")

    def _refuse_another_recipe(self) -> None:
        """Refuse a folder with the training of another recipe, or of the same on other data."""
        path = self.folder / run_folder.RECIPE
        if path.exists():
            changed = differences(load_recipe(path), self.recipe, ignore=FREE)
            wrong = refused(changed) + [line for line in changed if is_under(line, ("corpus", "tokenizer"))]
            if self.newest is None:  # the checkpoints are gone: what they were made with is all that is left
                wrong = list(changed)
            if wrong:
                message = f"{path}: another recipe made this run: " + "; ".join(wrong)
                hint = f"to continue it: lmkit run {shlex.quote(str(path))}; or {OTHERWISE}"
                raise UsageError("run.other_recipe", message, hint=hint)
        files = [] if self.skip_data else list(self.record.changed_content())
        if files and "train" not in self.redone:
            message = f"{self.folder}: changed since this run was trained: " + "; ".join(files)
            raise UsageError("run.other_data", message, hint=OTHERWISE)

    def _refuse_own_sources(self) -> None:
        """Refuse a recipe that reads files of this run which it would replace or set aside."""
        from lmkit.training.run_data import token_paths

        folder, restarts = os.path.realpath(self.folder), "train" in self.redone
        names = (*run_folder.RUN_FILES, run_folder.CHECKPOINTS) if restarts else run_folder.RUN_FILES
        recipe = self.recipe
        sources = {**self.record.sources}
        if recipe.checkpoint.resume not in ("auto", "never"):
            sources["checkpoint.resume"] = [Path(recipe.checkpoint.resume)]
        if self.train.init_from is not None:
            sources["train.init_from"] = [self.train.init_from]
        for part, named in zip(("train", "valid"), token_paths(recipe), strict=True):
            own_file = run_folder.token_file(self.folder, part).absolute()  # is made again
            sources[f"data.{part}"] = [path for path in shard_paths(named) if path.absolute() != own_file]
        own = list(map(os.path.realpath, map(self.folder.joinpath, names)))
        for key, paths in sources.items():
            for path in paths:
                real = os.path.realpath(path)
                if any(Path(real).is_relative_to(name) for name in own) or (restarts and real == folder):
                    message = (
                        f"{path} (key {key}): belongs to the run in {self.folder} that would make it again"
                    )
                    hint = "copy it to another place and name that, or name a new run: --set run.name=..."
                    raise UsageError("run.reads_itself", message, hint=hint)

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint; it may be damaged."""
        return max(self.checkpoints.glob("step-" + 8 * "[0-9]"), default=None)

    def trained_with(self, checkpoint: Path) -> str | None:
        """Return the hash of the tokenizer of a checkpoint, or else of the folder; None: neither says it."""
        try:
            return str(read_object(checkpoint / "state.json")["data"]["tokenizer_sha256"])
        except (OSError, ValueError, LookupError, TypeError):  # damaged, or imported
            path = self.folder / run_folder.TOKENIZER
            return Tokenizer.load(path).sha256 if path.exists() else None

    def why(self, stage: str) -> str | None:
        """Return why a stage has to be done: what of its outputs is damaged, or ""; None if it is up to date."""
        if self.skip_data and stage in DATA_STAGES:
            return None
        damaged = self.record.damaged(stage)
        if stage == "train" and damaged is not None:
            made, newest = self.record.outputs("train").get("checkpoints", []), self.newest
            if newest is not None and newest / "manifest.json" not in made:
                return ""  # `lmkit train` has gone on
        if stage in ("evaluate", "generate") and self.why("train") is not None:
            return ""
        if not damaged:
            return "" if damaged is None else None
        return f"{damaged[0]} {'was changed or damaged' if damaged[0].exists() else 'is missing'}"

    def to_set_aside(self) -> list[Path]:
        """Return what of an earlier training this run replaces."""
        if "train" not in self.redone or not run_folder.is_run(self.folder):
            return []
        return [path for name in OF_TRAINING if os.path.lexists(path := self.folder / name)]

    def set_aside(self, paths: Sequence[Path]) -> None:
        """Move the earlier training to a new folder inside, with copies of the record and of its tokenizer.

        If something cannot be copied or moved, all is as it was.
        """
        stem = f"{OLD}{time.strftime('%Y%m%d-%H%M%S')}"
        names = chain([stem], (f"{stem}-{number}" for number in count(2)))
        aside = next(place for name in names if not os.path.lexists(place := self.folder / name))
        moved: list[Path] = []
        try:
            run_folder.save_record(aside, {})  # a run from the beginning, if the process is killed
            for path in (self.folder / name for name in (run_folder.TOKENIZER, *run_folder.BESIDE_TOKENIZER)):
                if path.is_file():
                    write_atomic(aside / path.name, read_input(path))
            for path in paths:
                _move(path, aside / path.name)
                moved.append(path)
        except BaseException:  # a full disk, Ctrl-C
            for path in reversed(moved):
                _move(aside / path.name, path)
            shutil.rmtree(aside, ignore_errors=True)
            raise
        log.warning("the earlier training is kept in %s, a run folder itself", aside)

    def bring_up_to_date(self, stage: str) -> str:
        """Do a stage unless it is up to date; return "up to date" or the seconds that it took."""
        if (damage := self.why(stage)) is None:
            log.info("%s: up to date", stage)
            return "up to date"
        if damage:
            log.warning("%s: %s, so that this stage runs again", stage, damage)
            for path in self.record.damaged(stage) or ():
                if path.exists() and not path.is_relative_to(self.checkpoints):  # a training keeps whole ones
                    log.warning("%s: kept as %s", stage, keep_damaged(path))
        started = time.perf_counter()
        self.record.begin(stage)
        self.record.finish(stage, STAGES[stage](self))
        seconds = time.perf_counter() - started
        log.info("%s: done in %.1f s", stage, seconds)
        return f"{seconds:.1f} s"

    def compare_texts(self) -> None:
        """Say how much of the held-out text stands in the training text, if it is known."""
        from lmkit.training.run_data import token_paths

        learned, held_out = map(shard_paths, token_paths(self.recipe))
        self.overlap = overlap_of(learned, held_out, name=some_of(held_out), strict=self.strict)
        if self.overlap is not None:
            log.info("held out: %s", self.overlap)

    def save_recipe(self) -> None:
        """Write the recipe into the run folder, unless the model there was trained for more steps."""
        trained = 0 if self.newest is None else int(self.newest.name[len("step-") :])
        steps = self.train.steps
        if self.train.epochs:  # the training knows how many steps they are
            steps = run_folder.object_in(self.folder / "training.json").get("steps", trained)
        if trained <= steps or not (self.folder / run_folder.RECIPE).exists():
            save_recipe(self.recipe)
        else:
            said = "train.steps = %d: the run was trained to step %d; it keeps this model and its recipe"
            log.warning(said, steps, trained)


def _make_corpus(run: Pipeline) -> Outputs:
    key = "valid" if run.corpus.valid else "train"
    learned = set(run.record.content["corpus.train"] if key == "valid" else ())
    repeated = []
    for path, digest in zip(getattr(run.corpus, key), run.record.content[f"corpus.{key}"], strict=True):
        repeated += [str(path)] if digest in learned else []
        learned |= {digest} if key == "train" else set()
    if repeated:
        said = "corpus.%s: %s: has the content of a file in corpus.train: held-out text may have been learned"
        log.warning(said, key, some_of(repeated))
    files = prepare_corpus(run.corpus, run.folder / "corpus", mark=run.record.mark, progress=run.progress)
    return {"train": list(files.train), "valid": list(files.valid)}


def _make_tokenizer(run: Pipeline) -> Outputs:
    table, path = run.tokenizer, run.folder / run_folder.TOKENIZER
    if table.path is not None:
        tokenizer = Tokenizer.load(table.path, end_of_text=table.end_of_text).for_training()
    else:
        tokenizer = train_tokenizer(
            run.record.outputs("corpus")["train"],
            vocab_size=table.vocab_size,
            special_tokens=table.special_tokens,
            end_of_text=table.end_of_text,
            separator=run.record.mark,
            max_token_bytes=table.max_token_bytes,
            workers=table.workers,
            errors=run.corpus.errors,
            progress=run.progress,
        )
    # A damaged record did not tell that the text changed.
    if (newest := run.newest) is not None and run.trained_with(newest) not in (None, tokenizer.sha256):
        run.record.forget(("corpus", "tokenizer"))  # with the old corpus, the run goes on
        run.record.save()
        message = f"{path}: the checkpoints need it, and this corpus makes another one"
        raise UsageError("run.other_data", message, hint=OTHERWISE)
    template = template_for(table, tokenizer, source=run.corpus.source)
    if template is not None:
        template.check(tokenizer, table.path or path)
    beside = tuple(map(run.folder.joinpath, run_folder.BESIDE_TOKENIZER))
    for file in beside:  # of the tokenizer before
        file.unlink(missing_ok=True)
    if template is not None:
        template.save(run.folder / run_folder.CHAT_TEMPLATE)
    tokenizer.save(path)
    return {"tokenizer": [path, *filter(Path.exists, beside)]}


def _encode(run: Pipeline) -> Outputs:
    tokenizer = Tokenizer.load(run.folder / run_folder.TOKENIZER)
    outputs = {}
    for part, sources in run.record.outputs("corpus").items():
        path = run_folder.token_file(run.folder, part)
        path.with_suffix(SIDECAR).unlink(missing_ok=True)  # a damaged one would not be replaced
        if run.corpus.source == "chat":
            from lmkit.tokenizer.chat import read_template

            template = read_template(run.folder / run_folder.CHAT_TEMPLATE)
            encode_chat(sources, path, tokenizer, template, progress=run.progress)
        else:
            how: Any = {"workers": run.recipe.data.workers, "errors": run.corpus.errors, "force": True}
            encode_corpus(sources, path, tokenizer, separator=run.record.mark, progress=run.progress, **how)
        outputs[part] = list(filter(Path.exists, map(path.with_suffix, (*PARTS, OVERLAP))))
    return outputs


def _train(run: Pipeline) -> Outputs:
    from lmkit.generation import write_samples
    from lmkit.training.session import train

    run.record.forget(("evaluate", "generate"))
    run.record.save()
    if run.tell_ranks is not None:
        run.tell_ranks("train")
    result = train(
        run.recipe, nproc=run.nproc, lock=run.lock, write_samples=write_samples, checks_tokens=False
    )
    assert result is not None
    newest = [] if result.checkpoint is None else sorted(Path(result.checkpoint).iterdir())
    path = run.folder / "training.json"
    write_atomic(path, json.dumps(asdict(result), default=str) + "\n")
    return {"training": [path], "checkpoints": [run.checkpoints, *newest]}


def _evaluate(run: Pipeline) -> Outputs:
    # The training ends with an evaluation: use it if it is of the newest checkpoint.
    found = read_object(run.folder / "training.json").get("evaluation")
    if found is None or found["checkpoint"] != str(run.newest) or run.redone[:1] == ["evaluate"]:
        from lmkit.training.judging import evaluate_run

        with alone():
            found = asdict(evaluate_run(run.folder, device=run.recipe.run.device))
    path = run.folder / "evaluation.json"
    write_atomic(path, json.dumps(found, default=str) + "\n")
    return {"evaluation": [path]}


def _generate(run: Pipeline) -> Outputs:
    from lmkit.cli.generate import as_text, continue_prompts

    with alone():
        made = continue_prompts(run.folder, device=run.recipe.run.device)
    path = run.folder / run_folder.STORIES
    write_atomic(path, as_text(made))
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
    from lmkit.training.run_data import token_paths

    evaluation = read_object(run.folder / "evaluation.json")
    training = read_object(run.folder / "training.json")
    train = open_tokens(run_folder.token_file(run.folder, "train")).meta
    valid = open_tokens(run_folder.token_file(run.folder, "valid")).meta
    learned, held_out = map(read_meta, token_paths(run.recipe))
    files = {path.name: path for path in sorted(run.folder.iterdir()) if path.name != ".lock"}
    fields: dict[str, Any] = {
        "folder": run.folder,
        "stages": done,
        "corpus_bytes": train.num_bytes + valid.num_bytes,
        "vocab_size": train.vocab_size,
        "train_tokens": learned.num_tokens,
        "valid_tokens": held_out.num_tokens,
        "parameters": training["parameters"],
        "steps": training["step"],
        "tokens_per_second": training.get("tokens_per_second"),
        "loss": evaluation["loss"],
        "perplexity": evaluation["perplexity"],
        "bits_per_byte": evaluation["bits_per_byte"],
        "overlap": None if run.overlap is None else asdict(run.overlap),
        "files": files,
        "story": read_input(run.folder / run_folder.STORIES).decode("utf-8", "replace"),
    }
    speed, perplexity, bits = fields["tokens_per_second"], fields["perplexity"], fields["bits_per_byte"]
    lines = [
        f"\n{fields['story'].strip()}\n",
        f"corpus      {size_of(fields['corpus_bytes'])} of text",
        f"tokenizer   {train.vocab_size:,} tokens",
        f"token files {learned.num_tokens:,} to train on, {held_out.num_tokens:,} held out",
        f"model       {fields['parameters']:,} parameters, {fields['steps']:,} steps"
        + ("" if speed is None else f", {speed:,.0f} tokens/s"),
        f"held out    loss {fields['loss']:.4f}"
        + ("" if perplexity is None else f", perplexity {perplexity:.2f}")
        + ("" if bits is None else f", {bits:.4f} bits per byte"),
        f"run folder  {run.folder}",
        statement("another story", f"lmkit generate {shlex.quote(str(run.folder))} --seed 1"),
    ]
    return Result("\n".join(lines), fields)


def _move(path: Path, place: Path) -> None:
    if path.is_symlink():  # a relative link would lead elsewhere
        place.symlink_to(os.path.realpath(path))
        path.unlink()
    else:
        os.replace(path, place)


def _check_files(paths: Sequence[Path], key: str) -> None:
    """Refuse what is no file, where the recipe names files under `key`."""
    for path in paths:
        if key.startswith("corpus."):
            refuse_directory(key, path)
        if path.is_file():
            continue
        yours = '["FILE"]' if key.startswith("corpus.") else "FILE"
        hint = f"name yours: --set '{key}={yours}'; paths are relative to the current folder"
        if path.parent.name in shipped_recipes():  # a run that has not been made
            hint = f"make it: lmkit run {path.parent.name}; or {hint}"
        wrong = "not a regular file" if path.exists() else "no such file"
        raise UsageError("run.missing_file", f"{path}: {wrong} (key {key})", hint=hint)


def _mark_of(recipe: Recipe) -> str | None:
    """Return what ends a document in text files."""
    corpus, table = recipe.corpus, recipe.tokenizer
    if corpus is not None:
        if end := mark_of((*corpus.train, *corpus.valid), corpus.separator, None):
            return end
        if corpus.source not in ("synth", "files", "chat"):
            return END_OF_TEXT
    path = None if table is None else table.path
    if path is not None and not path.is_file():  # refused elsewhere; or the run has its own
        return END_OF_TEXT
    return end_of_text_of(recipe)
