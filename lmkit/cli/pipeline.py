"""The stages of `lmkit run`: corpus -> tokenizer -> token files -> training -> evaluation -> stories.

`STAGES`, at the end, lists them. A stage that is up to date is skipped (see `lmkit.cli.stages`).

The stages that need torch import it when they run: a run that is up to date is summarised at once.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lmkit.cli.stages import RECORD, Outputs, StageRecord, stage_keys
from lmkit.data.corpora import prepare_corpus
from lmkit.data.encoding import encode_corpus
from lmkit.data.token_files import open_tokens
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.progress import Progress
from lmkit.measure.tables import megabytes, statement
from lmkit.recipe.load import differences, load_recipe, recipe_to_toml, required
from lmkit.recipe.schema import Recipe
from lmkit.recipe.vocabulary import END_OF_TEXT
from lmkit.storage import FolderLock, remove_partials, write_atomic
from lmkit.storage.outputs import refuse_unwritable
from lmkit.tokenizer import Tokenizer, train_tokenizer

log = logging.getLogger("lmkit")

RECIPE = "recipe.toml"
DATA_STAGES = ("corpus", "tokenizer", "encode")
# These may change under the same run name: no earlier stage depends on them.
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
            f"tokenizer   {self.vocab_size:,} tokens",
            f"token files {self.train_tokens:,} to train on, {self.valid_tokens:,} held out",
            f"model       {self.parameters:,} parameters, {self.steps:,} steps{speed}",
            f"held out    loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, "
            f"{self.bits_per_byte:.4f} bits per byte",
            f"run folder  {self.folder}",
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
    nproc: int = 1,
    progress: Progress,
) -> RunSummary | None:
    """Bring a run up to date and summarise it.

    Under torchrun every rank calls this: rank 0 makes the data while the others wait, all ranks train, and rank 0
    evaluates and generates.

    Args:
        from_stage: redo this stage and all after it.
        skip_data: use corpus, tokenizer and token files as they are.
        force: delete the content of the run folder and start over.
        nproc: ranks to start for the training; 1 under torchrun.

    Returns:
        The summary; None on ranks other than 0.

    Raises:
        UsageError: a table is missing, the options exclude each other, or another recipe made the run folder.
        LmkitError: a stage failed.
    """
    pipeline = Pipeline(recipe, progress=progress, nproc=nproc)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and nproc > 1:
        raise UsageError(
            "ranks.started_twice",
            "--nproc: torchrun has started the ranks already",
            hint="leave out one of them",
        )
    if ranks > 1 and os.environ["RANK"] != "0":
        _follow(pipeline)
        return None
    with pipeline.leading() if ranks > 1 else nullcontext():
        pipeline.open(force=force, from_stage=from_stage, skip_data=skip_data)
        done = {
            stage: pipeline.bring_up_to_date(stage, trust=skip_data and stage in DATA_STAGES)
            for stage in STAGES
        }
    return pipeline.summary(done)


def plan(recipe: Recipe, *, from_stage: str | None, skip_data: bool, force: bool) -> RunPlan:
    """Say which stages `run` would do; touches nothing.

    Raises:
        UsageError: `run` would refuse this folder.
    """
    pipeline = Pipeline(recipe, progress=lambda stage, done, total: None)
    pipeline.check_options(force=force, from_stage=from_stage, skip_data=skip_data)
    if not force:
        pipeline.refuse_another_recipe()
    redo = False
    stages = {}
    for stage in STAGES:
        trusted = skip_data and stage in DATA_STAGES
        redo = redo or force or stage == from_stage or not (trusted or pipeline.record.is_finished(stage))
        stages[stage] = "would run" if redo else "up to date"
    return RunPlan(str(pipeline.folder), stages)


# Several ranks under torchrun


_SIGNAL, _LOOK_S = "lmkit run", 0.2


def _shared_store() -> Any:
    """Join the key-value store of torchrun's ranks."""
    from torch.distributed.rendezvous import rendezvous

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timedelta(minutes=10))))
    return store


def _follow(pipeline: Pipeline) -> None:
    """On ranks other than 0: wait until rank 0 has made the data, however long that takes, then train with it."""
    from lmkit.parallel.failures import RankLost
    from lmkit.training.session import train

    store = _shared_store()
    while not store.check([_SIGNAL]):  # torchrun ends this rank if rank 0 dies
        time.sleep(_LOOK_S)
    told = store.get(_SIGNAL).decode()
    if told == "failed":
        raise RankLost("ranks.first_failed", "rank 0 failed before the training", hint="look for its error")
    if told == "train":
        train(pipeline.recipe)


