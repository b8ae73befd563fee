"""`lmkit bench ddp`: every gradient strategy on one model, interleaved, against one GPU and against no communication.

What is timed is the step that `lmkit train` runs. Definitions, all per round and then summarized by medians with a
95% interval over rounds:

- scaling: step time of one rank alone / step time with W ranks (weak scaling: the same rows per rank);
- exposed communication: step time - step time of the same step without communication (`none`);
- communication alone: the time of a step's reduction with no compute at the same time; what is not exposed was
  hidden;
- host time: how long rank 0's CPU is busy with a step on an idle GPU;
- host ahead: how long a GPU still worked after its host had queued a sample's last step, on the rank with the least;
  near zero, the host was measured;
- link bytes: see `Traffic`; "expected" is the formula over the model's parameters.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from lmkit.bench.harness import (
    Context,
    FlagNames,
    not_enough_memory,
    out_of_memory_is_a_row,
    without_garbage_collection,
)
from lmkit.bench.report import Summary, grouped
from lmkit.errors import UsageError, did_you_mean
from lmkit.measure.memory import claim_workspaces, release_memory
from lmkit.measure.plots import grouped_bars, line_plot, of_rate, of_samples, of_time, timeline
from lmkit.measure.ranges import quietly
from lmkit.measure.statistics import FEWEST_PAIRS, clip, median, overlap, paired_ratio, spread, total, union
from lmkit.measure.tables import Column, Rows, markdown_table
from lmkit.measure.timing import SteadyStateClock, time_variants
from lmkit.recipe.tables import (
    ModelConfig,
    ParallelConfig,
    PositiveFloat,
    PositiveInt,
    StrategyVariant,
    Table,
)
from lmkit.registry import BENCHES, STRATEGIES

if TYPE_CHECKING:
    import torch

    from lmkit.parallel.protocol import GradientSync
    from lmkit.parallel.ranks import Ranks
    from lmkit.training.setup import TrainingStep

SOLO = ("one rank", "one rank, bf16 weights")
"""Variants that run on rank 0 alone, while the other ranks wait."""
TORCH_VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"gradient_as_bucket_view": False},
    "static": {"static_graph": True},
    "+ ZeRO": {},
}
TORCH_BUCKET_MB = 25.0  # PyTorch's default
SETTLE_S = 1.5
"""How long all GPUs work, untimed, before the first sample and after a sample of one rank: the power of those that
rested has fallen, and its limit answers late, so that the next samples would be too short and then too long."""
TRACE_WARMUP = 5
TRACE_STEPS = 16  # the first traced steps show a host that is not ahead of its GPU yet


class RanksOptions(Table):
    """The keys that `bench ddp` and `bench optimizer` share; the model comes from [model]."""

    rows: PositiveInt = 4
    """Sequences per rank and step."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the matrix products."""
    variants: Annotated[tuple[StrategyVariant, ...], FlagNames(("--contenders",))] = ()
    """Strategies, with options ("bucketed 100 MB", "zero1 bf16"), and rivals; empty: all."""
    rounds: PositiveInt = 10
    """Interleaved samples of each variant; fewer than 6 give no interval."""
    steps_per_sample: PositiveInt = 4
    """Training steps that one sample times; half as many, untimed, lead into it."""


class Options(RanksOptions):
    """`[bench.ddp]`."""

    bucket_sweep_mb: tuple[PositiveFloat, ...] = (1, 10, 100, 1000)
    """Bucket sizes in MiB to compare; empty: no sweep."""
    max_seconds: PositiveFloat = 600.0
    """Seconds of timing, of the variants and again of the bucket sizes; whole rounds only."""


# Variants


@dataclass(frozen=True)
class Case:
    """A model and what one rank feeds it per step."""

    name: str
    model: ModelConfig
    rows: int
    precision: str
    parallel: ParallelConfig

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one rank."""
        return self.rows * self.model.context_length


def case_of(recipe: Any, options: RanksOptions, bench: str) -> Case:
    """Return the recipe's model with its vocabulary.

    Raises:
        UsageError: there is no [model], or nothing says how large the vocabulary is.
    """
    from lmkit.recipe.load import required

    command = f"bench {bench.replace('_', '-')}"
    model = required(recipe.model, "model", command=command)
    if model.vocab_size is None:
        if recipe.tokenizer is None:
            raise UsageError(
                "bench.no_vocabulary",
                f"model.vocab_size: `lmkit {command}` has no tokenizer that could give it",
                hint="for example --set model.vocab_size=10000",
            )
        model = model.model_copy(update={"vocab_size": recipe.tokenizer.vocab_size})
    return Case(recipe.run.name, model, options.rows, options.precision, recipe.parallel)


def check(recipe: Any) -> None:
    """Refuse unknown variants and a model without a vocabulary before ranks start."""
    options = recipe.bench.table("ddp")
    case_of(recipe, options, "ddp")
    for name in options.variants:
        parse_name(name, recipe.parallel)


def ladder() -> tuple[str, ...]:
    """Return the variants that are measured by default: one rank, every strategy, PyTorch's rivals."""
    return ("one rank", *STRATEGIES.names, *(f"torch_ddp {variant}" for variant in TORCH_VARIANTS))


def baseline_of(name: str) -> str:
    """Return the variant of one rank with the same weights."""
    return SOLO[1] if "bf16" in name.replace("bf16 wire", "").split() else SOLO[0]


