"""Weights and optimizer state as named tensors: of plain, wrapped, tied and sharded models."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from raising import raises
from torch import nn

from lmkit.core.adamw import decay_groups
from lmkit.errors import LmkitError, UsageError
from lmkit.model.transformer import TransformerLM
from lmkit.optim.adamw import AdamW
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.shards import consolidate
from lmkit.parallel.zero1 import Zero1
from lmkit.recipe.tables import ModelConfig, ParallelConfig
from lmkit.training.resume import (
    load_checkpoint,
    load_optimizer_tensors,
    optimizer_layout,
    optimizer_tensors,
    save_checkpoint,
)
from lmkit.training.weights import load_weights, model_weights

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


@pytest.mark.parametrize("place", ["file", "file object"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_going_on_from_a_saved_checkpoint_equals_never_having_stopped(name, place, tmp_path):
    model, other = make_model(), make_model()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 3, seed=1)
    optimizer.param_groups[0]["lr"] = 0.05  # as a schedule does
    out = tmp_path / "new" / "c.safetensors" if place == "file" else io.BytesIO()
    save_checkpoint(model, optimizer, 3, out)
    train(model, optimizer, 2, seed=2)

    resumed = OPTIMIZERS[name](other)
    if isinstance(out, io.BytesIO):
        out.seek(0)
    assert load_checkpoint(out, other, resumed) == 3
    assert resumed.param_groups[0]["lr"] == 0.05
    assert [type(value) for value in resumed.defaults.values()] == [
        type(value) for value in optimizer.defaults.values()
    ]
    train(other, resumed, 2, seed=2)
    for key, value in model_weights(model).items():
        assert torch.equal(value, model_weights(other)[key]), key
    after = optimizer_tensors(resumed, other)
    for key, value in optimizer_tensors(optimizer, model).items():
        assert torch.equal(value, after[key]), key


def test_a_checkpoint_without_optimizer_and_one_on_a_sharded_one(tmp_path):
    model, other = make_model(), make_model()
    save_checkpoint(model, None, 7, tmp_path / "weights")
    assert load_checkpoint(str(tmp_path / "weights"), other, OPTIMIZERS["ours"](other)) == 7
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    sync = Zero1(Ranks(), ParallelConfig(strategy="zero1"))
    sync.attach(model)
    sharded = sync.build_optimizer(torch.optim.AdamW, [{"params": list(model.parameters())}])
    loss = model.loss(torch.arange(8)[None], torch.arange(8)[None])
    loss.backward()
    sync.finish()
    sharded.step()
    save_checkpoint(model, sharded, 8, tmp_path / "sharded")
    plain = torch.optim.AdamW(other.parameters())
    assert load_checkpoint(tmp_path / "sharded", other, plain) == 8
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert plain.state[other.lm_head.weight]["exp_avg"].abs().sum() > 0


def test_state_of_a_joined_matrix_is_saved_by_the_names_of_its_parts():
    """By whole and by sharded optimizers; either loads what the other saved."""
    parts = {"q": slice(0, 16), "k": slice(16, 24), "v": slice(24, 32)}
    whole, sharded = (make_model(num_kv_heads=1) for _ in range(2))
    load_weights(sharded, model_weights(whole), origin=Path("saved"))
    plain = torch.optim.AdamW(whole.parameters())
    sync = Zero1(Ranks(), ParallelConfig(strategy="zero1"))
    sync.attach(sharded)
    shards = sync.build_optimizer(torch.optim.AdamW, [{"params": list(sharded.parameters())}])
    for model, optimizer in ((whole, plain), (sharded, shards)):
        model.loss(torch.arange(8)[None], torch.arange(8)[None]).backward()
        if optimizer is shards:
            sync.finish()
        optimizer.step()
    of_shards = consolidate([shards.state_dict()])
    saved = optimizer_tensors(plain, whole)
    moments = plain.state[whole.layers[0].attn.qkv_proj.weight]
    for letter, rows in parts.items():
        name = f"layers.0.attn.{letter}_proj.weight"
        assert torch.equal(saved[f"{name}.exp_avg"], moments["exp_avg"][rows])
        assert torch.equal(of_shards[name]["exp_avg"], saved[f"{name}.exp_avg"].flatten())
        assert saved[f"{name}.step"] == 1

    again = torch.optim.AdamW(sharded.parameters())
    tensors = optimizer_tensors(shards, sharded)
    load_optimizer_tensors(again, sharded, [tensors], optimizer_layout(shards), origin="saved")
    loaded = again.state[sharded.layers[0].attn.qkv_proj.weight]["exp_avg"]
    assert torch.equal(loaded, moments["exp_avg"])
    load_optimizer_tensors(shards, sharded, [saved], None, origin="saved")
    assert torch.equal(optimizer_tensors(shards, sharded)["0.exp_avg"], tensors["0.exp_avg"])


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_fault_57_a_pickle_is_refused_by_load_checkpoint(tmp_path):
    model, path, sentinel = make_model(), tmp_path / "model.safetensors", tmp_path / "executed"
    path.write_bytes(pickle.dumps(Touch(sentinel)))
    with raises(LmkitError, "checkpoint.damaged", path):
        load_checkpoint(path, model)
    assert not sentinel.exists()
    with raises(UsageError, "checkpoint.not_found", "nothing"):
        load_checkpoint(tmp_path / "nothing", model)
    save_checkpoint(make_model(d_model=32), None, 1, path)
    with raises(UsageError, "checkpoint.other_model", path):
        load_checkpoint(path, model)
    save_checkpoint(model, OPTIMIZERS["torch"](model), 1, path)
    with raises(LmkitError, "checkpoint.other_optimizer", path):
        load_checkpoint(path, model, OPTIMIZERS["ours"](model))  # which has two parameter groups


def test_state_of_another_model_is_refused_with_the_difference():
    model, other = make_model(), make_model(num_layers=1)
    optimizer = OPTIMIZERS["ours"](model)
    train(model, optimizer, 1, seed=1)
    with raises(LmkitError, "checkpoint.other_optimizer", "saved", "layers.1"):
        load_optimizer_tensors(
            OPTIMIZERS["ours"](other), other, [optimizer_tensors(optimizer, model)], None, origin="saved"
        )
    with raises(LmkitError, "checkpoint.other_model", "layers.0.ln1.weight: saved 16, model 32"):
        load_weights(make_model(d_model=32), model_weights(model), origin=Path("saved"))
    with raises(LmkitError, "checkpoint.other_model", "layers.1.", "saved missing"):
        load_weights(model, model_weights(other), origin=Path("saved"))


def test_tied_weights_are_saved_once_and_stay_tied():
    model, other = make_model(tie_embeddings=True), make_model(tie_embeddings=True)
    saved = model_weights(model)
    assert ("lm_head.weight" in saved) != ("token_embeddings.weight" in saved)
    load_weights(other, saved, origin=Path("saved"))
    assert other.lm_head.weight is other.token_embeddings.weight
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


class Wrapped(nn.Module):
    """Names what it wraps as DistributedDataParallel and torch.compile do."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
