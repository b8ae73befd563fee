"""Train: batches through steps; records, evaluations and checkpoints when they are due."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from lmkit.data.batches import BatchSource
from lmkit.errors import LmkitError
from lmkit.measure.memory import peak_memory
from lmkit.measure.ranges import range_
from lmkit.parallel.failures import StepWatch, losses_named
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import CheckpointConfig, TrainConfig
from lmkit.training.checkpoint_writer import CheckpointWriter
from lmkit.training.evaluation import Evaluation, HeldOut, evaluate
from lmkit.training.metrics import Sink
from lmkit.training.model_state import model_weights, optimizer_tensors
from lmkit.training.signals import StopSignals, end_as_stopped
from lmkit.training.state import TrainingState, capture_rng
from lmkit.training.step import Outcome, Step, load_batch

Ending = Literal["finished", "stopped early"]


class Diverged(LmkitError):
    """A loss or gradient is not finite on some rank. All ranks raise it at the same step."""


class TrainingClock:
    """Measure the wall-clock time of a run, including what earlier sessions used."""

    def __init__(self, *, used_seconds: float, max_minutes: float | None, ranks: Ranks) -> None:
        self._used = used_seconds
        self._limit = None if max_minutes is None else max_minutes * 60
        self._ranks = ranks
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time used so far."""
        return self._used + time.perf_counter() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Time until `max_minutes`; None without that limit."""
        return None if self._limit is None else max(0.0, self._limit - self.seconds)

    def fraction(self) -> float | None:
        """Return the used share of `max_minutes`, by rank 0's clock. All ranks call it and get the same value."""
        if self._limit is None:
            return None
        share = torch.tensor(self.seconds / self._limit, dtype=torch.float64)
        if self._ranks.world_size > 1:
            dist.broadcast(share, src=0)
        return share.item()


