"""`lmkit bench ddp`: every strategy on the same model, interleaved, against one GPU and against no communication.

Definitions, all per round and then summarised by medians with a 95% interval over rounds:

- scaling: step time of one rank alone / step time with W ranks (weak scaling: the same rows per rank);
- exposed communication: step time - step time of the same step without communication;
- communication alone: the time of a step's reduction with nothing beside it; what of it is not exposed was hidden;
- without communication (`none`) each rank is as fast as its GPU and host: no strategy is faster than the slowest;
- host time: how long rank 0's CPU is busy with a step on a GPU that has nothing else to do;
- host ahead: how long a GPU still worked when its host had handed over a sample's last step, on the rank with the
  least; near zero, the host was measured;
- link bytes: see `lmkit.parallel.collectives`; "expected" is the formula over the model's parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lmkit.bench.ddp_clock import SteadyStateClock, without_garbage_collection
from lmkit.bench.ddp_contenders import (
    SOLO,
    Contender,
    DdpCase,
    baseline_of,
    begin_account,
    contender,
    parse_name,
)
from lmkit.bench.journal import Journal
from lmkit.measure.memory import claim_workspaces, release_memory
from lmkit.measure.progress import Progress
from lmkit.measure.statistics import median, paired_ratio, spread
from lmkit.measure.timing import time_variants
from lmkit.parallel.collectives import agree
from lmkit.parallel.ranks import Ranks

SETTLE_S = 1.5
"""How long all GPUs work, untimed, before the first sample and after one that all but one rested through. Their
power had fallen, and the limit on it answers late: on H200s the first samples (0.7 s) were 1% shorter than the rest,
the next one 4% longer."""


class Sample(NamedTuple):
    """What one rank measured.

    Attributes:
        step_ms: ms per step; of what one rank does alone 0 or next to it on the others.
        ahead_ms: as in `SteadyStateClock`; NaN on a CPU.
    """

    step_ms: float
    ahead_ms: float


Samples = dict[str, list[list[Sample]]]
"""Contender -> round -> rank."""

LADDER = ("one rank", "none", "naive", "flat", "overlap", "bucketed", "torch_ddp", "zero1")
RIVALS = ("torch_ddp default", "torch_ddp static", "torch_ddp + ZeRO")


def ddp_rows(
    case: DdpCase,
    names: Sequence[str],
    ranks: Ranks,
    *,
    rounds: int = 10,
    steps_per_sample: int = 8,
    warmup: int = 3,
    max_seconds: float = math.inf,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> list[dict[str, Any]]:
    """Measure contenders that fit into memory together; every rank calls this, every rank gets the rows.

    Args:
        names: see `ddp_contenders.contender`. "one rank" and "none" give the others their baselines.
        rounds: interleaved samples per contender; with fewer than 6, `scaling_low` and `scaling_high` are the least
            and the greatest ratio, and no 95% interval.
        warmup: steps before the first sample; at least 3, the first of which settles the bucket order.
        max_seconds: of timing; no further round begins on any rank when they are over on one.
        journal: where the first rank keeps the rows of the rounds so far.

    Returns:
        One row per contender, with its samples; a contender that ran out of memory has `status` "out of memory".

    Raises:
        UsageError: no contender of that name.
    """
    for name in names:
        parse_name(name)  # a misspelt one is told before the first is measured
    claim_workspaces(ranks.device)
    contenders: dict[str, Contender | None] = {}
    facts: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        if progress is not None and ranks.is_first:
            progress("building", number, len(names))
        built = _build_and_measure(name, case, ranks, max(3, warmup))
        if built is None:
            facts[name] = {"status": "out of memory"}
        else:
            contenders[name], facts[name] = built

    def rows_of(samples: Samples) -> list[dict[str, Any]]:
        rows = [
            {"case": case.name, "contender": name, "world_size": 1 if name in SOLO else ranks.world_size}
            | facts[name]
            | _numbers(name, case, ranks, samples)
            for name in names
        ]
        _add_memory_overhead(rows)
        return rows

    def keep(samples: Samples) -> None:
        if journal is not None and ranks.is_first:
            journal.replace(rows_of(samples))

    samples: Samples = {}
    if contenders:
        with without_garbage_collection():
            samples = _time_together(contenders, ranks, rounds, steps_per_sample, max_seconds, progress, keep)
    rows = rows_of(samples)
    contenders.clear()
    release_memory(ranks.device)
    return rows


def _build_and_measure(
    name: str, case: DdpCase, ranks: Ranks, warmup: int
) -> tuple[Contender | None, dict[str, Any]] | None:
    """Build a contender, run its first steps, note memory and traffic; None if it does not fit on some rank."""
    on_gpu = ranks.device.type == "cuda"
    mine = ranks.is_first or name not in SOLO
    built: Contender | None = None
    facts: dict[str, Any] = {"status": "ok"}
    full = False
    try:
        begin_account(ranks)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(ranks.device)
            start = torch.cuda.memory_allocated(ranks.device)
        if mine:
            built = contender(name, case, ranks)
            for _ in range(warmup):
                built.sync.traffic.reset()
                loss = built.step()
            facts |= _traffic_facts(built, ranks)
            facts["loss"] = float(loss)
        if on_gpu:
            torch.cuda.synchronize(ranks.device)
            facts["peak_bytes"] = torch.cuda.max_memory_allocated(ranks.device) - start
            facts["host_ms"] = _host_ms(built, ranks) if built is not None else None
        facts["communication_alone_ms"] = _communication_alone(name, built, ranks) if mine else None
    except torch.OutOfMemoryError:
        full = True
    if agree(ranks, stop=full).stop:
        del built
        release_memory(ranks.device)
        return None
    return built, _from_first_rank(facts, ranks)


def _traffic_facts(built: Contender, ranks: Ranks) -> dict[str, Any]:
    traffic = built.sync.traffic
    facts: dict[str, Any] = {
        "calls_per_step": traffic.calls,
        "payload_bytes": traffic.payload_bytes,
        "link_bytes": traffic.link_bytes,
        "parameter_bytes": sum(p.nbytes for p in built.model.parameters() if p.requires_grad),
    }
    if built.sync.gather is not None:
        facts["gather"] = built.sync.gather
    return facts


def _host_ms(built: Contender, ranks: Ranks, repeats: int = 5) -> float:
    """Median ms until a step has been handed to an idle GPU (whose queue takes thousands of launches)."""
    samples = []
    with without_garbage_collection():
        for _ in range(repeats):
            torch.cuda.synchronize(ranks.device)
            started = time.perf_counter()
            built.step()
            samples.append((time.perf_counter() - started) * 1e3)
    torch.cuda.synchronize(ranks.device)
    return median(samples)


def _communication_alone(name: str, built: Contender | None, ranks: Ranks, repeats: int = 5) -> float | None:
    """Median ms of reducing gradients that are all there already; None where it cannot be had apart."""
    if (
        built is None
        or name in (*SOLO, "none")
        or not name.startswith(("naive", "flat", "overlap", "bucketed"))
    ):
        return None
    built.backward()
    clock = SteadyStateClock(ranks.device, 1)
    with without_garbage_collection():
        samples = [
            clock.sample_ms(built.communicate, 1, before=[lambda: agree(ranks)]) for _ in range(repeats)
        ]
    built.optimizer.zero_grad(set_to_none=True)
    return median(samples)


def _time_together(
    contenders: dict[str, Contender | None],
    ranks: Ranks,
    rounds: int,
    steps_per_sample: int,
    max_seconds: float,
    progress: Progress | None,
    keep: Callable[[Samples], None],
) -> Samples:
    """Interleaved samples; `keep` is called with those so far after each round."""
    deadline = time.monotonic() + max_seconds
    samples: Samples = {name: [] for name in contenders}
    samples_before = count()
    clock = SteadyStateClock(ranks.device, steps_per_sample)
    turns: list[str] = []  # contenders in the order of this round
    may_rest = ranks.device.type == "cuda" and ranks.world_size > 1
    rested = may_rest  # while the last contender was built

    def prepare(name: str) -> None:
        nonlocal rested
        if progress is not None and ranks.is_first:
            progress("timing", next(samples_before), rounds * len(contenders))
        built = contenders[name]
        if rested and name not in SOLO:
            assert built is not None
            _settle(built, ranks, steps_per_sample)
        rested = may_rest and name in SOLO
        turns.append(name)
        agree(ranks)

    def after_round(own: dict[str, float]) -> bool:
        ahead = dict(zip(turns, clock.ahead_ms, strict=True)) if clock.ahead_ms else {}
        turns.clear()
        clock.ahead_ms.clear()
        mine = torch.tensor(
            [(own[name], ahead.get(name, math.nan)) for name in contenders], dtype=torch.float64
        )
        of_rank = [mine.clone() for _ in range(ranks.world_size)]
        if ranks.world_size > 1:
            dist.all_gather(of_rank, mine)
        for number, name in enumerate(contenders):
            samples[name].append([Sample(*each[number].tolist()) for each in of_rank])
        keep(samples)
        return agree(ranks, stop=time.monotonic() > deadline).stop

    time_variants(
        {name: (built.step if built is not None else _wait) for name, built in contenders.items()},
        device=ranks.device,
        repeats=rounds,
        warmup=0,
        prepare={name: partial(prepare, name) for name in contenders},
        clock=clock,
        after_round=after_round,
    )
    return samples


def _settle(built: Contender, ranks: Ranks, steps: int) -> None:
    """`SETTLE_S` of steps; collective."""
    agree(ranks)  # or the time of those who rested would run out while the first is still measured
    until = time.perf_counter() + SETTLE_S
    while not agree(ranks, stop=time.perf_counter() > until).stop:
        for _ in range(steps):
            built.step()
        torch.cuda.synchronize(ranks.device)


def _wait() -> None:
    """The other ranks' part in what one rank does alone."""


