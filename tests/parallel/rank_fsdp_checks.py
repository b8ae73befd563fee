"""Checks of `fsdp` inside a process group: its weights, when it gathers and frees them, and what that takes."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from rank_model import assert_close_models, check, groups_of, noise, our_adamw, plain, start
from torch import nn

from lmkit.core.adamw import decay_groups
from lmkit.model.transformer import TransformerLM, compile_model
from lmkit.parallel.fsdp import FreedShards, Fsdp
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ModelConfig, ParallelConfig

TINY = ModelConfig(vocab_size=64, context_length=8, d_model=32, d_ff=64, num_layers=4, num_heads=2)


def sharded(config: ModelConfig, ranks: Ranks, seed: int = 0, **keys: Any) -> tuple[Fsdp, TransformerLM, Any]:
    """(strategy, a model that was drawn layer by layer, optimizer)."""
    torch.manual_seed(seed)
    model = TransformerLM(config, device="meta")
    sync = Fsdp(ranks, ParallelConfig(strategy="fsdp", **keys))
    sync.attach(model)
    return sync, model, sync.build_optimizer(our_adamw, decay_groups(model.parameters(), 0.1))


def tokens(ranks: Ranks, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + ranks.rank)
    ids = torch.randint(0, 64, (2, 9), generator=generator).to(ranks.device)
    return ids[:, :-1], ids[:, 1:]


def lm_step(sync: Fsdp, model: TransformerLM, optimizer: Any, ranks: Ranks, step: int) -> float:
    loss = model.loss(*tokens(ranks, step))
    loss.backward()
    sync.finish()
    sync.clip_gradients(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@check(tied=(False, True))
def check_fsdp_draws_the_weights_of_a_whole_model(ranks: Ranks, tied: bool) -> None:
    """Bit for bit, layer by layer, from the same stream of random numbers, of which as many are left."""
    config = TINY.model_copy(update={"tie_embeddings": tied})
    longest = []

    def lend(original: Callable, flat: FreedShards, *given: Any) -> None:
        original(flat, *given)
        longest.append(sum(f._lent is not None for f in sync._flats))

    torch.manual_seed(7)
    whole = TransformerLM(config, device=ranks.device)
    left = torch.rand(3, device=ranks.device)
    torch.manual_seed(7 if ranks.is_first else 8)
    model = TransformerLM(config, device="meta")
    sync = Fsdp(ranks, ParallelConfig(strategy="fsdp"))
    with around(FreedShards, "lend", lend):
        sync.attach(model)
    assert max(longest) == 1, "one layer at a time is whole"
    if ranks.is_first:
        assert torch.equal(torch.rand(3, device=ranks.device), left)
    drawn = sync.whole_weights(ranks.device)
    expected = whole.state_dict()
    assert drawn.keys() == expected.keys()
    assert all(torch.equal(drawn[name], value) for name, value in expected.items())
    assert (model.lm_head.weight is model.token_embeddings.weight) == tied


@contextmanager
def around(owner: Any, name: str, wrapper: Callable) -> Iterator[None]:
    original = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **keys: wrapper(original, *args, **keys))
        yield


@check(weights=("bf16",), state=("fp32", "bf16"))
@check(weights=("fp32",), state=("bf16",))
def check_fsdp_dtypes(ranks: Ranks, weights: str, state: str) -> None:
    """Weights are gathered in one dtype and kept in another; training goes the same way as in float32."""
    exact, narrow = (
        sharded(TINY, ranks, weights=chosen, options={"state_dtype": kept})
        for chosen, kept in (("fp32", "fp32"), (weights, state))
    )
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    seen = []
    narrow[1].layers[0].register_forward_pre_hook(
        lambda layer, _: seen.append(layer.attn.output_proj.weight.dtype)
    )
    for step in range(4):
        one, other = (lm_step(*run, ranks, step) for run in (exact, narrow))
        # A loss of 4 in bf16: activations are rounded by 2^-9 some thirty times, weights in each of four updates.
        assert other == pytest.approx(one, rel=0.02)
    assert set(seen) == {dtype}
    kept = torch.bfloat16 if state == "bf16" else torch.float32
    for flat in narrow[0]._flats:
        assert flat.shard.dtype == kept
    assert {s["exp_avg"].dtype for s in narrow[2].state.values()} == {kept}
    assert {value.dtype for value in narrow[1].state_dict().values()} == {kept}
    assert {value.is_meta for value in narrow[1].state_dict().values()} == {not ranks.is_first}


@check(how=("block",), reshard=(True, False))
@check(how=("attention", "selective", "compiled"), reshard=(True,))
def check_fsdp_of_blocks(ranks: Ranks, how: str, reshard: bool) -> None:
    """Blocks that are computed again in the backward pass, or compiled: bit for bit, or to float32's rounding."""
    options = {"reshard_after_forward": reshard}
    plain_run = sharded(TINY, ranks, options=options)
    compiled = how == "compiled"
    # The budget is enough for attention in all blocks, and for more in some.
    again = {"activation_checkpointing": "none" if compiled else how, "activation_gb": 3e-5}
    sync, model, optimizer = sharded(TINY.model_copy(update=again), ranks, options=options)
    if compiled:
        compile_model(model, "block", backend="aot_eager")
    if how == "selective":
        assert len(set(model._keeps(torch.zeros(2, 8, 32, requires_grad=True)))) >= 2
    for step in range(2):
        loss = lm_step(sync, model, optimizer, ranks, step)
        tolerance = 1e-5 if compiled else noise(ranks, 1e-6)
        assert loss == pytest.approx(lm_step(*plain_run, ranks, step), rel=tolerance)
    assert all(flat.gathered_bytes == 0 for flat in sync._flats)


