"""The whole model: its loss, its options against each other, its names. Its logits are those of transformers:
tests/training/test_exchange.py."""

import copy
import math
from itertools import chain

import pytest
import torch
from switches import ALL_SWITCHES
from torch.nn import functional as F

from lmkit.core import model as core
from lmkit.model import ModelConfig, TransformerLM, parameter_names
from lmkit.model.transformer import lie_side_by_side


@pytest.mark.parametrize(
    "fields",
    [*({"attention": name} for name in ("vectorized", "flash_torch", "sdpa")), ALL_SWITCHES],
    ids=str,
)
def test_logits_and_loss_are_those_of_the_core(make_model, fields):
    model = make_model(**{"num_kv_heads": 2, **fields})
    plain = core.TransformerLM(model.config.changed(attention="reference"), dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    ids, targets = torch.randint(61, (2, 2, 13))
    logits = plain(ids)
    torch.testing.assert_close(model(ids), logits, rtol=1e-9, atol=1e-9)  # float64
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(ids, targets), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_a_short_layer_sees_its_window_and_the_last_one_all(make_model, attention):
    model = make_model(attention_window=4, attention=attention)
    ids, seen = torch.randint(1, 61, (1, 13)), []
    for layer in model.layers:
        layer.attn.output_proj.register_forward_hook(lambda module, given, out: seen.append(out[0]))
    for first in (ids[0, 0], 0):
        ids[0, 0] = first
        model(ids)
    changed = [(one - other).abs().amax(dim=-1) > 1e-9 for one, other in zip(seen[:2], seen[2:], strict=True)]
    assert changed[0].tolist() == [True] * 4 + [False] * 9
    assert changed[1].all()


@pytest.mark.parametrize(
    "fields",
    [
        *({"attention": name} for name in ("reference", "vectorized", "flash_torch", "sdpa")),
        ALL_SWITCHES,
        {"attention": "sdpa", "activation_checkpointing": "attention"},
        {"rope_scaling": "llama3", "rope_factor": 3.0, "rope_original_context": 40, "rope_theta": 100.0},
    ],
    ids=str,
)
def test_packed_documents_are_computed_as_if_each_stood_alone(make_model, fields):
    """Losses and gradients; the first row begins in the middle of a document, the second has one of one token."""
    model = make_model(**fields, separate_documents=True)
    rows = [[[3, 8, 2, 2], [7, 4, 7, 9, 1, 5], [7, 30]], [[7], [7, 5, 5, 5, 6, 1], [0, 2, 60, 60, 12]]]
    targets = torch.randint(61, (2, 12))
    marked = [[*chain(*([~first, *rest] for first, *rest in row))] for row in rows]
    loss = model.loss(torch.tensor(marked), targets)
    loss.backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = torch.zeros((), dtype=torch.float64)
    for row, wanted in zip(rows, targets, strict=True):
        for document, own in zip(row, wanted.split([len(document) for document in row]), strict=True):
            alone = alone + model.loss(torch.tensor([document]), own[None]) * len(document) / 24
    alone.backward()
    # float64, but for the table of rotations: float32 angles of other positions.
    torch.testing.assert_close(loss, alone, rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_separate_documents_is_no_switch(make_model):
    """A document by itself is the same to a model with it: decode steps and exports need not know it."""
    ids = torch.randint(61, (2, 9))
    model = make_model(separate_documents=True)
    assert not model.config.switches
    assert torch.equal(model(ids), make_model()(ids))
    ids[:, 0] = ~ids[:, 0]
    assert torch.equal(model(ids), make_model()(torch.cat([~ids[:, :1], ids[:, 1:]], dim=1)))


def test_parameter_names(make_model):
    model = make_model()
    in_a_layer = "ln1 ln2 attn.q_proj attn.k_proj attn.v_proj attn.output_proj ffn.w1 ffn.w2 ffn.w3"
    names = {"token_embeddings.weight", "ln_final.weight", "lm_head.weight"}
    names |= {f"layers.{layer}.{name}.weight" for layer in range(2) for name in in_a_layer.split()}
    assert set(model.state_dict()) == names  # no buffer is saved
    found = parameter_names(model)
    assert list(found) == list(model.parameters())
    assert set(found.values()) == names
    assert all(torch.equal(model.state_dict()[name], parameter) for parameter, name in found.items())


def test_biases_have_names_of_their_own_and_start_from_zero(make_model):
    config = make_model(num_kv_heads=2, qkv_bias=True).config
    model = TransformerLM(config)
    biases = {name: value for name, value in model.state_dict().items() if name.endswith("bias")}
    assert {name: tuple(value.shape) for name, value in biases.items()} == {
        f"layers.{layer}.attn.{name}_proj.bias": (size,)
        for layer in range(2)
        for name, size in (("q", 32), ("k", 16), ("v", 16))
    }
    assert not any(value.any() for value in biases.values())
    other = TransformerLM(config)
    other.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert torch.equal(other.layers[1].attn.k_proj.bias, torch.ones(16))


def test_joined_matrices_load_by_their_own_names(make_model):
    model, other = make_model(num_kv_heads=2), make_model(num_kv_heads=2, seed=1)
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    twin = copy.deepcopy(other)
    twin.load_state_dict(state)
    assert all(torch.equal(mine, state[name]) for name, mine in twin.state_dict().items())
    assert not torch.equal(other.layers[0].attn.k_proj.weight, twin.layers[0].attn.k_proj.weight)
    assert lie_side_by_side([layer.weight for layer in twin.layers[0].attn.joined_layers()])
    name = "layers.1.attn.k_proj.weight"
    wrong = {**state, name: state[name][1:]}
    lacking = {key: value for key, value in state.items() if key != name}
    for given in (wrong, lacking):
        with pytest.raises(RuntimeError, match=name):
            twin.load_state_dict(given)


def test_a_tied_head_is_one_matrix_with_both_gradients(make_model):
    tied = make_model(tie_embeddings=True)
    assert tied.lm_head.weight is tied.token_embeddings.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())
    untied = make_model(tie_embeddings=False)
    untied.load_state_dict(tied.state_dict())
    ids, targets = torch.randint(61, (2, 9)), torch.randint(61, (2, 9))
    tied.loss(ids, targets).backward()
    untied.loss(ids, targets).backward()
    both = untied.lm_head.weight.grad + untied.token_embeddings.weight.grad
    torch.testing.assert_close(tied.lm_head.weight.grad, both, rtol=1e-12, atol=1e-15)
    assert tied.float().lm_head.weight is tied.token_embeddings.weight  # a cast keeps them one


def test_switches_are_all_listed_and_zero_init_zeroes_what_writes_to_the_stream(make_model):
    """A switch without the mark would be used by decode steps that do not know it."""
    config = make_model(**ALL_SWITCHES).config
    assert config.switches == set(ALL_SWITCHES) - {"num_kv_heads", "attention"}
    model = TransformerLM(config.model_copy(update={"zero_init": True}))
    for layer in model.layers:
        assert not layer.attn.output_proj.weight.any()
        assert not layer.ffn.w2.weight.any()
        assert layer.attn.v_proj.weight.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(make_model, dtype):
    ids, targets = torch.randint(61, (2, 9)), torch.randint(61, (2, 9))
    exact = make_model()
    wide, narrow = copy.deepcopy(exact).float(), copy.deepcopy(exact).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        assert wide(ids).dtype == dtype
        loss = wide.loss(ids, targets)
    for result in (loss, narrow.loss(ids, targets), exact.loss(ids, targets)):
        result.backward()
    assert loss.item() == pytest.approx(exact.loss(ids, targets).item(), rel=0.01)
    # 8 bits of mantissa, about twenty roundings deep: a percent or two of the norm.
    for model in (wide, narrow):
        for (name, parameter), truth in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert parameter.grad.dtype == parameter.dtype
            assert (parameter.grad.double() - truth.grad).norm() < 0.05 * truth.grad.norm(), name


def test_attention_gets_views_of_the_projections(make_model):
    model = make_model(num_kv_heads=2, dtype=torch.float32)
    seen = {}

    def look(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        seen.update(q=q, k=k, v=v, causal=causal)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    model.layers[0].attn.attention = look
    model(torch.randint(61, (2, 9)))
    assert seen["causal"] is True
    assert seen["q"].shape == (2, 4, 9, 8)
    assert seen["k"].shape == seen["v"].shape == (2, 2, 9, 8)
    for name in "qkv":  # views of (batch, seq, heads, head_dim)
        assert seen[name].stride(3) == 1
        assert seen[name].stride(1) == 8
        assert seen[name].stride(2) > seen[name].stride(1)


def test_a_tied_matrix_starts_as_a_head_and_predictions_are_near_uniform():
    torch.manual_seed(0)
    sizes = {"vocab_size": 500, "d_model": 128, "d_ff": 256, "num_layers": 1, "num_heads": 4}
    model = TransformerLM(ModelConfig(**sizes, tie_embeddings=True))
    # Cutting a normal at 3 sigma leaves 98.7% of its spread; 64k samples estimate it to 0.3%.
    assert model.lm_head.weight.std().item() == pytest.approx(0.9866 * math.sqrt(2 / 628), rel=0.02)
    loss = model.loss(torch.randint(500, (4, 64)), torch.randint(500, (4, 64)))
    assert abs(loss.item() - math.log(500)) < 0.3


def test_a_seed_draws_the_weights_one_after_the_other_by_name(make_model):
    config = make_model(num_kv_heads=2).config
    torch.manual_seed(3)
    state = TransformerLM(config).state_dict()
    torch.manual_seed(3)
    for name, weight in state.items():
        std = 1.0 if name == "token_embeddings.weight" else (2 / sum(weight.shape)) ** 0.5
        expected = torch.ones_like(weight)
        if "ln" not in name:
            torch.nn.init.trunc_normal_(expected, std=std, a=-3 * std, b=3 * std)
        assert torch.equal(weight, expected), name


def test_a_model_without_memory_gets_the_values_of_the_seed_later(make_model):
    config = make_model().config
    torch.manual_seed(3)
    reference = TransformerLM(config)
    expected = reference.state_dict()
    on_meta = TransformerLM(config, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in on_meta.parameters()} == {("meta", torch.bfloat16)}
    assert [(b.device.type, b.dtype) for b in on_meta.buffers()] == [("meta", torch.float32)]  # RoPE's
    ids = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    logits, loss = on_meta(ids), on_meta.loss(ids, ids)
    loss.backward()
    assert (logits.device.type, logits.shape[:2], loss.shape) == ("meta", (2, 4), ())
    model = on_meta.float().to_empty(device="cpu")
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    ids = torch.randint(61, (1, 9))
    assert torch.equal(model(ids), reference(ids))  # RoPE's table too
