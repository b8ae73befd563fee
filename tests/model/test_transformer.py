"""The whole model against formulas in float64, against Hugging Face's Llama, and its options against each other."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lmkit.errors import UsageError
from lmkit.model import ModelConfig, TransformerLM, compile_model, parameter_names, transformer
from lmkit.model.memory import KEEPS, Form, kept, kept_by_layers

MakeModel = Callable[..., TransformerLM]


def retold(model: TransformerLM, ids: list[int]) -> torch.Tensor:
    """Compute logits (seq, vocab_size) of one sequence from the weights by name, in loops, without shared code."""
    config = model.config
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}
    heads, kv_heads = config.num_heads, config.num_kv_heads or config.num_heads
    size = config.d_model // heads

    def normed_heads(heads: torch.Tensor, name: str) -> torch.Tensor:
        return torch.stack([norm(head, name) for head in heads]) if config.qk_norm else heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        rms = math.sqrt(sum(float(value) ** 2 for value in x) / len(x) + config.norm_eps)
        return x / rms * weights[name + ".weight"]

    def turn(vector: torch.Tensor, position: int) -> torch.Tensor:
        turned = vector.clone()
        for i in range(0, size, 2):
            angle = position / config.rope_theta ** (i / size)
            if config.rope_scaling != "none":
                wavelength = 2 * math.pi * config.rope_theta ** (i / size)
                angle *= retold_share(config, wavelength)
            turned[i] = vector[i] * math.cos(angle) - vector[i + 1] * math.sin(angle)
            turned[i + 1] = vector[i] * math.sin(angle) + vector[i + 1] * math.cos(angle)
        return turned

    embedded = [weights["token_embeddings.weight"][token] for token in ids]
    stream = embedded
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        if config.layer_scalars:
            r, s = weights[at + "scalars.weight"]
            stream = [r * x + s * e for x, e in zip(stream, embedded, strict=True)]
        normed = [norm(x, at + "ln1") for x in stream]
        q, k, v = (
            [
                (
                    weights[f"{at}attn.{name}_proj.weight"] @ x + weights.get(f"{at}attn.{name}_proj.bias", 0)
                ).unflatten(0, (-1, size))
                for x in normed
            ]
            for name in "qkv"
        )
        q, k = (
            [normed_heads(x, f"{at}attn.{name}_norm") for x in given] for name, given in (("q", q), ("k", k))
        )
        if config.value_embeddings and layer % 2 == 1:  # the second and last of two layers
            table = weights[at + "attn.value_embeddings.weight"]
            v = [x + table[token].unflatten(0, (-1, size)) for x, token in zip(v, ids, strict=True)]
        window = config.attention_window if layer == 0 else None
        for i in range(len(ids)):
            outputs = []
            start = 0 if window is None else max(0, i + 1 - window)
            for head in range(heads):
                shared = head // (heads // kv_heads)
                query = turn(q[i][head], i)
                scores = [float(query @ turn(k[j][shared], j)) / math.sqrt(size) for j in range(start, i + 1)]
                highest = max(scores)
                shares = [math.exp(score - highest) for score in scores]
                outputs.append(sum(s / sum(shares) * v[start + j][shared] for j, s in enumerate(shares)))
            stream[i] = stream[i] + weights[at + "attn.output_proj.weight"] @ torch.cat(outputs)
        for i, x in enumerate(stream):
            normed_x = norm(x, at + "ln2")
            gate = weights[at + "ffn.w1.weight"] @ normed_x
            if config.mlp == "relu2":
                inner = torch.where(gate > 0, gate * gate, 0.0)
            else:
                inner = gate / (1 + torch.exp(-gate)) * (weights[at + "ffn.w3.weight"] @ normed_x)
            stream[i] = x + weights[at + "ffn.w2.weight"] @ inner
    logits = torch.stack([weights["lm_head.weight"] @ norm(x, "ln_final") for x in stream])
    c = config.logit_softcap
    return logits if c is None else c * torch.tanh(logits / c)


def retold_share(config: ModelConfig, wavelength: float) -> float:
    """By how much Llama 3.1's reference code, or linear scaling, multiplies the frequency of a wavelength."""
    if (
        config.rope_scaling == "linear"
        or wavelength > config.rope_original_context / config.rope_low_freq_factor
    ):
        return 1 / config.rope_factor
    if wavelength < config.rope_original_context / config.rope_high_freq_factor:
        return 1.0
    smooth = (config.rope_original_context / wavelength - config.rope_low_freq_factor) / (
        config.rope_high_freq_factor - config.rope_low_freq_factor
    )
    return (1 - smooth) / config.rope_factor + smooth


