"""A model as any `nn.Module`: copied, pickled, saved, exported and compiled, with the numbers of the original."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import FIELDS, make
from torch import Tensor, nn

from lmkit.core import model as core
from lmkit.model import TransformerLM

IDS = torch.tensor([[5, 1, 7, 7, 0, 30, 2], [4, 4, 1, 0, 6, 2, 8]])


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def losses(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    loss = model.loss(IDS[:, :-1], IDS[:, 1:])  # type: ignore[operator]
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("kind", [core.TransformerLM, TransformerLM])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved])
@pytest.mark.parametrize("name", ["sdpa", "switches"])
def test_a_copy_computes_the_same_and_shares_nothing(
    name: str, again: Callable[..., Any], kind: type[nn.Module]
):
    model = make(name, kind)
    other = again(model)
    expected = losses(model)
    torch.testing.assert_close(losses(other), expected, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    torch.testing.assert_close(losses(model), expected, rtol=0, atol=0)


SLOWER = [pytest.param(name, marks=pytest.mark.full) for name in FIELDS if name != "sdpa"]


@pytest.mark.parametrize("name", ["sdpa", *SLOWER])
def test_an_exported_model_computes_the_same_for_other_batches_and_lengths(name: str):
    model = make(name)
    batch, seq = torch.export.Dim("batch", max=8), torch.export.Dim("seq", min=2, max=16)
    exported = torch.export.export(model, (IDS,), dynamic_shapes={"ids": {0: batch, 1: seq}}).module()
    for ids in (IDS, IDS[:1, :4], IDS.repeat(2, 2)):
        torch.testing.assert_close(exported(ids), model(ids))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does so
@pytest.mark.parametrize("name", FIELDS)
def test_a_strict_export_and_a_compiled_graph_compute_the_same(name: str):
    model = make(name)
    exported = torch.export.export(model, (IDS,), strict=True).module()
    torch.testing.assert_close(exported(IDS), model(IDS))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS), model(IDS))
    gradients = [
        torch.autograd.grad(run(IDS).square().mean(), list(model.parameters())) for run in (compiled, model)
    ]
    torch.testing.assert_close(*gradients)
