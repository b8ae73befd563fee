"""The training step that `lmkit train`, benches and loops of one's own share."""

import re
import textwrap
from typing import Any

import pytest
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


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_embedding_head_and_gains_have_rates_of_their_own(name):
    """Adam's first step moves every weight by its rate, and decay takes lr times weight_decay of it."""
    rates = {"embedding_lr": 0.5, "head_lr": 0.02, "gain_lr": 0.1}
    table = OptimizerConfig(name=name, lr=0.01, weight_decay=0.1, eps=1e-30, **rates)
    step = build_step(CONFIG, optimizer=table, grad_clip=0.0)
    before = {key: value.clone() for key, value in step.model.state_dict().items()}
    ids = torch.arange(CONFIG.vocab_size).reshape(1, 1, -1)[..., : CONFIG.context_length]
    step(ids, ids.flip(-1), lr=0.01 / 4)  # as at a quarter of the schedule
    expected = {"token_embeddings.weight": 0.5, "lm_head.weight": 0.02, "ln_final.weight": 0.1}
    expected |= {"layers.0.ffn.w1.weight": 0.01} if name == "adamw" else {}
    for key, rate in expected.items():
        decay = 0.01 / 4 * 0.1 if before[key].dim() == 2 else 0.0
        moved = (step.model.state_dict()[key] - before[key] * (1 - decay)).abs()
        moved = moved[moved > 0.1 * moved.max()]  # rows of other tokens have no gradient
        torch.testing.assert_close(moved, torch.full_like(moved, rate / 4), rtol=1e-3, atol=1e-6)