def is_sharded(name: str) -> bool:
    """Return whether the ranks of a variant hold a share of the optimizer state each."""
    strategy, _, detail = name.partition(" ")
    known = strategy in STRATEGIES.names and name not in SOLO
    return detail == "+ ZeRO" or (known and "optimizer" in STRATEGIES.facts(strategy).shards)


def _is_own(name: str) -> bool:
    """Return whether a variant is a strategy of lmkit that synchronizes."""
    strategy = name.partition(" ")[0]
    return (
        name not in (*SOLO, "none") and strategy in STRATEGIES.names and not STRATEGIES.facts(strategy).rival
    )


def parse_name(name: str, parallel: ParallelConfig, bench: str = "ddp") -> tuple[ParallelConfig, str]:
    """Return the [parallel] table of a variant, and the words after its strategy.

    Names: "one rank", "one rank, bf16 weights", a strategy, a strategy with options ("bucketed 100 MB", "bucketed
    bf16 wire", "zero1 bf16", "zero1 bf16 collective"), or a rival of PyTorch's: "torch_ddp" (gradients as views of
    buckets of 25 MiB), "torch_ddp default", "torch_ddp static", "torch_ddp + ZeRO".

    Args:
        parallel: the recipe's; a variant without a size has its `bucket_mb`.
        bench: whose table names the variant, for the error.

    Raises:
        UsageError: no such variant.
    """
    plain = ParallelConfig(bucket_mb=parallel.bucket_mb)
    if name in SOLO:
        strategy, weights = ("zero1", "bf16") if name == SOLO[1] else ("none", "fp32")
        return plain.model_copy(update={"strategy": strategy, "weights": weights}), ""
    strategy, _, detail = name.partition(" ")
    if strategy == "torch_ddp" and detail in TORCH_VARIANTS:
        options = {"bucket_mb": TORCH_BUCKET_MB, "options": TORCH_VARIANTS[detail]}
        return plain.model_copy(update={"strategy": strategy, **options}), detail
    named = _named_options(detail)
    uses = STRATEGIES.facts(strategy).uses if strategy in STRATEGIES.names else ()
    if strategy not in STRATEGIES.names or named is None or not named.keys() <= set(uses):
        known = (*SOLO, *STRATEGIES.names, *(f"torch_ddp {variant}" for variant in TORCH_VARIANTS))
        raise UsageError(
            "bench.unknown_variant",
            f"bench.{bench}.variants: there is no {name!r}{did_you_mean(name, known)}",
            hint=f"{'; '.join(known)}; or with options that the strategy uses: bucketed 100 MB; zero1 bf16; "
            "flat bf16 wire",
        )
    size = {"bucket_mb": TORCH_BUCKET_MB} if strategy == "torch_ddp" else {}
    return plain.model_copy(update={"strategy": strategy, **size, **named}), detail


_SIZE = re.compile(r"\d*\.?\d+(e[+-]?\d+)?")


def _named_options(detail: str) -> dict[str, Any] | None:
    """Return the keys of [parallel] that "100 MB bf16 wire" names; None if it says something else, or one twice."""
    words = detail.split()
    named: dict[str, Any] = {}
    while words:
        said: dict[str, Any]
        match words:
            case ["bf16", "wire", *words]:
                said = {"reduce_dtype": "bf16"}
            case ["bf16", *words]:
                said = {"weights": "bf16"}
            case ["collective", *words]:
                said = {"gather": "collective"}
            case [number, "MB", *words] if _SIZE.fullmatch(number) and 0 < float(number) < math.inf:
                said = {"bucket_mb": float(number)}
            case _:
                return None
        if said.keys() & named.keys():
            return None
        named |= said
    return named


class Loop:
    """The training loop of one variant: the step that `lmkit train` runs, on random tokens."""

    def __init__(self, name: str, case: Case, ranks: Ranks) -> None:
        from lmkit.data.batches import RandomTokens
        from lmkit.parallel.ranks import Ranks as Place
        from lmkit.training.setup import TrainingStep

        parallel, detail = parse_name(name, case.parallel)
        self.ranks = ranks = Place(device=ranks.device) if name in SOLO else ranks
        assert case.model.vocab_size is not None
        batches = RandomTokens(
            case.model.vocab_size,
            batch_size=case.rows * ranks.world_size,
            context_length=case.model.context_length,
            seed=0,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        make = _redundancy_free_adamw if detail == "+ ZeRO" else None
        self.training: TrainingStep = TrainingStep(
            case.model, ranks, batches, precision=case.precision, parallel=parallel, make_optimizer=make
        )
        self.sync: GradientSync = self.training.step.sync
        self.optimizer = self.training.optimizer
        self.step = self.training.run
        if detail == "+ ZeRO":
            self.optimizer.register_step_post_hook(partial(_count_broadcasts, self.sync.traffic))


def _redundancy_free_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make PyTorch's ZeRO-1: whole parameters dealt out to the ranks, broadcast after the step."""
    import torch

    # Its package compiles deprecated TorchScript when it is imported, with a warning.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        [parameter for group in groups for parameter in group["params"]],
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        fused=True,
        weight_decay=0.1,
        lr=3e-4,
    )


