"""`lmkit run`: corpus -> tokenizer -> token files -> training -> evaluation -> stories, in one run folder.

The stages that need torch import it when they run: a run that is up to date is summarised at once.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmkit.commands.numbers import count, megabytes
from lmkit.commands.stages import StageRecord, file_signature, stage_key
from lmkit.data.corpora import prepare_corpus
from lmkit.data.encoding import encode_corpus
from lmkit.data.token_files import open_tokens
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.progress import Progress
from lmkit.measure.tables import statement
from lmkit.recipe.load import differences, load_recipe, recipe_to_toml, required
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import TokenizerConfig
from lmkit.recipe.vocabulary import END_OF_TEXT
from lmkit.storage import FolderLock, remove_partials, write_atomic
from lmkit.storage.outputs import refuse_unwritable
from lmkit.tokenizer import Tokenizer, train_tokenizer

log = logging.getLogger("lmkit")

STAGES = ("corpus", "tokenizer", "encode", "train", "evaluate", "generate")
RECIPE, RECORD = "recipe.toml", "stages.json"
DATA_STAGES = ("corpus", "tokenizer", "encode")
# These may change under the same run name: nothing that earlier stages made depends on them.
FREE = ("generate", "wandb", "checkpoint.resume", "data.workers", "tokenizer.workers")


@dataclass(frozen=True)
class RunSummary:
    """What `lmkit run` made; sizes in bytes, speeds in tokens per second."""

    folder: str
    stages: dict[str, str]
    corpus_bytes: int
    vocab_size: int
    train_tokens: int
    valid_tokens: int
    parameters: int
    steps: int
    tokens_per_second: float | None
    loss: float
    perplexity: float
    bits_per_byte: float
    files: dict[str, str]
    story: str

    def __str__(self) -> str:
        speed = "" if self.tokens_per_second is None else f", {self.tokens_per_second:,.0f} tokens/s"
        lines = [
            "",
            self.story.strip(),
            "",
            f"corpus      {megabytes(self.corpus_bytes)} of text",
            f"tokenizer   {count(self.vocab_size)} tokens",
            f"token files {count(self.train_tokens)} to train on, {count(self.valid_tokens)} held out",
            f"model       {count(self.parameters)} parameters, {count(self.steps)} steps{speed}",
            f"held out    loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, "
            f"{self.bits_per_byte:.4f} bits per byte",
            f"everything is in {self.folder}",
            statement("another story", f"lmkit generate {shlex.quote(self.folder)} --seed 1"),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class RunPlan:
    """What `lmkit run` would do."""

    folder: str
    stages: dict[str, str]

    def __str__(self) -> str:
        return "\n".join([self.folder, *(f"  {stage:<10}{state}" for stage, state in self.stages.items())])


def run(
    recipe: Recipe,
    *,
    from_stage: str | None = None,
    skip_data: bool = False,
    force: bool = False,
    progress: Progress,
) -> RunSummary:
    """Bring a run up to date and summarise it.

    Args:
        from_stage: redo this stage and all after it.
        skip_data: take corpus, tokenizer and token files as they are.
        force: delete what the run folder holds and start over.

    Raises:
        UsageError: a table is missing, the run folder was made by another recipe, or this is one of several ranks.
        LmkitError: a stage failed.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            "lmkit run: is one process, and here are several ranks",
            hint="make the data with lmkit run, then train on all of them: torchrun ... -m lmkit train RECIPE",
        )
    pipeline = Pipeline(recipe, progress=progress)
    pipeline.open(force=force, from_stage=from_stage, skip_data=skip_data)
    done: dict[str, str] = {}
    for stage in STAGES:
        done[stage] = pipeline.bring_up_to_date(stage, trust=skip_data and stage in DATA_STAGES)
    return pipeline.summary(done)


def plan(recipe: Recipe, *, from_stage: str | None, skip_data: bool, force: bool) -> RunPlan:
    """Say which stages `run` would do, touching nothing.

    Raises:
        UsageError: `run` would refuse this folder.
    """
    pipeline = Pipeline(recipe, progress=lambda stage, done, total: None)
    check_stage(from_stage)
    if skip_data:
        pipeline.check_data(force=force, from_stage=from_stage)
    if force:
        pipeline.refuse_to_clear()
    else:
        pipeline.refuse_another_recipe()
    redo = False
    stages = {}
    for stage in STAGES:
        trusted = skip_data and stage in DATA_STAGES
        redo = redo or force or stage == from_stage
        redo = redo or not (trusted or pipeline.is_finished(stage))
        stages[stage] = "would run" if redo else "up to date"
    return RunPlan(str(pipeline.folder), stages)


def check_stage(stage: str | None) -> None:
    """Refuse a stage that does not exist."""
    if stage is not None and stage not in STAGES:
        raise UsageError(f"--from: {stage!r} is not a stage", hint="stages: " + ", ".join(STAGES))


