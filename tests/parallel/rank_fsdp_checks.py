"""Checks of `fsdp` inside a process group."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from rank_model import (
    OrderlyModel,
    adamw,
    assert_close_models,
    assert_equals_joined_run,
    check,
    groups_of,
    our_adamw,
    seeded_model,
    sgd,
    start,
)
from torch import nn

from lmkit.core.adamw import decay_groups
from lmkit.model.transformer import TransformerLM, compile_model
from lmkit.parallel.fsdp import FreedShards, Fsdp
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ModelConfig, ParallelConfig

TINY = ModelConfig(vocab_size=64, context_length=8, d_model=32, d_ff=64, num_layers=4, num_heads=2)
orderly = partial(seeded_model, kind=OrderlyModel)


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


def noise(ranks: Ranks, on_gpu: float) -> float:
    """The tolerance between runs of the same arithmetic: GPUs add the rows of embeddings' gradients in any order."""
    return 0.0 if ranks.device.type == "cpu" else on_gpu


def lm_step(sync: Fsdp, model: TransformerLM, optimizer: Any, ranks: Ranks, step: int) -> float:
    loss = model.loss(*tokens(ranks, step))
    loss.backward()
    sync.finish()
    sync.clip_gradients(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@check(strategy=("fsdp",), accumulation=(1, 2), make=(adamw,), reshard=(True, False), copies=(1,))
@check(strategy=("fsdp",), accumulation=(1,), make=(our_adamw, sgd), reshard=(True,), copies=(1,))
@check(strategy=("fsdp",), accumulation=(2,), make=(adamw,), reshard=(True,), copies=(2,))
def check_joined_batch(
    ranks: Ranks, strategy: str, accumulation: int, make: Callable, reshard: bool, copies: int
) -> None:
    """Unused, frozen, tied parameters, clipping, several copies: as training on the joined batch."""
    options = {"reshard_after_forward": reshard, "shard_ranks": ranks.world_size // copies}
    model = assert_equals_joined_run(
        ranks, strategy, [accumulation] * 10, max_norm=0.2, make=make, kind=OrderlyModel, options=options
    )
    before = orderly(0, ranks)
    assert torch.equal(model.never, before.never)
    assert torch.equal(model.frozen.weight, before.frozen.weight)
    assert not torch.equal(model.embedding.weight, before.embedding.weight)


def gradients_of(sync: Fsdp) -> dict[str, torch.Tensor]:
    """The whole mean gradients by name, of parameters that have one on the ranks that hold parts of them."""
    found: dict[str, torch.Tensor] = {}
    for flat in sync._flats:
        if flat.gradient is not None:
            shard, flat.shard = flat.shard, flat.gradient
            whole = flat.named(flat.gather_state())
            flat.shard = shard
            found |= {name: value for name, value in whole.items() if name != "never"}
    return found


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


@check()
def check_fsdp_mixed_dtypes(ranks: Ranks) -> None:
    """fp32 and bf16 weights in one layer are gathered apart."""
    torch.manual_seed(0)
    layer = nn.ModuleDict({"wide": nn.Linear(8, 8), "narrow": nn.Linear(8, 8).bfloat16()})
    model = Chain(nn.ModuleList([layer])).to(ranks.device)
    oracle = copy.deepcopy(model)
    sync, call, optimizer = start("fsdp", model, ranks, sgd)
    reference = sgd(groups_of(oracle))
    assert sorted(str(flat.shard.dtype) for flat in sync._flats) == ["torch.bfloat16", "torch.float32"]
    x = torch.ones(2, 8, device=ranks.device)  # the same on all ranks, so that the mean is exact
    for _ in range(3):
        for module, steps in ((oracle, reference), (call, optimizer)):
            module(x).square().mean().backward()
            if module is call:
                sync.finish()
            steps.step()
            steps.zero_grad()
    sync.wait_for_weights()
    assert_close_models(model, oracle, 0.0)


class Chain(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Pair, layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Pair(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.wide, self.narrow = parts["wide"], parts["narrow"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).bfloat16()).float()


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
