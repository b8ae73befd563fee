"""Train a recipe in its run folder: from scratch or resumed; alone, under torchrun, or with ranks of its own."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lmkit.core.batches import BatchSource
from lmkit.data.shards import name_of
from lmkit.errors import UsageError
from lmkit.measure.environment import card_here, describe_environment, has_bf16
from lmkit.measure.plots import decorate
from lmkit.measure.ranges import enable_ranges_from_environment
from lmkit.model.accounting import count_parameters
from lmkit.parallel.collectives import decided_by_first
from lmkit.parallel.ranks import Ranks, local_device, losses_named
from lmkit.recipe import run_folder
from lmkit.recipe.load import save_recipe
from lmkit.recipe.recipe import Recipe
from lmkit.storage.atomic import PARTIAL_SUFFIX, FolderLock, write_atomic
from lmkit.storage.outputs import refuse_unwritable
from lmkit.training import metrics, resume, run_data
from lmkit.training.checkpoint import Checkpoint, TrainingState, open_checkpoint, saved_steps
from lmkit.training.evaluation import EvaluateResult, Evaluation, summarise
from lmkit.training.precision import with_precision
from lmkit.training.process import numerics, ranks_of, stop_signals
from lmkit.training.setup import check_device, step_of
from lmkit.training.trainer import Trainer, WriteSamples
from lmkit.training.weights import GivenWeights, open_given

log = logging.getLogger("lmkit")


@dataclass(frozen=True)
class TrainResult:
    """Result of a training session; losses in nats per token.

    Attributes:
        status: "finished", "stopped early" or "nothing to do"; of `plan`, how the session would begin.
        resumed_from: the step at which the session began; None: from scratch.
        tokens: seen by the optimizer in the whole run.
        tokens_per_second: in this session, without evaluation.
        loss: of the last logged training step.
        checkpoint: the newest of the run, at most at `step`.
        evaluation: on all held-out tokens, after the last step only, as `lmkit evaluate` reports it.
    """

    folder: str
    status: str
    step: int
    steps: int
    resumed_from: int | None
    parameters: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    loss: float | None
    checkpoint: str | None
    evaluation: EvaluateResult | None

    def __str__(self) -> str:
        begin = "" if self.resumed_from in (None, self.step) else f" (resumed at step {self.resumed_from})"
        head = f"{self.folder}: {self.status} at step {self.step} of {self.steps}{begin}"
        lines = [head, f"model     {self.parameters:,} parameters"]
        since = "" if self.resumed_from is None else f" since step {self.resumed_from}"
        speed = "" if self.tokens_per_second is None else f", {self.tokens_per_second:,.0f} tokens/s{since}"
        lines.append(f"training  {self.tokens:,} tokens in {metrics.duration(self.seconds)}{speed}")
        if self.loss is not None:
            lines.append(f"loss      {self.loss:.4f} in training")
        if (held_out := self.evaluation) is not None:
            bits = "" if held_out.bits_per_byte is None else f", {held_out.bits_per_byte:.4f} bits per byte"
            lines.append(f"held out  loss {held_out.loss:.4f}, perplexity {held_out.perplexity:.2f}{bits}")
        if self.checkpoint is not None:
            lines.append(f"saved     {self.checkpoint}")
        return "\n".join(lines)


def train(
    recipe: Recipe,
    *,
    stop_at_step: int | None = None,
    nproc: int = 1,
    lock: FolderLock | None = None,
    write_samples: WriteSamples | None = None,
    checks_tokens: bool = True,
) -> TrainResult | None:
    """Train, from scratch or from the newest checkpoint of the run folder.

    A process makes one training at a time. While it runs, it draws from PyTorch's default generator: other threads
    need a `torch.Generator` of their own.

    Args:
        stop_at_step: end early after this step; the learning-rate schedule stays that of `train.steps`.
        nproc: ranks to start on this machine. Under torchrun leave it at 1.
        lock: of the run folder, if the caller holds it.
        write_samples: writes the texts of `train.sample_interval`: `lmkit.generation.write_samples`.
        checks_tokens: refuse token files that are not as `lmkit run` made them.

    Returns:
        The result; None on ranks other than the first.

    Raises:
        ValueError: `train.sample_interval` without `write_samples`.
        UsageError: the recipe lacks a table, or does not fit its data, its run folder or the number of ranks.
        LmkitError: the loss is not finite, a checkpoint cannot be written, a rank is lost...
        OSError: another file cannot be written; saved checkpoints are intact.
        SystemExit, KeyboardInterrupt: SIGTERM or SIGINT; the state is saved.
    """
    run_data.check_recipe(recipe)  # before ranks start, which takes seconds
    if checks_tokens:
        run_data.refuse_changed(recipe)
    if recipe.train is not None and recipe.train.sample_interval and write_samples is None:
        raise ValueError("train.sample_interval needs write_samples=lmkit.generation.write_samples")
    given = (recipe, stop_at_step, lock, write_samples)
    if nproc > 1:
        from lmkit.parallel.launch import spawn_ranks

        return spawn_ranks(nproc, _run_rank, given)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record

        # Lets torchrun show the traceback of errors that are no LmkitError.
        return record(_run_rank)(*given)
    return _run_rank(*given)


def _run_rank(
    recipe: Recipe, stop_at_step: int | None, lock: FolderLock | None, write_samples: WriteSamples | None
) -> TrainResult | None:
    """Train as one of the ranks; return the result on rank 0."""
    enable_ranges_from_environment()
    with (
        ranks_of(recipe) as ranks,
        losses_named(ranks, "between steps"),
        numerics(recipe.run, ranks),
        ExitStack() as held,
    ):
        own = FolderLock(recipe.run.path) if lock is None else nullcontext()
        start = _prepare(recipe, ranks, stop_at_step, partial(held.enter_context, own))
        resolved, checkpoint = start.recipe, start.checkpoint
        if start.done is not None:
            for note in start.notes if ranks.is_first else ():
                log.warning(note)
            return start.done if ranks.is_first else None
        resumed_from = None if checkpoint is None else checkpoint.state.step
        sink = metrics.Sink()
        if ranks.is_first:
            if not run_folder.is_run(recipe.run.path):
                run_folder.save_record(recipe.run.path, {})
            run_data.keep_tokenizer(recipe)
            save_recipe(recipe)
            environment = json.dumps(describe_environment(), indent=1) + "\n"
            write_atomic(recipe.run.path / run_folder.ENVIRONMENT, environment)
            assert resolved.train is not None
            after = resumed_from or 0
            others: list[metrics.Sink] = [metrics.Console(resolved.train.steps, first_step=after)]
            if resolved.wandb.enabled:
                others.append(metrics.wandb_sink(resolved, recipe.run.path, after_step=after))
            if resolved.train.tensorboard:
                others.append(metrics.tensorboard_sink(recipe.run.path, after_step=after))
            sink = metrics.MetricsFile(recipe.run.path / run_folder.METRICS, after_step=after, others=others)
        try:
            for note in (*start.notes, start.begin):
                sink.note(note)
            step = step_of(resolved, ranks, start.data)
            if start.given is not None:
                resume.begin_with(start.given, step)
            counters = resume.Counters()
            if checkpoint is not None:
                counters = resume.restore(checkpoint, step, recipe.optimizer.name)
            with stop_signals(ranks) as signals:
                given = resolved, step, start.data, start.batches, sink
                how: Any = {"stop_at_step": stop_at_step, "write_samples": write_samples}
                trainer = Trainer(*given, counters=counters, signals=signals, **how)
                ending, evaluation = trainer.run()
        finally:
            sink.close()
        if not ranks.is_first:
            return None
        decorate("loss.png", partial(metrics.draw_losses, recipe.run.path, title=f"{recipe.run.name}: loss"))
        counters.seconds = trainer.clock.seconds
        return _result(
            resolved,
            counters,
            status=ending,
            resumed_from=resumed_from,
            tokens_per_second=trainer.clock.speed,
            loss=trainer.train_loss,
            evaluation=evaluation,
        )


@dataclass(frozen=True)
class _Start:
    """A session that has passed all checks.

    Attributes:
        recipe: resolved.
        checkpoint: to resume from; None: from scratch, or with the weights `given`.
        begin: a line for people that says so.
        notes: further lines: on the choice of the checkpoint, on what changed since.
        done: the result if nothing is left to do, not even an evaluation.
    """

    recipe: Recipe
    data: run_data.Data
    batches: BatchSource
    checkpoint: Checkpoint | None
    given: GivenWeights | None
    begin: str
    notes: tuple[str, ...]
    done: TrainResult | None = None


def _prepare(
    recipe: Recipe, ranks: Ranks, stop_at_step: int | None, hold: Callable[[], object] | None
) -> _Start:
    """Refuse what cannot work; choose the checkpoint. `hold` locks the run folder, which is cleaned then; None writes
    nothing."""
    data = run_data.open_data(recipe)
    of_data, narrow = run_data.resolve(recipe, data), has_bf16(ranks.device)
    resolved = with_precision(of_data, has_bf16=narrow)
    check_device(resolved, ranks.device)
    batches = run_data.make_batches(resolved, data, ranks)
    if hold is None:
        path, skipped = resume.choose_start(recipe)
        notes = [f"skipped {why}" for why in skipped]
    else:
        path, notes = decided_by_first(ranks, partial(resume.open_folder, recipe, hold))
        if ranks.world_size > 1:
            _refuse_private_folder(recipe.run.path, ranks)
    notes = [*notes, *run_data.notes_on(resolved, data)]
    if path is None:
        given = None if recipe.train is None or recipe.train.init_from is None else open_given(resolved, data)
        begin = "no checkpoint yet: starting from scratch" if given is None else f"starting from {given.path}"
        return _Start(resolved, data, batches, None, given, begin, tuple(notes))
    checkpoint = open_checkpoint(path)
    before = checkpoint.state.recipe.get("train") or {}  # an imported model has no [train]
    resolved = with_precision(of_data, has_bf16=narrow, saved=before.get("precision"))
    notes += resume.check_agreement(checkpoint, resolved, data.identity, ranks.world_size)
    begin, done = f"resuming from {path}", None
    if resume.is_finished(checkpoint.state, resolved, stop_at_step):
        done = _finished_before(resolved, checkpoint, data)
        what = "only the last evaluation is left" if done is None else "nothing to do"
        begin = f"{what}: already at step {checkpoint.state.step}"
    return _Start(resolved, data, batches, checkpoint, None, begin, tuple(notes), done)


def misfit(recipe: Recipe, *, ranks: int) -> str | None:
    """Return a warning if the recipe will not fit on this machine's GPUs; None if it will, or they are not used."""
    if recipe.run.device == "cpu" or not torch.cuda.is_available():
        return None
    from lmkit.training.plan import plan

    made = plan(recipe, card_here(), ranks=ranks)
    if made.fits:
        return None
    return (
        f"this will not fit: a step takes {made.memory.peak / 1e9:.1f} GB in {made.memory.peaks_at}, and "
        f"{made.usable / 1e9:.1f} GB of {made.card.name} are usable; lmkit plan says what fits"
    )


