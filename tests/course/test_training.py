"""What a course asks of loss, clipping, AdamW, schedule, batches and save/load, through the public API."""

import io
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lmkit.data import TokenBatches
from lmkit.model import ModelConfig, TransformerLM
from lmkit.optim import AdamW, clip_gradients, cosine_lr
from lmkit.training import load_checkpoint, save_checkpoint


def test_clipping_scales_all_gradients_by_one_factor_and_only_if_they_are_too_long():
    frozen, a, b = (torch.zeros(n, requires_grad=True) for n in (1, 2, 1))
    a.grad, b.grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])  # of length 7
    assert clip_gradients([frozen, a, b], max_norm=10.0).item() == 7
    assert (a.grad.tolist(), b.grad.tolist()) == ([2, 3], [6])
    clip_gradients([frozen, a, b], max_norm=1.0)
    assert_close(torch.cat([a.grad, b.grad]), torch.tensor([2.0, 3.0, 6.0]) / 7)
    assert frozen.grad is None


def test_adamw_first_steps_by_hand():
    """The first update of every element is lr in size, whatever its gradient; decay is apart from it."""
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    optimizer = AdamW([weight], lr=0.1, betas=(0.5, 0.75), eps=1e-8, weight_decay=0.2)
    weight.grad = torch.tensor([8.0, -0.5])
    optimizer.step()
    first = torch.tensor([0.98 - 0.1, -2 * 0.98 + 0.1])
    assert_close(weight.detach(), first)
    weight.grad = torch.zeros(2)
    optimizer.step()  # m = g / 4, corrected by 3/4; v = 3 g^2 / 16, corrected by 7/16
    assert_close(weight.detach(), 0.98 * first - 0.1 * torch.tensor([1.0, -1.0]) / 3 / (3 / 7) ** 0.5)


def test_adamw_takes_the_way_of_the_published_algorithm_of_pytorch():
    torch.manual_seed(1)
    start = torch.randn(5, 3, dtype=torch.float64)
    mine, theirs = (start.clone().requires_grad_() for _ in range(2))
    settings = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.3}
    optimizers = AdamW([mine], **settings), torch.optim.AdamW([theirs], **settings)
    for _ in range(50):
        for weight, optimizer in zip((mine, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            (weight - torch.arange(3)).square().sum().backward()
            optimizer.step()
    assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_cosine_schedule_with_warm_up():
    settings = {"lr": 0.8, "min_lr": 0.2, "warmup_steps": 4, "total_steps": 12}
    rates = [cosine_lr(step, **settings) for step in (0, 1, 4, 6, 8, 10, 12, 99)]
    quarter = 0.3 * math.cos(math.pi / 4)
    assert rates == pytest.approx([0, 0.2, 0.8, 0.5 + quarter, 0.5, 0.5 - quarter, 0.2, 0.2])


def test_batches_are_windows_and_targets_the_tokens_that_follow():
    """The token at i is i: every start is drawn, about as often as the others, and none beyond the end."""
    batches = TokenBatches(np.arange(30, dtype=np.uint16), batch_size=400, context_length=10, seed=3)
    inputs, targets = (ids[0] for ids in batches.batch(step=0))
    assert (inputs.dtype, inputs.shape) == (torch.int64, (400, 10))
    assert_close(targets, inputs + 1)
    assert_close(inputs, inputs[:, :1] + torch.arange(10))
    counts = torch.bincount(inputs[:, 0], minlength=20)
    assert len(counts) == 20  # starts 0 to 19: the last target is token 29
    assert counts.min() > 20 - 4 * math.sqrt(20)  # 20 expected of each; four standard deviations
    assert counts.max() < 20 + 4 * math.sqrt(20)
    assert not torch.equal(batches.batch(step=1)[0][0], inputs)


@pytest.mark.parametrize("place", ["file", "buffer"])
def test_saved_and_loaded_a_model_goes_on_as_if_nothing_had_happened(place, tmp_path):
    config = ModelConfig(vocab_size=20, context_length=8, d_model=8, d_ff=16, num_layers=1, num_heads=2)
    ids = torch.randint(20, (6, 4, 9), generator=torch.Generator().manual_seed(0))

    def made(seed: int) -> tuple[TransformerLM, AdamW]:
        torch.manual_seed(seed)
        model = TransformerLM(config)
        return model, AdamW(model.parameters(), lr=0.01)

    def trained(model: TransformerLM, optimizer: AdamW, batches: torch.Tensor) -> list[float]:
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = model.loss(batch[:, :-1], batch[:, 1:])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    whole, other = made(0), made(1)
    trained(*whole, ids[:3])
    out = tmp_path / "checkpoint" if place == "file" else io.BytesIO()
    save_checkpoint(*whole, 3, out)
    if isinstance(out, io.BytesIO):
        out.seek(0)
    assert load_checkpoint(out, *other) == 3
    assert trained(*other, ids[3:]) == trained(*whole, ids[3:])
