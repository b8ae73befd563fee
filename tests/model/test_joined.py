"""q, k, v and gate, up as one matrix product of modules that stay modules."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from lmkit.core import model as core
from lmkit.core.kv_cache import KVCache
from lmkit.core.sampling import Sampling
from lmkit.generation import Decoder
from lmkit.model import TransformerLM
from lmkit.model.transformer import (
    compile_model,
    in_order_of_memory,
    is_original,
    join,
    joined_sets,
    lie_side_by_side,
)
from lmkit.training.precision import hold_weights
from lmkit.training.setup import build_step

IDS = torch.arange(18).reshape(2, 9)
JOINED = ["attn.q_proj", "attn.k_proj", "attn.v_proj", "ffn.w1", "ffn.w3"]


def all_lie_side_by_side(model: TransformerLM) -> bool:
    sets = list(joined_sets(model))
    assert len(sets) == len(model.layers) * (3 if model.config.qkv_bias else 2)
    return all(lie_side_by_side(parameters) for parameters in sets)


class Adapted(nn.Module):
    """A layer that somebody wrapped: twice its output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.layer(x)


def assert_decodes(model: TransformerLM, tolerance: float) -> None:
    """The next logits of a decoder are those of the model."""
    decoder = Decoder(model, 1, sampling=Sampling(0.0), most=9)
    decoder.start([0], [IDS[0].tolist()], seeds=[0])
    with torch.inference_mode():
        torch.testing.assert_close(decoder._step(9), model(IDS[:1])[:, -1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("keep", ["none", "block", "attention"])
@pytest.mark.parametrize("name", [*JOINED, "attn.output_proj", "ln2"])
def test_a_layer_that_somebody_replaced_computes(make_model, name, keep):
    """Twice its output is what twice its weights give."""
    model, twice = (make_model(activation_checkpointing=keep, num_kv_heads=2) for _ in range(2))
    block = model.layers[1]
    owner, _, last = name.rpartition(".")
    setattr(block.get_submodule(owner), last, Adapted(block.get_submodule(name)))
    with torch.no_grad():
        twice.layers[1].get_submodule(name).weight.mul_(2)
    losses = [each.loss(IDS, IDS) for each in (model, twice)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)  # float64
    mine = block.get_submodule(name).layer.weight.grad
    torch.testing.assert_close(
        mine, 2 * twice.layers[1].get_submodule(name).weight.grad, rtol=1e-9, atol=1e-15
    )


@pytest.mark.parametrize("keep", ["none", "block"])
def test_hooks_fire_and_may_change_what_they_see(make_model, keep):
    model, plain = (make_model(activation_checkpointing=keep) for _ in range(2))
    seen: dict[str, torch.Tensor] = {}

    def keep_output(name):
        return lambda module, inputs, output: seen.setdefault(name, output)

    for name in JOINED:
        model.layers[0].get_submodule(name).register_forward_hook(keep_output(name))
    model.layers[1].ffn.w1.register_forward_hook(lambda module, inputs, output: output * 0)
    loss = model.loss(IDS, IDS)
    assert list(seen) == JOINED
    normed = model.layers[0].ln1(model.token_embeddings(IDS))
    torch.testing.assert_close(seen["attn.k_proj"], normed @ plain.layers[0].attn.k_proj.weight.T)
    with torch.no_grad():
        plain.layers[1].ffn.w1.weight.zero_()
    torch.testing.assert_close(loss, plain.loss(IDS, IDS), rtol=1e-12, atol=0)


@pytest.mark.parametrize("keep", ["none", "block", "attention"])
@pytest.mark.parametrize(
    "names", [["layers.0", "layers.1", "layers"], ["ln_final", "layers.1.attn", "layers.0.ffn.w1"]]
)
def test_nothing_writes_into_what_a_hook_saw(make_model, keep, names):
    model, seen = make_model(activation_checkpointing=keep), []

    def look(module, inputs, output):
        tensors = [
            x for x in (*inputs, *(output if isinstance(output, tuple) else [output])) if torch.is_tensor(x)
        ]
        seen.extend((x, x.detach().clone()) for x in tensors)

    for name in names:
        model.get_submodule(name).register_forward_hook(look)
    model.loss(IDS, IDS).backward()
    assert len(seen) >= 4
    for kept, then in seen:
        assert torch.equal(kept, then)


class Halved(nn.Module):
    """A block that somebody wrapped, which is called as the core calls a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, *others: object) -> torch.Tensor:
        return self.block(x, *others) / 2


@pytest.mark.parametrize("keep", ["none", "block", "attention"])
@pytest.mark.parametrize("name", ["layers.1", "layers.2", "layers", "ln_final", "wrapped", "patched"])
def test_hooks_around_blocks_see_one_tensor(make_model, keep, name):
    """The output of a block as the core defines it, whatever sums the fast form leaves to the next norm."""
    model, plain = (make_model(activation_checkpointing=keep, num_layers=3) for _ in range(2))
    if name == "wrapped":
        model.layers[1] = Halved(model.layers[1])
    elif name == "patched":
        forward = model.layers[1].forward
        model.layers[1].forward = lambda *inputs, **options: forward(*inputs, **options) / 2
    elif name in ("layers.1", "layers"):
        model.get_submodule(name).register_forward_hook(lambda module, inputs, output: output / 2)
    else:
        hook = lambda module, inputs: (inputs[0] / 2, *inputs[1:])  # noqa: E731
        model.get_submodule(name).register_forward_pre_hook(hook)
    half = 3 if name in ("layers", "ln_final") else 2  # blocks after which x is halved
    x, cos_sin = plain.token_embeddings(IDS), plain.rope(IDS.shape[1])
    for number, block in enumerate(plain.layers, 1):
        x = core.TransformerBlock.forward(block, x, cos_sin)
        x = x / 2 if number == half else x
    expected = plain.lm_head(plain.ln_final(x))
    found = model(IDS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    for logits in (found, expected):
        logits.square().mean().backward()
    torch.testing.assert_close(
        model.token_embeddings.weight.grad, plain.token_embeddings.weight.grad, rtol=1e-10, atol=1e-15
    )


@pytest.mark.parametrize("keep", ["block", "attention"])
def test_a_block_computed_again_draws_the_same_random_numbers(make_model, keep):
    gradients = []
    for keeps in ("none", keep):
        model = make_model(activation_checkpointing=keeps)
        model.layers[1].ffn = nn.Sequential(model.layers[1].ffn, nn.Dropout(0.5))
        torch.manual_seed(7)
        model.loss(IDS, IDS).backward()
        gradients.append(model.token_embeddings.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-15)


def test_a_compiled_block_obeys_its_own_hooks(make_model):
    model, plain = make_model(), make_model()
    for each in (model, plain):
        each.layers[1].ffn.register_forward_hook(lambda module, inputs, output: output / 2)
    compile_model(model, "block", backend="eager")
    torch.testing.assert_close(model(IDS), plain(IDS))


def test_a_cache_refuses_layers_out_of_order(make_model):
    model = make_model()
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]
    with pytest.raises(ValueError, match=r"\[1, 0"):
        KVCache(model, 1)
    for place, block in enumerate(model.layers):
        block.attn.layer = place
    expected = model(IDS)[:, -1:]
    torch.testing.assert_close(model(IDS, KVCache(model, 2))[:, -1:], expected)


def test_hooks_of_all_modules_fire(make_model):
    model, seen = make_model(activation_checkpointing="attention"), set()
    with register_module_forward_hook(lambda module, inputs, output: seen.add(module)):
        model.loss(IDS, IDS)
    assert {module for block in model.layers for module in (block.ln2, *block.attn.children())} <= seen


@pytest.mark.parametrize("name", ["token_embeddings", "lm_head", "ln_final"])
def test_a_layer_around_the_blocks_may_be_replaced(make_model, name):
    model = make_model()
    losses, layer = [model.loss(IDS, IDS)], model.get_submodule(name)
    new = {
        "token_embeddings": lambda: nn.Embedding(*layer.weight.shape),
        "lm_head": lambda: nn.Linear(*reversed(layer.weight.shape), bias=False),
        "ln_final": lambda: nn.RMSNorm(layer.weight.shape, eps=layer.eps),
    }[name]().double()
    new.weight = layer.weight
    setattr(model, name, new)
    losses.append(model.loss(IDS, IDS))
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)


def test_ties_stay(make_model):
    config = make_model(tie_embeddings=True).config
    model, other, *more = (TransformerLM(config, device=device) for device in ("cpu", "meta", "meta", "cpu"))
    saved = model.state_dict()
    other.to_empty(device="cpu")
    assert other.is_tied
    # The dict remembers that it was assigned.
    for each, assign in zip((other, *more), (True, True, False), strict=True):
        each.load_state_dict(saved, assign=assign)
        assert each.is_tied
        assert torch.equal(each(IDS), model(IDS))


@pytest.mark.parametrize("name", [*JOINED, "attn.output_proj", "ffn.w2", "ln1", "attn"])
def test_a_text_is_written_by_the_layer_that_somebody_put_in(make_model, name):
    """Not by its weights alone, which are all that a fast step reads."""
    model = make_model()
    block = model.layers[1]
    owner, _, last = name.rpartition(".")
    if name == "attn":
        block.attn.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        setattr(block.get_submodule(owner), last, Adapted(block.get_submodule(name)))
        block.get_submodule(name).weight = block.get_submodule(name).layer.weight  # as adapters show it
    assert not is_original(model)
    assert_decodes(model, 1e-11)


@pytest.mark.parametrize("keep", ["none", "block"])
@pytest.mark.parametrize("name", [*JOINED, "attn.output_proj", "ffn.w2"])
def test_a_bias_that_somebody_gave_one_layer_counts(make_model, name, keep):
    """The core's model computes layer by layer."""
    model = make_model(activation_checkpointing=keep, num_kv_heads=2)
    plain = core.TransformerLM(model.config, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        layer = each.layers[1].get_submodule(name)
        layer.bias = nn.Parameter(torch.arange(1.0, layer.out_features + 1, dtype=torch.float64))
        each.loss(IDS, IDS).backward()
    torch.testing.assert_close(model(IDS), plain(IDS), rtol=1e-12, atol=1e-12)
    for (found, parameter), (_, expected) in zip(
        sorted(model.named_parameters()), sorted(plain.named_parameters()), strict=True
    ):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-9, atol=1e-12, msg=found)
    assert not is_original(model)


@pytest.mark.parametrize("bias", [False, True])
def test_weights_stay_side_by_side(make_model, bias):
    model = make_model(qkv_bias=bias, num_kv_heads=2, dtype=torch.float32)
    assert all_lie_side_by_side(model)
    assert all_lie_side_by_side(copy.deepcopy(model))
    assert all_lie_side_by_side(copy.deepcopy(model).bfloat16())
    deferred = TransformerLM(model.config, device="meta")
    deferred.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, True, True)
    assert all_lie_side_by_side(deferred)
    assert torch.equal(deferred(IDS), model(IDS))
    hold_weights(model, "bf16")
    assert not all_lie_side_by_side(model)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    model.to("cpu")  # moves nothing: an optimizer may own this memory
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    torch.testing.assert_close(model(IDS).float(), deferred(IDS), rtol=0.1, atol=0.1)  # a copy: 8 bits
    assert all_lie_side_by_side(build_step(model.config, precision="bf16").model)


def test_gradients_are_those_of_a_copy():
    torch.manual_seed(0)
    memory = torch.randn(7, 3, dtype=torch.float64)
    beside = [nn.Parameter(part) for part in memory.split([2, 4, 1])]
    apart = [nn.Parameter(part.clone()) for part in beside]
    beside[1].requires_grad_(False)
    x = torch.randn(5, 3, dtype=torch.float64)
    joined = join(beside)
    assert joined.data_ptr() == memory.data_ptr()
    for parts in (beside, apart):
        (x @ join(parts).T).square().sum().backward()
    assert beside[1].grad is None
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(beside[::2], apart[::2], strict=True))
    assert not lie_side_by_side(beside[::-1])
    assert not lie_side_by_side([nn.Parameter(memory[:4]), nn.Parameter(memory[3:])])