def _numbers(name: str, case: DdpCase, ranks: Ranks, samples: Samples) -> dict[str, Any]:
    if name not in samples:
        return {}
    own = _slowest(samples[name])
    summary = spread(own)
    world_size = 1 if name in SOLO else ranks.world_size
    numbers: dict[str, Any] = {
        "step_ms": summary.median,
        "p10_ms": summary.p10,
        "p90_ms": summary.p90,
        "tokens_per_s": world_size * case.tokens_per_step / summary.median * 1e3,
        "samples_ms": own,
    }
    if name == "none":  # with all others, ranks wait for one another
        numbers["rank_ms"] = [
            median([sample.step_ms for sample in of_rank]) for of_rank in zip(*samples[name], strict=True)
        ]
    if ranks.device.type == "cuda":
        taking_part = slice(1 if name in SOLO else None)
        numbers["ahead_ms"] = median(
            [min(sample.ahead_ms for sample in of_rank[taking_part]) for of_rank in samples[name]]
        )
    baseline = baseline_of(name)
    if baseline in samples and name not in SOLO:
        ratio = paired_ratio(own, _slowest(samples[baseline]))
        numbers |= {"scaling": ratio.speedup, "scaling_low": ratio.low, "scaling_high": ratio.high}
    if "none" in samples and name not in (*SOLO, "none") and baseline_of(name) == SOLO[0]:
        exposed = [mine - bare for mine, bare in zip(own, _slowest(samples["none"]), strict=True)]
        numbers |= {"exposed_ms": median(exposed), "exposed_share": median(exposed) / summary.median}
    return numbers


