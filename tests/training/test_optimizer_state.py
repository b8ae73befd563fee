from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lmkit.errors import LmkitError, UsageError
from lmkit.model.transformer import TransformerLM
from lmkit.optim.adamw import AdamW, decay_groups
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.zero1 import Zero1
from lmkit.recipe.tables import ModelConfig, ParallelConfig
from lmkit.training.model_state import load_optimizer_tensors, load_weights, model_weights, optimizer_tensors

CONFIG = ModelConfig(vocab_size=64, context_length=8, d_model=16, d_ff=32, num_layers=2, num_heads=2)


def make_model(**changes: object) -> TransformerLM:
    return TransformerLM(CONFIG.model_copy(update=changes))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "ours": lambda model: AdamW(decay_groups(model.parameters(), 0.1)),
    "torch": lambda model: torch.optim.AdamW(model.parameters()),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_going_on_equals_never_having_stopped(name: str) -> None:
    model, other = make_model(), make_model()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 3, seed=1)
    saved_model = {key: value.clone() for key, value in model_weights(model).items()}
    saved = {key: value.clone() for key, value in optimizer_tensors(optimizer, model).items()}
    assert "layers.0.ffn.w1.weight.exp_avg" in saved or name == "momentum"
    train(model, optimizer, 2, seed=2)

    resumed = OPTIMIZERS[name](other)
    load_weights(other, saved_model, origin=Path("saved"))
    load_optimizer_tensors(resumed, other, [saved], None, origin="saved")
    train(other, resumed, 2, seed=2)
    for key, value in model_weights(model).items():
        assert torch.equal(value, model_weights(other)[key]), key
    after = optimizer_tensors(resumed, other)
    for key, value in optimizer_tensors(optimizer, model).items():
        assert torch.equal(value, after[key]), key


def test_state_of_another_model_is_refused() -> None:
    model, other = make_model(), make_model(num_layers=1)
    optimizer = OPTIMIZERS["ours"](model)
    train(model, optimizer, 1, seed=1)
    with pytest.raises(LmkitError, match=r"layers\.1"):
        load_optimizer_tensors(
            OPTIMIZERS["ours"](other), other, [optimizer_tensors(optimizer, model)], None, origin="saved"
        )


def test_weights_of_another_model_are_refused_with_the_difference() -> None:
    with pytest.raises(UsageError, match=r"layers\.0\.ln1\.weight: saved 16, model 32"):
        load_weights(make_model(d_model=32), model_weights(make_model()), origin=Path("saved"))
    with pytest.raises(UsageError, match=r"layers\.1\.\S+: saved missing"):
        load_weights(make_model(), model_weights(make_model(num_layers=1)), origin=Path("saved"))


def test_tied_weights_are_saved_once_and_stay_tied() -> None:
    model, other = make_model(tie_embeddings=True), make_model(tie_embeddings=True)
    saved = model_weights(model)
    assert ("lm_head.weight" in saved) != ("token_embeddings.weight" in saved)
    load_weights(other, saved, origin=Path("saved"))
    assert other.lm_head.weight is other.token_embeddings.weight
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


class Wrapped(nn.Module):
    """As DistributedDataParallel and torch.compile name what they wrap."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
def test_fault_59_saved_from_a_wrapped_model_loads_plain_and_the_other_way_round(wrapper: str) -> None:
    model, plain = make_model(), make_model()
    wrapped = Wrapped(Wrapped(model, wrapper), "module")
    assert model_weights(wrapped).keys() == model_weights(plain).keys()
    load_weights(plain, model_weights(wrapped), origin=Path("saved"))
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)
    fresh = Wrapped(make_model(), wrapper)
    load_weights(fresh, model_weights(plain), origin=Path("saved"))
    optimizer = OPTIMIZERS["ours"](wrapped)
    train(wrapped, optimizer, 1, seed=1)
    load_optimizer_tensors(
        OPTIMIZERS["ours"](plain), plain, [optimizer_tensors(optimizer, wrapped)], None, origin="saved"
    )


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
def test_a_sharded_optimizer_calls_the_parameters_of_a_wrapped_model_as_the_plain_one_does(
    wrapper: str,
) -> None:
    model = Wrapped(make_model(), wrapper)
    sync = Zero1(Ranks(), ParallelConfig(strategy="zero1"))
    sync.attach(model)
    optimizer = sync.build_optimizer(torch.optim.SGD, [{"params": list(model.parameters())}])
    names = {name for bucket in optimizer.shard_layout.buckets for name in bucket.names}
    assert names == set(model_weights(make_model()))


def test_fault_59_saved_from_a_compiled_layer_loads_plain() -> None:
    model, plain = make_model(), make_model()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")  # type: ignore[assignment]
    load_weights(plain, model_weights(model), origin=Path("saved"))
    assert torch.equal(plain.layers[0].ffn.w1.weight, model.layers[0].ffn.w1.weight)
