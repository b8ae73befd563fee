"""Checks of `zero1` and of the memory that GPUs read from one another, run as those of rank_checks.py are."""

from __future__ import annotations

import gc
import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from rank_model import (
    FLOAT64_TOLERANCE,
    SMALL_BUCKETS,
    adamw,
    assert_close_models,
    assert_same_on_all_ranks,
    batch,
    check,
    feed,
    groups_of,
    joined_run,
    one_step,
    our_adamw,
    refused,
    seeded_model,
    sgd,
    train,
)
from torch import nn

from lmkit.parallel import zero1
from lmkit.parallel.collectives import agree
from lmkit.parallel.gather import PeerMemory, check_pairing
from lmkit.parallel.protocol import build_strategy
from lmkit.parallel.ranks import Ranks, process_group
from lmkit.parallel.zero1 import Zero1
from lmkit.recipe.tables import ParallelConfig


@check()
def check_zero1_after_others_were_dropped(ranks: Ranks) -> None:
    """One rank forgets what it shared at once, the others later: what is shared next is the right piece all the same.

    Memory that is used again by some ranks only would be another piece than is meant.
    """

    def start() -> tuple:
        model = seeded_model(0, ranks, torch.float32)
        sync = Zero1(ranks, SMALL_BUCKETS)
        return model, sync, sync.attach(model), sync.build_optimizer(our_adamw, groups_of(model))

    oracle = seeded_model(0, ranks, torch.float32)
    train(
        Zero1(ranks, ParallelConfig(bucket_mb=0.0003, gather="collective")),
        oracle,
        ranks,
        steps=3,
        make=our_adamw,
    )
    gc.disable()
    try:
        runs = []
        for number in range(6):
            runs.append(start())
            if number % 2 == 0:
                one_step(*runs[-1][1:], ranks, 0)
            if ranks.rank == number % ranks.world_size:
                forgotten = weakref.ref(runs[-1][1])
                runs.clear()
                gc.collect()
                assert forgotten() is None
        del runs
        model, sync, call, optimizer = start()
        for step in range(3):
            one_step(sync, call, optimizer, ranks, step)
            if ranks.rank == step:
                gc.collect()
    finally:
        gc.enable()
    sync.wait_for_weights()
    assert_close_models(model, oracle, 0.0)
    assert_same_on_all_ranks(model, ranks)


@check(make=(adamw, our_adamw, sgd))
def check_zero1_equals_unsharded(ranks: Ranks, make: Callable) -> None:
    model, reference = seeded_model(0, ranks, torch.float32), seeded_model(0, ranks, torch.float32)
    optimizer = make(groups_of(reference))
    sync = Zero1(ranks, SMALL_BUCKETS)
    sync.attach(model)
    sharded = sync.build_optimizer(make, groups_of(model))
    mine = [p for p in model.parameters() if p.requires_grad]
    theirs = [p for p in reference.parameters() if p.requires_grad]
    torch.manual_seed(5)
    for step in range(20):
        gradients = [torch.randn_like(p) for p in theirs]
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.clone()
        feed(sync, mine, gradients)
        for group in (*optimizer.param_groups, *sharded.param_groups):
            group["lr"] = 0.01 / (1 + step)  # as a schedule does
        optimizer.step()
        sharded.step()
        sync.wait_for_weights()
        # Element-wise arithmetic on the same numbers; only vector lanes may differ, which our kernel has none of.
        exact = make is our_adamw and ranks.device.type == "cuda"
        assert_close_models(model, reference, 0.0 if exact else 1e-7)


@check()
def check_zero1_state_is_one_share(ranks: Ranks) -> None:
    model = seeded_model(0, ranks, torch.float32)
    sync = Zero1(ranks, SMALL_BUCKETS)
    train(sync, model, ranks, steps=1)
    _, optimizer = train(Zero1(ranks, SMALL_BUCKETS), seeded_model(0, ranks, torch.float32), ranks, steps=1)
    layout = optimizer.shard_layout
    held = sum(
        value.numel()
        for state in optimizer.state.values()
        for key, value in state.items()
        if key == "exp_avg"
    )
    assert held == sum(bucket.shard_size for bucket in layout.buckets)
    for bucket in layout.buckets:
        padding = bucket.shard_size * ranks.world_size - bucket.num_elements
        assert 0 <= padding < ranks.world_size * 128
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for bucket in layout.buckets for name in bucket.names} == trainable
    for bucket in layout.buckets:  # matrices decay, vectors do not: never in one bucket
        ranks_of_tensors = {dict(model.named_parameters())[name].ndim >= 2 for name in bucket.names}
        assert len(ranks_of_tensors) == 1


