"""The gate of trainings on a GPU: what lmkit runs there is within its budget, and a wrong graph is not."""

import pytest
import torch

from lmkit.attention import attention_function
from lmkit.bench.training_gate import after_timing, budget_of, judge, of_pytorch, reference
from lmkit.model.fp8 import check_fp8
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import ModelConfig, TrainConfig
from lmkit.registry import ATTENTION
from lmkit.training import build_step
from lmkit.training.setup import TrainingStep

pytestmark = [
    pytest.mark.gpu,
    # torch.compile advises a float32 product to round to TF32; lmkit's fp32 does not
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
SMALL = ModelConfig(vocab_size=1024, context_length=256, d_model=256, d_ff=704, num_layers=4, num_heads=4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast", "fp8"])
@pytest.mark.parametrize("attention", ["flash_triton", "sdpa"])
def test_kernels_and_operations_are_within_the_budget(precision, attention):
    device = torch.device("cuda")
    if precision == "fp8":
        check_fp8(device)
    train = TrainConfig(batch_size=8, precision=precision)
    recipe = Recipe(model=SMALL.changed(attention=attention), train=train)
    theirs = reference(of_pytorch(recipe), Ranks(device=device))
    row, _ = judge(TrainingStep(recipe, Ranks(device=device)), theirs, budget_of(precision))
    assert row == {"status": "ok"}


@pytest.mark.parametrize("cuda_graph", ["on", "off"])
@pytest.mark.parametrize("compiled", ["none", "block"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast", "fp16", "fp8"])
def test_a_training_is_right_after_timing_and_its_weights_have_not_moved(precision, compiled, cuda_graph):
    device = torch.device("cuda")
    if precision == "fp8":
        check_fp8(device)
    train = TrainConfig(batch_size=8, precision=precision, cuda_graph=cuda_graph)
    model = SMALL.changed(attention="flash_triton", compile=compiled)
    training = TrainingStep(Recipe(model=model, train=train), Ranks(device=device))
    for _ in range(30):
        training.run()
    before = {name: weight.clone() for name, weight in training.model.state_dict().items()}
    assert after_timing(training, budget_of(precision), forward=True) == {}
    for name, weight in training.model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_what_a_graph_computes_is_checked_after_timing():
    """The graph holds the kernel that was there when it was captured; Python calls the right one."""
    device, is_wrong = torch.device("cuda"), [True]

    def wrong_at_first(q, k, v, *, causal, scale=None):
        return attention_function("sdpa")(q, k, v, causal=causal and not is_wrong[0], scale=scale)

    ATTENTION.register("wrong_at_first")(wrong_at_first)
    train = TrainConfig(batch_size=8, precision="fp32", cuda_graph="on")
    recipe = Recipe(model=SMALL.changed(attention="wrong_at_first"), train=train)
    training = TrainingStep(recipe, Ranks(device=device))
    for _ in range(10):
        training.run()
    is_wrong[0] = False
    assert after_timing(training, budget_of("fp32"))["status"] == "wrong result"


def test_a_step_from_python_is_built_on_the_gpu():
    """Its kernel runs there only."""
    step = build_step(SMALL.changed(attention="flash_triton"))
    assert step.ranks.device.type == "cuda"
    inputs, targets = torch.randint(1024, (2, 1, 4, 256))
    assert torch.isfinite(step(inputs, targets, lr=1e-3).loss)
