"""`lmkit train`: token files -> a trained model in a run folder. Alone, under torchrun, or starting its own ranks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from lmkit.data.batches import BatchSource
from lmkit.errors import LmkitError, UsageError, out_of_memory, reason
from lmkit.measure.environment import describe_environment
from lmkit.measure.plots import loss_curve
from lmkit.measure.ranges import enable_ranges_from_environment
from lmkit.model.accounting import count_parameters
from lmkit.parallel.failures import losses_named
from lmkit.parallel.launch import spawn_ranks
from lmkit.parallel.ranks import Ranks, local_device
from lmkit.recipe.load import recipe_to_toml, required
from lmkit.recipe.schema import Recipe
from lmkit.storage import FolderLock, remove_partials, write_atomic
from lmkit.storage.outputs import refuse_unwritable
from lmkit.training.checkpoint import CHECKPOINTS, Checkpoint, clean_leftovers, open_checkpoint, saved_steps
from lmkit.training.console import duration
from lmkit.training.evaluation import Evaluation
from lmkit.training.metrics import METRICS, Record, read_metrics
from lmkit.training.process import numerics, ranks_of
from lmkit.training.resume import check_agreement, choose_start, is_finished, restore, world_change
from lmkit.training.run_data import Data, check_token_files, make_batches, open_data, resolve, resolved_tables
from lmkit.training.setup import assemble, check_device, open_sink
from lmkit.training.signals import StopSignals
from lmkit.training.trainer import Moment, Trainer

log = logging.getLogger("lmkit")


Status = Literal["finished", "stopped early", "nothing to do"]


@dataclass(frozen=True)
class TrainResult:
    """What a training session came to; losses in nats per token.

    Attributes:
        resumed_from: the step that the session began at; None: from scratch.
        loss: of the last logged training step. valid_loss, perplexity, bits_per_byte: on all held-out tokens,
            after the last step only.
        tokens: seen by the optimizer in the whole run. tokens_per_second: of this session, evaluation left out.
        checkpoint: the newest of the run; one that was damaged, and gone on from before, does not count.
    """

    folder: str
    status: Status
    step: int
    steps: int
    resumed_from: int | None
    parameters: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    loss: float | None
    valid_loss: float | None
    perplexity: float | None
    bits_per_byte: float | None
    checkpoint: str | None

    def __str__(self) -> str:
        if self.status == "nothing to do":
            head = f"nothing to do: {self.folder} is already at step {self.step} of {self.steps}"
        else:
            begin = "" if self.resumed_from is None else f" (resumed at step {self.resumed_from})"
            head = f"{self.folder}: {self.status} at step {self.step} of {self.steps}{begin}"
        lines = [head, f"model     {self.parameters:,} parameters"]
        speed = "" if self.tokens_per_second is None else f", {self.tokens_per_second:,.0f} tokens/s"
        lines.append(f"training  {self.tokens:,} tokens in {duration(self.seconds)}{speed}")
        if self.loss is not None:
            lines.append(f"loss      {self.loss:.4f} in training")
        if self.valid_loss is not None and self.perplexity is not None:
            bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
            lines.append(f"held out  loss {self.valid_loss:.4f}, perplexity {self.perplexity:.2f}{bits}")
        if self.checkpoint is not None:
            lines.append(f"saved     {self.checkpoint}")
        return "\n".join(lines)


def train(recipe: Recipe, *, stop_at_step: int | None = None, nproc: int = 1) -> TrainResult | None:
    """Train, from scratch or from where the run folder stands.

    Args:
        stop_at_step: end early after this step; the learning-rate schedule stays that of `train.steps`.
        nproc: ranks to start on this machine. Under torchrun leave it at 1.

    Returns:
        The result; None on ranks other than the first.

    Raises:
        UsageError: the recipe lacks a table, or does not fit its data, its run folder or the number of ranks.
        LmkitError: the loss is not finite, a checkpoint cannot be written, a rank is lost...
        SystemExit, KeyboardInterrupt: SIGTERM or SIGINT; the state is saved.
    """
    required(recipe.model, "model", command="train")
    required(recipe.train, "train", command="train")
    check_token_files(recipe)  # before ranks start and meet, which takes seconds
    if nproc > 1:
        if "RANK" in os.environ:
            raise UsageError("--nproc: torchrun has started the ranks already", hint="leave one of them out")
        return spawn_ranks(nproc, _train_as_rank, (recipe, stop_at_step))
    live: Callable[[Recipe, int | None], TrainResult | None] = _train_as_rank
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record

        live = record(live)  # lets torchrun show the traceback of what is no LmkitError
    return live(recipe, stop_at_step)


def _train_as_rank(recipe: Recipe, stop_at_step: int | None) -> TrainResult | None:
    """One rank's whole life. A full disk, a file that vanished or too little memory is the user's to mend, wherever
    it is met."""
    try:
        return _live(recipe, stop_at_step)
    except OSError as error:
        raise LmkitError(
            f"{error.filename or recipe.run.path}: {reason(error)}",
            hint="check the disk; checkpoints that were saved are intact, and training again goes on from them",
        ) from error
    except (MemoryError, RuntimeError) as error:
        explained = out_of_memory(error)
        if explained is None:
            raise
        raise explained from error


def _live(recipe: Recipe, stop_at_step: int | None) -> TrainResult | None:
    enable_ranges_from_environment()
    with (
        ranks_of(recipe) as ranks,
        losses_named(ranks, "between steps"),
        numerics(recipe.run, ranks),
        ExitStack() as held,
    ):
        data = open_data(recipe)
        resolved = resolve(recipe, data)
        check_device(resolved, ranks.device)
        batches = make_batches(resolved, data, ranks)  # before anything is written: it may be refused
        start = decided_by_first(ranks, lambda: _open_folder(resolved, held))
        checkpoint = None if start["checkpoint"] is None else open_checkpoint(Path(start["checkpoint"]))
        notes: list[str] = start["notes"]
        if checkpoint is None:
            notes.append("no checkpoint yet: starting from scratch")
        else:
            changes = check_agreement(checkpoint, resolved, data.identity) + world_change(checkpoint, ranks)
            if is_finished(checkpoint.state, resolved, stop_at_step):
                done = _finished_before(resolved, checkpoint, data)
                if done is not None:
                    for note in notes if ranks.is_first else ():
                        log.warning(note)
                    return done if ranks.is_first else None
            notes += [f"resuming from {checkpoint.path}", *changes]
        if ranks.is_first:
            describe_run(recipe.run.path, recipe)
        return _train(resolved, ranks, data, batches, checkpoint, notes, stop_at_step)


def _open_folder(recipe: Recipe, held: ExitStack) -> dict[str, Any]:
    """On the first rank: take the run folder, tidy it, choose where to begin."""
    folder = recipe.run.path
    refuse_unwritable(folder, option="--set run.folder=...")
    held.enter_context(FolderLock(folder))
    removed = tidy(folder)
    start = choose_start(recipe)
    notes = [f"removed {path}, left by a session that was killed" for path in removed]
    return {
        "checkpoint": None if start.checkpoint is None else str(start.checkpoint),
        "notes": [*notes, *start.notes],
    }


def _train(
    recipe: Recipe,
    ranks: Ranks,
    data: Data,
    batches: BatchSource,
    checkpoint: Checkpoint | None,
    notes: list[str],
    stop_at_step: int | None,
) -> TrainResult | None:
    """Build everything, run the loop, evaluate."""
    sink = open_sink(recipe, ranks, after_step=0 if checkpoint is None else checkpoint.state.step)
    try:
        for note in notes:
            sink.note(note)
        used_seconds = checkpoint.state.seconds if checkpoint else 0.0
        parts = assemble(recipe, ranks, data, batches, sink, used_seconds=used_seconds)
        moment = Moment() if checkpoint is None else restore(checkpoint, parts)
        with StopSignals() as signals:
            loop = Trainer(parts, moment, signals, stop_at_step=stop_at_step)
            ending = loop.run()
            evaluation = loop.final_evaluation() if ending == "finished" else None
    finally:
        sink.close()
    if not ranks.is_first:
        return None
    draw_losses(recipe.run.path, title=f"{recipe.run.name}: loss")
    return _result(
        recipe,
        status=ending,
        resumed_from=None if checkpoint is None else checkpoint.state.step,
        step=moment.step,
        tokens=moment.tokens,
        seconds=parts.clock.seconds,
        tokens_per_second=loop.tokens_per_second,
        loss=moment.train_loss,
        evaluation=evaluation,
    )


def _finished_before(recipe: Recipe, checkpoint: Checkpoint, data: Data) -> TrainResult | None:
    """The result of a run that has nothing left to do; None if its last evaluation was cut short."""
    state = checkpoint.state
    records = read_metrics(recipe.run.path / METRICS)
    final = next((r for r in reversed(records) if _is_final(r, state.step)), None)
    if final is None and data.valid is not None and is_finished(state, recipe, None):
        return None
    last = next((r for r in reversed(records) if r["kind"] == "train" and r["step"] <= state.step), {})
    return _result(
        recipe,
        status="nothing to do",
        resumed_from=state.step,
        step=state.step,
        tokens=state.tokens,
        seconds=state.seconds,
        tokens_per_second=None,
        loss=last.get("loss"),
        evaluation=None
        if final is None
        else Evaluation(**{key: final[key] for key in Evaluation.__dataclass_fields__}),
    )


def _is_final(record: Record, step: int) -> bool:
    return (
        record["kind"] == "final"
        and record["step"] == step
        and Evaluation.__dataclass_fields__.keys() <= record.keys()
    )


def _result(recipe: Recipe, *, step: int, evaluation: Evaluation | None, **facts: Any) -> TrainResult:
    model, train = resolved_tables(recipe)
    # A later one than where the run stands is one that could not be gone on from.
    saved = [saved for saved in saved_steps(recipe.run.path / CHECKPOINTS) if saved.step <= step]
    return TrainResult(
        folder=str(recipe.run.path),
        step=step,
        steps=train.steps,
        parameters=count_parameters(model).total,
        valid_loss=None if evaluation is None else evaluation.loss,
        perplexity=None if evaluation is None else evaluation.perplexity,
        bits_per_byte=None if evaluation is None else evaluation.bits_per_byte,
        checkpoint=str(saved[-1].path) if saved else None,
        **facts,
    )


@dataclass(frozen=True)
class TrainPlan:
    """What `lmkit train` would do."""

    folder: str
    parameters: int
    steps: int
    tokens_per_step: int
    train_tokens: int | None
    ranks: int
    start: str
    notes: tuple[str, ...]
    stop_at_step: int | None

    def __str__(self) -> str:
        stop = "" if self.stop_at_step is None else f", stopping after step {self.stop_at_step:,}"
        data = "random tokens" if self.train_tokens is None else f"{self.train_tokens:,} tokens"
        return (
            "".join(f"{note}\n" for note in self.notes) + f"{self.folder}: {self.start}\n"
            f"{self.parameters:,} parameters, {self.steps:,} steps of {self.tokens_per_step:,} tokens "
            f"from {data}, on {self.ranks} rank{'s' if self.ranks > 1 else ''}{stop}"
        )


def plan(recipe: Recipe, *, stop_at_step: int | None = None, nproc: int = 1) -> TrainPlan:
    """Check what `train` would check, and say what it would do; writes nothing.

    Args:
        stop_at_step, nproc: as of `train`.

    Raises:
        UsageError: as `train`.
    """
    data = open_data(recipe)
    resolved = resolve(recipe, data)
    model, table = resolved_tables(resolved)
    device = local_device(recipe.run.device, local_rank=nproc - 1)
    check_device(resolved, device)
    ranks = Ranks(world_size=nproc, device=device)
    make_batches(resolved, data, ranks)
    refuse_unwritable(recipe.run.path, option="--set run.folder=...")
    begin = choose_start(resolved)
    notes, start = begin.notes, "starting from scratch"
    if begin.checkpoint is not None:
        start = f"resuming from {begin.checkpoint}"
        checkpoint = open_checkpoint(begin.checkpoint)
        notes += check_agreement(checkpoint, resolved, data.identity) + world_change(checkpoint, ranks)
        if is_finished(checkpoint.state, resolved, stop_at_step):
            is_done = _finished_before(resolved, checkpoint, data) is not None
            what = "nothing to do" if is_done else "only the last evaluation is left"
            start = f"{what}: already at step {checkpoint.state.step}"
    return TrainPlan(
        folder=str(recipe.run.path),
        parameters=count_parameters(model).total,
        steps=table.steps,
        tokens_per_step=table.batch_size * model.context_length,
        train_tokens=None if data.train is None else data.train.meta.num_tokens,
        ranks=nproc,
        start=start,
        notes=notes,
        stop_at_step=stop_at_step,
    )


RECIPE = "recipe.toml"


ENVIRONMENT = "environment.json"


LOSS_PICTURE = "loss.png"


_CURVES = {"train": "training", "valid": "held out", "final": "all held-out data"}  # kind of record -> label


def tidy(folder: Path) -> list[Path]:
    """Remove what a killed session left behind; the caller holds the folder's lock."""
    checkpoints = folder / CHECKPOINTS
    removed = remove_partials(folder)
    if checkpoints.is_dir():
        removed += clean_leftovers(checkpoints)
    return removed