@check(reshard=(True, False))
def check_fsdp_memory(ranks: Ranks, reshard: bool) -> None:
    """Weights, gradients and state are a share and padding; no more than two layers are gathered at a time, and at
    most as many gradients are whole; the first step takes no more than the third. Weights that are away are NaN."""
    sync, model, optimizer = sharded(TINY, ranks, options={"reshard_after_forward": reshard})
    peaks = []

    def count(original: Callable, flat: FreedShards) -> None:
        original(flat)
        gathered = [f for f in sync._flats if f.gathered_bytes]
        peaks[-1] = max(peaks[-1], len(gathered))

    with around(FreedShards, "start", count):
        for step in range(3):
            peaks.append(0)
            assert all(torch.isnan(parameter).all() for parameter in model.parameters())
            assert all(parameter.untyped_storage().nbytes() <= 4 for parameter in model.parameters())
            loss = model.loss(*tokens(ranks, step))
            loss.backward()
            assert all(flat.gathered_bytes == 0 for flat in sync._flats)
            assert all(parameter.grad is None for parameter in model.parameters())
            sync.finish()
            share = sum(p.numel() for p in model.parameters()) / ranks.world_size
            padding = 128 * len(sync._flats)
            held = {
                "weights": sum(flat.shard.numel() for flat in sync._flats),
                "gradients": sum(flat.gradient.numel() for flat in sync._flats),
            }
            optimizer.step()
            held["state"] = sum(state["exp_avg"].numel() for state in optimizer.state.values())
            optimizer.zero_grad()
            assert share <= held["weights"] == held["gradients"] <= share + padding
            assert held["state"] <= held["weights"]
            assert all(flat.gradient is None for flat in sync._flats)
    layers = len(sync._flats)
    assert peaks == ([2] * 3 if reshard else [layers] * 3)