SWITCHES: list[dict[str, Any]] = [
    {"qk_norm": True, "num_kv_heads": 2},
    {"mlp": "relu2"},
    {"layer_scalars": True},
    {"value_embeddings": True, "num_kv_heads": 2},
    {"logit_softcap": 3.0},
    {"attention_window": 4, "attention": "sdpa"},
]
ALL_SWITCHES: dict[str, Any] = {key: value for fields in SWITCHES for key, value in fields.items()}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        *SWITCHES,
        ALL_SWITCHES | {"attention": "flash_torch"},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "tie_embeddings": True},
        {"norm_eps": 0.01, "rope_theta": 100.0},
        {"attention": "sdpa"},
        {"qkv_bias": True, "num_kv_heads": 2},
        {"rope_scaling": "linear", "rope_factor": 3.0},
        {"rope_scaling": "llama3", "rope_factor": 3.0, "rope_original_context": 40, "rope_theta": 100.0},
    ],
    ids=str,
)
def test_logits_and_loss_follow_the_formulas(make_model: MakeModel, fields: dict) -> None:
    model = make_model(**fields)
    ids = torch.randint(61, (2, 13))
    targets = torch.randint(61, (2, 13))
    expected = torch.stack([retold(model, row.tolist()) for row in ids])
    # float64 but for the float32 table of rotations (2^-25), over two layers.
    torch.testing.assert_close(model(ids).detach(), expected, rtol=1e-6, atol=1e-6)
    loss = -sum(expected[b, s].log_softmax(0)[targets[b, s]].item() for b in range(2) for s in range(13)) / (
        2 * 13
    )
    assert model.loss(ids, targets).item() == pytest.approx(loss, rel=1e-6)


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
def test_packed_documents_are_computed_as_if_each_stood_alone(make_model: MakeModel, fields: dict) -> None:
    """Losses and gradients; the first row begins in the middle of a document, the second has one of one token."""
    model = make_model(**fields, document_token=7)
    rows = [[[3, 8, 2, 2], [7, 4, 9, 9, 1, 5], [7, 30]], [[7], [7, 5, 5, 5, 6, 1], [7, 2, 60, 60, 12]]]
    targets = torch.randint(61, (2, 12))
    loss = model.loss(torch.tensor([[*chain(*row)] for row in rows]), targets)
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


def test_a_document_token_is_no_switch(make_model: MakeModel) -> None:
    """A document by itself is the same to a model with it: decode steps and exports need not know it."""
    ids = torch.randint(1, 61, (2, 9))
    ids[:, 0] = 0
    model = make_model(document_token=0)
    assert not model.config.switches
    assert torch.equal(model(ids), make_model()(ids))


def test_parameter_names(make_model: MakeModel) -> None:
    model = make_model()
    in_a_layer = "ln1 ln2 attn.q_proj attn.k_proj attn.v_proj attn.output_proj ffn.w1 ffn.w2 ffn.w3"
    names = {"token_embeddings.weight", "ln_final.weight", "lm_head.weight"}
    names |= {f"layers.{layer}.{name}.weight" for layer in range(2) for name in in_a_layer.split()}
    assert set(model.state_dict()) == names  # no buffer is saved
    parts = parameter_names(model)
    assert list(parts) == list(model.parameters())
    assert {name for shapes in parts.values() for name in shapes} == names
    state = model.state_dict()
    for parameter, shapes in parts.items():
        assert all(state[name].shape == shape for name, shape in shapes.items())
        assert torch.equal(torch.cat([state[name] for name in shapes]), parameter)
    assert list(parts[model.layers[0].attn.qkv_proj.weight]) == [
        f"layers.0.attn.{name}_proj.weight" for name in "qkv"
    ]