def _count_broadcasts(traffic: Any, optimizer: Any, *_: Any) -> None:
    """Count what PyTorch's ZeRO-1 sent in its step: the parameters dealt to each rank, one tensor a rank."""
    for of_device in optimizer._buckets:
        for of_rank in of_device:
            traffic.count_broadcast(of_rank.nbytes, optimizer.world_size)


def begin_account(ranks: Ranks) -> None:
    """Empty the allocator before a variant is built whose memory counts. Collective."""
    import torch

    from lmkit.parallel.ranks import release_collectives

    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
        release_collectives(ranks)
    release_memory(ranks.device)


# Measuring


class Sample(NamedTuple):
    """What one rank measured.

    Attributes:
        step_ms: ms per step; 0 or almost on ranks that only wait.
        ahead_ms: as in `SteadyStateClock`; NaN on a CPU.
    """

    step_ms: float
    ahead_ms: float


Samples = dict[str, list[list[Sample]]]
"""Variant -> round -> rank."""


@BENCHES.register(
    "ddp",
    order=4,
    help="Gradient synchronization: all strategies, and what they cost.",
    recipes=("bench_ddp", "bench_ddp_cpu"),
    ranks="required",
    example="lmkit bench ddp bench_ddp_cpu --nproc 2",
    row_keys=("variant", "case", "world_size"),
)
def ddp(context: Context) -> Rows:
    """Return a row per variant, and those of the bucket sweep, each with its samples."""
    options: Options = context.options
    case = case_of(context.recipe, options, "ddp")
    rows = measure(case, options.variants or ladder(), context, part="ladder")
    sweep = [f"bucketed {mb:.12g} MB" for mb in options.bucket_sweep_mb]
    if sweep:
        # The journal keeps the ladder: only its rows are worth more than another run.
        rows += measure(case, ("one rank", "none", *sweep), context, part="bucket sweep", journal=False)
    bucketed = next((row for row in rows if row["variant"] == "bucketed" and row["status"] == "ok"), None)
    if bucketed is not None and context.device.type == "cuda":
        traced = trace_step(Loop("bucketed", case, context.ranks))
        release_memory(context.device)
        bucketed |= {"timeline": traced} if traced else {}
    return rows


def measure(case: Case, names: Sequence[str], context: Context, *, part: str, journal: bool = True) -> Rows:
    """Measure variants that fit into memory together; every rank calls this and gets the rows.

    A variant that runs out of memory has `status` "out of memory".
    """
    ranks, options = context.ranks, context.options
    claim_workspaces(ranks.device)
    loops: dict[str, Loop | None] = {}
    facts: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        context.progress(f"{part}, building", number, len(names))
        built = _build(name, case, ranks)
        if isinstance(built, str):
            facts[name] = not_enough_memory(built)
        else:
            loops[name], facts[name] = built

    def rows_of(samples: Samples) -> Rows:
        rows: Rows = [
            {
                "case": case.name,
                "variant": name,
                "world_size": 1 if name in SOLO else ranks.world_size,
                "part": part,
            }
            | facts[name]
            | numbers(name, case, ranks, samples)
            | {"rounds": options.rounds}
            for name in names
        ]
        _compare_with_expected(rows, case.parallel)
        return rows

    def keep(samples: Samples) -> None:
        if journal and ranks.is_first:
            context.journal.replace(rows_of(samples))

    samples: Samples = {}
    if loops:
        with without_garbage_collection():
            samples = _time_together(loops, context, part, keep)
    rows = rows_of(samples)
    loops.clear()
    release_memory(ranks.device)
    return rows


def _build(name: str, case: Case, ranks: Ranks) -> tuple[Loop | None, dict[str, Any]] | str:
    """Build a variant, run its first steps, note memory and traffic; return why, if it does not fit on some rank."""
    import torch

    from lmkit.parallel.collectives import agree

    on_gpu = ranks.device.type == "cuda"
    takes_part = ranks.is_first or name not in SOLO
    built: Loop | None = None
    facts: dict[str, Any] = {"status": "ok"}
    start = 0
    with out_of_memory_is_a_row(facts, ranks.device):
        begin_account(ranks)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(ranks.device)
            start = torch.cuda.memory_allocated(ranks.device)
        built = Loop(name, case, ranks) if takes_part else None
    # Steps are collective: ranks agree before them, too.
    if agree(ranks, stop=facts["status"] != "ok").stop:
        return _does_not_fit(facts)
    with out_of_memory_is_a_row(facts, ranks.device):
        if built is not None:
            for _ in range(3):  # the first settles the order of buckets
                built.sync.traffic.reset()
                loss = built.step()
            facts |= _traffic_facts(built) | {"loss": float(loss)}
        if on_gpu:
            torch.cuda.synchronize(ranks.device)
            facts["peak_bytes"] = torch.cuda.max_memory_allocated(ranks.device) - start
            facts["host_ms"] = _host_ms(built) if built is not None else None
        facts["communication_alone_ms"] = _communication_alone(name, built, ranks)
    if agree(ranks, stop=facts["status"] != "ok").stop:
        del built
        release_memory(ranks.device)
        return _does_not_fit(facts)
    return built, _from_first_rank(facts, ranks)


def _does_not_fit(facts: Mapping[str, Any]) -> str:
    return str(facts.get("detail", "on another rank"))


