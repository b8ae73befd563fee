"""`lmkit bench lm-matrix`: short real trainings over attention kernels x gradient strategies.

The strategies of a kernel take turns, one epoch each per round. Every training starts from the same weights and sees
the same batches, so loss curves can be compared, too. "one rank" is the same training on one GPU with the whole
batch, on each rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from lmkit.bench.context import Context
from lmkit.bench.ddp_variants import SOLO
from lmkit.bench.harness import ratio_fields
from lmkit.bench.summary import Summary
from lmkit.bench.trainings import SPREAD, Variant, interval, measure_figures, speed_fields
from lmkit.errors import UsageError
from lmkit.measure.memory import claim_workspaces
from lmkit.measure.plots import grouped_bars, loss_curve, table_picture
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.tables import Column, Rows, grouped
from lmkit.measure.timing import SteadyStateClock
from lmkit.recipe import NUM_BYTES
from lmkit.recipe.keys import FlagNames
from lmkit.recipe.tables import (
    Checkpointing,
    Count,
    ModelConfig,
    ParallelConfig,
    PositiveFloat,
    PositiveInt,
    Table,
    check_heads,
)
from lmkit.recipe.values import AttentionName, RegisteredName
from lmkit.registry import ATTENTION, BENCHES, STRATEGIES

if TYPE_CHECKING:
    from lmkit.bench.training_gate import Reference
    from lmkit.core.batches import TokenBatches, Tokens
    from lmkit.measure.limits import Limits
    from lmkit.parallel.ranks import Ranks
    from lmkit.training.setup import TrainingStep

ONE_RANK = SOLO[0]
EVAL_BATCHES = 20
STORIES = 400  # about half a megabyte
HELD_OUT = 0.1
"""The share of the tokens, at their end, that no training sees."""


def _single(name: str) -> str:
    """Return our name of a variant. "Local No DDP" is one rank: our `none` has a replica on every rank."""
    return ONE_RANK if name == "Local No DDP" else name


MatrixStrategy = Annotated[
    str, BeforeValidator(_single), AfterValidator(RegisteredName(STRATEGIES, also=(ONE_RANK,)))
]


class Options(Table):
    """`[bench.lm_matrix]`."""

    kernels: tuple[AttentionName, ...] = ("vectorized", "flash_torch", "sdpa")
    """Attention kernels, the rows of the matrix."""
    strategies: Annotated[tuple[MatrixStrategy, ...], FlagNames(("--wrappers", "--modes"))] = ("none",)
    """Strategies of gradient synchronization, the columns of the matrix, and "one rank"."""
    num_layers: PositiveInt = 2
    """Blocks of the model."""
    d_model: PositiveInt = 64
    """Width of the residual stream."""
    d_ff: PositiveInt = 192
    """Width inside the feed-forward part."""
    num_heads: PositiveInt = 4
    """Attention heads; each has d_model / num_heads dimensions."""
    context_length: PositiveInt = 64
    """Tokens per sequence."""
    vocab_size: PositiveInt = NUM_BYTES
    """Vocabulary size, at least that of the tokens; 256 for generated stories, which are bytes."""
    tie_embeddings: bool = False
    """As in [model]."""
    compile: Literal["none", "block", "whole"] = "none"
    """As in [model]."""
    activation_checkpointing: Checkpointing = "none"
    """As in [model]."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """As in [train]."""
    batch_size: PositiveInt = 8
    """Sequences per step over all ranks; "one rank" takes them all."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """As in [train]."""
    steps_per_epoch: PositiveInt = 5
    """Steps of an epoch. One sample times one epoch."""
    warmup_epochs: Count = 1
    """Untimed epochs before the first sample."""
    timed_epochs: PositiveInt = 6
    """Samples of each cell; fewer than 6 give no interval."""
    bucket_mb: PositiveFloat = 50.0
    """Bucket size in MiB (`bucketed`, `torch_ddp`, `zero1`)."""
    tokens: Annotated[Path | None, FlagNames(("--train-path",))] = None
    """A token file (.npy), a glob of several, or a text file (or .gz, .zst) whose bytes are the tokens; default:
    generated stories."""
    lr: PositiveFloat = 3e-4
    """Learning rate of all steps but the first three, which are checked and take 1e-5."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Options:
        check_heads(self.d_model, self.num_heads)
        return self