def _refuse_private_folder(folder: Path, ranks: Ranks) -> None:
    """Refuse a run folder that some rank, on another machine perhaps, does not share with rank 0. Collective."""

    def leave_sign() -> str:
        name = f"seen-{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
        (folder / name).touch()
        return name

    sign = folder / decided_by_first(ranks, leave_sign)
    sees: list[bool] = [False] * ranks.world_size
    dist.all_gather_object(sees, sign.exists())
    if ranks.is_first:
        sign.unlink()
    if not all(sees):
        blind = ", ".join(str(rank) for rank, seen in enumerate(sees) if not seen)
        message = f"{folder}: rank {blind} cannot see what rank 0 writes there (key run.folder)"
        hint = "put it on a disk that all machines share: --set run.folder=/shared/runs"
        raise UsageError("run.not_shared", message, hint=hint)


def _finished_before(recipe: Recipe, checkpoint: Checkpoint, data: run_data.Data) -> TrainResult | None:
    """Return the result of a finished run; None if its last evaluation is missing."""
    state = checkpoint.state
    records = metrics.read_metrics(recipe.run.path / run_folder.METRICS)
    finals = [
        summarise(r["loss"], r["tokens"], r.get("bytes_per_token"))
        for r in records
        if r["kind"] == "final" and r["step"] == state.step and None not in (r["loss"], r.get("tokens"))
    ]
    if not finals and data.valid is not None and resume.is_finished(state, recipe, None):
        return None
    logged = [r.get("loss") for r in records if r["kind"] == "train" and r["step"] <= state.step]
    return _result(
        recipe,
        state,
        status="nothing to do",
        resumed_from=state.step,
        loss=logged[-1] if logged else None,
        evaluation=finals[-1] if finals else None,
    )


