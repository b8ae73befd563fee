"""Build what training needs from the tables of a recipe: model, optimizer, step.

`step_of` is the only place that makes the step of a recipe, and `build_step` the only one that puts a step together.
`lmkit train` runs the result, and so does `TrainingStep`, which benches, profilers and `lmkit plan --check` measure.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmkit import __version__
from lmkit.attention import check_kernel, check_values
from lmkit.attention.dispatch import LARGEST_ERROR
from lmkit.core.adamw import decay_groups
from lmkit.core.batches import Batch, BatchSource
from lmkit.core.model import Linear
from lmkit.core.ranges import range_
from lmkit.core.step import gradient_norm
from lmkit.data.token_files import check_divisible
from lmkit.errors import UsageError
from lmkit.measure.environment import has_bf16
from lmkit.model.operations import choose_operations
from lmkit.model.transformer import TransformerLM, compile_model, place_side_by_side
from lmkit.parallel.place import read_place
from lmkit.parallel.ranks import Ranks, local_device
from lmkit.parallel.strategy import MakeOptimizer, build_strategy
from lmkit.plugins import checked, wrong_result
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from lmkit.registry import OPERATIONS, OPTIMIZERS, SCHEDULES, STRATEGIES
from lmkit.training.checkpoint import TrainingState, capture_rng, open_checkpoint
from lmkit.training.precision import NARROW_WEIGHTS, PRODUCTS, autocast, hold_weights, with_precision
from lmkit.training.resume import optimizer_layout
from lmkit.training.run_data import Data, check_token_files, make_batches, resolved_tables
from lmkit.training.step import Outcome, Step, load_batch
from lmkit.training.weights import open_weights

ALONE = ParallelConfig(strategy="none")
RANDOM = Data()
MOST_CHECKED = 512
"""Tokens on which a plugin's attention is compared with the reference before it trains."""
_USUAL = TrainConfig()


def build_step(
    model: ModelConfig,
    ranks: Ranks | None = None,
    *,
    optimizer: OptimizerConfig | None = None,
    make_optimizer: MakeOptimizer | None = None,
    parallel: ParallelConfig = ALONE,
    precision: str = _USUAL.precision,
    grad_clip: float = _USUAL.grad_clip,
    fingerprint: str = "",
    **options: Any,
) -> Step:
    """Build a model, its gradient synchronisation and its optimizer; return the step that trains it.

    Weights are initialised from torch's generator and equal on all ranks (rank 0's count).

    Args:
        model: the table [model], with `vocab_size` set; `compile` is obeyed.
        ranks: this process's place; None: as in torch.distributed's default group, or, without a group, alone on
            the device of `run.device = "auto"`: a GPU where there is one.
        optimizer: the table [optimizer]; None: its defaults.
        make_optimizer: makes the optimizer of the parameter groups; None: the one that the table names.
        parallel: the table [parallel].
        precision, grad_clip: as in the table [train].
        fingerprint: has to be equal on all ranks.
        options: masked, max_skips, spike_sigmas, cuda_graph: see `Step`. A graph does not notice changes of model and
            optimizer but of the learning rate, weights and state.

    Raises:
        LmkitError: ranks have different models or fingerprints.
        UsageError: the attention kernel does not run on the device; the optimizer refuses an option, or keeps no
            masters where the precision is "bf16" or "fp8".

    Example:

        step = build_step(ModelConfig(vocab_size=256, d_model=64, d_ff=192, num_layers=2, num_heads=4))
        outcome = step(inputs, targets, lr=1e-3)    # int64, (accumulation, rows, seq)
    """
    ranks = ranks or Ranks.current(otherwise="auto")
    one_query = torch.empty(1, 1, 1, model.head_dim, dtype=PRODUCTS[precision], device=ranks.device)
    check_kernel(model.attention, one_query)
    table = optimizer or OptimizerConfig()
    facts = STRATEGIES.facts(parallel.strategy)
    # A strategy that shards parameters draws them layer by layer: no rank holds the whole model.
    is_drawn_later = ranks.world_size > 1 and "parameters" in facts.shards
    plain = TransformerLM(model, device="meta" if is_drawn_later else ranks.device)
    if precision == "fp8":
        from lmkit.model.fp8 import use_fp8

        use_fp8(plain.layers)
    if model.compile != "none":
        compile_model(plain, model.compile)
    masters: dict[Tensor, Tensor] = {}
    if precision in NARROW_WEIGHTS and "weights" in facts.uses:
        parallel = parallel.changed(weights="bf16")  # the strategy keeps masters itself
    else:
        masters = hold_weights(plain, precision)
        place_side_by_side(plain)
    sync = build_strategy(parallel, ranks)
    # `attach` keeps the model's `loss`.
    call = checked(STRATEGIES, parallel.strategy, sync.attach(plain, fingerprint=fingerprint), "loss")
    if ranks.world_size > 1 and sync.averages:  # as `attach` does with the parameters
        for master in masters.values():
            dist.broadcast(master, src=0)
    groups = decay_groups(plain.parameters(), table.weight_decay)
    if parallel.weights == "bf16" and precision in NARROW_WEIGHTS and "parameters" not in facts.shards:
        for group in groups:
            if group["params"][0].dim() < 2:
                group["weights"] = "fp32"  # gains stay what `hold_weights` would leave them
    if not OPTIMIZERS.facts(table.name).elementwise:  # Muon orthogonalises the matrices of linear layers
        matrices = {module.weight for module in plain.layers.modules() if isinstance(module, Linear)}
        joined, groups = groups, []
        for group, is_matrix in product(joined, (True, False)):
            if params := [param for param in group["params"] if (param in matrices) == is_matrix]:
                groups.append({**group, "params": params, "is_matrix": is_matrix})
    groups = list(_with_rates(groups, plain, table))
    made: Any = sync.build_optimizer(make_optimizer or partial(_make_optimizer, table), groups)
    if masters:
        made.keep_masters(masters)
    return Step(plain, call, made, sync, ranks, precision=precision, grad_clip=grad_clip, **options)