def _slowest(rounds: Sequence[Sequence[Sample]]) -> list[float]:
    """The slowest rank's time of each round: a step of all ends when its does."""
    return [max(sample.step_ms for sample in of_rank) for of_rank in rounds]


def _add_memory_overhead(rows: list[dict[str, Any]]) -> None:
    """Peak memory over that of one rank with the same weights."""
    peaks = {row["contender"]: row.get("peak_bytes") for row in rows}
    for row in rows:
        alone = peaks.get(baseline_of(row["contender"]))
        if alone and row.get("peak_bytes"):
            row["peak_overhead"] = row["peak_bytes"] / alone - 1.0
        if row.get("parameter_bytes") and row["world_size"] > 1:
            row["expected_link_bytes"] = expected_link_bytes(
                row["contender"], row["parameter_bytes"], row["world_size"]
            )


def expected_link_bytes(name: str, parameter_bytes: int, world_size: int) -> float:
    """The formula: what a rank must send per step, without flags and padding.

    An all-reduce of the gradients costs 2 (W-1)/W of their bytes, and so do reduce-scatter and all-gather together
    (of gradients and weights). Gradients of fp32 weights that travel as bf16 count half. PyTorch's ZeRO-1 reduces
    whole gradients everywhere and then broadcasts the weights, which costs (W-1)/W of their bytes on top.
    """
    if name == "none":
        return 0.0
    strategy, detail, options = parse_name(name)
    gradients = 0.5 if options.reduce_dtype == "bf16" and options.weights == "fp32" else 1.0
    weights = 1.0 if strategy == "zero1" else gradients  # the second half of an all-reduce
    broadcast = 1.0 if detail == "+ ZeRO" else 0.0
    return (gradients + weights + broadcast) * (world_size - 1) / world_size * parameter_bytes


def compare(rows: Sequence[dict[str, Any]], candidate: str, baseline: str) -> dict[str, Any]:
    """How much faster `candidate` is than `baseline`: median of the paired ratios and its 95% interval."""
    by_name = {row["contender"]: row for row in rows}
    own, other = by_name[candidate].get("samples_ms"), by_name[baseline].get("samples_ms")
    if own is None or other is None:
        return {"candidate": candidate, "baseline": baseline, "ratio": math.nan}
    ratio = paired_ratio(own, other)
    return {
        "candidate": candidate,
        "baseline": baseline,
        "ratio": ratio.speedup,
        "low": ratio.low,
        "high": ratio.high,
        "verdict": ratio.verdict,
    }


def _from_first_rank(facts: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Rank 0's facts on every rank, so that all ranks return the same rows."""
    if ranks.world_size == 1:
        return facts
    carrier: list[Any] = [facts]
    dist.broadcast_object_list(carrier, src=0, device=torch.device("cpu"))
    return carrier[0]