@check()
def check_fsdp_hybrid(ranks: Ranks) -> None:
    """Two copies of the model: a rank holds its share of one, and gathers nothing from the other."""
    whole = sharded(TINY, ranks)
    count = ranks.world_size // 2
    sync, model, optimizer = sharded(TINY, ranks, options={"shard_ranks": count})
    for step in range(3):
        losses = [lm_step(*run, ranks, step) for run in (whole, (sync, model, optimizer))]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # float32 sums in another order
    share = sum(p.numel() for p in model.parameters()) / count
    assert share <= sum(flat.shard.numel() for flat in sync._flats) <= share + 128 * len(sync._flats)
    assert optimizer.state_dict()["rank"] == ranks.rank % count
    assert optimizer.shard_layout["world_size"] == count


@check()
def check_fsdp_gathers_the_next_layer_meanwhile(ranks: Ranks) -> None:
    sync, model, optimizer = sharded(TINY, ranks)
    first, second, third, _ = model.layers
    seen: list[tuple[str, bool]] = []

    def note(what: str, layer: nn.Module) -> None:
        (flat,) = sync._flats_of[layer]
        seen.append((what, flat.gathered_bytes > 0))

    second.ln1.register_forward_pre_hook(lambda *_: note("forward", third))
    second.attn.register_forward_hook(
        lambda *args: args[-1].register_hook(lambda _: note("backward", first)) and None
    )
    for step in range(2):
        lm_step(sync, model, optimizer, ranks, step)
    assert seen == [("forward", True), ("backward", True)] * 2


@check()
def check_fsdp_frees_before_a_graph_what_was_gathered_for_no_step(ranks: Ranks) -> None:
    """The graph would change the shards, and the next step without it would read the weights from before."""
    sync, model, optimizer = sharded(TINY, ranks)
    lm_step(sync, model, optimizer, ranks, 0)
    with torch.no_grad():
        for gather in (sync.wait_for_weights, lambda: model.hidden_states(tokens(ranks, 0)[0])):
            gather()
            assert any(flat.gathered_bytes for flat in sync._flats)
            sync.end_step()
            assert not any(flat.gathered_bytes for flat in sync._flats)


@check()
def check_fsdp_of_frozen_layers(ranks: Ranks) -> None:
    """Gradients pass through frozen layers, whose weights are freed when they have."""
    torch.manual_seed(0)
    oracle = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]).to(ranks.device, torch.float64)
    for index in (1, 2, 3, 5):
        oracle[index].requires_grad_(False)
    model = copy.deepcopy(oracle)
    make = plain(partial(torch.optim.SGD, lr=1.0))  # an update is a gradient
    sync, call, optimizer = start("fsdp", model, ranks, make)
    most = []

    def count(original: Callable, flat: FreedShards) -> None:
        original(flat)
        most.append(sum(f.gathered_bytes > 0 for f in sync._flats))

    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(ranks.device)
    with around(FreedShards, "start", count):
        for module in (oracle, call):
            module(x).square().mean().backward()
    assert max(most) <= 3, "a frozen layer is freed when the one before it has been gathered"
    sync.finish()
    for either in (optimizer, make(groups_of(oracle))):
        either.step()
    sync.wait_for_weights()
    assert_close_models(model, oracle, 1e-12)  # float64 in another order


@check()
def check_fsdp_without_gradients(ranks: Ranks) -> None:
    """Evaluation gathers and frees; it sees the step's result, and the next step is as without it."""
    runs = [sharded(TINY, ranks) for _ in range(2)]
    for step in range(2):
        for sync, model, optimizer in runs:
            lm_step(sync, model, optimizer, ranks, step)
        sync, model, _ = runs[1]
        with torch.no_grad():
            alone = model.loss(*tokens(Ranks(device=ranks.device), 9)).item()
        assert all(flat.gathered_bytes == 0 for flat in sync._flats)
        whole = TransformerLM(TINY, device=ranks.device)
        whole.load_state_dict(sync.whole_weights())
        expected = whole.loss(*tokens(Ranks(device=ranks.device), 9)).item()
        assert alone == pytest.approx(expected, rel=noise(ranks, 1e-6))
    first, second = (run[0].whole_weights() for run in runs)
    for name, weights in first.items():
        torch.testing.assert_close(second[name], weights, rtol=0, atol=noise(ranks, 1e-3))