def check(recipe: Any) -> None:
    """Refuse a missing text, and a vocabulary without room for the tokens, before ranks start."""
    from lmkit.data.shards import SUFFIXES

    options, needed = recipe.bench_table("lm_matrix"), NUM_BYTES
    if (path := options.tokens) is not None and path.suffix in SUFFIXES:
        from lmkit.data.shards import open_tokens

        needed = open_tokens(path).meta.vocab_size
    elif path is not None and not path.is_file():
        hint = "name a token file (.npy) or a text"
        raise UsageError("bench.no_text", f"bench.lm_matrix.tokens: {path}: no such file", hint=hint)
    if options.vocab_size < needed:
        ids = f"{needed} ids of {path or 'bytes'}"
        message = f"bench.lm_matrix.vocab_size: {options.vocab_size} is less than the {ids}"
        raise UsageError("bench.small_vocabulary", message, hint=f"--vocab-size {needed} or more")


@BENCHES.register(
    "lm_matrix",
    order=3,
    help="Short trainings: attention kernels x gradient strategies.",
    recipes=("lm_matrix", "lm_matrix_cpu"),
    ranks="optional",
    folder="lm-matrix",
    example="lmkit bench lm-matrix lm_matrix_cpu --nproc 2",
    row_keys=("kernel", "strategy", "ranks"),
)
def lm_matrix(context: Context) -> Rows:
    """Return a row per kernel and strategy. Rows that the journal has are not measured again."""
    import torch

    from lmkit.data.shards import split

    options = context.options
    tokens = tokens_of(options, context.recipe.run.seed)
    parts = split(tokens, int(len(tokens) * (1 - HELD_OUT)))
    check_batches(options, min(map(len, parts)), context.ranks)
    limits = context.known_limits([options.precision])
    references: dict[bool, Reference] = {}
    known = {(row["kernel"], row["strategy"]): row for row in context.journal.rows()}
    for kernel in context.each("kernels", options.kernels):
        if missing := [strategy for strategy in options.strategies if (kernel, strategy) not in known]:
            rows = _train_kernel(kernel, missing, context, parts, references, limits)
            torch.compiler.reset()
            context.keep(rows)
            known |= {(kernel, row["strategy"]): row for row in rows}
    for kernel in options.kernels:
        _add_ratios({strategy: known[kernel, strategy] for strategy in options.strategies})
    return [known[kernel, strategy] for kernel in options.kernels for strategy in options.strategies]


def _add_ratios(rows: Mapping[str, dict[str, Any]]) -> None:
    """Compare the strategies of a kernel with the first, with one rank, and with `none`."""
    right = {name: row for name, row in rows.items() if row["status"] == "ok"}
    first, one, bare = (right.get(name) for name in (next(iter(rows)), ONE_RANK, "none"))
    for row in right.values():
        if first is not None and row is not first:
            row |= ratio_fields(paired_ratio(row["samples_ms"], first["samples_ms"]))
        if one is not None and row["ranks"] > 1:
            row["scaling"] = paired_ratio(row["samples_ms"], one["samples_ms"]).speedup / row["ranks"]
        if bare is not None and row["ranks"] > 1:
            row["overhead"] = row["peak_gb"] / bare["peak_gb"] - 1


