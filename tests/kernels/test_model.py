"""Models on the fused kernels, in Triton's interpreter, against the same models on PyTorch's operations."""

import copy

import pytest
import torch
from marking import full_but

pytest.importorskip("triton", reason="Triton is not installed")

from lmkit.model import ModelConfig, TransformerLM, compile_model
from lmkit.model.operations import PLAIN

pytestmark = pytest.mark.interpreter
IDS = torch.tensor([[5, 1, 7, 7, 0, 3, 2], [4, 4, 1, 0, 6, 2, 8]])
TARGETS = torch.tensor([[1, 7, 7, 0, 3, 2, 9], [4, 1, 0, 6, 2, 8, 10]])


def make_models(**fields) -> list[TransformerLM]:
    """A fused model and its plain copy, 2 layers; gains are not 1, where a wrong one would not show."""
    config = ModelConfig(vocab_size=11, context_length=7, d_model=32, d_ff=24, num_layers=2, num_heads=2)
    torch.manual_seed(0)
    fused = TransformerLM(config.changed(**{"attention": "flash_triton", "operations": "fused", **fields}))
    with torch.no_grad():
        for name, parameter in fused.named_parameters():
            if "ln" in name or "_norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    plain = copy.deepcopy(fused)
    plain.operations = PLAIN
    return [fused, plain]


def assert_equal_gradients(fused: TransformerLM, plain: TransformerLM, tolerance: float) -> None:
    for (name, mine), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == other.grad.dtype == mine.dtype
        assert (mine.grad - other.grad).norm() < tolerance * other.grad.norm(), name


OFTEN = [
    {"num_kv_heads": 1, "tie_embeddings": True},
    {"qk_norm": True, "activation_checkpointing": "block", "attention": "sdpa"},
]
FIELDS = [
    {},
    {"activation_checkpointing": "block", "attention": "sdpa"},
    {"qk_norm": True, "num_kv_heads": 1},
]
FIELDS += [{"qk_norm": True, "activation_checkpointing": "attention"}]


@pytest.mark.parametrize("fields", full_but(OFTEN, OFTEN + FIELDS), ids=str)
def test_losses_logits_and_gradients(fields):
    fused, plain = make_models(**fields)
    losses = [model.loss(IDS, TARGETS) for model in (fused, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    assert_equal_gradients(fused, plain, 3e-6)  # float32: sums in other orders, over two layers
    with torch.no_grad():
        torch.testing.assert_close(fused(IDS), plain(IDS), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fused.loss(IDS, TARGETS), losses[0].detach(), rtol=1e-6, atol=0)


def test_under_autocast():
    models = make_models(num_layers=1)
    for model in models:
        with torch.autocast("cpu", dtype=torch.float16):
            model.loss(IDS, TARGETS).backward()
    assert_equal_gradients(*models, 0.02)  # float16: 11 bits, about twenty roundings deep


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiler_sees_plain_operations():
    """Of which it makes kernels itself, also where the whole model is compiled from outside."""
    torch.compiler.reset()
    fused, plain = make_models(num_layers=1, qk_norm=True)
    torch.compile(fused.loss, fullgraph=True, backend="aot_eager")(IDS, TARGETS).backward()
    plain.loss(IDS, TARGETS).backward()
    assert_equal_gradients(fused, plain, 3e-6)
    compile_model(fused, "block", backend="aot_eager")
    assert fused.layers.operations is PLAIN


@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "activation_checkpointing": "block"}], ids=str)
def test_transforms_of_a_model_on_kernels_give_what_backward_gives(fields):
    """torch.func cannot transform a kernel: the model computes by PyTorch's operations there."""
    fused, _ = make_models(**fields)
    parameters = dict(fused.named_parameters())
    loss = fused.loss(IDS, TARGETS)
    expected = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))

    holder = torch.nn.Module()
    holder.model, holder.forward = fused, lambda ids, targets: (fused.loss(ids, targets), fused(ids))

    def losses(parameters, ids, targets):
        own, logits = torch.func.functional_call(holder, parameters, (ids[None], targets[None]))
        return own + torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)

    given = {f"model.{name}": x.detach() for name, x in parameters.items()}
    per_sample = torch.func.vmap(torch.func.grad(losses), (None, 0, 0))(given, IDS, TARGETS)
    for name, right in expected.items():
        found = per_sample[f"model.{name}"].mean(0) / 2
        assert (found - right).norm() < 3e-6 * right.norm(), name  # float32, as above
