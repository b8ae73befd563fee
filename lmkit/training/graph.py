"""Capture a whole training step in a CUDA graph: the host then launches one graph, not a thousand kernels."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lmkit.core.ranges import range_
from lmkit.parallel.collectives import agree
from lmkit.parallel.ranks import free_before_leaving

if TYPE_CHECKING:
    from lmkit.training.step import Outcome, Step

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

    A graph does the same operations in the same order on the same tensors: weights, optimizer state and losses are
    bit for bit those without it (where the kernels themselves are deterministic). Batches, learning rate and flags
    are copied to tensors that the graph reads. Batches of another shape are worked on without the graph.

    Args:
        always: capture any step; False: only one whose host is busy for more than `HOST_SHARE` of it, on any rank.

    Attributes:
        note: what was decided, and why, in one line; empty while nothing is.
    """

    def __init__(self, step: Step, *, always: bool) -> None:
        self.note = ""
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures: bool | None = None  # not decided
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
        self._captures = captures
        self.note = f"CUDA graph: {'on' if captures else 'off'}, {why}"

    @property
    def may_capture(self) -> bool:
        """Whether the step is captured, or may be after a few more."""
        return self._captures is not False

    def fits(self, inputs: torch.Tensor) -> bool:
        """Return whether `replay` may be called for a batch."""
        if self._graph is None:
            return False
        # State was loaded: the graph would update what was there before.
        if self._first_state() is not self._state:
            self._graph, self._steps = None, 0
            return False
        return inputs.shape == self._inputs.shape

    def replay(self, inputs: torch.Tensor, targets: torch.Tensor, lr: float) -> torch.Tensor:
        """Make a step; return its report."""
        assert self._graph is not None
        with range_("graph"):
            self._inputs.copy_(inputs)
            self._targets.copy_(targets)
            self._lr.fill_(lr)
            self._set_lr(lr)
            self._graph.replay()
            return self._report.clone()  # the next replay writes to it

    def prepare(self, make: Callable[[], Outcome], inputs: torch.Tensor, targets: torch.Tensor) -> Outcome:
        """Make a step without the graph. Capture the next, if it was the last one before that."""
        if self._captures is False or self._graph is not None:
            return make()
        self._steps += 1
        if self._captures is None and self._steps > WARM_UPS:
            outcome = self._measured(make)
            if len(self._host_s) == MEASURED:
                self._decide_by_host(min(self._host_s) / min(self._total_s))
        else:
            outcome = make()
        if self._captures and self._steps >= WARM_UPS:
            if agree(self._step.ranks, stop=not self._has_room(inputs.device)):
                self._decide(False, "its graph might not fit into the memory that is left")
            else:
                self._capture(inputs, targets)
        return outcome

    def _decide_by_host(self, share: float) -> None:
        """Capture if the host of this rank or of another, for which all wait, is busy for too large a share."""
        is_busy = share > HOST_SHARE
        captures = agree(self._step.ranks, stop=is_busy)
        other = ", that of another rank for more" if captures and not is_busy else ""
        self._decide(captures, f"the host is busy for {share:.0%} of a step{other}")

    def _has_room(self, device: torch.device) -> bool:
        """Return whether a graph fits beside what outlives a step. A capture that fails leaves gaps and is slow.

        Args:
            device: with its index, which that of the ranks may lack.
        """
        held = torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held
        total = torch.cuda.get_device_properties(device).total_memory
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total - held
        needed = GRAPH_SHARE * (torch.cuda.max_memory_allocated(device) - held) + GRAPH_BYTES
        return min(free, allowed) > needed

    def _measured(self, make: Callable[[], Outcome]) -> Outcome:
        """Measure how long the host and the GPU are busy with a step; waits for the GPU."""
        torch.cuda.synchronize(self._step.ranks.device)
        started = time.perf_counter()
        outcome = make()
        self._host_s.append(time.perf_counter() - started)
        torch.cuda.synchronize(self._step.ranks.device)
        self._total_s.append(time.perf_counter() - started)
        return outcome

    def _capture(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        from lmkit.kernels.launch import recording

        step, lr = self._step, self._step.optimizer.param_groups[0]["lr"]
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
                self._report = step.launch(self._inputs, self._targets, self._lr)
            self._graph, self._state = graph, self._first_state()
        except RuntimeError as error:
            self._decide(False, f"the step cannot be captured: {str(error).partition(chr(10))[0]}")
        if self._graph is None:  # after the handler, whose error keeps the tensors of the capture alive
            generator.graphsafe_set_state(before)  # PyTorch leaves it in the state of a capture
            step.sync.reset()
            step.optimizer.zero_grad(set_to_none=True)
        self._set_lr(lr)
        if step.ranks.world_size > 1 and agree(step.ranks, stop=self._graph is None) and self._graph:
            self._graph = None
            self._decide(False, "another rank cannot capture its step")
        if self._graph is None:
            gc.collect()  # the error and its frames hold one another
            graph.reset()
            torch.cuda.empty_cache()  # what the capture took, the steps without it need

    def _set_lr(self, lr: float) -> None:
        for group in self._step.optimizer.param_groups:
            group["lr"] = lr

    def _first_state(self) -> Any:
        return next(iter(self._step.optimizer.state.values()), None)