def _with_rates(
    groups: list[dict[str, Any]], model: TransformerLM, table: OptimizerConfig
) -> Iterator[dict[str, Any]]:
    """Yield the groups, split where parameters have learning rates of their own; these decay as all others do."""
    rates = {model.token_embeddings.weight: table.embedding_lr, model.lm_head.weight: table.head_lr}
    for group in groups:
        by_rate: dict[float, list[Tensor]] = {}
        for param in group["params"]:
            rate = table.gain_lr if param.dim() < 2 else rates.get(param)
            by_rate.setdefault(rate or table.lr, []).append(param)
        for rate, params in by_rate.items():
            own, factor = {**group, "params": params}, rate / table.lr
            if factor != 1:
                own |= {"lr_factor": factor, "weight_decay": group["weight_decay"] / factor}
            yield own


def step_of(
    recipe: Recipe,
    ranks: Ranks,
    data: Data = RANDOM,
    *,
    parallel: ParallelConfig | None = None,
    make_optimizer: MakeOptimizer | None = None,
) -> Step:
    """Build the step of a resolved recipe; refuse ranks with different recipes or data."""
    model, train = resolved_tables(recipe)
    return build_step(
        model,
        ranks,
        optimizer=recipe.optimizer,
        make_optimizer=make_optimizer,
        parallel=parallel or (recipe.parallel if ranks.world_size > 1 else ALONE),
        precision=train.precision,
        grad_clip=train.grad_clip,
        masked=any(source.file.mask is not None for source in data.sources),
        cuda_graph=train.cuda_graph,
        max_skips=train.max_skips if train.nonfinite == "skip" else 0,
        spike_sigmas=train.spike_sigmas,
        fingerprint=f"{recipe.model_dump_json()} {data.identity}",
    )