def _from_first_rank(facts: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return rank 0's facts, so that all ranks return the same rows."""
    import torch
    import torch.distributed as dist

    if ranks.world_size == 1:
        return facts
    carrier: list[Any] = [facts]
    dist.broadcast_object_list(carrier, src=0, device=torch.device("cpu"))
    return carrier[0]


def _traffic_facts(built: Loop) -> dict[str, Any]:
    traffic = built.sync.traffic
    facts: dict[str, Any] = {
        "calls_per_step": traffic.calls,
        "payload_bytes": traffic.payload_bytes,
        "link_bytes": traffic.link_bytes,
        "parameter_bytes": sum(p.nbytes for p in built.training.model.parameters() if p.requires_grad),
    }
    if built.ranks.world_size > 1 and built.sync.gather is not None:
        facts["gather"] = built.sync.gather
    return facts


def _host_ms(built: Loop) -> float:
    """Return the median ms until a step has been queued on an idle GPU (its queue takes thousands of launches)."""
    import torch

    samples = []
    with without_garbage_collection():
        for _ in range(5):
            torch.cuda.synchronize(built.ranks.device)
            started = time.perf_counter()
            built.step()
            samples.append((time.perf_counter() - started) * 1e3)
    torch.cuda.synchronize(built.ranks.device)
    return median(samples)


def _communication_alone(name: str, built: Loop | None, ranks: Ranks) -> float | None:
    """Return the median ms of reducing gradients that are all there; None where that cannot be separated."""
    from lmkit.parallel.collectives import agree

    if built is None or not _is_own(name) or is_sharded(name):
        return None
    built.training.backward()
    clock = SteadyStateClock(ranks.device, 1)
    with without_garbage_collection():
        samples = [clock.sample_ms(built.sync.finish, 1, before=[lambda: agree(ranks)]) for _ in range(5)]
    built.optimizer.zero_grad(set_to_none=True)
    return median(samples)


def _time_together(
    loops: dict[str, Loop | None], context: Context, part: str, keep: Callable[[Samples], None]
) -> Samples:
    """Return interleaved samples; `keep` is called with those so far after each round."""
    import torch
    import torch.distributed as dist

    from lmkit.parallel.collectives import agree

    ranks, options = context.ranks, context.options
    deadline = time.monotonic() + options.max_seconds
    samples: Samples = {name: [] for name in loops}
    samples_before = count()
    clock = SteadyStateClock(ranks.device, options.steps_per_sample)
    turns: list[str] = []  # variants in the order of this round
    may_rest = ranks.device.type == "cuda" and ranks.world_size > 1
    rested = may_rest  # while the last variant was built

    def prepare(name: str) -> None:
        nonlocal rested
        context.progress(f"{part}, timing", next(samples_before), options.rounds * len(loops))
        built = loops[name]
        if rested and name not in SOLO:
            assert built is not None
            settle(built, options.steps_per_sample)
        rested = may_rest and name in SOLO
        turns.append(name)
        agree(ranks)

    def after_round(own: dict[str, float]) -> bool:
        ahead = dict(zip(turns, clock.ahead_ms, strict=True)) if clock.ahead_ms else {}
        turns.clear()
        clock.ahead_ms.clear()
        mine = torch.tensor([(own[name], ahead.get(name, math.nan)) for name in loops], dtype=torch.float64)
        of_rank = [mine.clone() for _ in range(ranks.world_size)]
        if ranks.world_size > 1:
            dist.all_gather(of_rank, mine)
        for number, name in enumerate(loops):
            samples[name].append([Sample(*each[number].tolist()) for each in of_rank])
        keep(samples)
        return agree(ranks, stop=time.monotonic() > deadline).stop

    time_variants(
        {name: (built.step if built is not None else _wait) for name, built in loops.items()},
        device=ranks.device,
        repeats=options.rounds,
        warmup=0,
        prepare={name: partial(prepare, name) for name in loops},
        clock=clock,
        after_round=after_round,
    )
    return samples


def settle(built: Loop, steps: int) -> None:
    """Run `SETTLE_S` of steps. Collective."""
    import torch

    from lmkit.parallel.collectives import agree

    ranks = built.ranks
    agree(ranks)  # or the time of those that rested would run out while the first is still measured
    until = time.perf_counter() + SETTLE_S
    while not agree(ranks, stop=time.perf_counter() > until).stop:
        for _ in range(steps):
            built.step()
        torch.cuda.synchronize(ranks.device)


def _wait() -> None:
    """Do what the other ranks do while one rank runs alone."""


def numbers(name: str, case: Case, ranks: Ranks, samples: Samples) -> dict[str, Any]:
    """Return the fields of a variant that its samples give."""
    if name not in samples:
        return {}
    own = _slowest(samples[name])
    times = spread(own)
    world_size = 1 if name in SOLO else ranks.world_size
    fields: dict[str, Any] = {
        "step_ms": times.median,
        "p10_ms": times.p10,
        "p90_ms": times.p90,
        "tokens_per_s": world_size * case.tokens_per_step / times.median * 1e3,
        "samples_ms": own,
    }
    if name == "none":  # with all others, ranks wait for one another
        of_ranks = zip(*samples[name], strict=True)
        fields["rank_ms"] = [median([sample.step_ms for sample in of_rank]) for of_rank in of_ranks]
    if ranks.device.type == "cuda":
        taking_part = slice(1 if name in SOLO else None)
        least = [min(sample.ahead_ms for sample in of_rank[taking_part]) for of_rank in samples[name]]
        fields["ahead_ms"] = median(least)
    baseline = baseline_of(name)
    if baseline in samples and name not in SOLO:
        ratio = paired_ratio(own, _slowest(samples[baseline]))
        fields |= {"scaling": ratio.speedup, "scaling_low": ratio.low, "scaling_high": ratio.high}
    if "none" in samples and name not in (*SOLO, "none") and baseline == SOLO[0]:
        exposed = [mine - bare for mine, bare in zip(own, _slowest(samples["none"]), strict=True)]
        fields |= {"exposed_ms": median(exposed), "exposed_share": median(exposed) / times.median}
    return fields


def _slowest(rounds: Sequence[Sequence[Sample]]) -> list[float]:
    """Return the slowest rank's time of each round: a step of all ends when its does."""
    return [max(sample.step_ms for sample in of_rank) for of_rank in rounds]


def _compare_with_expected(rows: Rows, parallel: ParallelConfig) -> None:
    """Add the peak over that of one rank with the same weights, and the bytes of the formula."""
    peaks = {row["variant"]: row.get("peak_bytes") for row in rows}
    for row in rows:
        alone = peaks.get(baseline_of(row["variant"]))
        if alone and row.get("peak_bytes"):
            row["peak_overhead"] = row["peak_bytes"] / alone - 1.0
        if row.get("parameter_bytes") and row["world_size"] > 1:
            expected = expected_link_bytes(
                row["variant"], row["parameter_bytes"], row["world_size"], parallel
            )
            row["expected_link_bytes"] = expected


def expected_link_bytes(
    name: str, parameter_bytes: int, world_size: int, parallel: ParallelConfig | None = None
) -> float:
    """Return what a rank must send per step, without flags and padding.

    An all-reduce of the gradients costs 2 (W-1)/W of their bytes, and so do a reduce-scatter and an all-gather
    together (of gradients and weights). Gradients of fp32 weights that are reduced as bf16 count half. PyTorch's
    ZeRO-1 reduces whole gradients everywhere and then broadcasts the weights, which costs (W-1)/W of their bytes on
    top.
    """
    if name == "none":
        return 0.0
    options, detail = parse_name(name, parallel or ParallelConfig())
    gradients = 0.5 if options.reduce_dtype == "bf16" and options.weights == "fp32" else 1.0
    weights = (
        1.0 if is_sharded(name) and detail != "+ ZeRO" else gradients
    )  # the second half of an all-reduce
    broadcast = 1.0 if detail == "+ ZeRO" else 0.0
    return (gradients + weights + broadcast) * (world_size - 1) / world_size * parameter_bytes


# One step on the GPU, from a trace

Timeline = dict[str, list[tuple[float, float]]]
"""Compute and communication: when kernels ran, (start, end) in ms since the step's start, joined where they touch."""


def trace_step(built: Loop) -> Timeline | None:
    """Trace steps (every rank calls this, on GPUs) and return the last but one; None on ranks other than 0.

    Rank 0 alone is traced. That slows down its host, so the others wait for it: the time of its own collectives is
    not spent waiting.
    """
    import torch

    from lmkit.parallel.collectives import agree

    ranks = built.ranks
    for _ in range(TRACE_WARMUP):
        built.step()
    torch.cuda.synchronize(ranks.device)
    agree(ranks)
    tracing = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with quietly(tracing) if ranks.is_first else nullcontext() as profiler:
        for _ in range(TRACE_STEPS):
            built.step()
        torch.cuda.synchronize(ranks.device)
    if profiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="lmkit-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_step(json.loads(path.read_text("utf-8"))["traceEvents"], TRACE_STEPS)


def read_step(events: Sequence[Mapping[str, Any]], steps: int) -> Timeline | None:
    """Return the last but one of `steps` steps in the events of a Chrome trace (times in us); None without
    collectives (the profiler may not be allowed to see kernels).

    A step goes from the end of the last collective of the step before to the end of its own.

    Raises:
        ValueError: the steps did not make equally many collectives.
    """
    spans = [
        ("nccl" in event["name"].lower(), event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    collectives = sorted((start, end) for communicates, start, end in spans if communicates)
    if not collectives:
        return None
    if len(collectives) % steps:
        raise ValueError(f"{len(collectives)} collectives in {steps} steps: not the same number in each")
    per_step = len(collectives) // steps
    begin, finish = (max(end for _, end in collectives[: n * per_step]) for n in (steps - 2, steps - 1))

    def inside(communicates: bool) -> list[tuple[float, float]]:
        of_kind = [(start, end) for kind, start, end in spans if kind is communicates]
        return [
            ((start - begin) / 1e3, (end - begin) / 1e3) for start, end in union(clip(of_kind, begin, finish))
        ]

    return {"compute": inside(False), "communication": inside(True)}


# Rows in words

COLUMNS = (
    Column("variant", "variant", instead="status"),
    Column("step_ms", "ms/step", ".2f", "status"),
    Column("spread", "spread", ".1%"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("scaling", "scaling", ".1%"),
    Column("exposed_ms", "exposed ms", ".2f"),
    Column("peak_overhead", "memory", "+.1%"),
    Column("calls_per_step", "calls", ",d"),
    Column("link_mb", "MB sent", ",.1f"),
    Column("expected_mb", "formula", ",.1f"),
)
REPORT_COLUMNS = (
    Column("variant", "variant", instead="status"),
    Column("step_ms", "ms/step", ".2f", "status"),
    Column("middle", "p10-p90"),
    Column("host_ms", "host ms", ".1f"),
    Column("ahead_ms", "ahead ms", ".1f"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("scaling_interval", "scaling [95%]"),
    Column("exposed_ms", "exposed ms", ".2f"),
    Column("communication_alone_ms", "alone ms", ".2f"),
    Column("alone_gb_per_s", "alone GB/s", ".3g"),
    Column("hidden", "hidden", ".0%"),
    Column("peak_gb", "peak GB", ".2f"),
    Column("peak_overhead", "memory", "+.1%"),
    Column("calls_per_step", "calls", ",d"),
    Column("link_mb", "MB sent", ",.1f"),
    Column("expected_mb", "formula", ",.1f"),
)
COMPARISON_COLUMNS = (
    Column("candidate", "ours"),
    Column("baseline", "against"),
    Column("ratio", "times as fast", ".3f"),
    Column("low", "95% from", ".3f"),
    Column("high", "to", ".3f"),
)
SPREAD_NOTE = "spread: (p90 - p10) / median"
_NOTES = {
    "middle": "ms/step: the median of samples of the slowest rank; half as many untimed steps lead into each, and on "
    "GPUs "
    f"{SETTLE_S:g} s of steps into the first and into one after a sample of one rank, during which the others rested",
    "spread": SPREAD_NOTE,
    "host_ms": "host ms: how long the CPU is busy with a step on an idle GPU",
    "ahead_ms": "ahead ms: how long the GPU still worked after its host had queued a sample's last step, on the rank "
    "with "
    "the least; near 0 the host was measured: use more steps per sample",
    "scaling": "scaling: one rank's step time over this one's, same rows per rank",
    "exposed_ms": "exposed: step time minus that of the same step without communication (none)",
    "communication_alone_ms": "alone: a step's reduction with no compute at the same time; alone GB/s: what a rank "
    "sends, "
    "over that time",
    "hidden": "hidden: the share of the reduction that does not lengthen the step (below 0: what it costs the "
    "compute)",
    "peak_overhead": "memory: peak over one rank's",
    "link_mb": "MB sent: 10^6 bytes, of a rank in a step",
    "expected_mb": "formula: 2 (W-1)/W of the gradients; PyTorch's ZeRO also broadcasts the weights, (W-1)/W of "
    "their bytes",
}


def filled(columns: Sequence[Column], rows: Rows) -> list[Column]:
    """Return the columns for which some row has a value, and those of names."""
    return [
        column for column in columns if column.instead or any(row.get(column.key) is not None for row in rows)
    ]


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: the fastest, what overlap hides, bytes, bucket sizes, memory."""
    shown = [with_units(row) for row in rows]
    columns = filled(REPORT_COLUMNS, shown)
    tables = {}
    for (part, case), members in grouped(
        shown, lambda row: (row.get("part") or "ladder", row["case"])
    ).items():
        title = f"{case} ({part})"
        tables[title] = markdown_table(members, filled(REPORT_COLUMNS, members))
        if alone := next((row["rank_ms"] for row in members if row.get("rank_ms")), None):
            each = ", ".join(f"{ms:.2f}" for ms in alone)
            tables[title] += f"\nWithout communication the ranks take {each} ms a step, each by itself.\n"
        if compared := comparisons(members):
            tables[f"{title}: against PyTorch"] = markdown_table(compared, COMPARISON_COLUMNS)
    found = []
    for case, members in grouped(shown, lambda row: str(row["case"])).items():
        said = findings(members)
        found += [f"{case}: {said[0]}", *said[1:]] if said else []
    # The sweep measures "one rank" and "none" again only to compare with them.
    table = [
        row for row in shown if row.get("part") != "bucket sweep" or row["variant"].startswith("bucketed")
    ]
    names = {column.key for column in columns} | {column.key for column in filled(COLUMNS, table)}
    return Summary(
        "Data parallelism",
        filled(COLUMNS, table),
        table,
        about=f"{max(row['world_size'] for row in rows)} ranks",
        findings=tuple(found),
        tables=tables,
        notes=(*_rounds_notes(rows), *(note for key, note in _NOTES.items() if key in names)),
    )


def summarize_sharding(rows: Rows) -> Summary:
    """Say what sharding does to the speed: sharded variants, one rank and `bucketed`; nothing without sharded
    ones."""
    shown = [
        with_units(row)
        for row in rows
        if is_sharded(row["variant"]) or row["variant"].startswith("one rank") or row["variant"] == "bucketed"
    ]
    if not any(is_sharded(row["variant"]) for row in shown):
        return Summary("Speed", (), [])
    keys = ("variant", "step_ms", "tokens_per_s", "scaling")
    columns = (*(column for column in COLUMNS if column.key in keys), Column("peak_gb", "peak GB", ".2f"))
    found = []
    for case, members in grouped(shown, lambda row: str(row["case"])).items():
        found += [f"{case}, {finding}" for finding in sharding_findings(members)]
    return Summary("Speed", filled(columns, shown), shown, findings=tuple(found))


def with_units(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with what only people need: megabytes, intervals as text."""
    shown = dict(row)
    units = (
        ("link_mb", "link_bytes", 1e6),
        ("expected_mb", "expected_link_bytes", 1e6),
        ("peak_gb", "peak_bytes", 1e9),
    )
    for key, source, unit in units:
        if row.get(source) is not None:
            shown[key] = row[source] / unit
    if row.get("step_ms"):
        shown["spread"] = (row["p90_ms"] - row["p10_ms"]) / row["step_ms"]
        shown["middle"] = f"{row['p10_ms']:.2f}-{row['p90_ms']:.2f}"
    if row.get("scaling"):
        interval = f" [{row['scaling_low']:.1%}, {row['scaling_high']:.1%}]" if enough_rounds(row) else ""
        shown["scaling_interval"] = f"{row['scaling']:.1%}{interval}"
    if row.get("communication_alone_ms") and row.get("exposed_ms") is not None:
        shown["hidden"] = 1.0 - row["exposed_ms"] / row["communication_alone_ms"]
        shown["alone_gb_per_s"] = row["link_bytes"] / row["communication_alone_ms"] / 1e6
    return shown


def enough_rounds(row: Mapping[str, Any]) -> bool:
    """Return whether the row's rounds are enough for a 95% interval."""
    return len(row.get("samples_ms", ())) >= FEWEST_PAIRS


def _rounds_notes(rows: Rows) -> tuple[str, ...]:
    """Say what few rounds mean for the numbers, if they are few."""
    timed = [row for row in rows if row.get("samples_ms")]
    if not timed:
        return ()
    fewest = min(timed, key=lambda row: len(row["samples_ms"]))
    made, asked, notes = len(fewest["samples_ms"]), fewest.get("rounds"), []
    if asked is not None and made < asked:
        notes.append(f"{made} of {asked} rounds: then bench.ddp.max_seconds was over")
    if made < FEWEST_PAIRS:
        notes.append(
            f"fewer than {FEWEST_PAIRS} rounds have no 95% interval: what differs here may be chance"
        )
    return tuple(notes)


def comparisons(rows: Rows) -> Rows:
    """Compare our strategies with PyTorch's, by the ratios of the same rounds."""
    timed = {row["variant"]: row for row in rows if row.get("samples_ms")}
    found: Rows = []
    for ours, row in timed.items():
        # The simplest strategies have no options; nobody would use them instead of PyTorch's.
        if not _is_own(ours) or not STRATEGIES.facts(ours.partition(" ")[0]).uses:
            continue
        for rival, other in timed.items():
            is_rival = STRATEGIES.facts("torch_ddp").rival and rival.startswith("torch_ddp")
            together = len(row["samples_ms"]) == len(other["samples_ms"])
            if is_rival and together and is_sharded(rival) == is_sharded(ours):
                ratio = paired_ratio(row["samples_ms"], other["samples_ms"])
                interval = {"low": ratio.low, "high": ratio.high} if enough_rounds(row) else {}
                found.append({"candidate": ours, "baseline": rival, "ratio": ratio.speedup, **interval})
    return found


def scaling_in_words(row: Mapping[str, Any]) -> str:
    """Return `95.1% of linear scaling (95% interval 94.0% to 96.2%)`."""
    low, high = row["scaling_low"], row["scaling_high"]
    interval = (
        f"95% interval {low:.1%} to {high:.1%}" if enough_rounds(row) else "too few rounds for an interval"
    )
    return f"{row['scaling']:.1%} of linear scaling ({interval})"


def findings(rows: Rows) -> list[str]:
    """Return the sentences that the rows of one case support."""
    timed = _timed(rows)
    synced = [row for name, row in timed.items() if row["world_size"] > 1 and name != "none"]
    found = []
    if full_precision := [row for row in synced if "bf16" not in row["variant"]]:
        best = min(full_precision, key=lambda row: row["step_ms"])
        scaling = f", {scaling_in_words(best)}" if best.get("scaling") else ""
        found.append(
            f"Fastest with fp32 gradients: {best['variant']}, {best['step_ms']:.2f} ms a step{scaling}."
        )
    naive, bucketed = timed.get("naive"), timed.get("bucketed")
    if naive and bucketed and naive.get("exposed_ms") and bucketed.get("exposed_ms") is not None:
        found.append(
            f"Overlap: {bucketed['exposed_ms']:.2f} ms of bucketed's communication lengthen the step, "
            f"{bucketed['exposed_ms'] / naive['exposed_ms']:.2f} of naive's {naive['exposed_ms']:.2f} ms."
        )
    # Strategies that communicate after the backward pass have nothing to hide communication behind.
    overlapping = [
        row for row in synced if row.get("hidden") is not None and row["variant"] not in ("naive", "flat")
    ]
    if overlapping:
        most = max(overlapping, key=lambda row: row["hidden"])
        if most["hidden"] <= 0:
            found.append(
                "Nothing is hidden: every step takes longer by more than its communication alone does."
            )
        else:
            found.append(
                f"Most hidden: {most['variant']}, whose {most['communication_alone_ms']:.2f} ms of communication "
                f"(alone) leave {most['exposed_ms']:.2f} ms exposed: {most['hidden']:.0%} hidden."
            )
    if counted := [row for row in synced if row.get("expected_link_bytes") and row.get("link_bytes")]:
        apart = max(abs(row["link_bytes"] / row["expected_link_bytes"] - 1) for row in counted)
        who = "1 variant" if len(counted) == 1 else f"{len(counted)} variants"
        found.append(f"Bytes: what {who} sent differs from the formula by at most {apart:.2%}.")
    sizes = sorted((row for row in synced if _bucket_mb(row) is not None), key=lambda row: row["step_ms"])
    if len(sizes) > 1:
        smallest, largest = (
            f"{_bucket_mb(row):g} MB is {word} ({row['step_ms']:.2f} ms, {row['calls_per_step']} calls)"
            for row, word in ((sizes[0], "best"), (sizes[-1], "worst"))
        )
        found.append(f"Bucket size: {smallest}, {largest}.")
    if bucketed and bucketed.get("peak_overhead") is not None:
        found.append(f"Memory: bucketed peaks at {bucketed['peak_overhead']:+.1%} of one rank's.")
    return found


def _timed(rows: Rows) -> dict[str, dict[str, Any]]:
    """Return the timed rows by variant: the ladder's, if the bucket sweep has the same variant."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("step_ms"):
            found.setdefault(row["variant"], row)
    return found


def _bucket_mb(row: Mapping[str, Any]) -> float | None:
    size = re.fullmatch(r"bucketed ([\d.e+-]+) MB", row["variant"])
    return float(size[1]) if size else None


def sharding_findings(rows: Rows) -> list[str]:
    """Compare each sharded variant with PyTorch's ZeRO, with one rank, and with `bucketed`."""
    timed = _timed(rows)
    rival, bucketed = timed.get("torch_ddp + ZeRO"), timed.get("bucketed")
    found = []
    for name, row in timed.items():
        if not _is_own(name) or not is_sharded(name):
            continue
        parts = []
        if rival:
            ratio = rival["step_ms"] / row["step_ms"]
            parts.append(f"{ratio:.3f} times as fast as torch DDP + ZeroRedundancyOptimizer")
        if row.get("scaling"):
            parts.append(scaling_in_words(row))
        if bucketed and bucketed.get("peak_bytes") and row.get("peak_bytes"):
            parts.append(f"{row['peak_bytes'] / bucketed['peak_bytes'] - 1:+.1%} of bucketed's peak memory")
        found += [f"{name}: {', '.join(parts)}."] if parts else []
    return sorted(found, key=lambda finding: "bf16" not in finding)


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw throughput, exposed communication, the bucket sweep, and a step of `bucketed` if one was traced."""
    first = [row for row in rows if row.get("part") != "bucket sweep"]
    timed = [row for row in first if row.get("step_ms")]
    cases = ", ".join(dict.fromkeys(str(row["case"]) for row in rows))
    size = max(row["world_size"] for row in rows)
    files = {
        "ddp_throughput.png": grouped_bars(
            [row["variant"] for row in timed],
            {"tokens/s": [row["tokens_per_s"] for row in timed]},
            errors={"tokens/s": [of_rate(row, "step_ms") for row in timed]},
            title=f"{cases}: training throughput on {size} ranks (whiskers p10 to p90)",
            x_label="variant",
            y_label="tokens per second",
            spec=",.0f",
        )
    }
    exposed = [row for row in timed if row.get("exposed_ms") is not None]
    if exposed:  # `none` was among the variants
        bare = next(row for row in timed if row["variant"] == "none")["samples_ms"]
        beyond = [
            [mine - alone for mine, alone in zip(row["samples_ms"], bare, strict=True)] for row in exposed
        ]
        files["ddp_exposed.png"] = grouped_bars(
            [row["variant"] for row in exposed],
            {"exposed": [row["exposed_ms"] for row in exposed]},
            errors={"exposed": [of_samples(samples) for samples in beyond]},
            title=f"{cases}: communication that compute does not hide (whiskers p10 to p90)",
            x_label="variant",
            y_label="ms per step",
        )
    sized = {size: row for row in rows if (size := _bucket_mb(row)) is not None and row.get("step_ms")}
    if sized:
        files["ddp_bucket_sweep.png"] = line_plot(
            {"bucketed": [(size, row["step_ms"]) for size, row in sized.items()]},
            errors={
                "bucketed": {
                    size: whisker for size, row in sized.items() if (whisker := of_time(row, "step_ms"))
                }
            },
            title=f"{cases}: step time over bucket size (whiskers p10 to p90)",
            x_label="bucket size (MiB)",
            y_label="ms per step",
            log_x=True,
            from_zero=True,  # sizes differ by percents, and should look it
        )
    if traced := next((row["timeline"] for row in rows if row.get("timeline")), None):
        files["ddp_overlap.png"] = _timeline_picture(traced)
    return files


def _timeline_picture(step: Timeline) -> bytes:
    """Draw a step: compute above communication, on one axis."""
    communication, compute = (
        [(start, end) for start, end in step[name]] for name in ("communication", "compute")
    )
    return timeline(
        {"compute": compute, "communication": communication},
        title=f"bucketed: {total(communication):.2f} ms of communication in a step, "
        f"{overlap(communication, compute):.2f} of them while compute runs",
        x_label="time (ms), GPU of the traced rank",
    )
