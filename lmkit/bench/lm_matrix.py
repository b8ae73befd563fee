"""`lmkit bench lm-matrix`: short real trainings over attention kernels x gradient strategies.

All strategies of a kernel are alive at once and take turns, one epoch each per round, so that epochs of a round form
pairs. Every training starts from the same weights and sees the same batches, so loss curves can be compared, too.
"one rank" is the same training on one GPU with the whole batch; the other ranks wait meanwhile.

A training that does not fit in memory, or fails, becomes a row. If it does so on one of several ranks, the harness
starts the ranks again, without that cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from lmkit.bench.context import Context, FlagNames
from lmkit.bench.failures import failure_on_any_rank_is_a_row
from lmkit.bench.harness import add_figures, mfu_fields, ratio_fields, time_fields
from lmkit.bench.lm_matrix_data import batches_of, check_batches, parted, tokens_of
from lmkit.bench.lm_matrix_summary import ONE_RANK
from lmkit.bench.lm_matrix_summary import pictures as pictures
from lmkit.bench.lm_matrix_summary import summarize as summarize
from lmkit.errors import UsageError
from lmkit.measure.memory import GB, claim_workspaces, memory_in_use, release_memory, track_peak
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.tables import Rows
from lmkit.measure.timing import clock_for
from lmkit.recipe.model_table import Checkpointing
from lmkit.recipe.tables import (
    Count,
    ModelConfig,
    ParallelConfig,
    PositiveFloat,
    PositiveInt,
    Table,
    check_heads,
)
from lmkit.recipe.values import AttentionName, RegisteredName
from lmkit.recipe.vocabulary import NUM_BYTES
from lmkit.registry import ATTENTION, BENCHES, STRATEGIES

if TYPE_CHECKING:
    import numpy as np

    from lmkit.bench.training_gate import Budget, Reference
    from lmkit.measure.limits import Limits
    from lmkit.parallel.ranks import Ranks
    from lmkit.recipe.schema import Recipe
    from lmkit.training.setup import TrainingStep

EVAL_BATCHES = 20


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
    for done, kernel in enumerate(options.kernels):
        context.progress("kernels", done, len(options.kernels))
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
    context.progress("kernels", len(options.kernels), len(options.kernels))
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
    """Return one row per strategy. Epochs are interleaved; each round begins with another strategy."""
    from lmkit.model.accounting import count_parameters
    from lmkit.parallel.failures import StepWatch

    options, ranks = context.options, context.ranks
    config = _config(kernel, options)
    claim_workspaces(ranks.device)
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
    trainings: dict[str, Training] = {}

    epochs = options.warmup_epochs + options.timed_epochs

    @contextmanager
    def attempt(strategy: str, step: int) -> Iterator[None]:
        """Drop a training that fails in the block, or is wrong."""
        row, others = rows[strategy], len(trainings.keys() - {strategy})
        note = f", with {others} other trainings in memory" if others else ""
        with failure_on_any_rank_is_a_row(row, context, note), watch.step(step):
            yield
        if row["status"] != "ok":
            trainings.pop(strategy, None)
            release_memory(ranks.device)

    with StepWatch(ranks) as watch:  # reports a rank that gives up as lost
        for strategy in strategies:
            with attempt(strategy, 0):
                trainings[strategy] = Training(strategy, context, config, tokens, references)
                rows[strategy] |= trainings[strategy].judged
        order = list(trainings)
        for epoch in range(epochs):
            for strategy in order:
                with attempt(strategy, epoch + 1):
                    trainings[strategy].run_epoch(timed=epoch >= options.warmup_epochs)
            order = [name for name in (*order[1:], *order[:1]) if name in trainings]  # the same on every rank
        for strategy in list(trainings):
            with attempt(strategy, epochs):
                rows[strategy] |= trainings[strategy].end(held_out)
        for strategy, training in trainings.items() if ranks.is_first else ():
            add_figures(rows[strategy], limits, partial(training.fields, config, limits))
        baseline = trainings.get(options.strategies[0])
        for strategy, training in trainings.items() if ranks.is_first else ():
            both = (rows[strategy]["status"], rows[options.strategies[0]]["status"]) == ("ok", "ok")
            if baseline not in (None, training) and both:
                rows[strategy] |= ratio_fields(paired_ratio(training.samples_ms, baseline.samples_ms))
    return list(rows.values())


class Training:
    """A cell of the matrix: train one kernel with one strategy, an epoch at a time.

    Attributes:
        step: None on ranks that wait for the training of one rank.
        judged: fields of its row: whether its first steps are right.
    """

    def __init__(
        self,
        strategy: str,
        context: Context,
        config: ModelConfig,
        tokens: np.ndarray,
        references: Mapping[bool, Reference],
    ) -> None:
        from lmkit.bench.training_gate import judge
        from lmkit.parallel.ranks import Ranks
        from lmkit.training.setup import TrainingStep

        self._options = context.options
        self.judged: dict[str, Any] = {"status": "ok"}
        self._all_ranks = context.ranks
        self._ranks = ranks = Ranks(device=context.device) if strategy == ONE_RANK else context.ranks
        self.step: TrainingStep | None = None
        self.samples_ms: list[float] = []
        self._losses: list[float] = []
        self._valid_loss: float | None = None
        self._graph = ""
        self._own_bytes = self._peak_bytes = 0
        if strategy == ONE_RANK and not context.ranks.is_first:
            return
        batches = batches_of(context, tokens, ranks)
        _settle(ranks)
        before = memory_in_use(ranks.device)
        parallel = ParallelConfig(
            strategy="none" if strategy == ONE_RANK else strategy, bucket_mb=self._options.bucket_mb
        )
        self.step = TrainingStep(_recipe(context, config), ranks, batches, parallel=parallel)
        theirs = references[ranks.world_size == 1 or strategy != "none"]
        # The optimizer's state exists from here on.
        self.judged, self._losses = judge(self.step, theirs, self._budget, forward=True)
        _settle(ranks)
        self._own_bytes = _kept_bytes(self.step, ranks, before)

    def run_epoch(self, *, timed: bool) -> None:
        """Run `steps_per_epoch` steps; if `timed`, their ms per step become a sample. Collective."""
        from lmkit.parallel.collectives import agree

        num_steps = self._options.steps_per_epoch
        _settle(self._ranks)
        agree(self._all_ranks)  # the other ranks are idle while one rank trains
        if self.step is None:
            return
        with track_peak(self._ranks.device) as peak:
            losses = [self.step.run() for _ in range(self._options.untimed_steps)]
            clock, run = clock_for(self._ranks.device, "wall"), self.step.run
            elapsed_ms = clock.sample_ms(lambda: losses.append(run()), num_steps, before=())
        # Leave out what the other trainings keep on the device.
        self._peak_bytes = max(self._peak_bytes, self._own_bytes + peak.extra_bytes)
        self._losses += [loss.item() for loss in losses]
        if timed:
            self.samples_ms.append(elapsed_ms / num_steps)

    @property
    def _budget(self) -> Budget:
        from lmkit.bench.training_gate import budget_of

        return budget_of(self._options.precision)

    def end(self, held_out: np.ndarray) -> dict[str, Any]:
        """Evaluate, and average losses over the ranks; return status and detail if it is wrong by now, else {}.
        Collective."""
        import torch
        import torch.distributed as dist

        from lmkit.bench.training_gate import after_timing
        from lmkit.training.evaluation import HeldOut, evaluate

        if self.step is None:
            return {}
        if (graph := self.step.step.graph) is not None:
            self._graph = graph.note
        if wrong := after_timing(self.step, self._budget, forward=True):
            return wrong
        # Otherwise their memory would be freed while the next kernel is measured.
        self.step.wait_for_weights()
        if self._ranks.world_size > 1:
            losses = torch.tensor(self._losses, dtype=torch.float64)
            dist.all_reduce(losses)
            self._losses = (losses / self._ranks.world_size).tolist()
        rows = self._options.batch_size // self._all_ranks.world_size  # the same batches for all
        data = HeldOut(held_out, None, self._options.context_length, rows)
        found = evaluate(
            self.step.model, data, self._ranks, precision=self.step.step.precision, max_batches=EVAL_BATCHES
        )
        self._valid_loss = None if found is None else found.loss
        return {}

    def fields(self, config: ModelConfig, limits: Limits | None) -> dict[str, Any]:
        """Return the measured fields of the row."""
        from lmkit.model.accounting import flops_per_token

        length = self._options.context_length
        fields = time_fields(self.samples_ms)
        rate = self._options.batch_size * length / (fields["median_ms"] * 1e-3)
        flops = rate / self._ranks.world_size * flops_per_token(config, length)
        fields |= mfu_fields(flops, self._ranks.device, self._options.precision, limits)
        return fields | {
            "graph": self._graph,
            "epochs": len(self.samples_ms),
            "epoch_s": fields["median_ms"] * self._options.steps_per_epoch / 1e3,
            "tokens_per_s": rate,
            "peak_gb": self._peak_bytes / GB,
            "first_loss": self._losses[0],
            "final_loss": self._losses[-1],
            "valid_loss": self._valid_loss,
            "losses": self._losses,
        }


def _kept_bytes(step: TrainingStep, ranks: Ranks, before: int) -> int:
    """Return the bytes that a training keeps from step to step.

    On a CPU the resident set would count what earlier trainings left in the allocator, so weights and optimizer state
    are added up instead; a strategy's own buffers are missing there.
    """
    import torch

    if ranks.device.type == "cuda":
        return memory_in_use(ranks.device) - before
    state = [value for slots in step.optimizer.state.values() for value in slots.values()]
    tensors = [*step.model.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
    return sum(tensor.nbytes for tensor in tensors)


def _settle(ranks: Ranks) -> None:
    """Wait until buffers of finished collectives are freed, which would count as memory of another training."""
    import torch

    from lmkit.parallel.ranks import release_collectives

    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    release_collectives(ranks)
    if ranks.device.type == "cuda":
        torch.empty(1, device=ranks.device)
