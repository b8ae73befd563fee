"""Models whose blocks are computed again in the backward pass, or compiled, give the same numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from marking import full_but, full_except
from switches import ALL_SWITCHES
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode

from lmkit.model import compile_model, transformer
from lmkit.model.memory import Form, kept
from lmkit.model.operations import PLAIN

KEPT = [
    {"activation_checkpointing": "block"},
    {"activation_checkpointing": "attention"},
    # float64, 18 tokens, 4 heads of 8, d_ff 48: inputs of blocks 9 kB, attention 9 kB, q, k, v 23 kB ...
    *({"activation_checkpointing": "selective", "activation_gb": kb * 1e-6} for kb in (1, 25, 60, 100, 500)),
]


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen embeddings"])
@pytest.mark.parametrize("attention", ["reference", "flash_torch", "sdpa"])
@pytest.mark.parametrize("fields", [*KEPT, *(ALL_SWITCHES | keep for keep in (*KEPT[:2], KEPT[4]))], ids=str)
def test_activation_checkpointing_recomputes_the_same_gradients(make_model, fields, attention, frozen):
    """Bit for bit; also where the first block's input needs no gradient but its weights do."""
    ids, targets = torch.randint(61, (2, 9)), torch.randint(61, (2, 9))
    same = {key: value for key, value in fields.items() if not key.startswith("activation")}
    models = [make_model(**{**each, "attention": attention}) for each in (same, fields)]
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
        ("input", {"q_proj": 2, "output_proj": 2, "w1": 2, "swiglu": 2, "attention": 2}),
        ("attention", {"q_proj": 2, "output_proj": 2, "w1": 2, "swiglu": 2, "attention": 1}),
        ("qkv", {"q_proj": 1, "output_proj": 2, "w1": 2, "swiglu": 2, "attention": 1}),
        ("products", {"q_proj": 1, "output_proj": 1, "w1": 1, "swiglu": 2, "attention": 1}),
        ("all", {"q_proj": 1, "output_proj": 1, "w1": 1, "swiglu": 1, "attention": 1}),
    ],
)
def test_what_a_block_keeps_is_not_computed_again(make_model, monkeypatch, keep, again):
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
                for name in ("q_proj", "output_proj", "w1"):
                    weight = getattr(block.ffn if name == "w1" else block.attn, name).weight
                    calls[name] += args[1].untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
            calls["swiglu"] += function is torch.ops.aten.silu.default
            calls["attention"] += function is torch.ops.aten._softmax.default
            return function(*args, **(kwargs or {}))

    ids = torch.randint(61, (2, 9))
    with Counting():
        model.loss(ids, ids).backward()
    assert calls == again


# Dynamo looks at the .grad of every tensor that enters a graph, and PyTorch warns of that for a block's input.
ignore_dynamo = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@ignore_dynamo
@pytest.mark.parametrize(
    "fields", full_but([ALL_SWITCHES | KEPT[4]], [{}, KEPT[1], ALL_SWITCHES | KEPT[4]]), ids=str
)
@pytest.mark.parametrize("how", full_except("block", "whole"))
def test_a_compiled_model_has_the_same_names_and_numbers(make_model, how, fields):
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
@pytest.mark.parametrize(
    ("keep", "again"), full_but([("attention", 3)], [("attention", 3), ("qkv", 2), ("products", 0)])
)
def test_the_compiler_keeps_what_blocks_keep(make_model, keep, again):
    """A compiled rival computes as many matrix products again as a strategy whose blocks are not compiled."""
    torch.compiler.reset()
    model = make_model(num_layers=1, attention="sdpa", compile="block").float()
    graphs, storages = [], {}

    def compile_part(graph: torch.fx.GraphModule, example: list) -> Callable:
        graphs.append(graph)
        return make_boxed_func(graph)

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    backend = aot_autograd(  # as inductor has it
        fw_compiler=compile_part,
        bw_compiler=compile_part,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    block = torch.compile(model.layers[0], backend=backend)
    x = torch.randn(2, 9, model.config.d_model, requires_grad=True)
    cos_sin = model.rope(9)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        outputs = block(x, cos_sin, operations=PLAIN, keep=keep)
    sum(output.sum() for output in outputs).backward()
    for constant in (cos_sin, *model.parameters()):
        storages.pop(constant.untyped_storage().data_ptr(), None)
    form = Form(reuses_memory=False, device="cuda", stream=4, product=4, compiled=True)
    assert sum(storages.values()) == 18 * sum(kept(model.config, form, keep).values())
    products = [node for node in graphs[1].graph.nodes if node.target is torch.ops.aten.mm.default]
    assert len(products) == 8 + again


@ignore_dynamo
@pytest.mark.parametrize(("how", "graphs"), [("none", 0), ("block", 2), ("whole", 2)])
def test_blocks_share_one_graph(make_model, how, graphs):
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