def test_fault_59_saved_from_a_wrapped_model_loads_plain_and_the_other_way_round(wrapper):
    model, plain = make_model(), make_model()
    wrapped = Wrapped(Wrapped(model, wrapper), "module")
    assert model_weights(wrapped).keys() == model_weights(plain).keys()
    load_weights(plain, model_weights(wrapped), origin=Path("saved"))
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)
    load_weights(Wrapped(make_model(), wrapper), model_weights(plain), origin=Path("saved"))
    optimizer = OPTIMIZERS["ours"](wrapped)
    train(wrapped, optimizer, 1, seed=1)
    load_optimizer_tensors(
        OPTIMIZERS["ours"](plain), plain, [optimizer_tensors(optimizer, wrapped)], None, origin="saved"
    )
    sync = Zero1(Ranks(), ParallelConfig(strategy="zero1"))
    sync.attach(wrapped)
    sharded = sync.build_optimizer(torch.optim.SGD, [{"params": list(wrapped.parameters())}])
    names = {name for bucket in sharded.shard_layout.buckets for name in bucket.names}
    assert names == set(model_weights(plain))


def test_fault_59_saved_from_a_compiled_layer_loads_plain():
    model, plain = make_model(), make_model()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")  # type: ignore[assignment]
    load_weights(plain, model_weights(model), origin=Path("saved"))
    assert torch.equal(plain.layers[0].ffn.w1.weight, model.layers[0].ffn.w1.weight)
