"""`torch.func` and forward-mode differentiation of a whole model, beside `Tensor.backward` on the same model."""

from collections.abc import Callable

import pytest
import torch
from small_models import FIELDS, make
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, stack_module_state, vmap
from torch.nn import functional as F

from lmkit.core import model as core
from lmkit.model import TransformerLM, linear_cross_entropy

Parameters = dict[str, Tensor]
Loss = Callable[[nn.Module, Parameters, Tensor], Tensor]


def of_logits(model: nn.Module, parameters: Parameters, ids: Tensor) -> Tensor:
    logits = functional_call(model, parameters, (ids[:, :-1],))
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.loss(ids[:, :-1], ids[:, 1:])  # type: ignore[operator]


def own_loss(model: nn.Module, parameters: Parameters, ids: Tensor) -> Tensor:
    return functional_call(_Loss(model), {f"model.{name}": x for name, x in parameters.items()}, (ids,))


def gradients(loss: Loss, model: nn.Module, ids: Tensor) -> Parameters:
    """By `backward`, without a transform."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss(model, parameters, ids), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(31, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # PyTorch's forward mode compiles with it
@pytest.mark.parametrize("loss", [of_logits, own_loss])
@pytest.mark.parametrize(
    ("name", "kind"), [("sdpa", core.TransformerLM), *((name, TransformerLM) for name in FIELDS)]
)
def test_transforms_of_a_model_give_what_backward_gives(
    name: str, kind: type[nn.Module], loss: Loss, ids: Tensor
) -> None:
    model = make(name, kind)
    parameters = {name: x.detach() for name, x in model.named_parameters()}
    expected = gradients(loss, model, ids)

    torch.testing.assert_close(grad(lambda p: loss(model, p, ids))(parameters), expected)

    per_sample = vmap(grad(lambda p, row: loss(model, p, row[None])), (None, 0))(parameters, ids)
    rows = [gradients(loss, model, row[None]) for row in ids]
    for key, found in per_sample.items():
        torch.testing.assert_close(found, torch.stack([row[key] for row in rows]))

    tangents = {key: torch.randn_like(x) for key, x in parameters.items()}
    slope = sum((expected[key] * tangents[key]).sum() for key in parameters)
    torch.testing.assert_close(jvp(lambda p: loss(model, p, ids), (parameters,), (tangents,))[1], slope)
    with forward_ad.dual_level():
        duals = {key: forward_ad.make_dual(x, tangents[key]) for key, x in parameters.items()}
        torch.testing.assert_close(forward_ad.unpack_dual(loss(model, duals, ids)).tangent, slope)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("loss", [of_logits, own_loss])
def test_second_derivatives_come_from_torch_func_and_are_refused_elsewhere(loss: Loss, ids: Tensor) -> None:
    model, gain = make("sdpa"), torch.linspace(0.5, 1.5, 16, dtype=torch.float64)

    def of_gain(gain: Tensor) -> Tensor:
        return loss(model, {**dict(model.named_parameters()), "ln_final.weight": gain}, ids)

    curvature = hessian(of_gain)(gain)
    step = torch.zeros_like(gain).index_fill(0, torch.tensor(3), 1e-5)
    difference = grad(of_gain)(gain + step) - grad(of_gain)(gain - step)  # exact to about 1e-10
    torch.testing.assert_close(curvature[3], difference / 2e-5, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(curvature, curvature.mT)
    with pytest.raises(RuntimeError, match=r"differentiable once.*torch\.func"):
        torch.autograd.functional.hessian(of_gain, gain)


def test_an_ensemble_of_models_runs_as_one(ids: Tensor) -> None:
    models = [make("sdpa"), make("sdpa")]
    with torch.no_grad():
        models[1].lm_head.weight.neg_()
    parameters, buffers = stack_module_state(models)
    logits = vmap(lambda p, b: functional_call(models[0], (p, b), (ids,)))(parameters, buffers)
    torch.testing.assert_close(logits, torch.stack([model(ids) for model in models]))


def test_targets_below_zero_do_not_count_under_transforms_either(ids: Tensor) -> None:
    hidden, weight = torch.randn(3, 9, 16), torch.randn(31, 16)
    targets = torch.where(ids > 15, -1, ids)

    def reference(hidden: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight.mT).flatten(0, 1), targets.flatten(), ignore_index=-1)

    found = grad(lambda hidden: linear_cross_entropy(hidden, weight, targets))(hidden)
    torch.testing.assert_close(found, grad(reference)(hidden))