@contextmanager
def _alone() -> Iterator[None]:
    """Hide the environment of torchrun: the code inside runs in one process and waits for no other rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


class Pipeline:
    """One run: its recipe, its folder, and the record of its stages."""

    def __init__(self, recipe: Recipe, *, progress: Progress, nproc: int = 1) -> None:
        self.recipe = recipe
        self.corpus = required(recipe.corpus, "corpus", command="run")
        self.tokenizer = required(recipe.tokenizer, "tokenizer", command="run")
        required(recipe.model, "model", command="run")
        required(recipe.train, "train", command="run")
        can_start = self.tokenizer.path is not None or END_OF_TEXT in self.tokenizer.special_tokens
        if "" in recipe.generate.prompts and not can_start:  # noticed before the training, not after it
            raise UsageError(
                "generate.no_start",
                f"generate.prompts: an empty prompt needs {END_OF_TEXT}, which tokenizer.special_tokens lacks",
                hint="""add it there, or give a prompt: --set 'generate.prompts=["Once upon a time"]'""",
            )
        self.progress = progress
        self.nproc = nproc
        self.folder = recipe.run.path
        self.record = StageRecord(self.folder, stage_keys(recipe))
        self.from_stage: str | None = None
        self.tell_ranks: Callable[[str], None] = lambda word: None

    # The folder

    def check_options(self, *, force: bool, from_stage: str | None, skip_data: bool) -> None:
        """Refuse wrong options before anything is made or deleted."""
        if from_stage is not None and from_stage not in STAGES:
            raise UsageError(
                "run.unknown_stage",
                f"--from: {from_stage!r} is not a stage",
                hint="stages: " + ", ".join(STAGES),
            )
        if skip_data and (force or from_stage in DATA_STAGES):
            other = "--force deletes" if force else f"--from {from_stage} redoes"
            raise UsageError(
                "run.options_exclude",
                f"--skip-data: {other} the data that it uses",
                hint="leave out one of them",
            )
        for stage in DATA_STAGES if skip_data else ():
            if not self.record.was_made(stage):
                raise UsageError(
                    "run.no_data",
                    f"--skip-data: {self.folder} has no finished {stage} stage",
                    hint="run once without --skip-data",
                )
        is_run = any((self.folder / name).exists() for name in (RECIPE, RECORD))
        if force and self.folder.is_dir() and not is_run:
            others = sorted(path.name for path in self.folder.iterdir() if path.name != ".lock")
            if others:
                raise UsageError(
                    "run.not_a_run_folder",
                    f"{self.folder}: --force would delete {others[0]!r}, and this folder is not a run",
                    hint="empty it yourself, or choose another folder with --set run.folder=...",
                )

    def refuse_another_recipe(self) -> None:
        """Refuse a folder with the run of another recipe.

        Before there is a checkpoint nothing is lost: stages whose recipe changed are redone.
        """
        path = self.folder / RECIPE
        trained = self.record.was_made("train") or any(self.folder.glob("checkpoints/*"))
        if not path.exists() or not trained:
            return
        changed = differences(load_recipe(path), self.recipe, ignore=FREE)
        if changed:
            raise UsageError(
                "run.other_recipe",
                f"{path}: another recipe made this run: " + "; ".join(changed),
                hint=f"to continue it: lmkit run {shlex.quote(str(path))}; "
                "or name a new run (--set run.name=...), or --force",
            )

    def open(self, *, force: bool, from_stage: str | None, skip_data: bool) -> None:
        """Make the run folder, or check that the existing one belongs to this recipe."""
        self.check_options(force=force, from_stage=from_stage, skip_data=skip_data)
        refuse_unwritable(self.folder, option="--set run.folder=...")
        with FolderLock(self.folder):
            if force:
                for path in self.folder.iterdir():
                    if path.name != ".lock":
                        _delete(path)
            self.refuse_another_recipe()
            remove_partials(self.folder)
            write_atomic(self.folder / RECIPE, recipe_to_toml(self.recipe))
            self.record = StageRecord(self.folder, self.record.keys)
            self.from_stage = from_stage
            if from_stage is not None:
                stages = list(STAGES)
                self.record.forget(stages[stages.index(from_stage) :])

    # The work

    @contextmanager
    def leading(self) -> Iterator[None]:
        """On rank 0 under torchrun: tell the waiting ranks when to train, or that there is nothing to train."""
        store = _shared_store()

        def tell(word: str) -> None:
            if not store.check([_SIGNAL]):
                store.set(_SIGNAL, word)

        self.tell_ranks = tell
        try:
            yield
        except BaseException:
            tell("failed")
            raise
        tell("done")

    def bring_up_to_date(self, stage: str, *, trust: bool = False) -> str:
        """Do a stage unless it is up to date; return "up to date" or the seconds that it took."""
        if trust or self.record.is_finished(stage):
            log.info("%s: up to date", stage)
            return "up to date"
        started = time.perf_counter()
        if stage in DATA_STAGES:
            with FolderLock(self.folder):
                self.record.begin(stage)
                outputs = STAGES[stage](self)
        else:
            outputs = STAGES[stage](self)
        self.record.finish(stage, outputs)
        seconds = time.perf_counter() - started
        log.info("%s: done in %.1f s", stage, seconds)
        return f"{seconds:.1f} s"

    def begin_training(self) -> None:
        """Delete checkpoints of other data; keep those that this run can resume from."""
        from lmkit.training.run_data import open_data

        before = self.record.keys["encode"]
        if not self.record.has_begun("train", before):
            open_data(self.recipe)  # refuses damaged files while the checkpoints are still there
            for name in ("checkpoints", "metrics.jsonl"):
                _delete(self.folder / name)
        self.record.begin("train", before)

    def read(self, name: str, keys: Sequence[str]) -> dict[str, Any]:
        """Read what a stage wrote about itself."""
        path = self.folder / f"{name}.json"
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or not all(key in content for key in keys):
            stage = {"training": "train", "evaluation": "evaluate"}[name]
            raise LmkitError(
                "run.damaged_result", f"{path}: missing or damaged", hint=f"redo it with --from {stage}"
            )
        return content

    def summary(self, done: dict[str, str]) -> RunSummary:
        """Collect what the stages left in the run folder."""
        evaluation = self.read("evaluation", ("loss", "perplexity", "bits_per_byte"))
        training = self.read("training", ("parameters", "step"))
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


# The stages


def _make_corpus(run: Pipeline) -> Outputs:
    files = prepare_corpus(run.corpus, run.folder / "corpus", progress=run.progress)
    return {"train": list(files.train), "valid": list(files.valid)}


def _make_tokenizer(run: Pipeline) -> Outputs:
    path = run.folder / "tokenizer.json"
    table = run.tokenizer
    if table.path is not None:
        tokenizer = Tokenizer.load(table.path)
    else:
        tokenizer = train_tokenizer(
            run.record.outputs("corpus")["train"],
            vocab_size=table.vocab_size,
            special_tokens=table.special_tokens,
            workers=table.workers,
            errors=run.corpus.errors,
            progress=run.progress,
        )
    tokenizer.save(path)
    return {"tokenizer": [path]}


def _encode(run: Pipeline) -> Outputs:
    tokenizer = Tokenizer.load(run.folder / "tokenizer.json")
    outputs = {}
    for part, sources in run.record.outputs("corpus").items():
        path = run.folder / "tokens" / f"{part}.npy"
        encode_corpus(
            sources,
            path,
            tokenizer,
            workers=run.recipe.data.workers,
            errors=run.corpus.errors,
            force=True,
            progress=run.progress,
        )
        outputs[part] = [path]
    return outputs


def _train(run: Pipeline) -> Outputs:
    from lmkit.training.session import train

    run.begin_training()
    run.tell_ranks("train")
    parallel = run.recipe.parallel
    if (
        run.nproc == 1
        and os.environ.get("WORLD_SIZE", "1") == "1"
        and "strategy" in parallel.model_fields_set
    ):
        log.info('parallel.strategy: "%s" has no effect on one rank (see --nproc)', parallel.strategy)
    result = train(run.recipe, nproc=run.nproc)
    assert result is not None
    path = run.folder / "training.json"
    write_atomic(path, json.dumps(asdict(result), default=str) + "\n")
    return {"training": [path], "checkpoints": [run.folder / "checkpoints"]}


def _evaluate(run: Pipeline) -> Outputs:
    from lmkit.training.evaluation import evaluate_run

    result = None if run.from_stage == "evaluate" else _evaluation_of_training(run)
    if result is None:
        with _alone():
            result = evaluate_run(run.folder, device=run.recipe.run.device)
    path = run.folder / "evaluation.json"
    write_atomic(path, json.dumps(asdict(result), default=str) + "\n")
    return {"evaluation": [path]}


def _evaluation_of_training(run: Pipeline) -> Any:
    """Return the evaluation at the end of the training, if it is of the newest checkpoint; else None."""
    from lmkit.training.checkpoint import CHECKPOINTS, saved_steps
    from lmkit.training.evaluation import EvaluateResult

    found = run.read("training", ("step",)).get("evaluation")
    newest = saved_steps(run.folder / CHECKPOINTS)[-1]
    return None if found is None or found["checkpoint"] != str(newest.path) else EvaluateResult(**found)


def _generate(run: Pipeline) -> Outputs:
    from lmkit.cli.generate import write_text

    with _alone():
        result = write_text(run.folder, device=run.recipe.run.device)
    path = run.folder / "stories.txt"
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


def _delete(path: Path) -> None:
    """Remove a file or a folder, if there is one; of a link to a folder elsewhere, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
