"""The training step that `lmkit train`, benches and loops of one's own share."""

import re
import textwrap
from typing import Any

import torch
from run_folders import CONFIG, losses, train_here

import lmkit.training
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import OptimizerConfig, TrainConfig
from lmkit.training import build_step
from lmkit.training.setup import TrainingStep
from lmkit.training.step import Step

SMALL = ("model.vocab_size=64",)


def test_the_loop_in_the_package_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"(?:^    .+\n|^\n)+", lmkit.training.__doc__ or "", re.MULTILINE)
    (loop,) = (textwrap.dedent(block) for block in blocks if "build_step(" in block)
    namespace: dict[str, Any] = {}
    exec(loop, namespace)  # ends with an assertion of its own
    assert namespace["outcome"].applied
    assert (tmp_path / "model.safetensors").stat().st_size > 10_000


def test_benches_run_the_step_that_train_runs(tiny):
    """The same tables, seed and batches give the same losses, bit for bit."""
    recipe = tiny("optimizer.schedule=constant", "optimizer.warmup_steps=0", "data.source=random", *SMALL)
    recipe = recipe.changed(train={"grad_clip": 0.05})
    train_here(recipe, stop_at_step=3)
    step = TrainingStep(recipe, Ranks())
    assert [step.run().item() for _ in range(3)] == [loss for _, loss in losses(recipe)]


def test_passes_alone_leave_the_weights_and_drop_the_gradients():
    step = TrainingStep(Recipe(model=CONFIG, train=TrainConfig(batch_size=4, precision="bf16")), Ranks())
    before = step.model.lm_head.weight.clone()
    assert torch.isfinite(step.forward_backward())
    assert torch.isfinite(step.forward())
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert torch.equal(step.model.lm_head.weight, before)
    step.run()
    assert not torch.equal(step.model.lm_head.weight, before)


def test_the_tables_reach_the_optimizer_and_the_step():
    table = OptimizerConfig(lr=0.5, betas=(0.5, 0.6), weight_decay=0.25)
    step = build_step(CONFIG, optimizer=table, precision="fp16", grad_clip=0.125)
    assert isinstance(step, Step)
    decayed, rest = step.optimizer.param_groups
    assert (decayed["betas"], decayed["weight_decay"], rest["weight_decay"]) == ((0.5, 0.6), 0.25, 0.0)
    assert step.loss_scale is not None
    assert step.max_norm == 0.125
