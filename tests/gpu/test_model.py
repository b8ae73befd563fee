"""The model on fused kernels on a GPU: its gradients against float32, and what training puts around it."""

import copy

import pytest
import torch

from lmkit.kernels.rope import rope_
from lmkit.model import ModelConfig, TransformerLM, compile_model
from lmkit.model.fused import Fused
from lmkit.model.operations import PLAIN

pytestmark = pytest.mark.gpu
SMALL = ModelConfig(vocab_size=5000, context_length=256, d_model=256, d_ff=704, num_layers=3, num_heads=4)


def make_model(**fields) -> TransformerLM:
    torch.manual_seed(0)
    model = TransformerLM(SMALL.changed(**{"attention": "flash_triton", **fields}), device="cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)  # a wrong gain would not show at 1
    assert isinstance(model.operations, Fused)
    return model


def plain_copy(model: TransformerLM) -> TransformerLM:
    other = copy.deepcopy(model)
    other.operations = PLAIN
    return other


def narrow_copy(model: TransformerLM) -> TransformerLM:
    """Matrices in bfloat16, gains in float32: the residual stream is bfloat16."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.bfloat16()
    return other


def batch(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(config.vocab_size, (4, config.context_length + 1), device="cuda")
    return ids[:, :-1], ids[:, 1:]


def gradients(model: TransformerLM, ids, targets, autocast=None) -> dict[str, torch.Tensor]:
    with torch.autocast("cuda", autocast, enabled=autocast is not None):
        loss = model.loss(ids, targets)
    assert torch.isfinite(loss)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return {name: x.double() for (name, _), x in zip(model.named_parameters(), found, strict=True)}


def errors(found, truth) -> dict[str, float]:
    return {name: ((found[name] - truth[name]).norm() / truth[name].norm()).item() for name in truth}


FIELDS = [{}, {"num_kv_heads": 2, "tie_embeddings": True}, {"d_model": 512, "num_heads": 4}]
MORE_FIELDS = [{"attention": "sdpa"}, {"qk_norm": True, "num_kv_heads": 2}]


@pytest.mark.parametrize("fields", FIELDS + MORE_FIELDS, ids=str)
def test_float32_gradients_equal_the_plain_models(fields):
    model = make_model(**fields)
    ids, targets = batch(model.config)
    plain, fused = (gradients(each, ids, targets) for each in (plain_copy(model), model))
    found = errors(fused, plain)
    assert max(found.values()) < 1e-5, found  # float32: sums over 1024 tokens in other orders


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_bfloat16_gradients_are_nearly_as_exact_as_autocasts(fields):
    """On average over the parameters at most 1.3 times the error of the plain model under autocast, whose residual
    stream is float32. A single one may have 2 times: the head's and the embedding's gradients pass through the whole
    stream."""
    model = make_model(**fields)
    ids, targets = batch(model.config)
    truth = gradients(plain_copy(model), ids, targets)
    autocast = errors(gradients(plain_copy(model), ids, targets, torch.bfloat16), truth)
    narrow = errors(gradients(narrow_copy(model), ids, targets), truth)
    fused_autocast = errors(gradients(model, ids, targets, torch.bfloat16), truth)
    for name in truth:
        print(
            f"{name}: autocast {autocast[name]:.1e}, fused {fused_autocast[name]:.1e}, bf16 {narrow[name]:.1e}"
        )
        assert narrow[name] < 2 * autocast[name], name
        assert fused_autocast[name] < 1.3 * autocast[name], name
    assert sum(narrow.values()) < 1.3 * sum(autocast.values())


def test_activation_checkpointing_gives_the_same_gradients():
    model = narrow_copy(make_model())
    ids, targets = batch(model.config)
    once = gradients(model, ids, targets)
    model.config = model.config.model_copy(update={"activation_checkpointing": "block"})
    # The sum that blocks hand on is the same; dQ is added up in an order that changes from run to run.
    assert max(errors(gradients(model, ids, targets), once).values()) < 0.01


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("how", ["block", "whole"])
def test_compiled_models_have_the_same_gradients(how):
    torch.compiler.reset()
    model = narrow_copy(make_model())
    ids, targets = batch(model.config)
    eager = gradients(model, ids, targets)
    compile_model(model, how)
    # The compiler fuses casts, so that some sums skip a rounding to bfloat16 (2^-9 each).
    assert max(errors(gradients(model, ids, targets), eager).values()) < 0.03


def test_a_model_that_is_made_on_the_default_device():
    """All of it is there, or kernels read foreign memory."""
    with torch.device("cuda"):
        model = TransformerLM(ModelConfig(vocab_size=300, context_length=64))
    assert all(x.is_cuda for x in [*model.parameters(), *model.buffers()])
    table = model.rope.cos_sin.cpu()
    qkv = torch.randn(1, 64, 3 * 192, device="cuda")
    with pytest.raises(ValueError, match="one device"):
        rope_(qkv, table, 6)