def test_biases_have_names_of_their_own_and_start_from_zero(make_model: MakeModel) -> None:
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
    assert torch.equal(other.layers[1].attn.qkv_proj.bias, torch.ones(64))
    names = parameter_names(model)[model.layers[1].attn.qkv_proj.bias]
    assert list(names) == [f"layers.1.attn.{name}_proj.bias" for name in "qkv"]


def test_joined_matrices_load_by_their_own_names(make_model: MakeModel) -> None:
    model, other = make_model(num_kv_heads=2), make_model(num_kv_heads=2, seed=1)
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    twin = copy.deepcopy(other)
    twin.load_state_dict(state)
    assert all(torch.equal(mine, state[name]) for name, mine in twin.state_dict().items())
    assert not torch.equal(other.layers[0].attn.k_proj.weight, twin.layers[0].attn.k_proj.weight)
    assert twin.layers[0].attn.k_proj.weight.data_ptr() == twin.layers[0].attn.qkv_proj.weight[32:].data_ptr()
    name = "layers.1.attn.k_proj.weight"
    wrong = {**state, name: state[name][1:]}
    lacking = {key: value for key, value in state.items() if key != name}
    for given in (wrong, lacking):
        with pytest.raises(RuntimeError, match=name):
            twin.load_state_dict(given)


def test_a_tied_head_is_one_matrix_with_both_gradients(make_model: MakeModel) -> None:
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


def test_switches_have_their_parameters_and_are_all_listed(make_model: MakeModel) -> None:
    """A switch without the mark would be used by decode steps that do not know it."""
    config = make_model(**ALL_SWITCHES).config
    assert config.switches == set(ALL_SWITCHES) - {"num_kv_heads", "attention"}
    model = TransformerLM(config.model_copy(update={"zero_init": True}))
    first, last = model.layers
    assert first.scalars.weight.tolist() == [1.0, 0.0]
    assert not last.attn.value_embeddings.weight.any()
    assert first.attn.value_embeddings is None
    for layer in model.layers:
        assert not layer.attn.output_proj.weight.any()
        assert not layer.ffn.w2.weight.any()
        assert not hasattr(layer.ffn, "w3")
        assert layer.attn.qkv_proj.weight.any()


KEPT = [
    {"activation_checkpointing": "block"},
    {"activation_checkpointing": "attention"},
    # float64, 18 tokens, 4 heads of 8, d_ff 48: inputs of blocks 9 kB, attention 9 kB, q, k, v 23 kB ...
    *({"activation_checkpointing": "selective", "activation_gb": kb * 1e-6} for kb in (1, 25, 60, 100, 500)),
]


@pytest.mark.parametrize("keep", ["block", "attention", "selective"])
def test_switches_are_recomputed_the_same(make_model: MakeModel, keep: str) -> None:
    budget = {"activation_gb": 60e-6} if keep == "selective" else {}
    test_activation_checkpointing_recomputes_the_same_gradients(
        make_model, {**ALL_SWITCHES, "activation_checkpointing": keep, **budget}, "sdpa", False
    )


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen embeddings"])
@pytest.mark.parametrize("attention", ["reference", "flash_torch", "sdpa"])
@pytest.mark.parametrize("fields", KEPT, ids=str)
def test_activation_checkpointing_recomputes_the_same_gradients(
    make_model: MakeModel, fields: dict[str, Any], attention: str, frozen: bool
) -> None:
    """Bit for bit; also where the first block's input needs no gradient but its weights do."""
    ids, targets = torch.randint(61, (2, 9)), torch.randint(61, (2, 9))
    same = {key: value for key, value in fields.items() if not key.startswith("activation")}
    models = [make_model(**{"attention": attention, **each}) for each in (same, fields)]
    for model in models:
        model.token_embeddings.weight.requires_grad_(not frozen)
        model.loss(ids, targets).backward()
    for (name, plain), again in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if frozen and name == "token_embeddings.weight":
            assert plain.grad is again.grad is None
        else:
            assert plain.grad.any(), name
            assert torch.equal(plain.grad, again.grad), name


