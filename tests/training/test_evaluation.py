import math
from typing import Any

import numpy as np
import pytest
import torch
from run_folders import CONFIG

from lmkit.model.transformer import TransformerLM
from lmkit.training.evaluation import Evaluation, HeldOut, evaluate, summarise


@pytest.fixture
def model() -> TransformerLM:
    torch.manual_seed(1)
    return TransformerLM(CONFIG, dtype=torch.float64)


def tokens(length: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 64, length).astype(np.uint16)


def result_of(model: TransformerLM, ids: np.ndarray, **options: Any) -> Evaluation:
    return evaluate(model, HeldOut(ids, None, 8, rows=3), **options)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_recorded_and_the_mode_comes_back(model, training):
    seen = []
    model.ln_final.register_forward_hook(
        lambda module, *_: seen.append((module.training, torch.is_grad_enabled()))
    )
    model.train(training)
    result_of(model, tokens(60))
    assert set(seen) == {(False, False)}
    assert model.training == training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_products_run_in_the_precision_asked_for(model):
    exact, rounded = (
        result_of(model.float(), tokens(60), precision=name).loss for name in ("fp32", "bf16-autocast")
    )
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.01)  # 8 bits, a few roundings deep


def test_the_perplexity_of_a_large_loss():
    assert summarise(1e4, 10, None).perplexity == math.inf
    assert summarise(709.0, 10, None).perplexity == pytest.approx(math.exp(709.0))


def test_stops_when_asked_and_leaves_the_model_in_training_mode(model):
    asked = iter([0, 1])
    signals = type("Signals", (tuple,), {"__bool__": lambda self: bool(next(asked))})()
    model.train()
    held_out = HeldOut(tokens(200), None, 8, rows=3)
    assert evaluate(model, held_out, signals=signals) is None
    assert model.training