def _train_kernel(
    kernel: str,
    strategies: Sequence[str],
    context: Context,
    parts: tuple[Tokens, Tokens],
    references: dict[bool, Reference],
    limits: Limits | None,
) -> Rows:
    """Return one row per strategy.

    Args:
        references: steps of PyTorch's operations in one process, made here if there are none yet or the kernel does
            not see all keys: of the whole batch (True), and of this rank's rows, on which `none` trains.
    """
    from lmkit.bench.training_gate import after_timing, budget_of, judge, of_pytorch, reference
    from lmkit.model.accounting import count_parameters, flops_per_token
    from lmkit.parallel.ranks import Ranks
    from lmkit.training.setup import TrainingStep

    options, ranks = context.options, context.ranks
    shared = ("num_layers", "d_model", "d_ff", "num_heads", "context_length", "vocab_size")
    switches = ("tie_embeddings", "activation_checkpointing", "compile")
    model = ModelConfig(attention=kernel, **{key: getattr(options, key) for key in (*shared, *switches)})
    keys = ("lr", "precision", "cuda_graph")
    recipe = context.recipe_of(model, **{key: getattr(options, key) for key in keys})
    claim_workspaces(ranks.device)
    alone, budget = Ranks(device=ranks.device), budget_of(options.precision)
    for whole in (True, False) if not references or not ATTENTION.facts(kernel).sees_all else ():
        if whole or (ranks.world_size > 1 and "none" in options.strategies):
            batches = batches_of(context, parts[0], alone if whole else ranks)
            references[whole] = reference(of_pytorch(recipe), ranks, batches)
    losses: dict[str, list[Any]] = {}

    def make(strategy: str) -> TrainingStep:
        named = "none" if strategy == ONE_RANK else strategy
        parallel = ParallelConfig(strategy=named, bucket_mb=options.bucket_mb)
        own = alone if strategy == ONE_RANK else ranks
        return TrainingStep(recipe, own, batches_of(context, parts[0], own), parallel=parallel)

    def first_steps(strategy: str, training: TrainingStep) -> dict[str, Any]:
        theirs = references[ranks.world_size == 1 or strategy != "none"]
        found, losses[strategy] = judge(training, theirs, budget, forward=True)
        return found

    def run(strategy: str, training: TrainingStep) -> None:
        losses[strategy].append(training.run())

    def warm_up(strategy: str, training: TrainingStep) -> None:
        """Make the untimed epochs (at least a step), in which a CUDA graph may be captured."""
        for _ in range(max(1, options.warmup_epochs * options.steps_per_epoch)):
            run(strategy, training)

    def check(strategy: str, training: TrainingStep) -> dict[str, Any]:
        # The last check drops the graph, and may find no room: what is known of the training stays.
        note = training.step.graph.note if training.step.graph is not None else ""
        rows[strategy] |= {"graph": note, **_outcome(training, losses[strategy], context, parts[1])}
        return after_timing(training, budget, forward=True)

    facts = {**context.optimizer_field, "kernel": kernel, "precision": options.precision}
    facts |= {"compile": options.compile, "parameters": count_parameters(model).total}
    rows: dict[str, dict[str, Any]] = {
        strategy: facts | {"strategy": strategy, "ranks": 1 if strategy == ONE_RANK else ranks.world_size}
        for strategy in strategies
    }
    variants = {
        strategy: Variant(
            row=row,
            make=partial(make, strategy),
            judge=partial(first_steps, strategy),
            fill=partial(warm_up, strategy),
            run=partial(run, strategy),
            check=partial(check, strategy),
        )
        for strategy, row in rows.items()
    }

    def figures(strategy: str, samples_ms: list[float]) -> dict[str, Any]:
        length = options.context_length
        work = {"tokens": options.batch_size * length, "flops": flops_per_token(model, length)}
        how = {"precision": options.precision, "ranks": rows[strategy]["ranks"]}
        fields = speed_fields(samples_ms, context, limits, **work, **how)
        epoch_s = fields["median_ms"] * options.steps_per_epoch / 1e3
        return fields | {"epochs": len(samples_ms), "epoch_s": epoch_s}

    clock = SteadyStateClock(ranks.device, options.steps_per_epoch, untimed=0)
    measure_figures(variants, context, limits, figures, rounds=options.timed_epochs, clock=clock)
    return list(rows.values())


