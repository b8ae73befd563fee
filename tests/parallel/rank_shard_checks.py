"""Checks of `zero1` and `fsdp`, of Muon over shards, and of the memory that GPUs read from one another."""

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from raising import raises
from rank_model import (
    FLOAT64_TOLERANCE,
    EasyModel,
    adamw,
    assert_close_models,
    assert_equals_joined_run,
    assert_same_on_all_ranks,
    batch,
    check,
    gathered_when_waited_for,
    groups_of,
    joined_run,
    kind_for,
    noise,
    one_step,
    our_adamw,
    plain,
    seeded_model,
    start,
)
from torch import nn

from lmkit.core.adamw import decay_groups
from lmkit.errors import LmkitError
from lmkit.model.transformer import TransformerLM, compile_model
from lmkit.parallel import gather
from lmkit.parallel.collectives import agree
from lmkit.parallel.fsdp import FreedShards, Fsdp
from lmkit.parallel.gather import PeerMemory, check_pairing
from lmkit.parallel.ranks import Ranks, process_group
from lmkit.parallel.shards import consolidate
from lmkit.recipe.tables import ModelConfig, OptimizerConfig, ParallelConfig
from lmkit.training.setup import build_step


class Run:
    """A model trained under `zero1` with small buckets.

    Args:
        frozen_bf16: cast what is not trained, too: under bf16 weights this model's activations are bf16.
    """

    def __init__(
        self,
        ranks: Ranks,
        make: Callable = our_adamw,
        dtype: torch.dtype = torch.float32,
        frozen_bf16: bool = False,
        **keys: Any,
    ) -> None:
        self.ranks = ranks
        self.model = seeded_model(0, ranks, dtype)
        if frozen_bf16:
            self.model.frozen.bfloat16()
        self.sync, self.call, self.optimizer = start("zero1", self.model, ranks, make, **keys)
        self.parameters = trained(self.model)
        self.buckets = self.sync._flats

    def step(self, number: int, max_norm: float = float("inf")) -> None:
        one_step(self.sync, self.call, self.optimizer, self.ranks, number, max_norm=max_norm)

    def feed(self, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Synchronise random gradients, rounded to the dtype, instead of a pass's; return them.

        They are the same on every rank: their mean is exactly they (the world is a power of two).
        """
        generator = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(p.shape, generator=generator).to(dtype).to(p) for p in self.parameters]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.sync.finish()
        return gradients


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@check(make=(adamw, our_adamw))
def check_zero1_bf16_master(ranks: Ranks, make: Callable) -> None:
    """The master shards follow an fp32 AdamW fed the same (bf16) gradients; the weights are their rounding."""
    run, reference = Run(ranks, make, weights="bf16"), seeded_model(0, ranks, torch.float32)
    optimizer = make(groups_of(reference))
    assert run.model.embedding.weight.dtype == torch.bfloat16
    assert run.model.frozen.weight.dtype == torch.float32
    theirs = trained(reference)
    for step in range(5):
        for parameter, gradient in zip(theirs, run.feed(step, torch.bfloat16), strict=True):
            parameter.grad = gradient.float()
        norm = run.sync.clip_gradients(1.0)
        # Norms of bf16 are summed in float32, here and there in another order.
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 1.0), rtol=1e-5, atol=0)
        optimizer.step()
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.sync.wait_for_weights()
    for bucket in run.buckets:
        assert torch.equal(bucket.own_weights, bucket.shard.bfloat16())
    for p, q in zip(run.parameters, theirs, strict=True):
        # Masters agree to 1e-7; at a rounding border that may be one bf16 step (2^-8 relative).
        assert torch.allclose(p.float(), q.detach(), rtol=2**-8, atol=1e-6)
    assert_same_on_all_ranks(run.model, ranks)


@check()
def check_zero1_late_use(ranks: Ranks) -> None:
    """A parameter that is first used in a later step has no momentum yet, though decay alone makes some."""
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(ranks.rank), dtype=torch.float64)
    after = []
    for strategy in ("flat", "zero1"):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]).to(ranks.device, torch.float64)
        sync, _, optimizer = start(strategy, model, ranks, plain(make))
        for step in range(3):
            y = model[0](x.to(ranks.device))
            (model[1](y) if step else y).square().mean().backward()
            sync.finish()
            optimizer.step()
            optimizer.zero_grad()
        sync.wait_for_weights()
        after.append(model)
    assert_close_models(*after, 1e-12)  # sums of float64 in another order


@check()
def check_zero1_masters_of_whole_weights(ranks: Ranks) -> None:
    """Whole fp32 weights become masters as they are, and bf16 weights rounded once. Then all but those of a parameter
    that no rank used move."""
    run = Run(ranks, frozen_bf16=True, weights="bf16")
    weights = {name: p.detach() for name, p in seeded_model(1, ranks, torch.float32).named_parameters()}
    run.model.load_state_dict({key: weights.get(key, value) for key, value in run.model.state_dict().items()})
    run.optimizer.load_masters(weights)
    for bucket in run.buckets:
        whole = torch.cat([weights[name].flatten() for name in bucket.names])
        padded = nn.functional.pad(whole, (0, bucket.weights.numel() - whole.numel()))
        assert torch.equal(bucket.shard, ranks.own_part(padded))
    before = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
    for step in range(2):
        run.step(step, max_norm=0.7)
    run.sync.wait_for_weights()
    after = dict(run.model.named_parameters())
    assert [name for name, value in before.items() if torch.equal(value, after[name])] == ["never"]
    assert all(torch.equal(bucket.own_weights, bucket.shard.bfloat16()) for bucket in run.buckets)
    assert_same_on_all_ranks(run.model, ranks)


@check()
def check_zero1_reduction_in_bf16(ranks: Ranks) -> None:
    """fp32 weights, gradients reduced in bf16: our AdamW reads them so, PyTorch's gets them cast."""
    after = []
    for make, dtype in ((our_adamw, torch.bfloat16), (adamw, torch.float32)):
        run = Run(ranks, make, reduce_dtype="bf16")
        for step in range(5):
            run.feed(10 * step + ranks.rank)
            run.sync.clip_gradients(1.0)
            assert {bucket.gradient.dtype for bucket in run.buckets} == {dtype}
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.sync.wait_for_weights()
        assert_same_on_all_ranks(run.model, ranks)
        after.append(run.model)
    assert_close_models(*after, 1e-6)  # as the two optimizers agree on one device
    assert not torch.equal(after[0].shift, seeded_model(0, ranks, torch.float32).shift)


@check(weights=("fp32", "bf16"), make=(adamw, our_adamw))
def check_zero1_resumes(ranks: Ranks, weights: str, make: Callable) -> None:
    """3 + 2 steps from saved state, own or cut anew, are the 5 steps, bit for bit, weights and masters."""

    def steps(run: Run, which: range) -> None:
        for number in which:
            run.feed(number)
            run.optimizer.step()

    straight, first, second, third = (Run(ranks, make, weights=weights) for _ in range(4))
    steps(straight, range(5))
    steps(first, range(3))
    state = first.optimizer.state_dict()
    states: list = [None] * ranks.world_size
    held = {bucket: {k: v.cpu() for k, v in of.items()} for bucket, of in state["state"].items()}
    dist.all_gather_object(states, {**state, "state": held})
    for run, load in (
        (second, lambda: second.optimizer.load_state_dict(state)),
        (third, lambda: third.optimizer.load_whole(consolidate(states))),
    ):
        run.model.load_state_dict(first.model.state_dict())
        load()
        steps(run, range(3, 5))
        for name, value in straight.model.state_dict().items():
            assert torch.equal(value, run.model.state_dict()[name]), name
    first.optimizer.param_groups[-1]["lr"] = 0.125  # as a schedule leaves it
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    groups = (second.optimizer.param_groups[-1], second.optimizer.inner.param_groups[-1])
    assert [group["lr"] for group in groups] == [0.125, 0.125]


@check()
def check_zero1_gradients_that_were_refused(ranks: Ranks) -> None:
    """Zeroed while they still travel, they are in no later step."""
    run = Run(ranks, partial(torch.optim.SGD, lr=1.0))
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.call.loss(*batch(0, ranks.rank), ranks.rank).backward()
    run.sync.finish(wait=False)
    run.optimizer.zero_grad()
    run.optimizer.step()
    after = run.model.state_dict()
    assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []


@check()
def check_zero1_single_parameters(ranks: Ranks) -> None:
    """Parameters that fill buckets of their own, without padding: their gradients are reduced where they lie."""
    keys, kind = {"bucket_mb": 64 * 64 * 8 / 2**20}, partial(EasyModel, 64)
    for wait in (True, False):
        _, optimizer = assert_equals_joined_run(ranks, "zero1", [1] * 3, kind=kind, keys=keys, wait=wait)
        assert [flat.size for flat in optimizer._flats if len(flat.parameters) == 1].count(64 * 64) == 4


@check()
def check_zero1_weights_are_whole_when_read(ranks: Ranks) -> None:
    """Layers that are bypassed, evaluation, saving and loading see the step's result, not a half-gathered weight."""
    run, oracle = Run(ranks, adamw, torch.float64), seeded_model(0, ranks)
    joined_run(oracle, ranks.world_size, [1])
    with gathered_when_waited_for():
        run.step(0)
        # No layer's call reads the model's own parameter, or those of a layer that the last pass did not call.
        assert torch.allclose(run.model.scale, oracle.scale)
        if ranks.rank != 1:
            assert torch.allclose(run.model.sometimes.weight, oracle.sometimes.weight)
        with torch.no_grad():
            assert torch.allclose(run.model.loss(*batch(9, 0), 0), oracle.loss(*batch(9, 0), 0))
        assert_close_models(run.model, oracle, FLOAT64_TOLERANCE)
        run.step(1)
        run.model.load_state_dict(oracle.state_dict())  # what is on its way does not overwrite it
        run.sync.wait_for_weights()
    assert_close_models(run.model, oracle, 0.0)


def memory_that_peers_leave(num_bytes: int, times: int) -> int:
    """Bytes missing on the GPU after that many were shared, written to when nothing but the weights was left of them,
    and dropped. Run on every rank, by itself."""
    with process_group("cuda", timeout_s=60) as ranks:

        def share() -> None:
            weights = PeerMemory(num_bytes, ranks).of_rank[ranks.rank][: num_bytes // 2]
            weights += 7
            assert bool((weights == 7).all())

        def free_bytes() -> int:
            torch.cuda.empty_cache()
            agree(ranks)  # memory is free when no rank has it mapped
            return torch.cuda.mem_get_info(ranks.device)[0]

        share()  # what CUDA loads for it, and keeps
        before = free_bytes()
        for _ in range(times):
            share()
        return before - free_bytes()


class FileMemory:
    """What `PeerMemory` is to GPUs, for processes on one CPU: a file of every rank, mapped by all."""

    def __init__(self, num_bytes: int, ranks: Ranks) -> None:
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        self.of_rank = [
            torch.from_file(f"{folder[0]}/{rank}", shared=True, size=num_bytes, dtype=torch.uint8)
            for rank in range(ranks.world_size)
        ]
        dist.barrier()  # everybody has opened them
        if ranks.is_first:
            shutil.rmtree(folder[0])

    def barrier(self) -> None:
        dist.barrier()


@check()
def check_memory_that_is_mixed_up_is_refused(ranks: Ranks) -> None:
    """On all ranks, also those that see the right one: here only rank 0 sees another piece than its neighbour's."""
    of_rank = FileMemory(64, ranks).of_rank
    check_pairing(of_rank, ranks)
    assert not of_rank[ranks.rank].any()
    if ranks.is_first:
        of_rank[1] = torch.zeros_like(of_rank[1])
    with raises(LmkitError, "parallel.peer_memory_mixed_up"):
        check_pairing(of_rank, ranks)


def by_the_other_gather(ranks: Ranks, check: Callable[[Ranks], None]) -> None:
    """CPU ranks gather by reading one another's memory; GPU ranks, which do that by themselves, by all-gathers."""
    is_cpu = ranks.device.type == "cpu"
    made = []

    def make(num_bytes: int, ranks: Ranks) -> FileMemory:
        made.append(FileMemory(num_bytes, ranks))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "can_share_memory", lambda ranks: is_cpu)
        patch.setattr(gather, "PeerMemory", make)
        patch.setattr(gather, "SLOT_BYTES", 1024)  # a shard takes several
        check(ranks)
    assert bool(made) == is_cpu


@check(strategy=("zero1", "fsdp"))
def check_peers_wait_for_one_another(ranks: Ranks, strategy: str) -> None:
    """Ranks that are late, each in turn and anywhere in a step, change no bit of what is gathered from memory."""
    late_by = torch.Generator().manual_seed(ranks.rank)

    def fall_behind(*_: object) -> None:
        if ranks.device.type == "cuda":
            torch.cuda._sleep(int(torch.randint(2_000_000, (), generator=late_by)))  # up to 1 ms

    def weights_over_time(gather: str) -> list[torch.Tensor]:
        model = seeded_model(0, ranks, torch.float32, kind_for(strategy))
        sync, call, optimizer = start(strategy, model, ranks, gather=gather)
        for module in model.modules():
            module.register_forward_pre_hook(fall_behind)
            if strategy == "zero1":
                module.register_full_backward_pre_hook(fall_behind)
        optimizer.register_step_pre_hook(fall_behind)
        seen = []
        for step in range(15):
            one_step(sync, call, optimizer, ranks, step)
            if step % 5 == 4:
                sync.wait_for_weights()
                seen += [parameter.detach().clone() for parameter in model.parameters()]
        return seen

    # An update that was missed is 0.02; AdamW amplifies the differences of what GPUs add in any order.
    tolerance = noise(ranks, 1e-3) if strategy == "fsdp" else 0.0
    for mine, oracle in zip(weights_over_time("auto"), weights_over_time("collective"), strict=True):
        torch.testing.assert_close(mine, oracle, rtol=0, atol=tolerance)


TINY = ModelConfig(vocab_size=64, context_length=8, d_model=32, d_ff=64, num_layers=4, num_heads=2)


def sharded(config: ModelConfig, ranks: Ranks, seed: int = 0, **keys: Any) -> tuple[Fsdp, TransformerLM, Any]:
    """(strategy, a model that was drawn layer by layer, optimizer)."""
    torch.manual_seed(seed)
    model = TransformerLM(config, device="meta")
    sync = Fsdp(ranks, ParallelConfig(strategy="fsdp", **keys))
    sync.attach(model)
    return sync, model, sync.build_optimizer(our_adamw, decay_groups(model.parameters(), 0.1))


def is_whole(flat: FreedShards) -> bool:
    return flat._weights.untyped_storage().nbytes() > 0


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
        longest.append(sum(f.lent is not None for f in sync._flats))

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
    exact = sharded(TINY, ranks)
    narrow = sync, model, optimizer = sharded(TINY, ranks, weights=weights, options={"state_dtype": state})
    gathered, kept = (torch.bfloat16 if name == "bf16" else torch.float32 for name in (weights, state))
    seen = []
    model.layers[0].register_forward_pre_hook(
        lambda layer, _: seen.append(layer.attn.output_proj.weight.dtype)
    )
    for step in range(4):
        one, other = (lm_step(*run, ranks, step) for run in (exact, narrow))
        # A loss of 4 in bf16: activations are rounded by 2^-9 some thirty times, weights in each of four updates.
        assert other == pytest.approx(one, rel=0.02)
    assert set(seen) == {gathered}
    saved = model.state_dict().values()
    states = [state["exp_avg"] for state in optimizer.state.values()]
    assert {tensor.dtype for tensor in (*saved, *states, *(flat.shard for flat in sync._flats))} == {kept}
    assert {value.is_meta for value in saved} == {not ranks.is_first}


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
    assert not any(map(is_whole, sync._flats))


@check(reshard=(True, False))
def check_fsdp_memory(ranks: Ranks, reshard: bool) -> None:
    """Weights, gradients and state are a share and padding; no more than two layers are gathered at a time, and at
    most as many gradients are whole; the first step takes no more than the third. Weights that are away are NaN."""
    sync, model, optimizer = sharded(TINY, ranks, options={"reshard_after_forward": reshard})
    peaks = []

    def count(original: Callable, flat: FreedShards) -> None:
        original(flat)
        gathered = [f for f in sync._flats if is_whole(f)]
        peaks[-1] = max(peaks[-1], len(gathered))

    with around(FreedShards, "start", count):
        for step in range(3):
            peaks.append(0)
            assert all(torch.isnan(parameter).all() for parameter in model.parameters())
            assert all(parameter.untyped_storage().nbytes() <= 4 for parameter in model.parameters())
            loss = model.loss(*tokens(ranks, step))
            loss.backward()
            assert not any(map(is_whole, sync._flats))
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
        seen.append((what, is_whole(flat)))

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
            assert any(map(is_whole, sync._flats))
            sync.end_step()
            assert not any(map(is_whole, sync._flats))


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
        most.append(sum(is_whole(f) for f in sync._flats))

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
        assert not any(map(is_whole, sync._flats))
        whole = TransformerLM(TINY, device=ranks.device)
        whole.load_state_dict(sync.whole_weights())
        expected = whole.loss(*tokens(Ranks(device=ranks.device), 9)).item()
        assert alone == pytest.approx(expected, rel=noise(ranks, 1e-6))
    first, second = (run[0].whole_weights() for run in runs)
    for name, weights in first.items():
        torch.testing.assert_close(second[name], weights, rtol=0, atol=noise(ranks, 1e-3))


# Matrices of several shapes, small enough for a border of two shards to lie inside one.
CONFIG = ModelConfig(vocab_size=50, context_length=16, d_model=16, d_ff=24, num_layers=3, num_heads=2)
# With two ranks, the second has no element of a block.
NARROW = CONFIG.model_copy(update={"d_model": 2, "d_ff": 4, "num_heads": 1})
TABLE = OptimizerConfig(name="muon", lr=3e-3)


@check(strategy=("zero1", "fsdp"), weights=("fp32", "bf16"), narrow=(False,))
@check(strategy=("zero1", "fsdp"), weights=("fp32",), narrow=(True,))
# In bf16, in which GPUs compute, a gradient's last bit of float32 may move a direction by 2^-8.
@patch("lmkit.optim.muon._dtype_of_products", lambda device, dtype: dtype)
@patch("lmkit.optim.muon._dtype_of_directions", lambda part: torch.float32)
def check_muon_of_shards_is_muon_of_whole_matrices(
    ranks: Ranks, strategy: str, weights: str, narrow: bool
) -> None:
    """The losses of six steps are those of one rank with the joined batch."""
    parallel = ParallelConfig(strategy=strategy, weights=weights, bucket_mb=0.02)
    precision = "fp32" if weights == "fp32" else "bf16"
    losses = []
    for place, table in ((Ranks(device=ranks.device), ParallelConfig(strategy="none")), (ranks, parallel)):
        torch.manual_seed(0)
        step = build_step(
            NARROW if narrow else CONFIG, place, optimizer=TABLE, parallel=table, precision=precision
        )
        torch.manual_seed(1)
        ids = torch.randint(50, (1, 4, 17))
        told = []
        for _ in range(6):
            own = ids.chunk(place.world_size, dim=1)[place.rank]
            made = step(own[..., :-1], own[..., 1:], lr=3e-3)
            loss = torch.tensor(float(made.loss), device=ranks.device)
            if place.world_size > 1:  # each rank knows its own
                dist.all_reduce(loss)
            told.append(float(loss) / place.world_size)
        losses.append(told)
    # float32 sums in another order, which GPUs also change from run to run, and iterations that amplify the smallest
    # singular values; bf16 weights are rounded to 2^-8, and gradients of half a batch each.
    exact = 2e-6 if ranks.device.type == "cpu" else 2e-5
    assert losses[1] == pytest.approx(losses[0], rel=exact if weights == "fp32" else 3e-3)
    assert losses[0][-1] < losses[0][0] - (0 if narrow else 0.02)  # the matrices have moved