def describe_run(folder: Path, recipe: Recipe) -> None:
    """Write the resolved recipe and the environment: what is needed to make the run again."""
    write_atomic(folder / RECIPE, recipe_to_toml(recipe))
    write_atomic(folder / ENVIRONMENT, json.dumps(describe_environment(), indent=1) + "\n")


def draw_losses(folder: Path, *, title: str) -> None:
    """Write `loss.png` from the metrics, a marker at every evaluation; nothing if there are none yet."""
    records = read_metrics(folder / METRICS)
    series = {
        label: [(record["step"], record["loss"]) for record in records if record["kind"] == kind]
        for kind, label in _CURVES.items()
    }
    drawn = {label: points for label, points in series.items() if points}
    if drawn:
        picture = loss_curve(drawn, title=title, marked=(_CURVES["valid"], _CURVES["final"]))
        write_atomic(folder / LOSS_PICTURE, picture)


def decided_by_first(ranks: Ranks, decide: Callable[[], Any]) -> Any:
    """Call `decide` on rank 0 only, and return its answer (a JSON value) on every rank.

    The answer travels by collectives: whoever waits for it notices at once when rank 0 dies.

    Raises:
        LmkitError: what `decide` raised, on every rank.
    """
    if ranks.world_size == 1:
        return decide()
    if not ranks.is_first:
        told = json.loads(_from_first(b""))
        if "error" in told:
            exit_code, message, hint = told["error"]
            raise (UsageError if exit_code == UsageError.exit_code else LmkitError)(message, hint=hint)
        return told["answer"]
    try:
        answer = decide()
    except LmkitError as error:
        _from_first(json.dumps({"error": [error.exit_code, error.message, error.hint]}).encode())
        raise
    _from_first(json.dumps({"answer": answer}).encode())
    return answer


def _from_first(text: bytes) -> bytes:
    """On every rank what rank 0 calls it with."""
    size = torch.tensor(len(text))
    dist.broadcast(size, src=0)
    data = torch.tensor(list(text) or [0] * int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return data.numpy().tobytes()