@check(make=(adamw, our_adamw))
def check_zero1_bf16_master(ranks: Ranks, make: Callable) -> None:
    """The master shards follow an fp32 AdamW fed the same (bf16) gradients; the weights are their rounding."""
    model, reference = seeded_model(0, ranks, torch.float32), seeded_model(0, ranks, torch.float32)
    optimizer = make(groups_of(reference))
    sync = Zero1(ranks, ParallelConfig(bucket_mb=0.0003, weights="bf16"))
    sync.attach(model)
    sharded = sync.build_optimizer(make, groups_of(model))
    assert model.embedding.weight.dtype == torch.bfloat16
    assert model.frozen.weight.dtype == torch.float32
    mine = [p for p in model.parameters() if p.requires_grad]
    theirs = [p for p in reference.parameters() if p.requires_grad]
    for _ in range(5):
        gradients = [torch.randn_like(p) for p in theirs]
        for gradient in gradients:
            dist.broadcast(gradient, src=0)
        gradients = [gradient.bfloat16() for gradient in gradients]
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.float()
        feed(sync, mine, gradients)
        norm = sync.clip_gradients(1.0)
        # Norms of bf16 are summed in float32, here and there in another order.
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 1.0), rtol=1e-5, atol=0)
        optimizer.step()
        sharded.step()
        sharded.zero_grad()
    sync.wait_for_weights()
    for bucket in sync._buckets:
        assert torch.equal(bucket.shard, bucket.master.bfloat16())
    for p, q in zip(mine, theirs, strict=True):
        # Masters agree to 1e-7; at a rounding border that may be one bf16 step (2^-8 relative).
        assert torch.allclose(p.float(), q.detach(), rtol=2**-8, atol=1e-6)
    assert_same_on_all_ranks(model, ranks)


@check()
def check_zero1_bf16_unused(ranks: Ranks) -> None:
    """A parameter that no rank used keeps its value, in the master and in the weights; all others move."""
    model = seeded_model(0, ranks, torch.float32)
    model.frozen.bfloat16()  # what is not trained stays as it is; this model's activations become bf16
    before = {name: p.detach().bfloat16().clone() for name, p in model.named_parameters() if p.requires_grad}
    sync = Zero1(ranks, ParallelConfig(bucket_mb=0.0003, weights="bf16"))
    train(sync, model, ranks, steps=2, max_norm=0.7, make=our_adamw)
    kept = {
        name for name, value in before.items() if torch.equal(value, dict(model.named_parameters())[name])
    }
    assert kept == {"never"}
    for bucket in sync._buckets:
        assert torch.equal(bucket.shard, bucket.master.bfloat16())
    assert_same_on_all_ranks(model, ranks)


@check()
def check_zero1_late_use(ranks: Ranks) -> None:
    """A parameter that is first used in a later step has no momentum yet, though decay alone makes some."""

    def decayed(parameters: list) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)

    after = []
    for make_sync in (lambda: build_strategy("flat", ranks), lambda: Zero1(ranks, SMALL_BUCKETS)):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]).double().to(ranks.device)
        sync = make_sync()
        sync.attach(model)
        optimizer = sync.build_optimizer(decayed, [{"params": list(model.parameters())}])
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(ranks.rank), dtype=torch.float64)
            y = model[0](x.to(ranks.device))
            (model[1](y) if step else y).square().mean().backward()
            sync.finish()
            optimizer.step()
            optimizer.zero_grad()
        sync.wait_for_weights()
        after.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.allclose(*after, rtol=0, atol=1e-12)  # sums of float64 in another order


@check()
def check_zero1_masters_of_whole_weights(ranks: Ranks) -> None:
    """Whole fp32 weights become masters as they are, and bf16 weights rounded once."""
    model = seeded_model(0, ranks, torch.float32)
    model.frozen.bfloat16()
    sync = Zero1(ranks, ParallelConfig(bucket_mb=0.0003, weights="bf16"))
    sync.attach(model)
    optimizer = sync.build_optimizer(our_adamw, groups_of(model))
    other = seeded_model(1, ranks, torch.float32)
    weights = {name: parameter.detach() for name, parameter in other.named_parameters()}
    model.load_state_dict({name: weights.get(name, value) for name, value in model.state_dict().items()})
    optimizer.load_masters(weights)
    for bucket in sync._buckets:
        whole = torch.cat([weights[name].flatten() for name in bucket.layout.names])
        padded = torch.nn.functional.pad(whole, (0, bucket.weights.numel() - whole.numel()))
        assert torch.equal(bucket.master, bucket.shard_of(padded))
        assert torch.equal(bucket.shard, bucket.master.bfloat16())