def _result(
    recipe: Recipe,
    position: resume.Counters | TrainingState,
    *,
    status: str,
    resumed_from: int | None,
    tokens_per_second: float | None = None,
    loss: float | None = None,
    evaluation: Evaluation | None = None,
) -> TrainResult:
    model, train = run_data.resolved_tables(recipe)
    checkpoint = reported = None
    for step, path in saved_steps(recipe.run.path / run_folder.CHECKPOINTS):
        if step <= position.step:  # later ones were damaged: the run was resumed from an earlier one
            checkpoint = str(path)
    if evaluation is not None and checkpoint is not None:
        figures, file = asdict(evaluation), name_of(run_data.token_paths(recipe)[1])
        reported = EvaluateResult(**figures, checkpoint=checkpoint, step=position.step, tokens_file=file)
    return TrainResult(
        folder=str(recipe.run.path),
        status=status,
        step=position.step,
        steps=train.steps,
        resumed_from=resumed_from,
        parameters=count_parameters(model).total,
        tokens=position.tokens,
        seconds=position.seconds,
        tokens_per_second=tokens_per_second,
        loss=loss,
        checkpoint=checkpoint,
        evaluation=reported,
    )


def plan(recipe: Recipe, *, stop_at_step: int | None = None, nproc: int = 1) -> TrainResult:
    """Check what `train` would check, and return what there is before its first step; writes nothing."""
    run_data.check_recipe(recipe)
    run_data.refuse_changed(recipe)
    run_folder.refuse_foreign_files(recipe.run.path)
    ranks = Ranks(world_size=nproc, device=local_device(recipe.run.device, local_rank=nproc - 1))
    start = _prepare(recipe, ranks, stop_at_step, None)
    refuse_unwritable(recipe.run.path, option="--set run.folder=...")
    for note in start.notes:
        log.warning(note)
    if start.done is not None:
        return start.done
    state = resume.Counters() if start.checkpoint is None else start.checkpoint.state
    return _result(start.recipe, state, status=start.begin, resumed_from=state.step or None)
