"""Make one optimizer step: gradients of the micro-batches, agreement between ranks, update; or replay it as
a CUDA graph."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lmkit.core import step as core
from lmkit.core.batches import Batch, BatchSource
from lmkit.core.ranges import range_
from lmkit.model.transformer import TransformerLM
from lmkit.parallel.collectives import agree, largest_on_any_rank, sum_over_ranks
from lmkit.parallel.ranks import Ranks, free_before_leaving
from lmkit.parallel.strategy import Strategy
from lmkit.training.precision import GradientSums, LossScale, autocast

_LEAST = torch.iinfo(torch.int32).min


def load_batch(batches: BatchSource, step: int, device: torch.device) -> Batch:
    """Return the batch of a step on the device. On GPUs the copy is asynchronous."""
    with range_("data"):
        inputs, targets = batches.batch(step)
        if device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


APPLIED = 3
NUM_FLAGS = 4
"""Int32 flags at the beginning of a report, see `Outcome`; floats follow."""


class Outcome:
    """The result of one step. On GPUs, the first look at anything but `loss` waits for the step.

    Args:
        report: int32, on the device: stop, nonfinite, save, applied, then the bits of float32 numbers: every rank's
            loss, the norm of the gradient.
        ranks: the ranks that made the step.

    Attributes:
        loss: mean over this rank's rows, in nats per token; a scalar on the device.
        stop, save: whether a rank asked to stop, or for a checkpoint of this step.
        nonfinite: whether some rank saw a loss or gradient that is not finite (and loss scaling did not cause it).
        applied: whether the optimizer changed the weights.
        losses: of every rank: float32, (world_size,), in host memory.
        grad_norm: of the mean gradient over all ranks, before clipping: a float32 scalar in host memory.
    """

    stop: bool
    nonfinite: bool
    save: bool
    applied: bool
    losses: Tensor
    grad_norm: Tensor

    def __init__(self, report: Tensor, ranks: Ranks) -> None:
        self.loss = report[NUM_FLAGS + ranks.rank].view(torch.float32)
        self._host, self._arrived = report, None
        if report.is_cuda:
            self._host = torch.empty_like(report, device="cpu", pin_memory=True)
            self._host.copy_(report, non_blocking=True)
            self._arrived = torch.cuda.current_stream(report.device).record_event()

    def __getattr__(self, name: str) -> Any:
        """Read the report when an attribute of it is asked for the first time."""
        if name not in Outcome.__annotations__:
            raise AttributeError(name)
        if self._arrived is not None:
            self._arrived.synchronize()
        self.stop, self.nonfinite, self.save, self.applied = map(bool, self._host[:NUM_FLAGS].tolist())
        numbers = self._host[NUM_FLAGS:].view(torch.float32)
        self.losses, self.grad_norm = numbers[:-1], numbers[-1]
        return getattr(self, name)


class Step(core.Step):
    """`lmkit.core.step.Step` for long trainings; `build_step` makes one. The device decides whether it updates: with
    our AdamW on a GPU the host may launch further steps before it reads the `Outcome` of one.

    Args:
        model: the plain model.
        call: of `Strategy.attach`: `call.loss(ids, targets)` is the mean loss, in nats per token.
        grad_clip: largest norm of the gradient; 0 does not clip.
        masked: targets below zero do not count; all others of the global batch have the same weight.
        max_skips: after more steps in a row whose loss or gradient is not finite, no further step changes anything.
            None: every step is judged by itself.
        spike_sigmas: > 0: see `SpikeGuard`.
        cuda_graph: "on": capture the step; "auto": on a GPU whose host would set the pace; see `StepGraph`.

    Attributes:
        signals: read after the backward pass: if it is not empty, this rank asks to stop.
        save_at: from then on, as of `time.perf_counter`, this rank asks for a checkpoint.
        before_update: called before the weights change.
        decider: the optimizer that obeys its attribute `decision`; None if there is none.
        skipped: steps in a row, up to now, whose loss or gradient was not finite; an int32 scalar on the device.
    """

    sync: Strategy

    def __init__(
        self,
        model: TransformerLM,
        call: Any,
        optimizer: torch.optim.Optimizer,
        sync: Strategy,
        ranks: Ranks,
        *,
        precision: str,
        grad_clip: float,
        masked: bool = False,
        max_skips: int | None = None,
        spike_sigmas: float = 0.0,
        cuda_graph: Literal["auto", "on", "off"] = "off",
    ) -> None:
        super().__init__(call.loss, optimizer, sync, max_norm=grad_clip or math.inf)
        self.model, self.call, self.ranks = model, call, ranks
        self.masked = masked
        self.max_skips = max_skips
        self.skipped = torch.zeros((), dtype=torch.int32, device=ranks.device)
        self.decider: Any = getattr(optimizer, "inner", optimizer)  # of a sharded optimizer
        if not hasattr(self.decider, "decision"):
            self.decider = None
        self.signals: Sequence[int] = ()
        self.save_at = math.inf
        self.before_update: Callable[[], object] | None = None
        self._sent = (False, False)
        self._flags = torch.zeros(2, dtype=torch.int32, device=ranks.device)  # stop, save
        self.precision = precision
        self._autocast = autocast(ranks.device, precision)
        self.loss_scale = LossScale(ranks.device) if precision == "fp16" else None
        self.spikes = SpikeGuard(spike_sigmas, ranks.device) if spike_sigmas else None
        self.graph: StepGraph | None = None
        if cuda_graph == "on" or (cuda_graph == "auto" and ranks.device.type == "cuda"):
            self.graph = StepGraph(self, always=cuda_graph == "on")

    @property
    def runs_ahead(self) -> bool:
        """Whether a step returns before its outcome is known."""
        return self.ranks.device.type == "cuda" and self.decider is not None

    def __call__(self, inputs: Tensor, targets: Tensor, *, lr: float) -> Outcome:  # type: ignore[override]
        """Make one whole step on int64 (accumulation, rows, seq): `accumulate`, then `update`."""
        device = self.ranks.device
        inputs, targets = inputs.to(device), targets.to(device)
        if self.graph is None:
            return self.update(self.accumulate(inputs, targets), lr=lr)
        if not self.graph.fits(inputs):
            return self.graph.prepare(inputs, targets, lr)
        self._send()
        self.sync.end_step()  # the graph does not wait for what a step without it has left in flight
        return Outcome(self.graph.replay(inputs, targets, lr), self.ranks)

    def accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward over the micro-batches; return the mean loss (a scalar on the device)."""
        self._sums = GradientSums(self.model.parameters()) if len(inputs) > 2 else None
        self._shares: Tensor | None = None
        if self.masked:
            # They turn the mean losses of the micro-batches of all ranks, whose mean is taken, into shares of the
            # mean over all targets that count; (accumulation).
            counts = (targets >= 0).sum(dim=(1, 2))
            total = sum_over_ranks(counts.sum(), self.ranks).clamp(min=1)
            self._shares = counts * (len(targets) * self.ranks.world_size) / total
        return super().accumulate(inputs, targets)

    def backward(self, inputs: Tensor, targets: Tensor, index: int, count: int) -> Tensor:
        is_last = index == count - 1
        if is_last and self._sums is not None:
            self._sums.give()
        with range_("forward"), self._autocast:
            loss = self.loss(inputs, targets)  # (rows, seq) -> scalar
            if self._shares is not None:
                loss = loss * self._shares[index]
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        with range_("backward"):
            (loss * (scale / count)).backward()
        if not is_last and self._sums is not None:
            self._sums.take()
        return loss.detach().float()

    def update(self, loss: Tensor, *, lr: float) -> Outcome:
        """Reduce and clip the gradients, agree with the other ranks, and step the optimizer.

        If a loss or gradient is not finite on any rank, weights and optimizer state stay untouched on all ranks.
        """
        norm = self.reduce()
        self._send()
        return Outcome(self._update(loss, norm, lr), self.ranks)

    def reduce(self) -> Tensor:
        with range_("sync"):
            # Unscaling reads the gradients itself; clipping waits for the gradients that it reads.
            self.sync.finish(wait=self.loss_scale is not None)
        with range_("clip"):
            if self.loss_scale is not None:
                # The optimizer's tensors: parameters, or this rank's flat shards.
                self.loss_scale.unscale_(p for group in self.optimizer.param_groups for p in group["params"])
            return self.sync.clip_gradients(self.max_norm)

    def _send(self) -> None:
        """Copy this rank's flags to the device; call `before_update`."""
        flags = (bool(self.signals), time.perf_counter() >= self.save_at)
        if flags != self._sent:
            for on_device, flag in zip(self._flags, flags, strict=True):
                on_device.fill_(flag)
            self._sent = flags
        if self.before_update is not None:
            self.before_update()

    def _update(self, loss: Tensor, norm: Tensor, lr: float | Tensor) -> Tensor:
        """Step the optimizer if the ranks agree that the gradients are good; return the report for `Outcome`."""
        ranks, loss, norm = self.ranks, loss.float(), norm.float()
        losses = torch.full((ranks.world_size,), _LEAST, dtype=torch.int32, device=loss.device)
        losses[ranks.rank] = loss.view(torch.int32)  # the largest of each is that rank's, bit for bit
        bad = ~torch.isfinite(loss + norm)
        agreed = torch.cat((self._flags, bad.to(torch.int32)[None], losses))
        if ranks.world_size > 1:
            largest_on_any_rank(agreed, ranks)
        bad = agreed[2] != 0
        nonfinite = bad if self.loss_scale is None else self.loss_scale.judge(bad)
        applied = ~bad
        if self.spikes is not None:
            spike = self.spikes.judge(agreed[3:].view(torch.float32).mean(), norm, bad)
            nonfinite, applied = nonfinite | spike, applied & ~spike
        if self.max_skips is not None:
            is_over = self.skipped > self.max_skips
            applied &= ~is_over
            self.skipped.copy_(torch.where(is_over, self.skipped, (self.skipped + 1) * nonfinite))
        flags = torch.stack((agreed[0], nonfinite, agreed[1], applied))  # int32: the widest of them
        report = torch.cat((flags, agreed[3:], norm.view(torch.int32)[None]))
        with range_("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group.get("lr_factor", 1.0)
            if self.decider is not None:
                self.decider.decision = report[APPLIED]
            if self.decider is not None or report[APPLIED]:  # the latter waits for the device
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return report


WARM_UP = 20
"""Good steps before any is judged."""
MEMORY = 100
"""Good steps over which the mean and the variance run."""


class SpikeGuard:
    """Judge loss and gradient norm by their running mean and deviation over good steps: from `sigmas` deviations
    above the mean on, a step is a spike. The host waits for nothing.

    Attributes:
        state: the number of good steps, and mean and variance of the loss and of the norm; (5,) float64.
    """

    def __init__(self, sigmas: float, device: torch.device | str = "cpu") -> None:
        self.sigmas = sigmas
        self.state = torch.zeros(5, dtype=torch.float64, device=device)

    def judge(self, loss: Tensor, norm: Tensor, bad: Tensor) -> Tensor:
        """Return whether the step is a spike, a bool scalar; learn from it if it is none."""
        values = torch.stack((loss, norm)).double()
        steps, means, variances = self.state[0], self.state[1::2], self.state[2::2]
        above = values - means
        spike = ~bad & (steps >= WARM_UP) & (above > self.sigmas * variances.sqrt()).any()
        share = 1 / (steps + 1).clamp(max=MEMORY)
        learns = ~(bad | spike)
        # Finite even if the values are not: they are then not learnt from.
        above = torch.where(learns, above, 0.0)
        means += share * above
        variances += torch.where(learns, share * (above.square() * (1 - share) - variances), 0.0)
        steps += learns
        return spike


WARM_UPS = 2
"""Steps without graph in which things are compiled, tuned and allocated."""
MEASURED = 2
"""Steps after these whose host time is measured."""
HOST_SHARE = 0.7
"""A step whose host is busy for a larger share of it is captured: so near, the host sets the pace of some steps."""
GRAPH_SHARE, GRAPH_BYTES = 1.25, 200_000_000
"""A graph takes at most so much of the memory that a step takes and gives back, and so many bytes: while a step is
captured, what is freed on another stream is not used again. On two H200s it was 1.2 of it for `profile` under fsdp,
and 0.15 GB for quickstart."""


class StepGraph:
    """Capture the step after a few that are made without a graph; replay it from then on.

    Weights, optimizer state and losses are bit for bit those without it, where the kernels repeat. Batches,
    learning rate and flags are copied to tensors that the graph reads. Batches of another shape need no graph.

    Args:
        always: capture any step; False: only one whose host is busy for more than `HOST_SHARE` of it, on any rank.

    Attributes:
        captures: whether the step is captured; None while that is not decided.
        note: what was decided, and why, in one line; empty while nothing is.
    """

    def __init__(self, step: Step, *, always: bool) -> None:
        self.note = ""
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        self.captures: bool | None = None
        self._steps = 0
        self._host_s: list[float] = []
        self._total_s: list[float] = []
        if why := self._refusal():
            self._decide(False, why)
        elif always:
            self._decide(True, "as train.cuda_graph says")

    def _refusal(self) -> str:
        """Return why the step cannot be captured; empty if it can."""
        step = self._step
        if step.ranks.device.type != "cuda":
            return "there is no GPU"
        if step.ranks.world_size > 1 and (why := step.sync.not_captured()):
            return why
        if not step.runs_ahead:
            return f"the host waits for the GPU before {type(step.optimizer).__name__} makes its step"
        if not hasattr(step.decider, "captured"):
            return f"{type(step.decider).__name__} cannot be captured"
        return ""

    def _decide(self, captures: bool, why: str) -> None:
        self.captures = captures
        self.note = f"CUDA graph: {'on' if captures else 'off'}, {why}"

    def fits(self, inputs: Tensor) -> bool:
        """Return whether `replay` may be called for a batch."""
        if self._graph is None:
            return False
        # State was loaded: the graph would update what was there before.
        if self._first_state() is not self._state:
            self._graph, self._steps = None, 0
            return False
        return inputs.shape == self._inputs.shape

    def replay(self, inputs: Tensor, targets: Tensor, lr: float) -> Tensor:
        """Make a step; return its report."""
        assert self._graph is not None
        with range_("graph"):
            self._inputs.copy_(inputs)
            self._targets.copy_(targets)
            self._lr.fill_(lr)
            for group in self._step.optimizer.param_groups:
                group["lr"] = lr * group.get("lr_factor", 1.0)
            self._graph.replay()
            return self._report.clone()  # the next replay writes to it

    def prepare(self, inputs: Tensor, targets: Tensor, lr: float) -> Outcome:
        """Make a step without the graph. Capture the next, if it was the last one before that."""

        def make() -> Outcome:
            return self._step.update(self._step.accumulate(inputs, targets), lr=lr)

        if self.captures is False or self._graph is not None:
            return make()
        self._steps += 1
        if self.captures is None and self._steps > WARM_UPS:
            outcome = self._measured(make)
            if len(self._host_s) == MEASURED:
                # The host of this rank, or of another, for which all wait, is busy for too large a share.
                share = min(self._host_s) / min(self._total_s)
                captures = agree(self._step.ranks, stop=share > HOST_SHARE)
                other = ", that of another rank for more" if captures and share <= HOST_SHARE else ""
                self._decide(captures, f"the host is busy for {share:.0%} of a step{other}")
        else:
            outcome = make()
        if self.captures and self._steps >= WARM_UPS:
            if agree(self._step.ranks, stop=not self._has_room(inputs.device)):
                self._decide(False, "its graph might not fit into the memory that is left")
            else:
                self._capture(inputs, targets)
        return outcome

    def _has_room(self, device: torch.device) -> bool:
        """Return whether a graph fits beside what outlives a step. A capture that fails leaves gaps and is slow."""
        held = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held
        total = torch.cuda.get_device_properties(device).total_memory
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total - held
        needed = GRAPH_SHARE * (torch.cuda.max_memory_allocated(device) - held) + GRAPH_BYTES
        return min(free, allowed) > needed

    def _measured(self, make: Callable[[], Outcome]) -> Outcome:
        """Measure how long the host and the GPU are busy with a step."""
        torch.cuda.synchronize(self._step.ranks.device)
        started = time.perf_counter()
        outcome = make()
        self._host_s.append(time.perf_counter() - started)
        torch.cuda.synchronize(self._step.ranks.device)
        self._total_s.append(time.perf_counter() - started)
        return outcome

    def _capture(self, inputs: Tensor, targets: Tensor) -> None:
        from lmkit.kernels.launch import recording

        step, groups = self._step, self._step.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        step.sync.end_step()  # a graph cannot wait for what was launched before it
        self._inputs, self._targets = inputs.clone(), targets.clone()
        self._lr = torch.zeros((), dtype=torch.float64, device=inputs.device)
        graph = torch.cuda.CUDAGraph()
        free_before_leaving(graph)
        generator = torch.cuda.default_generators[inputs.device.index]
        before = generator.clone_state()
        try:
            # "thread_local": the thread that writes a checkpoint may go on.
            capture = recording(graph, capture_error_mode="thread_local")
            with step.decider.captured() as self._launches, capture:
                loss = step.accumulate(self._inputs, self._targets)
                self._report = step._update(loss, step.reduce(), self._lr)
                step.sync.end_step()  # nothing may be in flight at the end of a graph
            self._graph, self._state = graph, self._first_state()
        except RuntimeError as error:
            self._decide(False, f"the step cannot be captured: {str(error).partition(chr(10))[0]}")
        if self._graph is None:  # after the handler, whose error keeps the tensors of the capture alive
            generator.graphsafe_set_state(before)  # PyTorch leaves it in the state of a capture
            step.sync.reset()
            step.optimizer.zero_grad(set_to_none=True)
        for group, lr in zip(groups, rates, strict=True):
            group["lr"] = lr
        if step.ranks.world_size > 1 and agree(step.ranks, stop=self._graph is None) and self._graph:
            self._graph = None
            self._decide(False, "another rank cannot capture its step")
        if self._graph is None:
            gc.collect()  # the error and its frames hold one another
            graph.reset()
            torch.cuda.empty_cache()  # what the capture took, the steps without it need

    def _first_state(self) -> Any:
        return next(iter(self._step.optimizer.state.values()), None)
