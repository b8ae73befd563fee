"""Train: batches through steps; records, evaluations and checkpoints when they are due."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.distributed as dist

from lmkit.core.batches import BatchSource
from lmkit.core.ranges import range_
from lmkit.errors import LmkitError
from lmkit.measure.environment import device_name, known_peak
from lmkit.measure.memory import peak_memory
from lmkit.model.accounting import flops_per_token
from lmkit.model.transformer import TransformerLM
from lmkit.parallel.ranks import Ranks, losses_named, step_watch
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.run_folder import CHECKPOINTS
from lmkit.training.checkpoint import capture_rng
from lmkit.training.evaluation import Evaluation, evaluate, held_out_of
from lmkit.training.metrics import Sink
from lmkit.training.process import end_as_stopped
from lmkit.training.resume import CheckpointWriter, Counters, group_numbers, own_files
from lmkit.training.run_data import Data, resolved_tables
from lmkit.training.setup import initial_state, learning_rate
from lmkit.training.step import Outcome, Step, load_batch
from lmkit.training.weights import filled_model, model_weights

Ending = Literal["finished", "stopped early"]
Watch = Callable[[int], AbstractContextManager[None]]
"""Of `step_watch`."""
WriteSamples = Callable[[TransformerLM, Recipe], Sequence[str]]
"""Returns a text for each prompt of the table [generate], prompt included: `lmkit.generation.write_samples`. It is an
argument because training does not import generation. It may change the model."""


class Diverged(LmkitError):
    """A loss or gradient is not finite on some rank, or a held-out loss. All ranks raise it at the same step."""


class Clock:
    """Measure the time of a run, with what earlier sessions used; and tokens per second of this session."""

    def __init__(self, *, used_seconds: float, max_minutes: float | None, ranks: Ranks) -> None:
        self._since = time.perf_counter()
        self._began = self._since - used_seconds
        self._limit = None if max_minutes is None else max_minutes * 60
        self._ranks = ranks
        self.speed: float | None = None
        self._tokens, self._seconds = 0, 0.0

    @property
    def seconds(self) -> float:
        """Time used so far."""
        return time.perf_counter() - self._began

    def fraction(self) -> float | None:
        """Return the used share of `max_minutes`, by rank 0's clock; None without that limit. Collective."""
        if self._limit is None:
            return None
        share = torch.tensor(self.seconds / self._limit, dtype=torch.float64)
        if self._ranks.world_size > 1:
            dist.broadcast(share, src=0)
        return share.item()

    def read(self, tokens: int) -> float:
        """Return the tokens per second, given the tokens since the last call."""
        now = time.perf_counter()
        seconds, self._since = max(now - self._since, 1e-9), now
        self._tokens += tokens
        self._seconds += seconds
        self.speed = self._tokens / self._seconds
        return tokens / seconds

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave the time inside out of the speed, for example of an evaluation."""
        entered = time.perf_counter()
        yield
        self._since += time.perf_counter() - entered


class Trainer:
    """Train from `counters` to the end of the schedule, or to an earlier stop. Every rank runs one.

    Args:
        recipe: resolved.
        step: of `step_of`, restored where the run is resumed.
        signals: of `stop_signals`; they tell the trainer to stop.
        write_samples: writes those of `train.sample_interval`.
    """

    def __init__(
        self,
        recipe: Recipe,
        step: Step,
        data: Data,
        batches: BatchSource,
        sink: Sink,
        *,
        counters: Counters,
        signals: Sequence[int],
        stop_at_step: int | None = None,
        write_samples: WriteSamples | None = None,
    ) -> None:
        model, train = resolved_tables(recipe)
        ranks, keep = step.ranks, recipe.checkpoint
        self.ranks = ranks
        self.step = step
        self.counters = counters
        self.train_loss: float | None = None
        self.clock = Clock(used_seconds=counters.seconds, max_minutes=train.max_minutes, ranks=ranks)
        self._recipe, self._train, self._checkpoint = recipe, train, keep
        self._batches, self._sink, self._signals = batches, sink, signals
        self._write_samples = write_samples
        self._held_out = None
        if data.valid is not None:  # in batches of one micro-batch
            rows = train.batch_size // train.accumulation
            self._held_out = held_out_of(data.valid, model, context_length=model.context_length, rows=rows)
        self._end = train.steps if stop_at_step is None else min(stop_at_step, train.steps)
        self._learning_rate = learning_rate(recipe.optimizer, train.steps)
        self._tokens_per_step = train.batch_size * model.context_length  # over all ranks
        dtype = "bf16" if train.precision == "fp8" else train.precision.removesuffix("-autocast")
        peak = known_peak(device_name(ranks.device), dtype)
        seen = getattr(batches, "seen_context", model.context_length)
        self._flops_share = None if peak is None else flops_per_token(model, seen) / peak
        self._writer = CheckpointWriter(recipe.run.path / CHECKPOINTS, ranks, keep)
        step.signals = signals
        self._initial_state = initial_state(recipe, step, data)
        self._began_at = self._launched = counters.step
        self._flying: deque[tuple[Outcome, float]] = deque()  # launched, not waited for; with learning rates
        self._graph_note = ""
        self._stops = self._wants_save = False  # some rank asked for it
        self._saved_step = counters.step  # resumed from this checkpoint; or step 0, which is not saved
        # Rank 0 asks for a checkpoint if the last save is so long ago; other ranks never ask.
        self._save_every_s = 60 * keep.minutes if ranks.is_first and keep.minutes > 0 else math.inf
        step.save_at = time.perf_counter() + self._save_every_s
        self._logged_tokens = counters.tokens
        self._fraction = self.clock.fraction()

    def run(self) -> tuple[Ending, Evaluation | None]:
        """Train, then evaluate on all held-out tokens if the schedule has ended; errors: as of `session.train`."""
        completed = False
        try:
            if self._train.init_from is not None and self.counters.step == 0:  # to see what training changes
                with losses_named(self.ranks, "before step 1"):
                    self._evaluate("valid", self._train.eval_batches or None)
            with step_watch(self.ranks) as watch:
                stopped = self._run_steps(watch)
            self._writer.wait_for_all()
            completed = True
        except Diverged:
            self._writer.wait_for_all()  # an earlier checkpoint is good, and all ranks are there to finish it
            raise
        finally:
            self.step.graph = None  # NCCL waits for graphs when its group ends
            self.step.before_update = None  # no circle keeps the model in memory
            self.step.signals = ()
            if not completed:
                self._writer.abandon()
        if stopped:
            self._sink.note(f"stopped by a signal; step {self.counters.step} is saved")
            end_as_stopped(self._signals)
        if self._progress(self.counters.step) < 1:
            return "stopped early", None
        with losses_named(self.ranks, f"after step {self.counters.step}"):
            evaluation = self._evaluate("final", None)
        if evaluation is None and self._held_out is not None:
            end_as_stopped(self._signals)
        return "finished", evaluation

    def _run_steps(self, watch: Watch) -> bool:
        """Make steps until the end. Return True if a signal ended them.

        It waits for a step when it has launched the next one, or at once if something must happen in between.
        """
        train = self._train
        intervals = [*filter(None, (train.eval_interval, train.sample_interval, self._checkpoint.interval))]
        if self._is_done():
            return False
        device = self.ranks.device
        batch = load_batch(self._batches, self._launched, device)
        while True:
            landed = None
            with range_("step"):
                with watch(self._launched + 1):
                    lr = self._learning_rate(self._launched, self._fraction)
                    writer = self._writer
                    self.step.before_update = None if writer.writing is None else writer.release_weights
                    self._flying.append((self.step(*batch, lr=lr), lr))
                    self._launched += 1
                    if (graph := self.step.graph) is not None and graph.note != self._graph_note:
                        self._graph_note = graph.note
                        self._sink.note(graph.note)
                    batch = load_batch(self._batches, self._launched, device)  # the GPU is still computing
                if len(self._flying) > 1 or not self.step.runs_ahead:
                    landed = self._land(watch)
            stopped = landed is not None and self._after_step(*landed)
            is_due = 0 in map(self._launched.__mod__, intervals)
            if self._flying and (is_due or self._is_done() or self._stops or self._wants_save):
                stopped = self._after_step(*self._land(watch))
            if stopped:
                return True
            if self._is_done():
                return False

    def _land(self, watch: Watch) -> tuple[Outcome, float]:
        """Wait for the first step that was not waited for; count it, also if it is skipped: its batch is used up."""
        (outcome, lr), counters = self._flying.popleft(), self.counters
        with watch(counters.step + 1):
            counters.step += 1
            counters.tokens += self._tokens_per_step
            counters.valid_loss = None
            self._stops |= outcome.stop
            self._wants_save |= outcome.save
            counters.skipped_in_a_row = counters.skipped_in_a_row + 1 if outcome.nonfinite else 0
            if outcome.nonfinite:
                self._skip(outcome)
            self._fraction = self.clock.fraction()
        return outcome, lr

    def _progress(self, step: int) -> float:
        """Return the share of the schedule that is done: of the steps or of the time, whichever is further.

        Time counts only after the first step, so that every run makes at least one.
        """
        return max(step / self._train.steps, (self._fraction or 0.0) if step else 0.0)

    def _is_done(self) -> bool:
        return self._progress(self._launched) >= 1 or self._launched >= self._end

    def _skip(self, outcome: Outcome) -> None:
        """Record a step whose loss or gradient is not finite; stop the run if it is one too many."""
        counters = self.counters
        most, losses = self.step.max_skips or 0, outcome.losses.tolist()
        loss = losses[self.ranks.rank]
        kind = "a spike" if math.isfinite(sum(outcome.losses) + outcome.grad_norm) else "not finite"
        if counters.skipped_in_a_row > most:
            why, hint = f"{kind}; weights are untouched", "lower optimizer.lr"
            if most:
                why = f"{kind}, the last of {counters.skipped_in_a_row} in a row; train.max_skips is {most}"
            else:
                hint += ', or go on without such steps: --set train.nonfinite="skip"'
            what = f"loss {loss:.4f}, gradient norm {outcome.grad_norm.item():.2f}"
            bad = [f"{value} on rank {rank}" for rank, value in enumerate(losses) if not math.isfinite(value)]
            if bad and len(losses) > 1:
                what = f"loss {', '.join(bad)}"
            raise Diverged("train.nonfinite", f"step {counters.step}: {what}: {why}", hint=hint)
        self._record("skip", loss=loss, why=kind)

    def _record(self, kind: str, **values: Any) -> None:
        self._sink.record({"kind": kind, "step": self.counters.step, **values})

    def _after_step(self, outcome: Outcome, lr: float) -> bool:
        """Log, evaluate and save as due. Return True if a signal asks the run to stop."""
        with losses_named(self.ranks, f"after step {self.counters.step}"):
            counters, train, checkpoint = self.counters, self._train, self._checkpoint
            step, is_last = counters.step, not self._flying
            stopped = is_last and self._stops
            ends = is_last and (self._is_done() or self._stops)
            if outcome.applied and (step == 1 or step % train.log_interval == 0 or ends):
                self._log(outcome, lr)
            is_best = False
            if train.eval_interval and step % train.eval_interval == 0 and not stopped:
                evaluation = self._evaluate("valid", train.eval_batches or None)
                stopped = evaluation is None and self._held_out is not None
                if evaluation is not None:
                    counters.valid_loss = evaluation.loss
                    is_best = counters.best_loss is None or evaluation.loss < counters.best_loss
                    counters.best_loss = evaluation.loss if is_best else counters.best_loss
            if train.sample_interval and step % train.sample_interval == 0 and not stopped:
                self._sample()
            is_due = is_last and self._wants_save
            is_due |= checkpoint.interval > 0 and step % checkpoint.interval == 0
            if ends or stopped or is_due or (is_best and checkpoint.keep_best > 0):
                self._save()
            elif step == self._began_at + 1 and (checkpoint.interval > 0 or checkpoint.minutes > 0):
                self._writer.reserve(own_files(self.step))
            return stopped

    def _log(self, outcome: Outcome, lr: float) -> None:
        counters = self.counters
        self.train_loss = (outcome.losses.sum() / self.ranks.world_size).item()
        speed = self.clock.read(counters.tokens - self._logged_tokens)
        self._logged_tokens = counters.tokens
        share = None if self._flops_share is None else self._flops_share * speed / self.ranks.world_size
        steps_left = (self._end - counters.step) * self._tokens_per_step / speed
        seconds, limit = self.clock.seconds, self._train.max_minutes
        time_left = math.inf if limit is None else max(0.0, 60 * limit - seconds)
        self._record(
            "train",
            loss=self.train_loss,
            lr=lr,
            grad_norm=outcome.grad_norm.item(),
            tokens=counters.tokens,
            tokens_per_second=speed,
            mfu=share,
            memory_bytes=peak_memory(self.ranks.device),
            seconds=seconds,
            progress=self._progress(counters.step),
            eta_seconds=min(steps_left, time_left),
        )

    def _evaluate(self, kind: str, max_batches: int | None) -> Evaluation | None:
        """Evaluate and record; return None without held-out tokens, or if a signal came."""
        if self._held_out is None:
            return None
        with self.clock.excluded():
            how: Any = {"precision": self._train.precision, "max_batches": max_batches}
            evaluation = evaluate(self.step.model, self._held_out, self.ranks, signals=self._signals, **how)
        if evaluation is not None:
            if not math.isfinite(evaluation.loss):
                said = f"{kind} loss {evaluation.loss} on {evaluation.tokens} held-out tokens that count"
                hint = "lower optimizer.lr" if evaluation.tokens else "raise train.eval_batches"
                raise Diverged("train.nonfinite", f"step {self.counters.step}: {said}", hint=hint)
            self._record(kind, **asdict(evaluation))
        return evaluation

    def _sample(self) -> None:
        """Let a copy of the model write, and record its texts; torch's random generators are left as they were."""
        assert self._write_samples is not None
        texts: Sequence[str] = ()
        device = self.ranks.device
        try:
            with self.clock.excluded():
                # A collective if the weights are sharded, which makes them whole on the first rank.
                weights = model_weights(self.step.model)
                if self.ranks.is_first:
                    with torch.random.fork_rng([device] if device.type == "cuda" else []):
                        config, origin = resolved_tables(self._recipe)[0], self._recipe.run.path
                        model = filled_model(config, weights, device=device, origin=origin)
                        texts = self._write_samples(model, self._recipe)
        except (LmkitError, torch.OutOfMemoryError) as error:  # training can go on without
            self._sink.note(f"step {self.counters.step}: no texts: {str(error).partition('. ')[0]}")
        for number, text in enumerate(texts):
            self._record("sample", number=number, text=text)

    def _save(self) -> None:
        """Begin to save, unless this step is saved already."""
        counters, scale = self.counters, self.step.loss_scale
        self._wants_save = False
        if counters.step == self._saved_step:
            return
        self._writer.wait_for_all()
        counters.seconds = self.clock.seconds
        state = self._initial_state.changed(
            **asdict(counters),
            optimizer_groups=group_numbers(self.step.optimizer),
            time_fraction=self._fraction,
            loss_scale=None if scale is None else scale.state(),
            spikes=None if self.step.spikes is None else tuple(self.step.spikes.state.tolist()),
            rng=(capture_rng(self.ranks.device),),
        )
        self._writer.save(state, own_files(self.step))
        self._saved_step = counters.step
        self.step.save_at = time.perf_counter() + self._save_every_s
        self._record("checkpoint", stall_seconds=self._writer.stall_seconds)