class Speedometer:
    """Measure tokens per second, since the last read and over the session, without `excluded` blocks."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._tokens = 0
        self._earlier_tokens = 0
        self._earlier_seconds = 0.0

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def read(self) -> float:
        """Return the speed since the last call."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        speed = self._tokens / seconds
        self._earlier_tokens += self._tokens
        self._earlier_seconds += seconds
        self._since, self._tokens = now, 0
        return speed

    @property
    def session(self) -> float | None:
        """The mean speed up to the last read; None before the first."""
        return self._earlier_tokens / self._earlier_seconds if self._earlier_seconds else None

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Do not count the time inside, for example of an evaluation."""
        entered = time.perf_counter()
        yield
        self._since += time.perf_counter() - entered


@dataclass
class Moment:
    """The position of a run: everything besides tensors that changes from step to step."""

    step: int = 0
    tokens: int = 0
    skipped_in_a_row: int = 0
    valid_loss: float | None = None
    best_loss: float | None = None
    train_loss: float | None = None


@dataclass(frozen=True)
class Parts:
    """The objects that the trainer uses; `lmkit.training.setup.assemble` builds them.

    Attributes:
        held_out: None: there is nothing to evaluate on.
        learning_rate: (step, used fraction of the time or None) -> learning rate.
        tokens_per_step: over all ranks.
        flops_share: FLOPs of one token over the peak FLOP/s of one device; None where no peak is known.
        identity: the state that never changes (recipe, model, data); `_save` fills in the rest.
    """

    train: TrainConfig
    checkpoint: CheckpointConfig
    ranks: Ranks
    step: Step
    batches: BatchSource
    held_out: HeldOut | None
    learning_rate: Callable[[int, float | None], float]
    tokens_per_step: int
    flops_share: float | None
    writer: CheckpointWriter
    sink: Sink
    clock: TrainingClock
    identity: TrainingState


class Trainer:
    """Train from `moment` to the end of the schedule, or to an earlier stop. Every rank runs one.

    Args:
        signals: tell the trainer to stop; entered.
        stop_at_step: end early after this step.
    """

    def __init__(
        self, parts: Parts, moment: Moment, signals: StopSignals, *, stop_at_step: int | None = None
    ) -> None:
        self.parts = parts
        self.moment = moment
        self._signals = signals
        self._stop_at_step = stop_at_step
        self._began_at = moment.step
        self._saved_step = moment.step  # resumed from this checkpoint; or step 0, which is not saved
        self._speed = Speedometer()
        self._fraction = parts.clock.fraction()

    @property
    def tokens_per_second(self) -> float | None:
        """Mean of this session."""
        return self._speed.session

    def run(self) -> Ending:
        """Train.

        Raises:
            SystemExit, KeyboardInterrupt: a signal came; the state is saved.
            LmkitError: the loss or a gradient is not finite, a checkpoint cannot be written, a rank is lost.
        """
        completed = False
        try:
            with StepWatch(self.parts.ranks) as watch:
                stopped = self._run_steps(watch)
            self._await_save()
            completed = True
        except Diverged:
            self._await_save()  # an earlier checkpoint is good, and all ranks are there to finish it
            raise
        finally:
            if not completed:
                self.parts.writer.abandon()
        if stopped:
            self.parts.sink.note(f"stopped by a signal; step {self.moment.step} is saved")
            end_as_stopped(self._signals.received)
        return "finished" if self._is_over() else "stopped early"

    def _run_steps(self, watch: StepWatch) -> bool:
        """Make steps until the end. Return True if a signal ended them."""
        batch = None if self._is_done() else self._next_batch()
        while batch is not None:
            with range_("step"), watch.step(self.moment.step + 1):
                lr = self.parts.learning_rate(self.moment.step, self._fraction)
                loss = self.parts.step.accumulate(*batch)
                upcoming = self._next_batch(ahead=1)  # the GPU is still computing
                outcome = self.parts.step.update(
                    loss,
                    lr=lr,
                    stop=self._signals.received is not None,
                    before_update=self.parts.writer.release_weights,
                )
                self._count(outcome)
                self._fraction = self.parts.clock.fraction()
            with losses_named(self.parts.ranks, f"after step {self.moment.step}"):
                stopped = self._after_step(outcome, lr)
            if stopped:
                return True
            batch = None if self._is_done() else upcoming
        return False

    def _next_batch(self, ahead: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return load_batch(self.parts.batches, self.moment.step + ahead, self.parts.ranks.device)

    def _count(self, outcome: Outcome) -> None:
        """Advance by one step, applied or not: a bad batch must not come again."""
        moment = self.moment
        moment.step += 1
        moment.tokens += self.parts.tokens_per_step
        moment.valid_loss = None
        self._speed.count(self.parts.tokens_per_step)
        if not outcome.nonfinite:
            moment.skipped_in_a_row = 0
            return
        moment.skipped_in_a_row += 1
        train, loss = self.parts.train, outcome.loss.item()
        what = f"step {moment.step}: {self._what_is_not_finite(outcome)}"
        if train.nonfinite == "stop":
            raise Diverged(
                "train.nonfinite",
                f"{what}: not finite; weights are untouched",
                hint='lower optimizer.lr, or go on without such steps: --set train.nonfinite="skip"',
            )
        if moment.skipped_in_a_row > train.max_skips:
            raise Diverged(
                "train.nonfinite",
                f"{what}: not finite {moment.skipped_in_a_row} times in a row, train.max_skips is {train.max_skips}",
                hint="lower optimizer.lr",
            )
        self.parts.sink.record({"kind": "skip", "step": moment.step, "loss": loss})

    def _what_is_not_finite(self, outcome: Outcome) -> str:
        """Return the losses that are not finite, by rank; else the norm of the averaged gradient."""
        own = f"loss {outcome.loss.item():.4f}, gradient norm {outcome.grad_norm.item()}"
        if self.parts.ranks.world_size == 1:
            return own
        losses = [torch.empty_like(outcome.loss) for _ in range(self.parts.ranks.world_size)]
        dist.all_gather(losses, outcome.loss)
        bad = [
            f"{loss.item()} on rank {rank}" for rank, loss in enumerate(losses) if not torch.isfinite(loss)
        ]
        return f"loss {', '.join(bad)}" if bad else own

    def _after_step(self, outcome: Outcome, lr: float) -> bool:
        """Log, evaluate and save as due. Return True if a signal asks the run to stop."""
        step, train, checkpoint = self.moment.step, self.parts.train, self.parts.checkpoint
        stopped, ends = outcome.stop, self._is_done() or outcome.stop
        if outcome.applied and (step == 1 or step % train.log_interval == 0 or ends):
            self._log(outcome, lr)
        is_best = False
        if train.eval_interval and step % train.eval_interval == 0 and not stopped:
            evaluation = self._evaluate("valid", train.eval_batches or None)
            stopped = evaluation is None and self.parts.held_out is not None
            is_best = evaluation is not None and self._is_best(evaluation)
        if (
            ends
            or stopped
            or (checkpoint.interval > 0 and step % checkpoint.interval == 0)
            or (is_best and checkpoint.keep_best > 0)
        ):
            self._save()
        elif step == self._began_at + 1 and checkpoint.interval > 0:
            self.parts.writer.reserve(
                self.parts.identity,
                model=model_weights(self.parts.step.model),
                optimizer=self._optimizer_tensors(),
            )
        return stopped

    def _is_best(self, evaluation: Evaluation) -> bool:
        """Record a held-out loss. Return True if it is the best so far."""
        moment = self.moment
        moment.valid_loss = evaluation.loss
        if moment.best_loss is not None and evaluation.loss >= moment.best_loss:
            return False
        moment.best_loss = evaluation.loss
        return True

    def _log(self, outcome: Outcome, lr: float) -> None:
        parts, moment = self.parts, self.moment
        loss = outcome.loss
        if parts.ranks.world_size > 1:
            dist.all_reduce(loss)
            loss /= parts.ranks.world_size
        moment.train_loss = loss.item()
        speed = self._speed.read()
        share = None if parts.flops_share is None else parts.flops_share * speed / parts.ranks.world_size
        end = parts.train.steps if self._stop_at_step is None else min(self._stop_at_step, parts.train.steps)
        steps_left = (end - moment.step) * parts.tokens_per_step / speed
        time_left = parts.clock.seconds_left
        parts.sink.record(
            {
                "kind": "train",
                "step": moment.step,
                "loss": moment.train_loss,
                "lr": lr,
                "grad_norm": outcome.grad_norm.item(),
                "tokens": moment.tokens,
                "tokens_per_second": speed,
                "mfu": share,
                "memory_bytes": peak_memory(parts.ranks.device),
                "seconds": parts.clock.seconds,
                "progress": self._progress(),
                "eta_seconds": steps_left if time_left is None else min(steps_left, time_left),
            }
        )

    def final_evaluation(self) -> Evaluation | None:
        """Evaluate on all held-out tokens; None if there are none.

        Raises:
            SystemExit, KeyboardInterrupt: a signal came.
        """
        if self.parts.held_out is None:
            return None
        with losses_named(self.parts.ranks, f"after step {self.moment.step}"):
            evaluation = self._evaluate("final", None)
        if evaluation is None:
            end_as_stopped(self._signals.received)
        return evaluation

    def _evaluate(self, kind: str, max_batches: int | None) -> Evaluation | None:
        parts = self.parts
        if parts.held_out is None:
            return None
        with self._speed.excluded():
            evaluation = evaluate(
                parts.step.model,
                parts.held_out,
                parts.ranks,
                precision=parts.train.precision,
                max_batches=max_batches,
                asked_to_stop=lambda: self._signals.received is not None,
            )
        if evaluation is not None:
            parts.sink.record(
                {
                    "kind": kind,
                    "step": self.moment.step,
                    "loss": evaluation.loss,
                    "perplexity": evaluation.perplexity,
                    "bits_per_byte": evaluation.bits_per_byte,
                    "tokens": evaluation.tokens,
                }
            )
        return evaluation

    def _save(self) -> None:
        """Begin to save, unless this step is saved already."""
        parts, moment = self.parts, self.moment
        if moment.step == self._saved_step:
            return
        parts.writer.wait_for_all()
        scale = parts.step.loss_scale
        state = parts.identity.model_copy(
            update={
                "step": moment.step,
                "seconds": parts.clock.seconds,
                "time_fraction": self._fraction,
                "tokens": moment.tokens,
                "skipped_in_a_row": moment.skipped_in_a_row,
                "valid_loss": moment.valid_loss,
                "best_loss": moment.best_loss,
                "loss_scale": None if scale is None else scale.state(),
                "rng": (capture_rng(parts.ranks.device),),
            }
        )
        parts.writer.save(state, model=model_weights(parts.step.model), optimizer=self._optimizer_tensors())
        self._saved_step = moment.step
        parts.sink.record(
            {"kind": "checkpoint", "step": moment.step, "stall_seconds": parts.writer.stall_seconds}
        )

    def _await_save(self) -> None:
        with losses_named(self.parts.ranks, f"after step {self.moment.step}"):
            self.parts.writer.wait_for_all()

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        return optimizer_tensors(self.parts.step.optimizer, self.parts.step.model)

    def _progress(self) -> float:
        """Return the share of the schedule that is done: of the steps or of the time, whichever is further."""
        return max(self.moment.step / self.parts.train.steps, self._fraction or 0.0)

    def _is_over(self) -> bool:
        return self._progress() >= 1.0

    def _is_done(self) -> bool:
        stop_at = self._stop_at_step
        return self._is_over() or (stop_at is not None and self.moment.step >= stop_at)