@check()
def check_zero1_reduction_in_bf16(ranks: Ranks) -> None:
    """fp32 weights, gradients that travel as bf16: our AdamW reads them so, PyTorch's gets them cast."""
    after = []
    for make in (our_adamw, adamw):
        model = seeded_model(0, ranks, torch.float32)
        sync = Zero1(ranks, ParallelConfig(bucket_mb=0.0003, reduce_dtype="bf16"))
        sync.attach(model)
        optimizer = sync.build_optimizer(make, groups_of(model))
        parameters = [p for p in model.parameters() if p.requires_grad]
        for step in range(5):
            torch.manual_seed(10 * step + ranks.rank)
            feed(sync, parameters, [torch.randn(p.shape).to(p) for p in parameters])
            sync.clip_gradients(1.0)
            expected = torch.bfloat16 if make is our_adamw else torch.float32
            assert {bucket.master.grad.dtype for bucket in sync._buckets} == {expected}
            optimizer.step()
            optimizer.zero_grad()
        sync.wait_for_weights()
        assert_same_on_all_ranks(model, ranks)
        after.append(model)
    assert_close_models(*after, 1e-6)  # as the two optimizers agree on one device
    assert not torch.equal(after[0].shift, seeded_model(0, ranks, torch.float32).shift)


@check(weights=("fp32", "bf16"), make=(adamw, our_adamw))
def check_zero1_resumes(ranks: Ranks, weights: str, make: Callable) -> None:
    """3 + 2 steps from saved state are the 5 steps, bit for bit, weights and masters."""
    options = ParallelConfig(bucket_mb=0.0003, weights=weights)
    dtype = torch.float32

    def start() -> tuple:
        model = seeded_model(0, ranks, dtype)
        sync = Zero1(ranks, options)
        return model, sync, sync.attach(model), sync.build_optimizer(make, groups_of(model))

    def steps(run: tuple, which: range) -> None:
        model, sync, _, optimizer = run
        torch.manual_seed(which.start)
        for number in which:
            generator = torch.Generator().manual_seed(number)
            mine = [p for p in model.parameters() if p.requires_grad]
            feed(sync, mine, [torch.randn(p.shape, generator=generator).to(p) for p in mine])
            optimizer.step()

    straight, first, second = start(), start(), start()
    steps(straight, range(5))
    steps(first, range(3))
    weights_then, state_then = first[0].state_dict(), first[3].state_dict()
    second[0].load_state_dict(weights_then)
    second[3].load_state_dict(state_then)
    steps(second, range(3, 5))
    for (name, value), other in zip(
        straight[0].state_dict().items(), second[0].state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), name
    states: list = [None] * ranks.world_size
    on_cpu = {
        bucket: {key: value.cpu() for key, value in tensors.items()}
        for bucket, tensors in state_then["state"].items()
    }
    dist.all_gather_object(states, {**state_then, "state": on_cpu})
    third = start()
    third[0].load_state_dict(weights_then)
    third[3].load_resharded(states)
    steps(third, range(3, 5))
    for name, value in straight[0].state_dict().items():
        assert torch.equal(value, third[0].state_dict()[name]), name
    first[3].param_groups[-1]["lr"] = 0.125  # as a schedule leaves it
    second[3].load_state_dict(first[3].state_dict())
    assert second[3].param_groups[-1]["lr"] == second[3].inner.param_groups[-1]["lr"] == 0.125


