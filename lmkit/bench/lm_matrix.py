"""`lmkit bench lm-matrix`: short real trainings over attention kernels x gradient strategies.

All strategies of a kernel are alive at once and take turns, one epoch each per round, so that epochs of a round form
pairs. Every training starts from the same weights and sees the same batches, so loss curves can be compared, too.
"one rank" is the same training on one GPU with the whole batch; the other ranks wait meanwhile.

A training that does not fit in memory, or fails, becomes a row. If it does so on one of several ranks, the harness
starts the ranks again, without that cell.
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
from lmkit.bench.harness import grouped, mfu_notes, ratio_fields
from lmkit.bench.summary import Summary
from lmkit.bench.trainings import Memory, Variant, measure_figures, release_freed, speed_fields
from lmkit.errors import UsageError, reason
from lmkit.measure.memory import claim_workspaces, release_memory
from lmkit.measure.plots import grouped_bars, loss_curve, table_picture
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.tables import Column, Rows
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
from lmkit.storage.inputs import refuse_irregular

if TYPE_CHECKING:
    import numpy as np

    from lmkit.bench.training_gate import Reference
    from lmkit.core.batches import TokenBatches
    from lmkit.measure.limits import Limits
    from lmkit.parallel.ranks import Ranks
    from lmkit.recipe.schema import Recipe
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
    untimed_steps: Count = 0
    """Untimed steps before each epoch: GPUs that were idle during "one rank" are faster for a while."""
    warmup_epochs: Count = 1
    """Untimed epochs before the first sample."""
    timed_epochs: PositiveInt = 6
    """Samples of each cell; fewer than 6 give no interval."""
    bucket_mb: PositiveFloat = 50.0
    """Bucket size in MiB (`bucketed`, `torch_ddp`, `zero1`)."""
    tokens: Annotated[Path | None, FlagNames(("--train-path",))] = None
    """A token file (.npy), or a text file whose bytes are the tokens; by default generated stories."""
    lr: PositiveFloat = 3e-4
    """Constant learning rate."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Options:
        check_heads(self.d_model, self.num_heads)
        return self


def check(recipe: Any) -> None:
    """Refuse a vocabulary without room for the tokens, before ranks start."""
    options = recipe.bench_table("lm_matrix")
    needed = NUM_BYTES
    if options.tokens is not None and options.tokens.suffix == ".npy":
        from lmkit.data.token_files import open_tokens

        needed = open_tokens(options.tokens).meta.vocab_size
    if options.vocab_size < needed:
        ids = f"{needed} ids of {options.tokens or 'bytes'}"
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
    """Return a row per kernel and strategy. Rows that the journal has are not measured again.

    Raises:
        UsageError: a batch that the ranks do not divide, or a context longer than the text.
        RankGaveUp: a training failed on one of several ranks.
    """
    import torch

    options = context.options
    tokens = tokens_of(options, context.recipe.run.seed)
    check_batches(options, tokens, context.ranks)
    # Rank 0 measures while the others wait for it at the first collective.
    limits = context.limits([options.precision]) if context.ranks.is_first else None
    training_part, held_out = parted(tokens)
    references: dict[bool, Reference] = {}
    known = {(row["kernel"], row["strategy"]): row for row in context.journal.rows()}
    for kernel in context.each("kernels", options.kernels):
        missing = [strategy for strategy in options.strategies if (kernel, strategy) not in known]
        if missing and (not references or not ATTENTION.facts(kernel).sees_all):
            references = _references(kernel, context, training_part)
        rows = (
            _train_kernel(kernel, missing, context, training_part, held_out, references, limits)
            if missing
            else []
        )
        torch.compiler.reset()
        release_memory(context.device)
        context.keep(rows)
        known |= {(kernel, row["strategy"]): row for row in rows}
    return [known[kernel, strategy] for kernel in options.kernels for strategy in options.strategies]


