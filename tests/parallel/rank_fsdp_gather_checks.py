"""Checks of when `fsdp` gathers and frees weights, from whom, and what that takes."""

import copy
from collections.abc import Callable

import pytest
import torch
from raising import raises
from rank_fsdp_checks import TINY, around, gradients_of, lm_step, noise, sharded, tokens
from rank_model import check, sgd, start
from torch import nn

from lmkit.errors import UsageError
from lmkit.model.transformer import TransformerLM
from lmkit.parallel.fsdp import FreedShards
from lmkit.parallel.ranks import Ranks
from lmkit.parallel.strategy import build_strategy
from lmkit.recipe.tables import ParallelConfig


@check(reshard=(True, False))
def check_fsdp_memory(ranks: Ranks, reshard: bool) -> None:
    """Weights, gradients and state are a share and padding; no more than two layers are gathered at a time, and at
    most as many gradients are whole; the first step takes no more than the third."""
    sync, model, optimizer = sharded(TINY, ranks, options={"reshard_after_forward": reshard})
    peaks = []

    def count(original: Callable, flat: FreedShards) -> None:
        original(flat)
        gathered = [f for f in sync._flats if f.gathered_bytes]
        peaks[-1] = max(peaks[-1], len(gathered))

    with around(FreedShards, "start", count):
        for step in range(3):
            peaks.append(0)
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
    with raises(UsageError, "parallel.wrong_option", "shard_ranks", "3"):
        build_strategy(ParallelConfig(strategy="fsdp", options={"shard_ranks": 3}), ranks)


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
def check_fsdp_peers_wait_for_one_another(ranks: Ranks) -> None:
    """Ranks that are late, each in turn and anywhere in a step, change no bit of what is gathered from memory."""
    late_by = torch.Generator().manual_seed(ranks.rank)

    def fall_behind(*_: object) -> None:
        if ranks.device.type == "cuda":
            torch.cuda._sleep(int(torch.randint(2_000_000, (), generator=late_by)))  # up to 1 ms

    def weights_after_steps(gather: str) -> dict[str, torch.Tensor]:
        sync, model, optimizer = sharded(TINY, ranks, gather=gather)
        for layer in model.modules():
            layer.register_forward_pre_hook(fall_behind)
        optimizer.register_step_pre_hook(fall_behind)
        for step in range(6):
            lm_step(sync, model, optimizer, ranks, step)
        return sync.whole_weights()

    read, gathered = (weights_after_steps(gather) for gather in ("auto", "collective"))
    for name, weights in read.items():
        # An update that was missed is 0.02; AdamW amplifies the differences of what GPUs add in any order.
        torch.testing.assert_close(weights, gathered[name], rtol=0, atol=noise(ranks, 1e-3))


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
def check_fsdp_weights_are_nan_while_they_are_away(ranks: Ranks) -> None:
    """Not memory that was freed."""
    sync, model, optimizer = sharded(TINY, ranks)
    for _ in range(2):
        assert all(torch.isnan(parameter).all() for parameter in model.parameters())
        assert all(parameter.untyped_storage().nbytes() <= 4 for parameter in model.parameters())
        lm_step(sync, model, optimizer, ranks, 0)


@check()
def check_fsdp_of_frozen_layers(ranks: Ranks) -> None:
    """Gradients pass through frozen layers, whose weights are freed when they have."""
    torch.manual_seed(0)
    oracle = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]).to(ranks.device, torch.float64)
    for index in (1, 2, 3, 5):
        oracle[index].requires_grad_(False)
    model = copy.deepcopy(oracle)
    sync, call, _ = start("fsdp", model, ranks, sgd)
    most = []

    def count(original: Callable, flat: FreedShards) -> None:
        original(flat)
        most.append(sum(f.gathered_bytes > 0 for f in sync._flats))

    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(ranks.device)
    with around(FreedShards, "start", count):
        for module in (oracle, call):
            module(x).square().mean().backward()
    sync.finish()
    assert max(most) <= 3, "a frozen layer is freed when the one before it has been gathered"
    found = gradients_of(sync)
    expected = {name: p.grad for name, p in oracle.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)  # float64 in another order


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


@check(name=("fsdp",))
def check_fsdp_traffic(ranks: Ranks, name: str) -> None:
    """Each layer's weights are gathered twice, but the last one's once, and its gradients are scattered."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]).to(ranks.device)
    sync = build_strategy(ParallelConfig(strategy=name, gather="collective"), ranks)
    sync.attach(model)
    sync.build_optimizer(sgd, [{"params": list(model.parameters())}])
    sync.traffic.reset()
    model(torch.randn(2, 64, device=ranks.device)).sum().backward()
    sync.finish()
    passes, flags = 6 + 5 + 6, 6 * 4  # one int32 a parameter: who used it
    share = (ranks.world_size - 1) / ranks.world_size
    assert sync.traffic.calls == passes + 1
    assert sync.traffic.payload_bytes == passes * 64 * 64 * 4 + flags
    assert sync.traffic.link_bytes == pytest.approx(share * (passes * 64 * 64 * 4 + 2 * flags))