def refuse_prompts_without_a_start(prompts: Sequence[str], tokenizer: TokenizerConfig) -> None:
    """Refuse an empty prompt that the tokenizer to be trained could not begin: all the training would come before
    anybody noticed."""
    if "" in prompts and tokenizer.path is None and END_OF_TEXT not in tokenizer.special_tokens:
        raise UsageError(
            f"generate.prompts: an empty prompt starts from {END_OF_TEXT}, which tokenizer.special_tokens lacks",
            hint="""add it there, or say how texts begin: --set 'generate.prompts=["Once upon a time"]'""",
        )


class Pipeline:
    """The stages of one run, each of them a method, and the record of which are done."""

    def __init__(self, recipe: Recipe, *, progress: Progress) -> None:
        self.recipe = recipe
        self.corpus_table = required(recipe.corpus, "corpus", command="run")
        self.tokenizer_table = required(recipe.tokenizer, "tokenizer", command="run")
        required(recipe.model, "model", command="run")
        required(recipe.train, "train", command="run")
        refuse_prompts_without_a_start(recipe.generate.prompts, self.tokenizer_table)
        self.progress = progress
        self.folder = recipe.run.path
        self.record = StageRecord(self.folder / RECORD)
        self.keys = self._keys()

    def _keys(self) -> dict[str, str]:
        tables = self.recipe.model_dump(mode="json")
        for table, key in (("tokenizer", "workers"), ("data", "workers")):
            tables[table].pop(key)  # the result does not depend on it
        given = self.tokenizer_table.path
        texts = file_signature(self.corpus_table.train, key="corpus.train")
        texts += file_signature(self.corpus_table.valid, key="corpus.valid")
        corpus = stage_key("corpus", tables["corpus"], texts)
        tokenizer = stage_key(
            "tokenizer",
            corpus,
            tables["tokenizer"],
            file_signature([given] if given else [], key="tokenizer.path"),
        )
        encode = stage_key("encode", tokenizer)
        train = stage_key(
            "train",
            encode,
            *(tables[name] for name in ("run", "data", "model", "optimizer", "train", "parallel")),
        )
        evaluate = stage_key("evaluate", train)
        generate = stage_key("generate", train, tables["generate"])
        return dict(zip(STAGES, (corpus, tokenizer, encode, train, evaluate, generate), strict=True))

    def is_finished(self, stage: str) -> bool:
        """True where the stage needs no work."""
        return self.record.finished(stage, self.keys[stage])

    def open(self, *, force: bool, from_stage: str | None, skip_data: bool) -> None:
        """Make the run folder, or check that the one that is there belongs to this recipe."""
        check_stage(from_stage)
        if skip_data:
            self.check_data(force=force, from_stage=from_stage)
        refuse_unwritable(self.folder, option="--set run.folder=...")
        if force:
            self.refuse_to_clear()
        with self._lock():
            if force:
                self._clear()
            self.refuse_another_recipe()
            remove_partials(self.folder)
            write_atomic(self.folder / RECIPE, recipe_to_toml(self.recipe))
            self.record = StageRecord(self.folder / RECORD)
            if from_stage is not None:
                for stage in STAGES[STAGES.index(from_stage) :]:
                    self.record.forget(stage)

    def check_data(self, *, force: bool, from_stage: str | None) -> None:
        """Refuse --skip-data where there is nothing to take, before anything is made or deleted."""
        if force or from_stage in DATA_STAGES:
            other = "--force deletes" if force else f"--from {from_stage} makes again"
            raise UsageError(f"--skip-data: {other} the data that it takes", hint="leave one of them out")
        for stage in DATA_STAGES:
            if not self.record.made(stage):
                raise UsageError(
                    f"--skip-data: {self.folder} has no finished {stage} stage",
                    hint="run once without --skip-data",
                )

    def _lock(self) -> FolderLock:
        return FolderLock(self.folder)

    def refuse_to_clear(self) -> None:
        """Refuse to delete what is in a folder that is not a run's."""
        if not self.folder.is_dir() or any((self.folder / name).exists() for name in (RECIPE, RECORD)):
            return
        others = sorted(path.name for path in self.folder.iterdir() if path.name != ".lock")
        if others:
            raise UsageError(
                f"{self.folder}: --force would delete {others[0]!r}, and this folder is not a run",
                hint="empty it yourself, or choose another folder with --set run.folder=...",
            )

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name != ".lock":
                _delete(path)

    def refuse_another_recipe(self) -> None:
        """Refuse a run folder that holds the run of another recipe.

        Until there is something of a training, nothing is lost: stages whose recipe changed are done again.
        """
        path = self.folder / RECIPE
        trained = self.record.made("train") or any(self.folder.glob("checkpoints/*"))
        if not path.exists() or not trained:
            return
        changed = differences(load_recipe(path), self.recipe, ignore=FREE)
        if changed:
            raise UsageError(
                f"{path}: this run was made by another recipe: " + "; ".join(changed),
                hint=f"go on with its own: lmkit run {shlex.quote(str(path))}; "
                "or name a new run (--set run.name=...), or --force",
            )

    def bring_up_to_date(self, stage: str, *, trust: bool = False) -> str:
        """Do a stage unless it is up to date; return what happened in a word or two."""
        if trust or self.is_finished(stage):
            log.info("%s: up to date", stage)
            return "up to date"
        key = self.keys[stage]
        started = time.perf_counter()
        if stage in DATA_STAGES:
            with self._lock():
                self.record.begin(stage, key)
                outputs = getattr(self, f"_{stage}")()
        else:
            # `lmkit train` may have taken the run further since: what is resumed is for the checkpoint to say.
            before = self.keys[STAGES[STAGES.index(stage) - 1]]
            fresh = not self.record.begun(stage, before)
            self.record.begin(stage, key, before)
            outputs = self._train(fresh=fresh) if stage == "train" else getattr(self, f"_{stage}")()
        self.record.finish(stage, key, outputs)
        seconds = time.perf_counter() - started
        log.info("%s: done in %.1f s", stage, seconds)
        return f"{seconds:.1f} s"

    def _corpus(self) -> dict[str, list[Path]]:
        files = prepare_corpus(self.corpus_table, self.folder / "corpus", progress=self.progress)
        return {"train": list(files.train), "valid": list(files.valid)}

    def _tokenizer(self) -> dict[str, list[Path]]:
        path = self.folder / "tokenizer.json"
        if self.tokenizer_table.path is not None:
            tokenizer = Tokenizer.load(self.tokenizer_table.path)
        else:
            tokenizer = train_tokenizer(
                self.record.outputs("corpus")["train"],
                vocab_size=self.tokenizer_table.vocab_size,
                special_tokens=self.tokenizer_table.special_tokens,
                workers=self.tokenizer_table.workers,
                errors=self.corpus_table.errors,
                progress=self.progress,
            )
        tokenizer.save(path)
        return {"tokenizer": [path]}

    def _encode(self) -> dict[str, list[Path]]:
        tokenizer = Tokenizer.load(self.folder / "tokenizer.json")
        outputs = {}
        for part, sources in self.record.outputs("corpus").items():
            path = self.folder / "tokens" / f"{part}.npy"
            encode_corpus(
                sources,
                path,
                tokenizer,
                workers=self.recipe.data.workers,
                errors=self.corpus_table.errors,
                force=True,
                progress=self.progress,
            )
            outputs[part] = [path]
        return outputs

    def _train(self, *, fresh: bool) -> dict[str, list[Path]]:
        from lmkit.training.run_data import open_data
        from lmkit.training.session import train

        if fresh:  # checkpoints of other data must not be resumed from
            open_data(self.recipe)  # which refuses damaged files while the checkpoints are still there
            for name in ("checkpoints", "metrics.jsonl"):
                _delete(self.folder / name)
        result = train(self.recipe)
        assert result is not None
        path = self.folder / "training.json"
        write_atomic(path, json.dumps(asdict(result), default=str) + "\n")
        return {"training": [path], "checkpoints": [self.folder / "checkpoints"]}

    def _evaluate(self) -> dict[str, list[Path]]:
        from lmkit.training.evaluation import evaluate_run

        result = evaluate_run(self.folder, device=self.recipe.run.device)
        path = self.folder / "evaluation.json"
        write_atomic(path, json.dumps(asdict(result), default=str) + "\n")
        return {"evaluation": [path]}

    def _generate(self) -> dict[str, list[Path]]:
        from lmkit.commands import generate

        result = generate.run(self.folder, device=self.recipe.run.device)
        path = self.folder / "stories.txt"
        write_atomic(path, str(result))
        return {"stories": [path]}

    def _read(self, name: str, keys: Sequence[str]) -> dict[str, Any]:
        """What a stage wrote about itself."""
        path = self.folder / f"{name}.json"
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or not all(key in content for key in keys):
            stage = {"training": "train", "evaluation": "evaluate"}[name]
            raise LmkitError(f"{path}: missing or damaged", hint=f"make it again with --from {stage}")
        return content

    def summary(self, done: dict[str, str]) -> RunSummary:
        """Collect what the stages left in the run folder."""
        evaluation = self._read("evaluation", ("loss", "perplexity", "bits_per_byte"))
        training = self._read("training", ("parameters", "step"))
        train, valid = (
            open_tokens(self.folder / "tokens" / f"{part}.npy").meta for part in ("train", "valid")
        )
        return RunSummary(
            folder=str(self.folder),
            stages=done,
            corpus_bytes=train.num_bytes + valid.num_bytes,
            vocab_size=train.vocab_size,
            train_tokens=train.num_tokens,
            valid_tokens=valid.num_tokens,
            parameters=training["parameters"],
            steps=training["step"],
            tokens_per_second=training.get("tokens_per_second"),
            loss=evaluation["loss"],
            perplexity=evaluation["perplexity"],
            bits_per_byte=evaluation["bits_per_byte"],
            files={path.name: str(path) for path in sorted(self.folder.iterdir()) if path.name != ".lock"},
            story=(self.folder / "stories.txt").read_text("utf-8", "replace"),
        )


def _delete(path: Path) -> None:
    """Remove a file or a folder, if there is one; of a link to a folder elsewhere, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