def _references(kernel: str, context: Context, tokens: np.ndarray) -> dict[bool, Reference]:
    """Return the steps of PyTorch's operations in one process: of the whole batch (True), and of this rank's rows,
    on which `none` trains."""
    from lmkit.bench.training_gate import agreed, of_pytorch, reference
    from lmkit.parallel.ranks import Ranks

    options, ranks = context.options, context.ranks
    found: dict[bool, Reference] = {}
    for whole in (True, False):
        place = Ranks(device=ranks.device) if whole else ranks
        if whole or (ranks.world_size > 1 and "none" in options.strategies):
            recipe = of_pytorch(_recipe(context, _config(kernel, options)))
            found[whole] = agreed(reference(recipe, ranks.device, batches_of(context, tokens, place)), ranks)
    return found


def _config(kernel: str, options: Options) -> ModelConfig:
    shared = ("num_layers", "d_model", "d_ff", "num_heads", "context_length", "vocab_size")
    switches = ("tie_embeddings", "activation_checkpointing", "compile")
    return ModelConfig(attention=kernel, **{key: getattr(options, key) for key in (*shared, *switches)})


def _recipe(context: Context, config: ModelConfig) -> Recipe:
    table = {key: getattr(context.options, key) for key in ("lr", "precision", "cuda_graph")}
    return context.recipe_of(config, **table)


def _train_kernel(
    kernel: str,
    strategies: Sequence[str],
    context: Context,
    tokens: np.ndarray,
    held_out: np.ndarray,
    references: Mapping[bool, Reference],
    limits: Limits | None,
) -> Rows:
    """Return one row per strategy."""
    from lmkit.model.accounting import count_parameters, flops_per_token

    options, ranks = context.options, context.ranks
    config = _config(kernel, options)
    claim_workspaces(ranks.device)
    memory = Memory(ranks.device)
    rows: dict[str, dict[str, Any]] = {
        strategy: {
            **context.optimizer_field,
            "kernel": kernel,
            "strategy": strategy,
            "ranks": 1 if strategy == ONE_RANK else ranks.world_size,
            "precision": options.precision,
            "compile": options.compile,
            "parameters": count_parameters(config).total,
            "status": "ok",
            "detail": "",
        }
        for strategy in strategies
    }
    variants = {
        strategy: Variant(
            row=row,
            make=partial(Cell, strategy, context, _recipe(context, config), tokens, memory),
            judge=lambda cell: cell.judge(references),
            more=lambda cell: cell.warm_up(),
            check=lambda cell, row=row: cell.end(row, held_out),  # type: ignore[misc]
        )
        for strategy, row in rows.items()
    }
    clock = SteadyStateClock(ranks.device, options.steps_per_epoch, options.untimed_steps)

    def figures(strategy: str, samples_ms: list[float]) -> dict[str, Any]:
        work = {
            "tokens": options.batch_size * options.context_length,
            "flops": flops_per_token(config, options.context_length),
            "precision": options.precision,
            "ranks": rows[strategy]["ranks"],
        }
        fields = speed_fields(samples_ms, context, limits, **work)
        epoch_s = fields["median_ms"] * options.steps_per_epoch / 1e3
        return fields | {"epochs": len(samples_ms), "epoch_s": epoch_s}

    turns = {"rounds": options.timed_epochs, "clock": clock}
    _, believed = measure_figures(variants, context, limits, figures, **turns)
    baseline = believed.get(options.strategies[0])
    for strategy, samples_ms in believed.items():
        if baseline is not None and samples_ms is not baseline:
            rows[strategy] |= ratio_fields(paired_ratio(samples_ms, baseline))
    return list(rows.values())