@pytest.mark.parametrize(
    ("keep", "again"),
    [
        ("input", {"qkv_proj": 2, "output_proj": 2, "gate_up": 2, "swiglu": 2, "attention": 2}),
        ("attention", {"qkv_proj": 2, "output_proj": 2, "gate_up": 2, "swiglu": 2, "attention": 1}),
        ("qkv", {"qkv_proj": 1, "output_proj": 2, "gate_up": 2, "swiglu": 2, "attention": 1}),
        ("products", {"qkv_proj": 1, "output_proj": 1, "gate_up": 1, "swiglu": 2, "attention": 1}),
        ("all", {"qkv_proj": 1, "output_proj": 1, "gate_up": 1, "swiglu": 1, "attention": 1}),
    ],
)
def test_what_a_block_keeps_is_not_computed_again(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, keep: str, again: dict[str, int]
) -> None:
    model = make_model(num_layers=1, activation_checkpointing="block")
    monkeypatch.setattr(
        transformer, "kept_by_layers", lambda config, form, tokens: [keep] * config.num_layers
    )
    calls = dict.fromkeys(again, 0)
    block = model.layers[0]

    class Counting(TorchDispatchMode):
        """Count matrix products by the shape of their weights."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.mm.default and args[1].is_contiguous() is False:
                for name in ("qkv_proj", "output_proj", "gate_up"):
                    owner = block.ffn if name == "gate_up" else block.attn
                    weight = getattr(owner, name).weight
                    calls[name] += args[1].untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
            calls["swiglu"] += function is torch.ops.aten.silu.default
            calls["attention"] += function is torch.ops.aten._softmax.default
            return function(*args, **(kwargs or {}))

    ids = torch.randint(61, (2, 9))
    with Counting():
        model.loss(ids, ids).backward()
    assert calls == again


def test_a_budget_is_spent_on_the_dearest_first(make_model: MakeModel) -> None:
    config = make_model(num_layers=3, attention="sdpa").config
    form = Form(reuses_memory=True, device="cuda", stream=2, product=2)
    size = {keep: 1000 * kept(config, form, keep) for keep in KEEPS}
    assert list(size.values()) == sorted(size.values())

    def choose(budget: int) -> list[str]:
        asked = {"activation_checkpointing": "selective", "activation_gb": budget / 1e9}
        return kept_by_layers(config.model_copy(update=asked), form, tokens=1000)

    assert choose(1) == choose(3 * size["input"]) == ["input"] * 3
    assert choose(2 * size["input"] + size["attention"] + 1) == ["input", "input", "attention"]
    assert choose(3 * size["attention"] - 1) == ["input", "attention", "attention"]
    assert choose(2 * size["attention"] + size["qkv"] + 1) == ["attention", "attention", "qkv"]
    assert choose(2 * size["products"] + size["all"] + 1) == ["products", "products", "all"]
    assert choose(3 * size["all"] + 1) == ["all"] * 3


# Dynamo looks at the .grad of every tensor that enters a graph, and PyTorch warns of that for a block's input.
ignore_dynamo = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@ignore_dynamo
@pytest.mark.parametrize("fields", [{}, *KEPT[:2], KEPT[4], KEPT[5]], ids=str)
@pytest.mark.parametrize("how", ["none", "block", pytest.param("whole", marks=pytest.mark.full)])
def test_a_compiled_model_has_the_same_names_and_numbers(
    make_model: MakeModel, how: str, fields: dict[str, Any]
) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    ids, targets = torch.randint(61, (2, 9)), torch.randint(61, (2, 9))
    same = {key: value for key, value in fields.items() if not key.startswith("activation")}
    plain = make_model(**{"attention": "vectorized", **same})
    compiled = make_model(**{"attention": "vectorized", **fields})
    compile_model(compiled, how, backend="aot_eager")
    for model in (plain, compiled):
        model.loss(ids, targets).backward()
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for (name, mine), yours in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        # float64; RoPE's table is float32 on both sides.
        torch.testing.assert_close(mine.grad, yours.grad, rtol=1e-9, atol=1e-12, msg=name)
    torch.testing.assert_close(compiled(ids), plain(ids), rtol=1e-9, atol=1e-12)


@ignore_dynamo
@pytest.mark.full
def test_switches_are_compiled(make_model: MakeModel) -> None:
    test_a_compiled_model_has_the_same_names_and_numbers(make_model, "block", ALL_SWITCHES)


@ignore_dynamo
@pytest.mark.parametrize(("how", "graphs"), [("none", 0), ("block", 2), ("whole", 2)])
def test_blocks_share_one_graph(make_model: MakeModel, how: str, graphs: int) -> None:
    """One for the blocks, whether there are two or ten, and one for the loss."""
    torch.compiler.reset()
    seen = []

    def count(graph: torch.fx.GraphModule, example: list) -> Callable:
        seen.append(graph)
        return graph.forward

    model = make_model(attention="vectorized", num_layers=3)
    compile_model(model, how, backend=count)  # type: ignore[arg-type]
    for _ in range(2):
        model.loss(torch.randint(61, (2, 9)), torch.randint(61, (2, 9)))
    assert len(seen) == graphs
    if graphs:
        products = sum("linear" in str(node.target) for node in seen[0].graph.nodes)
        in_a_block = 4  # q, k and v in one; output; gate and up in one; down
        assert products == in_a_block * (1 if how == "block" else 3)


def test_a_token_sees_nothing_that_follows(make_model: MakeModel) -> None:
    model = make_model()
    ids = torch.randint(61, (1, 12))
    changed = ids.clone()
    changed[0, 7] = (ids[0, 7] + 1) % 61
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(make_model: MakeModel, dtype: torch.dtype) -> None:
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


def test_attention_gets_views_of_the_projections(make_model: MakeModel) -> None:
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


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_have_the_promised_spread(tied: bool) -> None:
    """A tied matrix starts as a head."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 500, "d_model": 128, "d_ff": 256, "num_layers": 1, "num_heads": 4}
    model = TransformerLM(ModelConfig(**sizes, tie_embeddings=tied))
    expected = {
        "token_embeddings.weight": math.sqrt(2 / 628) if tied else 1.0,
        "layers.0.attn.k_proj.weight": math.sqrt(2 / 256),
        "layers.0.ffn.w2.weight": math.sqrt(2 / 384),
        "lm_head.weight": math.sqrt(2 / 628),
    }
    state = model.state_dict()
    for name, std in expected.items():
        # Cutting a normal at 3 sigma leaves 98.7% of its spread; 16k samples estimate it to 0.6%.
        assert state[name].std().item() == pytest.approx(0.9866 * std, rel=0.03)
        assert 2.5 * std < state[name].abs().max().item() <= 3 * std
    loss = model.loss(torch.randint(500, (4, 64)), torch.randint(500, (4, 64)))
    assert abs(loss.item() - math.log(500)) < 0.3  # near-uniform predictions at the start