def _outcome(
    training: TrainingStep, of_steps: list[Any], context: Context, held_out: Tokens
) -> dict[str, Any]:
    """Return the losses of a training, averaged over the ranks. Collective."""
    import torch

    from lmkit.bench.training_gate import STEPS
    from lmkit.parallel.collectives import sum_over_ranks
    from lmkit.training.evaluation import HeldOut, evaluate

    options, ranks = context.options, training.step.ranks
    # Otherwise their memory would be freed while the next kernel is measured.
    training.wait_for_weights()
    losses = sum_over_ranks(torch.tensor(list(map(float, of_steps)), dtype=torch.float64), ranks)
    # If another cell failed while it was timed, the others have made more steps.
    epochs = (options.warmup_epochs, options.timed_epochs)
    planned = STEPS + sum(max(1, number * options.steps_per_epoch) for number in epochs)
    found = None
    if len(losses) == planned:
        # The same batches for all cells.
        data = HeldOut(held_out, None, options.context_length, options.batch_size // context.ranks.world_size)
        how: dict[str, Any] = {"precision": training.step.precision, "max_batches": EVAL_BATCHES}
        found = evaluate(training.model, data, ranks, **how)
    curve = (losses[:planned] / ranks.world_size).tolist()
    loss = None if found is None else found.loss
    return {"valid_loss": loss, "first_loss": curve[0], "final_loss": curve[-1], "losses": curve}


def tokens_of(options: Options, seed: int) -> Tokens:
    """Return the tokens: the token file, memory-mapped, or the bytes of a text or of generated stories."""
    import numpy as np

    from lmkit.data.formats import opened
    from lmkit.data.shards import SUFFIXES, open_tokens
    from lmkit.data.synth import generate_stories

    if options.tokens is None:
        text = b"\n".join(story.encode() for story in islice(generate_stories(seed), STORIES))
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    if options.tokens.suffix in SUFFIXES:
        return open_tokens(options.tokens).tokens
    with opened(options.tokens) as (_, stream):
        return np.frombuffer(stream.read(), dtype=np.uint8)


def check_batches(options: Options, shortest: int, ranks: Ranks) -> None:
    """Refuse a batch that the ranks do not divide, and a context longer than the shortest part of the text."""
    size, length, count = options.batch_size, options.context_length, ranks.world_size
    if size % count:
        message = f"bench.lm_matrix.batch_size: {size} is not divisible by {count} ranks"
        raise UsageError("bench.batch_size", message, hint=f"give a multiple of {count}")
    if shortest <= length:
        more = f"{length} + 1 tokens are more than the held-out text has, {shortest}"
        message, hint = f"bench.lm_matrix.context_length: {more}", "give a shorter context, or a longer text"
        raise UsageError("bench.context_length", message, hint=hint)


def batches_of(context: Context, tokens: Tokens, ranks: Ranks) -> TokenBatches:
    from lmkit.core.batches import TokenBatches

    sizes: dict[str, Any] = {key: getattr(context.options, key) for key in ("batch_size", "context_length")}
    place: dict[str, Any] = {"rank": ranks.rank, "world_size": ranks.world_size}
    return TokenBatches(tokens, seed=context.recipe.run.seed, **sizes | place)


TITLE = "lm-matrix: attention kernels x gradient strategies"
ABOUT = ("precision", "compile")
TIME = Column("median_ms", "ms per step", ".2f", instead="status", axis="time of a step (ms)")
MEMORY = Column("peak_gb", "GB", ".3f", axis="peak memory (GB = 10^9 bytes)")
THROUGHPUT = Column("tokens_per_s", "tokens/s", ",.0f", axis="tokens per second, all ranks", better="higher")
COLUMNS = (
    Column("kernel", "kernel"),
    Column("strategy", "strategy"),
    TIME,
    SPREAD,
    THROUGHPUT,
    Column("mfu", "MFU", ".1%"),
    MEMORY,
    Column("speedup", "speedup", ".3f", note="over the first strategy with the same kernel, paired epochs"),
    Column("valid_loss", "valid loss", ".4f", note="after all epochs, on held-out text"),
    Column("ranks", "ranks", wide=True),
    *interval("speedup", ".3f"),
    Column("scaling", "scaling", ".1%", wide=True, note=f"speed / ranks / speed of {ONE_RANK}, same batch"),
    Column("overhead", "memory over none", "+.1%", wide=True),
    Column("graph", "CUDA graph", wide=True),
    Column("epoch_s", "s per epoch", ".3f", wide=True),
    Column("final_loss", "last loss", ".4f", wide=True),
)
NOTES = ("GB (10^9): peak of one rank, weights and optimizer included",)


def competes(row: Mapping[str, Any]) -> bool:
    """Return whether a row is a training: on several ranks `none` trains a separate model on each."""
    return row["ranks"] == 1 or row["strategy"] != "none"


def findings(rows: Rows) -> list[str]:
    """Say for each kernel what synchronization costs, and how far loss curves are apart."""
    trained = [row for row in rows if row["status"] == "ok" and competes(row)]
    found = []
    for kernel, members in grouped(trained, lambda row: str(row["kernel"])).items():
        by_name = {row["strategy"]: row for row in members}
        together = [row for row in members if row["ranks"] > 1]
        for other in ("naive", ONE_RANK) if together else ():
            fastest = by_name.get("bucketed") or min(together, key=lambda row: row["median_ms"])
            if other in by_name and by_name[other] is not fastest:
                ratio = paired_ratio(fastest["samples_ms"], by_name[other]["samples_ms"])
                found.append(f"{kernel}: {fastest['strategy']} against {other} {ratio}.")
    if len(trained) > 1:
        first = trained[0]
        pairs = [pair for row in trained for pair in zip(row["losses"], first["losses"], strict=True)]
        apart = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
        found.append(
            f"Convergence: the loss curves of {len(trained)} trainings differ by at most {apart:.2g} of the loss, "
            f"which falls from {first['first_loss']:.3f} to {first['final_loss']:.3f}."
        )
    return found


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw the matrix by time, memory and throughput, the loss curves, and bars and a table per kernel."""
    ranks = f"{max(row['ranks'] for row in rows)} ranks"

    def bars(rows: Rows, column: Column, title: str, group: str = "kernel") -> bytes:
        series = "strategy" if group == "kernel" else None
        title = f"{title} ({ranks})"
        return grouped_bars(rows, column, group=group, series=series, title=title, x_label=group)

    of_time = bars(rows, TIME, "Time per training step")
    files = {"time": of_time, "memory": bars(rows, MEMORY, "Peak memory of one rank")}
    files["throughput"] = bars(rows, THROUGHPUT, "Training throughput")
    headline = [row for row in rows if row["strategy"] in (ONE_RANK, "naive", "bucketed")]
    if len({row["strategy"] for row in headline}) > 1:
        files["headline"] = bars(headline, THROUGHPUT, "One rank, naive, bucketed and overlapped")
    trained = [row for row in rows if row["status"] == "ok"]
    curves = {f"{row['kernel']}, {row['strategy']}": list(enumerate(row["losses"], 1)) for row in trained}
    title = "Convergence, same start and batches"
    files["convergence"] = loss_curve(curves, title=title, x_label="optimizer step")
    found = {f"lm_matrix_{name}.png": picture for name, picture in files.items()}
    columns = Summary("", COLUMNS[1:], rows).filled()
    for kernel, chosen in grouped(rows, lambda row: str(row["kernel"])).items():
        title = f"{kernel}: training throughput"
        found[f"{kernel}_lm_matrix_throughput.png"] = bars(chosen, THROUGHPUT, title, group="strategy")
        cells = [[column.text(row) for column in columns] for row in chosen]
        headers = [column.header for column in columns]
        found[f"lm_matrix_table_{kernel}.png"] = table_picture(headers, cells, title=f"lm-matrix: {kernel}")
    return found
