"""What the model bench, lm-matrix and the profilers run: the trainer's own step, on batches from memory."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lmkit.data.batches import BatchSource
from lmkit.measure.ranges import range_
from lmkit.model.compilation import compile_model
from lmkit.model.transformer import TransformerLM
from lmkit.optim.adamw import AdamW, decay_groups
from lmkit.parallel.process_group import Ranks
from lmkit.parallel.strategies import SyncOptions, build_strategy
from lmkit.recipe.model import ModelConfig
from lmkit.training.step import Step, TrainableModel, autocast


class TrainingStep:
    """A model with its optimizer and gradient synchronisation, run step by step.

    Args:
        config: of the model; `config.compile` is obeyed.
        batches: this rank's batches.
        precision: "fp32", "bf16" or "fp16".
        strategy: a name of `lmkit.parallel.strategies.STRATEGIES`.
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
        strategy: str = "none",
        options: SyncOptions | None = None,
        seed: int = 0,
        lr: float = 3e-4,
    ) -> None:
        torch.manual_seed(seed)
        self.model = TransformerLM(config, device=ranks.device)
        compile_model(self.model, config.compile)
        sync = build_strategy(strategy, ranks, options)
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