@check()
def check_zero1_gradients_that_were_refused(ranks: Ranks) -> None:
    """Zeroed while they still travel, they are in no later step."""
    model = seeded_model(0, ranks)
    sync = Zero1(ranks, SMALL_BUCKETS)
    call = sync.attach(model)
    optimizer = sync.build_optimizer(partial(torch.optim.SGD, lr=1.0), groups_of(model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    call.loss(*batch(0, ranks.rank, 0), ranks.rank).backward()
    sync.finish(wait=False)
    optimizer.zero_grad()
    optimizer.step()
    after = model.state_dict()
    assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []


@check()
def check_zero1_single_parameters(ranks: Ranks) -> None:
    """Parameters that fill buckets of their own, without padding: their gradients are reduced where they lie."""
    torch.manual_seed(0)
    oracle, model = (
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(ranks.device, torch.float64)
        for _ in range(2)
    )
    model.load_state_dict(oracle.state_dict())
    sync = Zero1(ranks, ParallelConfig(bucket_mb=64 * 64 * 8 / 2**20))
    call = sync.attach(model)
    optimizer, reference = sync.build_optimizer(adamw, groups_of(model)), adamw(groups_of(oracle))
    alone = [bucket.sizes for bucket in optimizer.shard_layout.buckets if bucket.sizes == (64 * 64,)]
    assert len(alone) == 2
    for step in range(3):
        for rank in range(ranks.world_size):
            x = torch.randn(
                4, 64, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
            )
            (oracle(x.to(ranks.device)).square().mean() / ranks.world_size).backward()
            if rank == ranks.rank:
                call(x.to(ranks.device)).square().mean().backward()
        reference.step()
        reference.zero_grad(set_to_none=True)
        sync.finish(wait=step == 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    sync.wait_for_weights()
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)
    assert_same_on_all_ranks(model, ranks)


@check()
def check_zero1_weights_are_whole_when_read(ranks: Ranks) -> None:
    """Layers that are bypassed, evaluation and saving all see the step's result, not a half-gathered weight."""
    model = seeded_model(0, ranks)
    sync = Zero1(ranks, SMALL_BUCKETS)
    call = sync.attach(model)
    optimizer = sync.build_optimizer(adamw, groups_of(model))
    oracle = seeded_model(0, ranks)
    joined_run(oracle, world_size=ranks.world_size, steps=1, accumulation=1, max_norm=float("inf"))
    one_step(sync, call, optimizer, ranks, 0)
    assert torch.allclose(model.scale, oracle.scale)  # the model's own parameter: no layer's call reads it
    with torch.no_grad():
        ids, targets = batch(9, 0, 0)
        assert torch.allclose(model.loss(ids, targets, 0), oracle.loss(ids, targets, 0))
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)


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


@check()
def check_memory_that_is_mixed_up_is_refused(ranks: Ranks) -> None:
    """On all ranks, also those that see the right one: here only rank 0 sees another piece than its neighbour's."""
    of_rank = FileMemory(64, ranks).of_rank
    check_pairing(of_rank, ranks)
    assert not of_rank[ranks.rank].any()
    if ranks.is_first:
        of_rank[1] = torch.zeros_like(of_rank[1])
    with refused("parallel.peer_memory_mixed_up"):
        check_pairing(of_rank, ranks)


def by_the_other_gather(ranks: Ranks, check: Callable[[Ranks], None]) -> None:
    """CPU ranks gather by reading one another's memory; GPU ranks, which do that by themselves, by all-gathers."""
    is_cpu = ranks.device.type == "cpu"
    made = []

    def make(num_bytes: int, ranks: Ranks) -> FileMemory:
        made.append(FileMemory(num_bytes, ranks))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero1, "can_share_memory", lambda ranks: is_cpu)
        patch.setattr(zero1, "PeerMemory", make)
        check(ranks)
    assert bool(made) == is_cpu


@check()
def check_peers_wait_for_one_another(ranks: Ranks) -> None:
    """Ranks that are late, each in turn and anywhere in a step, change no bit of what is gathered from memory."""
    late_by = torch.Generator().manual_seed(ranks.rank)

    def fall_behind(*_: object) -> None:
        if ranks.device.type == "cuda":
            torch.cuda._sleep(int(torch.randint(2_000_000, (), generator=late_by)))  # up to 1 ms

    def run(gather: str) -> list[torch.Tensor]:
        model = seeded_model(0, ranks, torch.float32)
        sync = Zero1(ranks, ParallelConfig(bucket_mb=0.0003, gather=gather))
        call = sync.attach(model)
        optimizer = sync.build_optimizer(adamw, groups_of(model))
        for module in model.modules():
            module.register_forward_pre_hook(fall_behind)
            module.register_full_backward_pre_hook(fall_behind)
        optimizer.register_step_pre_hook(fall_behind)
        seen = []
        for step in range(15):
            one_step(sync, call, optimizer, ranks, step)
            if step % 5 == 4:
                sync.wait_for_weights()
                seen.extend(parameter.detach().clone() for parameter in model.parameters())
        return seen

    for mine, oracle in zip(run("auto"), run("collective"), strict=True):
        assert torch.equal(mine, oracle)