class TrainingStep:
    """Run the step of a recipe on batches from memory, one after the other: what benches and profilers measure.

    Args:
        recipe: resolved; its `optimizer.lr` is constant.
        batches: this rank's batches; None: random tokens.
        changes: `parallel` and `make_optimizer` of `step_of`.

    Attributes:
        outcome: of the last step that `run` made.
    """

    outcome: Outcome

    def __init__(
        self, recipe: Recipe, ranks: Ranks, batches: BatchSource | None = None, **changes: Any
    ) -> None:
        torch.manual_seed(recipe.run.seed)
        self.recipe = recipe
        self.step = step_of(recipe, ranks, **changes)
        self.model, self.optimizer = self.step.model, self.step.optimizer
        self._device = ranks.device
        self._batches = make_batches(recipe, RANDOM, ranks) if batches is None else batches
        self._lr = recipe.optimizer.lr
        self._done = 0
        self._batch: Batch | None = None

    def run(
        self,
        *,
        wait: bool = False,
        lr: float | None = None,
        batch: Batch | None = None,
        before_update: Callable[[], None] | None = None,
    ) -> Tensor:
        """Make one whole step on the next batch; return the loss, a scalar on the device.

        Args:
            lr: the learning rate; None: the recipe's.
            batch: in place of the next one.
            wait: return when the step is made.
            before_update: called before the weights change; the step is then made without a CUDA graph.
        """
        with range_("step"):
            self._batch = batch = batch or self.next_batch()
            lr = self._lr if lr is None else lr
            if before_update is None:
                outcome = self.step(*batch, lr=lr)
            else:
                self.step.before_update = before_update
                outcome = self.step.update(self.step.accumulate(*batch), lr=lr)
                self.step.before_update = None
            if wait and outcome.loss.is_cuda:
                torch.cuda.synchronize(outcome.loss.device)
        self.outcome = outcome
        return outcome.loss

    def backward(self) -> Tensor:
        """Run forward and backward on the current batch; the gradients stay, not yet reduced."""
        return self.step.accumulate(*(self._batch or self.next_batch()))

    def forward(self) -> Tensor:
        """Run forward passes with loss, without a graph, on the current batch; return the last micro-batch's loss."""
        inputs, targets = self._batch or self.next_batch()
        with torch.no_grad(), range_("forward"), autocast(self._device, self.step.precision):
            for ids, wanted in zip(inputs, targets, strict=True):
                loss = self.step.call.loss(ids, wanted)
        return loss

    def forward_backward(self) -> Tensor:
        """Run forward and backward on the current batch and drop the gradients; return the loss."""
        inputs, targets = self._batch or self.next_batch()
        with range_("fwd+bwd"):
            loss = self.step.accumulate(inputs, targets)
            self.optimizer.zero_grad(set_to_none=True)
        return loss

    def random_batch(self) -> Batch:
        """Return random tokens, shaped as the current batch, other ones on every rank."""
        inputs, _ = self._batch or self.next_batch()
        assert self.model.config.vocab_size is not None
        generator = torch.Generator().manual_seed(self.step.ranks.rank)
        ids = torch.randint(self.model.config.vocab_size, (2, *inputs.shape), generator=generator)
        return ids[0].to(inputs.device), ids[1].to(inputs.device)

    def wait_for_weights(self) -> None:
        """Wait for weights that are still being gathered; until then their memory is in use."""
        self.step.sync.wait_for_weights()

    def next_batch(self) -> Batch:
        """Return the next batch on the device; it is then the current one."""
        self._batch = load_batch(self._batches, self._done, self._device)
        self._done += 1
        return self._batch


def check_device(recipe: Recipe, device: torch.device) -> None:
    """Refuse what does not run on the device, and options of the optimizer, before anything is written or built."""
    model, train = recipe.model, recipe.train
    assert model is not None
    assert train is not None
    dtype, length = PRODUCTS[train.precision], min(model.context_length, MOST_CHECKED)
    one_query = torch.empty(1, 1, 1, model.head_dim, dtype=dtype, device=device)
    check_kernel(model.attention, one_query)
    width = (model.num_heads + 2 * model.kv_heads) * model.head_dim
    random = torch.randn(3, length, width, generator=torch.Generator().manual_seed(0))
    check_values(model.attention, random.to(device, dtype), model.kv_heads, model.head_dim)
    check_operations(model, train.precision, device)
    if train.precision == "fp8":
        from lmkit.model.fp8 import check_fp8

        check_fp8(device)
    if train.precision == "fp16" and device.type == "cpu":
        message = 'train.precision: "fp16" needs a GPU'
        raise UsageError("train.wrong_device", message, hint='use "bf16" or "fp32"')
    table = recipe.optimizer  # it says what it refuses when it is made
    groups = decay_groups([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))], table.weight_decay)
    if not OPTIMIZERS.facts(table.name).elementwise:
        for group in groups:
            group["is_matrix"] = group["params"][0].dim() == 2
    _make_optimizer(table, groups)