class Cell:
    """A cell of the matrix: train one kernel with one strategy.

    Attributes:
        step: None on ranks that wait for the training of one rank.
    """

    def __init__(
        self, strategy: str, context: Context, recipe: Recipe, tokens: np.ndarray, memory: Memory
    ) -> None:
        from lmkit.parallel.ranks import Ranks
        from lmkit.training.setup import TrainingStep

        self._strategy, self._options, self._memory = strategy, context.options, memory
        self._ranks = ranks = Ranks(device=context.device) if strategy == ONE_RANK else context.ranks
        self._all_ranks = context.ranks.world_size
        self._losses: list[Any] = []
        self.step: TrainingStep | None = None
        if strategy == ONE_RANK and not context.ranks.is_first:
            return
        release_freed(ranks)
        memory.begin(strategy)
        parallel = ParallelConfig(
            strategy="none" if strategy == ONE_RANK else strategy, bucket_mb=self._options.bucket_mb
        )
        self.step = TrainingStep(recipe, ranks, batches_of(context, tokens, ranks), parallel=parallel)

    def judge(self, references: Mapping[bool, Reference]) -> dict[str, Any]:
        """Make the first steps; return the fields of `training_gate.judge`."""
        from lmkit.bench.training_gate import budget_of, judge

        if self.step is None:
            return {}
        theirs = references[self._ranks.world_size == 1 or self._strategy != "none"]
        found, losses = judge(self.step, theirs, budget_of(self._options.precision), forward=True)
        self._losses += losses
        return found

    def warm_up(self) -> dict[str, Any]:
        """Make the untimed epochs (at least a step), in which a CUDA graph may be captured; return the peak."""
        if self.step is None:
            return {}
        release_freed(self._ranks)

        def run() -> None:
            for _ in range(max(1, self._steps_of(self._options.warmup_epochs))):
                self.run()

        return {"peak_gb": self._memory.peak_gb(self._strategy, self.step, run)}

    def _steps_of(self, epochs: int) -> int:
        return int(epochs * (self._options.untimed_steps + self._options.steps_per_epoch))

    def run(self) -> None:
        """Make one step."""
        if self.step is not None:
            self._losses.append(self.step.run())

    def end(self, row: dict[str, Any], held_out: np.ndarray) -> dict[str, Any]:
        """Add losses, averaged over the ranks, to the row; return status and detail if it is wrong by now, else {}.
        Collective."""
        import torch

        from lmkit.bench.training_gate import STEPS, after_timing, budget_of
        from lmkit.parallel.collectives import sum_over_ranks
        from lmkit.training.evaluation import HeldOut, evaluate

        if self.step is None:
            return {}
        options, ranks, graph = self._options, self._ranks, self.step.step.graph
        if wrong := after_timing(self.step, budget_of(options.precision), forward=True):
            return wrong
        # Otherwise their memory would be freed while the next kernel is measured.
        self.step.wait_for_weights()
        losses = sum_over_ranks(torch.tensor(list(map(float, self._losses)), dtype=torch.float64), ranks)
        # If another cell failed while it was timed, the others have made more steps.
        planned = STEPS + max(1, self._steps_of(options.warmup_epochs)) + self._steps_of(options.timed_epochs)
        valid_loss = None
        if len(losses) == planned:
            # The same batches for all cells.
            data = HeldOut(held_out, None, options.context_length, options.batch_size // self._all_ranks)
            precision = self.step.step.precision
            found = evaluate(self.step.model, data, ranks, precision=precision, max_batches=EVAL_BATCHES)
            valid_loss = None if found is None else found.loss
        curve = (losses[:planned] / ranks.world_size).tolist()
        row |= {
            "graph": graph.note if graph is not None else "",
            "first_loss": curve[0],
            "final_loss": curve[-1],
            "valid_loss": valid_loss,
            "losses": curve,
        }
        return {}


# Tokens


def tokens_of(options: Options, seed: int) -> np.ndarray:
    """Return the tokens: the token file, memory-mapped, or the bytes of a text or of generated stories."""
    import numpy as np

    from lmkit.data.synth import generate_stories
    from lmkit.data.token_files import open_tokens

    if options.tokens is not None and options.tokens.suffix == ".npy":
        return open_tokens(options.tokens).tokens
    if options.tokens is not None:
        return _bytes_of(options.tokens)
    text = b"\n".join(story.encode() for story in islice(generate_stories(seed), STORIES))
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def _bytes_of(path: Path) -> np.ndarray:
    """Return a text's bytes, memory-mapped."""
    import numpy as np

    try:
        refuse_irregular(path)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # numpy refuses empty files with a ValueError
        why = reason(error) if isinstance(error, OSError) else "an empty file"
        hint = "name a token file (.npy) or a text"
        raise UsageError("bench.no_text", f"bench.lm_matrix.tokens: {path}: {why}", hint=hint) from error


def parted(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens to train on and those that are held out."""
    border = int(len(tokens) * (1 - HELD_OUT))
    return tokens[:border], tokens[border:]


def check_batches(options: Options, tokens: np.ndarray, ranks: Ranks) -> None:
    """Refuse a batch that the ranks do not divide, and a context longer than the text."""
    if options.batch_size % ranks.world_size:
        raise UsageError(
            "bench.batch_size",
            f"bench.lm_matrix.batch_size: {options.batch_size} sequences are not divisible by "
            f"{ranks.world_size} ranks",
            hint=f"give a multiple of {ranks.world_size}",
        )
    if (shortest := min(map(len, parted(tokens)))) <= options.context_length:
        raise UsageError(
            "bench.context_length",
            f"bench.lm_matrix.context_length: {options.context_length} + 1 tokens are more than the held-out text "
            f"has, {shortest}",
            hint="give a shorter context" + ("" if options.tokens is None else ", or a longer token file"),
        )


def batches_of(context: Context, tokens: np.ndarray, ranks: Ranks) -> TokenBatches:
    """Return the batches of one of the ranks."""
    from lmkit.core.batches import TokenBatches

    return TokenBatches(
        tokens,
        batch_size=context.options.batch_size,
        context_length=context.options.context_length,
        seed=context.recipe.run.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )


HEADLINE = (ONE_RANK, "naive", "bucketed")
"""The strategies of the headline picture."""
TIME = Column("median_ms", "ms per step", ".2f", instead="status", axis="time of a step (ms)")
MEMORY = Column("peak_gb", "GB", ".3f", axis="peak memory (GB = 10^9 bytes)")
THROUGHPUT = Column("tokens_per_s", "tokens/s", ",.0f", axis="tokens per second, all ranks")
COLUMNS = (
    Column("kernel", "kernel"),
    Column("strategy", "strategy"),
    TIME,
    Column("spread", "spread", ".0%"),
    THROUGHPUT,
    Column("mfu", "MFU", ".1%"),
    MEMORY,
    Column("speedup", "speedup", ".3f"),
    Column("valid_loss", "valid loss", ".4f"),
)
WIDE = (
    Column("speedup_low", "95% from", ".3f"),
    Column("speedup_high", "to", ".3f"),
    Column("scaling", "scaling", ".1%"),
    Column("overhead", "memory over none", "+.1%"),
    Column("captured", "graph"),
    Column("epoch_s", "s per epoch", ".3f"),
    Column("final_loss", "last loss", ".4f"),
)


def summarize(rows: Rows) -> Summary:
    """Say what the rows support: the fastest cell, the best strategy against naive, convergence."""
    rows = with_ratios(rows)
    first = rows[0]
    has = {key for row in rows for key, value in row.items() if value is not None}
    notes = [*mfu_notes(rows), "GB (10^9): peak of one rank, weights and optimizer included"]
    if "speedup" in has:
        notes.append(f"speedup: over {first['strategy']} with the same kernel, paired epochs")
    if "scaling" in has:
        notes.append(
            f"scaling: the speed of all ranks / ranks x that of {ONE_RANK}, with the same batch of all ranks"
        )
    if "captured" in has:
        why = {row["graph"].partition(", ")[2] for row in rows if row.get("captured") == "no"}
        reasons = f"; no: {'; '.join(sorted(why))}" if why else ""
        notes.append(f"graph: whether a CUDA graph launched the steps{reasons}")
    if "valid_loss" in has:
        notes.append("valid loss: after all epochs, on held-out text")
    return Summary(
        "lm-matrix: attention kernels x gradient strategies",
        COLUMNS,
        rows,
        about=f"{_ranks(rows)}, {first.get('precision', '')}, compile {first.get('compile', 'none')}",
        findings=findings(rows),
        notes=notes,
        wide=WIDE,
    )


def with_ratios(rows: Rows) -> Rows:
    """Add scaling (against one rank), memory overhead (against `none`), both within each kernel, and whether a CUDA
    graph launched the steps."""
    found = {(row["kernel"], row["strategy"]): row for row in rows if row["status"] == "ok"}
    told = []
    for row in rows:
        alone, bare = (found.get((row["kernel"], name)) for name in (ONE_RANK, "none"))
        more: dict[str, Any] = {}
        if row["status"] == "ok" and row["ranks"] > 1:
            if alone is not None:
                more["scaling"] = paired_ratio(row["samples_ms"], alone["samples_ms"]).speedup / row["ranks"]
            if bare is not None:
                more["overhead"] = row["peak_gb"] / bare["peak_gb"] - 1
        if row.get("graph"):
            more["captured"] = "yes" if row["graph"].startswith("CUDA graph: on") else "no"
        told.append(row | more)
    return told


def _ranks(rows: Rows) -> str:
    ranks = max(row["ranks"] for row in rows)
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def findings(rows: Rows) -> list[str]:
    """Return the sentences that the rows support."""
    ran = [row for row in rows if row["status"] == "ok"]
    # On several ranks `none` trains a separate model on each rank: a bound for the others' speed, not a training.
    trained = [row for row in ran if row["ranks"] == 1 or row["strategy"] != "none"]
    if not trained:
        only_none = (
            "Only `none` ran, which on several ranks trains no model: nothing can be compared with it."
        )
        return [only_none if ran else "Nothing ran."]
    best = max(trained, key=lambda row: row["tokens_per_s"])
    found = [f"Fastest: {best['kernel']} with {best['strategy']}, {best['tokens_per_s']:,.0f} tokens/s."]
    for kernel, of_kernel in grouped(trained, lambda row: str(row["kernel"])).items():
        by_name = {row["strategy"]: row for row in of_kernel}
        together = [row for row in of_kernel if row["ranks"] > 1]
        if not together:
            continue
        fastest = by_name.get("bucketed") or min(together, key=lambda row: row["median_ms"])
        for other in (by_name.get("naive"), by_name.get(ONE_RANK)):
            if other is not None and other is not fastest:
                ratio = paired_ratio(fastest["samples_ms"], other["samples_ms"])
                found.append(f"{kernel}: {fastest['strategy']} against {other['strategy']} {ratio}.")
    if len(trained) > 1:
        first = trained[0]
        apart = max(
            abs(mine - theirs) / abs(theirs)
            for row in trained
            for mine, theirs in zip(row["losses"], first["losses"], strict=True)
        )
        found.append(
            f"Convergence: the loss curves of {len(trained)} trainings differ by at most {apart:.2g} of the loss, "
            f"which falls from {first['first_loss']:.3f} to {first['final_loss']:.3f}."
        )
    return found


def pictures(rows: Rows) -> dict[str, bytes]:
    """Draw the matrix by time, memory and throughput, the loss curves, and bars and a table per kernel."""
    by_kernel: dict[str, Any] = {"group": "kernel", "x_label": "attention kernel"}
    files = {
        f"lm_matrix_{name}.png": grouped_bars(
            rows, column, series="strategy", title=f"{title} ({_ranks(rows)})", **by_kernel
        )
        for name, column, title in (
            ("time", TIME, "Time per training step"),
            ("memory", MEMORY, "Peak memory of one rank"),
            ("throughput", THROUGHPUT, "Training throughput"),
        )
    }
    rows = with_ratios(rows)
    headline = [row for row in rows if row["strategy"] in HEADLINE]
    if len({row["strategy"] for row in headline}) > 1:
        files["lm_matrix_headline.png"] = grouped_bars(
            headline,
            THROUGHPUT,
            series=lambda row: row["strategy"] + ("" if row["ranks"] == 1 else f", {row['ranks']} ranks"),
            title=f"One rank, naive, bucketed and overlapped ({_ranks(rows)}; whiskers p10 to p90)",
            **by_kernel,
        )
    files["lm_matrix_convergence.png"] = loss_curve(
        {
            f"{row['kernel']}, {row['strategy']}": list(enumerate(row["losses"], 1))
            for row in rows
            if row["status"] == "ok"
        },
        title="Convergence, same start and batches",
        x_label="optimizer step",
    )
    columns = Summary("", (), rows).filled((*COLUMNS[1:], *WIDE))
    for kernel, chosen in grouped(rows, lambda row: str(row["kernel"])).items():
        files[f"{kernel}_lm_matrix_throughput.png"] = grouped_bars(
            chosen,
            THROUGHPUT,
            group="strategy",
            title=f"{kernel}: training throughput ({_ranks(rows)}; whiskers p10 to p90)",
            x_label="gradient strategy",
        )
        cells = [[column.text(row) for column in columns] for row in chosen]
        files[f"lm_matrix_table_{kernel}.png"] = table_picture(
            [column.header for column in columns], cells, title=f"lm-matrix: {kernel}"
        )
    return files
