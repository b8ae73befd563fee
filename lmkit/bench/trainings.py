"""The engine of `bench model`, `step`, `ddp`, `optimizer` and `lm-matrix`, and of `bench generate`.

A bench describes its variants (`Variant`). `measure` builds each and checks its first steps, times the right ones in
turns, and checks them again. A variant that fails, does not fit or is wrong becomes a row on every rank. The bench
then computes the figures of the rows from the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lmkit.bench.context import Context
from lmkit.bench.failures import failure_on_any_rank_is_a_row, time_what_fits
from lmkit.bench.harness import add_figures, mfu_fields, right_after_timing, time_fields
from lmkit.bench.turns import Samples, samples_in_turns, slowest
from lmkit.measure.limits import Limits
from lmkit.measure.memory import GB, memory_in_use, release_memory, track_peak
from lmkit.measure.timing import Clock, SteadyStateClock

if TYPE_CHECKING:
    import torch

    from lmkit.parallel.ranks import Ranks


def _nothing(training: Any) -> dict[str, Any]:
    return {}


@dataclass
class Variant:
    """A training, or a model that writes, that a bench times.

    Attributes:
        row: what identifies it, and status "ok"; a row with another status is not built.
        make: builds the training; without collectives.
        judge: makes its first steps; returns fields with a status.
        more: returns what is measured of a right training before it is timed.
        prepare: called before each sample, untimed.
        run: makes one step, or the part of a step that is timed.
        check: returns status and detail if the training is wrong after it was timed, else {}.
    """

    row: dict[str, Any]
    make: Callable[[], Any]
    judge: Callable[[Any], dict[str, Any]] = _nothing
    more: Callable[[Any], dict[str, Any]] = _nothing
    prepare: Callable[[Any], object] = _nothing
    run: Callable[[Any], object] = lambda training: training.run()
    check: Callable[[Any], dict[str, Any]] = _nothing


def measure_figures(
    variants: Mapping[str, Variant],
    context: Context,
    limits: Limits | None,
    figures: Callable[[str, list[float]], dict[str, Any]],
    **options: Any,
) -> tuple[dict[str, dict[str, Any]], dict[str, list[float]]]:
    """Measure variants, and add figures to their rows.

    Args:
        figures: returns the figures of a variant, from the samples of the slowest rank.
        options: of `measure`.

    Returns:
        The rows, and the samples of rows whose figures are believed.
    """
    samples = measure(variants, context, **options)
    rows = {name: variant.row for name, variant in variants.items()}
    believed = {}
    for name, rounds in samples.items():
        samples_ms = slowest(rounds)
        if add_figures(rows[name], limits, partial(figures, name, samples_ms)):
            believed[name] = samples_ms
    return rows, believed


def measure(
    variants: Mapping[str, Variant],
    context: Context,
    *,
    clock: Clock | None = None,
    stage: str = "",
    settle: bool = False,
    **turns: Any,
) -> Samples:
    """Measure variants that fit into memory together; return the samples of the right ones. Collective.

    Args:
        clock: None: the options' `steps_per_sample` steps in steady state.
        settle: make untimed steps before the first sample on GPUs.
        stage, turns: of `samples_in_turns`.
    """
    steps = 0 if clock is not None else context.options.steps_per_sample
    turns |= {"stage": stage, "settled": steps if settle else 0}
    clock = clock or SteadyStateClock(context.device, steps)
    rows = {name: variant.row for name, variant in variants.items()}
    built: dict[str, Any] = {}
    for number, (name, variant) in enumerate(variants.items()):
        if stage:
            context.progress(f"{stage}, building", number, len(variants))
        _begin(name, variant, context, built)

    def time_together(left: Mapping[str, Any], turn: Callable[[str], object]) -> Samples:
        runs = {name: partial(variants[name].run, training) for name, training in left.items()}
        prepare = {name: partial(variants[name].prepare, training) for name, training in left.items()}
        return samples_in_turns(runs, context, turn, clock, prepare=prepare, **turns)

    guard = partial(failure_on_any_rank_is_a_row, context=context)
    samples = time_what_fits(built, rows, guard, time_together)
    samples = right_after_timing(rows, samples, lambda name: variants[name].check(built[name]), context)
    built.clear()
    release_memory(context.device)
    return samples


def _begin(name: str, variant: Variant, context: Context, built: dict[str, Any]) -> None:
    """Build a variant, check its first steps, and add it to `built`; its row is then the same on all ranks."""
    import torch
    import torch.distributed as dist

    row, training = variant.row, None
    note = f", with {len(built)} other trainings in memory" if built else ""
    if row["status"] != "ok":
        return
    with failure_on_any_rank_is_a_row(row, context, note):
        training = variant.make()
    if row["status"] == "ok":  # steps are collective: they begin where all ranks have built the variant
        with failure_on_any_rank_is_a_row(row, context, note):
            row |= variant.judge(training)
            if row["status"] == "ok":
                row |= variant.more(training)
    if row["status"] != "ok":
        del training
        release_memory(context.device)
        return
    if context.ranks.world_size > 1:
        of_first: list[Any] = [row]
        dist.broadcast_object_list(of_first, src=0, device=torch.device("cpu"))
        row |= of_first[0]
    built[name] = training


class Memory:
    """Measure the memory of trainings that are alive at once, some of which share their weights."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: Counter[str] = Counter()
        self._others = 0

    def begin(self, weights: str) -> None:
        """Note what all but the trainings of these weights use, before another one is built."""
        self._others = memory_in_use(self._device) - self._own[weights]

    def peak_gb(self, weights: str, training: Any, run: Callable[[], object]) -> float:
        """Run a step; return the most that the trainings of these weights need, in GB.

        On a CPU the resident set would count what earlier trainings left in the allocator, so weights and optimizer
        state are added up instead, beside what grows during the step.
        """
        self._own[weights] = own = (
            memory_in_use(self._device) - self._others if self._device.type == "cuda" else _bytes_of(training)
        )
        with track_peak(self._device) as peak:
            run()
        return (own + peak.extra_bytes) / GB


def _bytes_of(training: Any) -> int:
    import torch

    state = [value for slots in training.optimizer.state.values() for value in slots.values()]
    tensors = [*training.model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    return sum(tensor.nbytes for tensor in tensors)


def release_freed(ranks: Ranks) -> None:
    """Free the buffers of finished collectives, which would count as memory of another training. Collective."""
    import torch

    from lmkit.parallel.ranks import release_collectives

    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
        release_collectives(ranks)
        torch.empty(1, device=ranks.device)
    release_memory(ranks.device)


def speed_fields(
    samples_ms: Sequence[float],
    context: Context,
    limits: Limits | None,
    *,
    tokens: int,
    flops: float,
    precision: str,
    ranks: int = 1,
    name: str = "median_ms",
) -> dict[str, Any]:
    """Return times, tokens/s and the MFU of a device.

    Args:
        tokens: of a step of all ranks.
        flops: of a token.
        name: the key of the median.
    """
    fields = time_fields(samples_ms, name)
    tokens_per_s = tokens / (fields[name] * 1e-3)
    mfu = mfu_fields(tokens_per_s * flops / ranks, context.device, precision, limits)
    return fields | {"tokens_per_s": tokens_per_s, **mfu}
