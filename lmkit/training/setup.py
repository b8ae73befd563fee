"""Recipe -> the objects that the loop drives: model, optimizer, schedule, step, checkpoint writer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from lmkit import __version__
from lmkit.attention import check_kernel
from lmkit.data.batches import BatchSource
from lmkit.errors import UsageError
from lmkit.measure.environment import device_name
from lmkit.measure.limits import known_peak
from lmkit.measure.ranges import range_
from lmkit.model.accounting import flops_per_token
from lmkit.model.transformer import TransformerLM, compile_model
from lmkit.optim.adamw import AdamW, decay_groups
from lmkit.optim.schedules import SCHEDULES
from lmkit.parallel.protocol import build_strategy
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import ModelConfig, ParallelConfig
from lmkit.registry import OPTIMIZERS
from lmkit.training.checkpoint import CHECKPOINTS, Retention
from lmkit.training.checkpoint_writer import CheckpointWriter
from lmkit.training.console import console
from lmkit.training.metrics import METRICS, Fanout, MetricsFile, Sink, WandbSink
from lmkit.training.model_state import optimizer_layout
from lmkit.training.run_data import Data, make_held_out, resolved_tables
from lmkit.training.state import TrainingState, capture_rng
from lmkit.training.step import PRECISIONS, Step, TrainableModel, autocast
from lmkit.training.trainer import Parts, TrainingClock


def check_device(recipe: Recipe, device: torch.device) -> None:
    """Refuse what the device cannot do, before anything is written or built.

    Raises:
        UsageError: fp16 on a CPU; an attention kernel that is not installed or does not run there.
    """
    model, train = resolved_tables(recipe)
    one_query = torch.empty(1, 1, 1, model.head_dim, dtype=PRECISIONS[train.precision], device=device)
    check_kernel(model.attention, one_query)
    if train.precision == "fp16" and device.type == "cpu":
        raise UsageError('train.precision: "fp16" needs a GPU', hint='use "bf16" or "fp32"')


def learning_rate(recipe: Recipe) -> Callable[[int, float | None], float]:
    """(step, fraction of `train.max_minutes` used) -> learning rate of that step.

    Warm-up counts steps. After it the schedule follows the steps or the time, whichever is further, so that it
    always reaches its end.
    """
    _, train = resolved_tables(recipe)
    optimizer = recipe.optimizer
    schedule = SCHEDULES[optimizer.schedule]

    def rate(step: int, fraction: float | None) -> float:
        position: float = step + 1  # the update that is about to be made
        if fraction is not None and position >= optimizer.warmup_steps:
            position = max(position, fraction * train.steps)
        return schedule(
            position,
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            warmup_steps=optimizer.warmup_steps,
            total_steps=train.steps,
        )

    return rate


def assemble(
    recipe: Recipe, ranks: Ranks, data: Data, batches: BatchSource, sink: Sink, *, used_seconds: float
) -> Parts:
    """Make everything that the loop needs, weights freshly initialised and equal on all ranks.

    Args:
        recipe: resolved.
        used_seconds: what earlier sessions of the run took.

    Raises:
        LmkitError: the ranks have different recipes or data.
    """
    model_config, train = resolved_tables(recipe)
    model = TransformerLM(model_config, device=ranks.device)
    compile_model(model, model_config.compile)
    sync = build_strategy(recipe.parallel if ranks.world_size > 1 else "none", ranks)
    call = sync.attach(model, fingerprint=f"{recipe_sha256(recipe)} {data.identity}")
    optimizer = sync.build_optimizer(
        _optimizer_maker(recipe), decay_groups(model.parameters(), recipe.optimizer.weight_decay)
    )
    return Parts(
        train=train,
        checkpoint=recipe.checkpoint,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        step=Step(
            cast(TrainableModel, call),
            optimizer,
            sync,
            ranks,
            precision=train.precision,
            grad_clip=train.grad_clip,
        ),
        batches=batches,
        held_out=make_held_out(recipe, data),
        learning_rate=learning_rate(recipe),
        tokens_per_step=train.batch_size * model_config.context_length,
        flops_share=peak_share(model_config, ranks.device, train.precision),
        writer=CheckpointWriter(
            recipe.run.path / CHECKPOINTS,
            ranks,
            Retention(
                recipe.run.path / CHECKPOINTS,
                keep_last=recipe.checkpoint.keep_last,
                keep_best=recipe.checkpoint.keep_best,
            ),
        ),
        sink=sink,
        clock=TrainingClock(used_seconds=used_seconds, max_minutes=train.max_minutes, ranks=ranks),
        identity=_identity(recipe, ranks, data, optimizer),
    )


def _optimizer_maker(recipe: Recipe) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    options = recipe.optimizer

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return OPTIMIZERS.load(options.name)(groups, options)

    return make


def _identity(recipe: Recipe, ranks: Ranks, data: Data, optimizer: torch.optim.Optimizer) -> TrainingState:
    """What every checkpoint of this session has in common."""
    model, _ = resolved_tables(recipe)
    layout = optimizer_layout(optimizer)
    return TrainingState(
        lmkit=__version__,
        step=0,
        seconds=0.0,
        tokens=0,
        world_size=ranks.world_size,
        strategy=recipe.parallel.strategy,
        optimizer_shards=1 if layout is None else ranks.world_size,
        optimizer_layout=layout,
        rng=(capture_rng(ranks.device),),
        model=model,
        recipe=recipe.model_dump(mode="json", exclude_none=True),
        recipe_sha256=recipe_sha256(recipe),
        data=data.identity,
    )


def recipe_sha256(recipe: Recipe) -> str:
    """Hash of a resolved recipe."""
    return hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()


def peak_share(model: ModelConfig, device: torch.device, precision: str) -> float | None:
    """FLOPs of one token over the device's peak FLOP/s: times tokens per second it is the MFU. None where the
    chip's peak is not known."""
    peak = known_peak(device_name(device), precision)
    return None if peak is None else flops_per_token(model, model.context_length) / peak