def test_a_seed_draws_the_weights_of_the_first_edition(make_model: MakeModel) -> None:
    """One after the other, by name, as before matrices were joined."""
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


def test_a_model_without_memory_gets_the_values_of_the_seed_later(make_model: MakeModel) -> None:
    config = make_model().config
    torch.manual_seed(3)
    reference = TransformerLM(config)
    expected = reference.state_dict()
    on_meta = TransformerLM(config, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in on_meta.parameters()} == {("meta", torch.bfloat16)}
    assert [(b.device.type, b.dtype) for b in on_meta.buffers()] == [("meta", torch.float32)]  # RoPE's
    model = on_meta.float().to_empty(device="cpu")
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    ids = torch.randint(61, (1, 9))
    assert torch.equal(model(ids), reference(ids))  # RoPE's table too


def test_refusals(make_model: MakeModel) -> None:
    with pytest.raises(ValueError, match="vocab_size is not set"):
        TransformerLM(ModelConfig())
    with pytest.raises(ValueError, match="25 tokens is longer than the context of 24"):
        make_model()(torch.zeros(1, 25, dtype=torch.int64))
    with pytest.raises(UsageError) as caught:
        TransformerLM(ModelConfig(vocab_size=5).model_copy(update={"attention": "nonesuch"}))
    assert caught.value.code == "registry.unknown_name"