def check_operations(model: ModelConfig, precision: str, device: torch.device) -> None:
    """Refuse operations that do not run on the device; compare a plugin's with PyTorch's before they train a model.

    Raises:
        UsageError: they do not run.
        LmkitError: the gradients of a small model are wrong.
    """
    dtype = PRODUCTS[precision]
    one_query = torch.empty(1, 1, 1, model.head_dim, dtype=dtype, device=device)
    operations = choose_operations(model.operations, one_query)
    if type(operations).__module__.startswith("lmkit."):
        return
    length = min(model.context_length, 64)
    sizes = {"vocab_size": 97, "num_layers": 2, "context_length": length, "activation_checkpointing": "none"}
    config = model.changed(**sizes, attention="reference", operations="plain", compile="none")
    with torch.random.fork_rng(devices=[]):  # what follows draws as if nothing was checked
        exact, mine = (TransformerLM(config).to(device) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for theirs, parameter in zip(exact.parameters(), mine.parameters(), strict=True):
            # Means far from 0 and gains other than 1 show other formulas.
            noise = torch.rand(parameter.shape, generator=generator).to(device)
            is_embedding = parameter is mine.token_embeddings.weight
            parameter.add_(1 if is_embedding else noise * (parameter.dim() == 1))
            theirs.copy_(parameter)
    mine.operations = operations
    ids = torch.randint(97, (2, 2, length), generator=generator).to(device)
    with autocast(device, precision):
        loss = mine.loss(*ids)
    found = torch.autograd.grad(loss, [*mine.parameters()], materialize_grads=True)
    rights = torch.autograd.grad(exact.double().loss(*ids), [*exact.parameters()])
    whole = gradient_norm([*rights])
    for (name, _), gradient, right in zip(mine.named_parameters(), found, rights, strict=True):
        error = float((gradient.double() - right).norm() / (right.norm() + 0.01 * whole))
        if not error <= LARGEST_ERROR[dtype]:  # also NaN
            wrong = f"wrong gradients of {name}: relative error {error:.2g} against PyTorch's operations"
            raise wrong_result(OPERATIONS, model.operations, wrong)


def _make_optimizer(table: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    try:
        made = OPTIMIZERS.load(table.name)(groups, table)
    except ValueError as error:
        defaults = OPTIMIZERS.facts(table.name).options.items()
        hint = "the defaults are " + (", ".join(f"{key} = {value}" for key, value in defaults) or "none")
        raise UsageError("optimizer.wrong_option", f"optimizer.options: {error}", hint=hint) from error
    needed = ("param_groups", "state", "step", "zero_grad")
    made = checked(OPTIMIZERS, table.name, made, *needed)
    for argument in inspect.signature(made.step).parameters.values():
        if argument.default is argument.empty and argument.kind is argument.POSITIONAL_OR_KEYWORD:
            found = f"{type(made).__name__}, whose step() needs {argument.name}"
            raise wrong_result(OPTIMIZERS, table.name, found)
    return cast(torch.optim.Optimizer, made)


def check_before_data(recipe: Recipe, *, nproc: int = 1) -> None:
    """Refuse what `train` would refuse whatever the data are, before hours go into making them."""
    device = local_device(recipe.run.device, local_rank=nproc - 1)
    check_device(with_precision(recipe, has_bf16=has_bf16(device)), device)
    assert recipe.train is not None
    ranks = max(nproc, read_place().world_size)
    check_divisible(recipe.train.batch_size, ranks, recipe.train.accumulation)
    check_token_files(recipe, are_made=False)
    if recipe.checkpoint.resume not in ("auto", "never"):
        open_checkpoint(Path(recipe.checkpoint.resume))
    if recipe.train.init_from is not None:
        open_weights(recipe.train.init_from)


def initial_state(recipe: Recipe, step: Step | None = None, data: Data = RANDOM) -> TrainingState:
    """Return the state before the first step, from which checkpoints copy what never changes: recipe, model, data."""
    assert recipe.model is not None
    layout = None if step is None else optimizer_layout(step.optimizer)
    return TrainingState(
        lmkit=__version__,
        step=0,
        seconds=0.0,
        tokens=0,
        world_size=1 if step is None else step.ranks.world_size,
        strategy="none" if step is None else recipe.parallel.strategy,
        optimizer_shards=1 if layout is None else layout["world_size"],
        optimizer_layout=layout,
        rng=(capture_rng(torch.device("cpu") if step is None else step.ranks.device),),
        model=recipe.model,
        recipe=recipe.model_dump(mode="json", exclude_none=True),
        recipe_sha256=hashlib.sha256(recipe.model_dump_json().encode()).hexdigest(),
        data=data.identity,
    )


def learning_rate(table: OptimizerConfig, steps: int) -> Callable[[int, float | None], float]:
    """Return the function (step, used fraction of `train.max_minutes` or None) -> learning rate.

    Warm-up counts steps. Afterwards the schedule follows steps or time, whichever has advanced further, so that it
    always reaches its end.
    """
    schedule = partial(
        SCHEDULES.load(table.schedule),
        lr=table.lr,
        min_lr=table.min_lr,
        warmup_steps=table.warmup_steps,
        total_steps=steps,
        **table.model_dump(include=set(SCHEDULES.facts(table.schedule).uses)),
    )

    def rate(step: int, fraction: float | None) -> float:
        position: float = step + 1  # the update that is about to be made
        if fraction is not None and position >= table.warmup_steps:
            position = max(position, fraction * steps)
        found = schedule(position)
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
            raise wrong_result(SCHEDULES, table.schedule, f"{found!r}, not a finite number")
        return found

    return rate
