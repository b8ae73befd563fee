"""The readable step, beside the step of training: equal bits where training adds nothing."""

import copy

import torch

from lmkit.core.adamw import AdamW
from lmkit.core.step import Step, Sync
from lmkit.recipe.tables import ModelConfig
from lmkit.training import build_step

CONFIG = ModelConfig(vocab_size=50, context_length=16, d_model=16, d_ff=24, num_layers=2, num_heads=2)


def test_makes_the_steps_of_training():
    """Two micro-batches; the norm is clipped."""
    torch.manual_seed(0)
    trained = build_step(CONFIG, precision="fp32", grad_clip=0.5)
    model = copy.deepcopy(trained.model)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    step = Step(model.loss, AdamW(groups), Sync(model.parameters()), max_norm=0.5)
    for number, batch in enumerate(torch.randint(50, (3, 2, 4, 17)), 1):
        losses = [make(batch[..., :-1], batch[..., 1:], lr=1e-2 / number) for make in (step, trained)]
        assert losses[0] == losses[1].loss
        assert losses[1].grad_norm > 0.5
    for mine, theirs in zip(model.parameters(), trained.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)  # clipped in place, or as it is read
        assert mine.grad is None


def test_a_loss_that_is_not_finite_changes_nothing():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight])
    step = Step(lambda x, y: (weight * x).sum() + y.sum(), optimizer, Sync([weight]))
    good, bad = torch.ones(2, 3), torch.tensor([[1.0, 1.0, 1.0], [1.0, torch.inf, 1.0]])
    step(good, torch.zeros(2, 1), lr=0.1)
    before = weight.detach().clone()
    assert not torch.equal(before, torch.ones(3))
    step(bad, torch.zeros(2, 1), lr=0.1)
    assert torch.equal(weight, before)
    assert weight.grad is None
    assert optimizer.state[weight]["step"] == 1