class TrainingStep:
    """A model with its optimizer and gradient synchronisation, run step by step.

    Args:
        config: of the model; `config.compile` is obeyed.
        batches: this rank's batches.
        precision: "fp32", "bf16" or "fp16".
        strategy: a name, or a [parallel] table; see `build_strategy`.
        seed: of the initial weights.
        lr: constant learning rate.
    """

    def __init__(
        self,
        config: ModelConfig,
        ranks: Ranks,
        batches: BatchSource,
        *,
        precision: str = "fp32",
        strategy: str | ParallelConfig = "none",
        seed: int = 0,
        lr: float = 3e-4,
    ) -> None:
        torch.manual_seed(seed)
        self.model = TransformerLM(config, device=ranks.device)
        compile_model(self.model, config.compile)
        sync = build_strategy(strategy, ranks)
        self._call = sync.attach(self.model)
        self.optimizer = sync.build_optimizer(
            lambda groups: AdamW(groups, lr=lr), decay_groups(self.model.parameters(), 0.1)
        )
        self._batches = batches
        self._ranks = ranks
        self._lr = lr
        self._done = 0
        self._batch: tuple[Tensor, Tensor] | None = None
        self._sync = sync
        self.set_precision(precision)

    def set_precision(self, precision: str) -> None:
        """Change the precision of the matrix products; weights and optimizer state stay."""
        self._precision = precision
        self._step = Step(
            cast(TrainableModel, self._call),  # attach keeps the model's `loss`
            self.optimizer,
            self._sync,
            self._ranks,
            precision=precision,
            grad_clip=1.0,
        )

    def run(self) -> Tensor:
        """One whole step on the next batch; the loss, a scalar that stays on the device."""
        with range_("step"):
            inputs, targets = self._next_batch()
            loss = self._step.accumulate(inputs, targets)
            self._step.update(loss, lr=self._lr, stop=False, before_update=_nothing)
        return loss

    def wait_for_weights(self) -> None:
        """Wait for weights that are still being gathered after a step: what they hold on the device is theirs until
        somebody has waited."""
        self._sync.wait_for_weights()

    def forward(self) -> Tensor:
        """A forward pass with loss and without a graph, on the batch at hand."""
        inputs, targets = self._batch_at_hand()
        with torch.no_grad(), range_("forward"), autocast(self._ranks.device, self._precision):
            return cast(TrainableModel, self._call).loss(inputs[0], targets[0])

    def forward_backward(self) -> Tensor:
        """Forward and backward of one step on the batch at hand; the gradients are dropped."""
        inputs, targets = self._batch_at_hand()
        with range_("fwd+bwd"):
            loss = self._step.accumulate(inputs, targets)
            self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        with range_("data"):
            inputs, targets = self._batches.batch(self._done)
            self._done += 1
            device = self._ranks.device
            if device.type == "cuda":
                inputs, targets = inputs.pin_memory(), targets.pin_memory()
            self._batch = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            return self._batch

    def _batch_at_hand(self) -> tuple[Tensor, Tensor]:
        return self._batch or self._next_batch()


def _nothing() -> None:
    return None


def open_sink(recipe: Recipe, ranks: Ranks, *, after_step: int) -> Fanout:
    """metrics.jsonl, stderr and, where the recipe says so, W&B; nothing on ranks other than the first.

    Args:
        after_step: the step that the session goes on from.
    """
    if not ranks.is_first:
        return Fanout([])
    assert recipe.train is not None
    folder = recipe.run.path
    sinks: list[Sink] = [
        MetricsFile(folder / METRICS, after_step=after_step),
        console(recipe.train.steps, first_step=after_step),
    ]
    if recipe.wandb.enabled:
        sinks.append(WandbSink(recipe, folder))
    return Fanout(sinks)
