"""Compiling in place: same names, same numbers. The inductor backend itself is PyTorch's to test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lmkit.model.transformer import TransformerLM, compile_model

# Dynamo looks at the .grad of every tensor that enters a graph, and PyTorch warns of that for a block's input.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("how", ["none", "block", "whole"])
def test_names_and_numbers_stay(
    make_model: Callable[..., TransformerLM], how: str, checkpointing: bool
) -> None:
    torch.manual_seed(0)
    ids, targets = torch.randint(61, (2, 9)), torch.randint(61, (2, 9))
    plain = make_model(attention="vectorized")
    compiled = make_model(attention="vectorized", activation_checkpointing=checkpointing)
    compile_model(compiled, how, backend="aot_eager")
    for model in (plain, compiled):
        model.loss(ids, targets).backward()

    assert list(compiled.state_dict()) == list(plain.state_dict())
    for (name, mine), (_, yours) in zip(compiled.named_parameters(), plain.named_parameters(), strict=True):
        # float64; RoPE's table is float32 on both sides.
        torch.testing.assert_close(mine.grad, yours.grad, rtol=1e-9, atol=1e-12, msg=name)
    torch.testing.assert_close(compiled(ids), plain(ids), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("how", "graphs"), [("none", 0), ("block", 2), ("whole", 2)])
def test_blocks_share_one_graph(make_model: Callable[..., TransformerLM], how: str, graphs: int) -> None:
    """One for the blocks, whether there are two or ten, and one for the loss."""
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
        in_a_block = 5  # q, k and v in one; output; three of the feed-forward network
        assert products == in_a_block * (1 if how == "block" else 3)