def test_flat_tensors_hold_a_set_in_its_order(make_model):
    model = make_model()
    backwards = list(model.layers[0].parameters())[::-1]
    ordered = in_order_of_memory(backwards, model)
    assert set(ordered) == set(backwards)
    flat = torch.cat([parameter.detach().flatten() for parameter in ordered])
    for parameter, part in zip(ordered, flat.split([p.numel() for p in ordered]), strict=True):
        parameter.data = part.view_as(parameter)
    assert all_lie_side_by_side(model)


def test_adapters_of_peft(make_model):
    """Low-rank adapters train, the model's weights do not, and merged adapters give the same numbers."""
    peft = pytest.importorskip("peft")
    model = make_model(dtype=torch.float32)
    before = model(IDS).detach()
    layers = ["q_proj", "v_proj", "output_proj", "w1", "w2", "lm_head"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False))
    assert not torch.allclose(adapted(IDS), before, atol=0.1)
    targets = IDS.where(IDS % 3 > 0, -1)
    loss = model.loss(IDS, targets)
    mean = torch.nn.functional.cross_entropy(model(IDS).flatten(0, 1), targets.flatten(), ignore_index=-1)
    torch.testing.assert_close(loss, mean)
    loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(trained) == 2 * (len(layers) - 1) * len(model.layers) + 2
    assert all("lora_" in name for name in trained)
    assert_decodes(model, 1e-4)
    found = adapted(IDS)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(IDS), found, rtol=1e-4, atol=1e-4)  # float32: other order of sums
    assert merged.state_dict().keys() == make_model().state_dict().keys()
