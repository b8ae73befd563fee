"""The gate of trainings on a GPU: what lmkit runs there is within its budget, and a wrong kernel is not."""

import pytest
import torch

from lmkit.attention import attention_function
from lmkit.bench.training_gate import budget_of, judge, of_pytorch, reference
from lmkit.model.fp8 import check_fp8
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import ModelConfig, TrainConfig
from lmkit.registry import ATTENTION
from lmkit.training import build_step
from lmkit.training.setup import TrainingStep

pytestmark = pytest.mark.gpu
SHAPE = {
    "vocab_size": 1024,
    "context_length": 256,
    "d_model": 256,
    "d_ff": 704,
    "num_layers": 4,
    "num_heads": 4,
}


def judged(precision: str, **model) -> dict:
    device = torch.device("cuda")
    if precision == "fp8":
        check_fp8(device)
    train = TrainConfig(batch_size=8, precision=precision)
    recipe = Recipe(model=ModelConfig(**SHAPE, **model), train=train)
    theirs = reference(of_pytorch(recipe), device)
    row, _ = judge(TrainingStep(recipe, Ranks(device=device)), theirs, budget_of(precision))
    return row


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast", "fp8"])
@pytest.mark.parametrize("attention", ["flash_triton", "sdpa"])
def test_kernels_and_operations_are_within_the_budget(precision, attention):
    assert judged(precision, attention=attention) == {"status": "ok"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mask_that_is_missing_is_found(precision):
    def sees_all(q, k, v, *, causal, scale=None):
        return attention_function("sdpa")(q, k, v, causal=False, scale=scale)

    ATTENTION.register("sees_everything")(sees_all)
    try:
        assert judged(precision, attention="sees_everything")["status"] == "wrong result"
    finally:
        ATTENTION.unregister("sees_everything")


def test_a_step_from_python_is_built_on_the_gpu():
    """Its kernel runs there only."""
    step = build_step(ModelConfig(**SHAPE, attention="flash_triton"))
    assert step.ranks.device.type == "cuda"
    inputs, targets = torch.randint(1024, (2, 1, 4, 256))
    assert torch.isfinite(step(inputs, targets, lr=1e-3).loss)
