"""Checks that run on every rank of one process group, and what runs them: every strategy from its start to its end.

Starting processes costs seconds, the checks milliseconds: all of them share one group, and the tests read the
outcomes by name."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import rank_api_checks  # noqa: F401 (adds its checks)
import rank_shard_checks
import torch
import torch.distributed as dist
from raising import raises
from rank_model import (
    CHECKS,
    FLOAT64_TOLERANCE,
    INSIDE,
    OURS,
    STRATEGIES,
    EasyModel,
    HardModel,
    adamw,
    assert_close_models,
    assert_equals_joined_run,
    batch,
    build,
    check,
    explode,
    groups_of,
    joined_run,
    kind_for,
    one_step,
    our_adamw,
    plain,
    seeded_model,
    sgd,
    start,
)
from rank_runner import run_checks
from torch import nn

from lmkit.core.step import Step, Sync
from lmkit.errors import LmkitError
from lmkit.parallel import data_parallel
from lmkit.parallel.collectives import Averager, Traffic, agree, largest_on_any_rank, on_any_rank
from lmkit.parallel.ranks import Ranks, process_group, release_collectives
from lmkit.parallel.strategy import broadcast_tensors, check_same_model
from lmkit.recipe.tables import ParallelConfig


def run_all(names: list[str], device: str = "cpu", backend: str | None = None) -> dict[str, list[str]]:
    return run_checks({name: CHECKS[name] for name in names}, device, backend)


@check(strategy=STRATEGIES, accumulation=(1, 2), make=(adamw,), how=("plain",))
@check(strategy=("zero1",), accumulation=(2,), make=(sgd,), how=("plain",))
@check(strategy=("fsdp",), accumulation=(1, 2), make=(adamw,), how=("plain", "kept"))
@check(strategy=("fsdp",), accumulation=(1,), make=(our_adamw, sgd), how=("plain",))
@check(strategy=("fsdp",), accumulation=(2,), make=(adamw,), how=("copies",))
def check_joined_batch(ranks: Ranks, strategy: str, accumulation: int, make: Callable, how: str) -> None:
    """Every strategy, torch_ddp too, equals training on the joined batch: unused, frozen, tied parameters."""
    kept, copies = {"reshard_after_forward": False}, {"shard_ranks": ranks.world_size // 2}

    def look(call: Any, _: object) -> None:  # used somewhere: a gradient everywhere; used nowhere: none
        model = getattr(call, "ddp", call)
        if strategy not in ("zero1", "fsdp"):
            grads = {name.split("model.")[-1]: p.grad for name, p in model.named_parameters()}
            assert grads["never"] is grads["frozen.weight"] is None
            assert grads["sometimes.weight"] is not None

    model, _ = assert_equals_joined_run(
        *(ranks, strategy, [accumulation] * 4),
        max_norm=0.2,
        make=make,
        keys={"options": {"plain": {}, "kept": kept, "copies": copies}[how]},
        look=look,
    )
    before = seeded_model(0, ranks)
    assert torch.equal(model.never, before.never)
    assert torch.equal(model.frozen.weight, before.frozen.weight)
    assert not torch.equal(model.embedding.weight, before.embedding.weight)


@check(strategy=(*STRATEGIES, "fsdp"))
def check_zeroed_gradients(ranks: Ranks, strategy: str) -> None:
    """zero_grad(set_to_none=False): gradients are there before they are complete, and must not leave early."""
    # Without weight decay: a gradient of zero and none at all are then the same to SGD.
    make = plain(partial(torch.optim.SGD, lr=0.05))
    assert_equals_joined_run(ranks, strategy, [1] * 4, make=make, set_to_none=False)


@check()
def check_the_core_averages_as_the_strategies(ranks: Ranks) -> None:
    """Tied, frozen, unused parameters, in orders that differ between ranks, and accumulation, without a strategy."""
    oracle, model = (seeded_model(0, ranks) for _ in range(2))
    for twin in (oracle, model):
        twin.never.requires_grad_(False)  # the core's step would let weight decay move it
    norms = joined_run(oracle, ranks.world_size, [2] * 4, max_norm=0.7)
    sync = Sync(model.parameters(), capacity=300)
    step = Step(partial(model.loss, rank=ranks.rank), adamw(groups_of(model)), sync, max_norm=0.7)
    for number in range(4):
        inputs, targets = zip(*(batch(number, ranks.rank, micro) for micro in range(2)), strict=True)
        step(torch.stack(inputs).to(ranks.device), torch.stack(targets).to(ranks.device), lr=0.02)
    assert len(sync.buckets.buckets) > 3
    assert max(norms) > 0.7
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)


@check(strategy=OURS)
def check_same_bits_in_the_first_step(ranks: Ranks, strategy: str) -> None:
    """A resumed run makes it later. With more than two ranks, the order of a sum depends on the buckets."""
    model = seeded_model(0, ranks, torch.float32, EasyModel)
    sync, call, optimizer = start(strategy, model, ranks, plain(partial(torch.optim.SGD, lr=0.0)))
    first: list[torch.Tensor] = []
    for _ in range(3):
        call.loss(*batch(0, ranks.rank), ranks.rank).backward()
        sync.finish()
        found = [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]
        first = first or found
        assert all(map(torch.equal, first, found))
        optimizer.step()
        optimizer.zero_grad()
    sync.wait_for_weights()


@check(strategy=INSIDE)
def check_accumulation_that_starts_later(ranks: Ranks, strategy: str) -> None:
    """The first steps communicate every pass, the next ones do not: the hooks follow."""
    assert_equals_joined_run(ranks, strategy, [1] * 3 + [3] * 3)


@check(strategy=("flat", *INSIDE), make=(adamw, our_adamw), clips=(True, False), kind=(EasyModel,))
@check(strategy=("overlap", "bucketed"), make=(adamw,), clips=(True,), kind=(HardModel,))
def check_late_gradients(ranks: Ranks, strategy: str, make: Callable, clips: bool, kind: Callable) -> None:
    """`finish(wait=False)`: the optimizer steps what has arrived and then the rest; the weights are the same.

    Where a rank has nothing for a parameter, who used it is known only when all have told.
    """
    hooks, calls = [], []

    def look(_: object, optimizer: torch.optim.Optimizer) -> None:
        if not hooks:
            hooks.append(optimizer.register_step_post_hook(lambda *_: calls.append(1)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_parallel, "LATE_BYTES", 0)
        assert_equals_joined_run(
            *(ranks, strategy, [1] * 5),
            max_norm=0.05 if clips else None,
            make=plain(make),
            kind=kind,
            look=look,
            wait=False,
        )
    # The first step settles the order and waits for everything; clipping leaves nothing to wait for.
    in_two_parts = strategy in ("overlap", "bucketed") and not clips
    assert len(calls) == (5 + 4 if in_two_parts else 5)


@check()
def check_traffic(ranks: Ranks) -> None:
    """Bytes and calls against the formula: 2 (W-1)/W of the gradients, or of them and the weights in halves.

    Under `fsdp` each layer's weights are gathered twice, but the last one's once.
    """
    share = (ranks.world_size - 1) / ranks.world_size
    matrix, flags = 64 * 64 * 4, 6 * 4  # one int32 a parameter: who used it
    table = {"naive": (6, 6, 12), "flat": (1, 6, 12), "overlap": (6, 6, 12), "bucketed": (3, 6, 12)}
    table |= {"zero1": (2 * 3, 12, 12), "fsdp": (6 + 5 + 6, 17, 17), "none": (0, 0, 0)}
    for strategy, (calls, moved, passes) in table.items():
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]).to(ranks.device)
        sync = build(strategy, ranks, ParallelConfig(bucket_mb=1.5 * matrix / 2**20))  # two close a bucket
        sync.attach(model)
        optimizer = sync.build_optimizer(sgd, [{"params": list(model.parameters())}])
        for _ in range(2):
            sync.traffic.reset()
            model(torch.randn(2, 64, device=ranks.device)).sum().backward()
            sync.finish()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # Where peers' memory is read, each of the step's two parts (one bucket, two) is announced with a float.
        announced = 2 if strategy == "zero1" and sync.gather == "reads peers" else 0
        # Who used what is told by a call of its own, or rides on the last bucket.
        own_call = strategy not in ("overlap", "bucketed", "none")
        small = (strategy != "none") * flags + 4 * announced
        assert sync.traffic.calls == calls + announced + own_call, strategy
        assert sync.traffic.payload_bytes == moved * matrix + small, strategy
        assert sync.traffic.link_bytes == pytest.approx(share * (passes * matrix + 2 * small)), strategy


@check(strategy=("flat", "overlap", "bucketed"))
def check_reduction_in_bf16(ranks: Ranks, strategy: str) -> None:
    """fp32 gradients that travel as bf16: each is off by at most two roundings of 2^-9, and stays fp32."""
    gradients = {}
    for dtype in ("fp32", "bf16"):
        model = seeded_model(0, ranks, torch.float32)
        sync, call, _ = start(strategy, model, ranks, reduce_dtype=dtype)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            sync.traffic.reset()
            call.loss(*batch(0, ranks.rank), ranks.rank).backward()
            sync.finish()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients[dtype] = (grads, sync.traffic.payload_bytes)
    for name, exact in gradients["fp32"][0].items():
        coarse = gradients["bf16"][0][name]
        assert coarse.dtype == torch.float32
        # Relative to the largest summand, not to the sum: contributions of the ranks may cancel.
        assert (coarse - exact).abs().max() <= 2**-7 * exact.abs().max() + 2**-7 * 0.1
        assert exact.numel() == 1 or not torch.equal(coarse, exact), f"{name} did not travel as bf16"
    assert gradients["bf16"][1] < 0.7 * gradients["fp32"][1]


class Mixed(nn.Module):
    """fp32 and bf16 weights in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).bfloat16()).float()


@check(strategy=(*OURS, "fsdp"))
def check_mixed_dtypes(ranks: Ranks, strategy: str) -> None:
    """fp32 and bf16 parameters side by side: never in one bucket, both averaged."""
    torch.manual_seed(0)
    oracle = nn.Sequential(Mixed(), Mixed()).to(ranks.device)
    model = copy.deepcopy(oracle)
    make = plain(partial(torch.optim.SGD, lr=0.5))
    sync, call, optimizer = start(strategy, model, ranks, make, bucket_mb=1.0)
    reference = make(groups_of(oracle))
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


@check(strategy=(*STRATEGIES, "fsdp"))
def check_nonfinite_reaches_everybody(ranks: Ranks, strategy: str) -> None:
    """One rank's NaN is in every rank's norm: all can refuse the step by the same number."""
    model = seeded_model(0, ranks, kind=kind_for(strategy))
    sync, call, optimizer = start(strategy, model, ranks)
    loss = call.loss(*batch(0, ranks.rank), ranks.rank)
    (loss * (float("nan") if ranks.rank == 1 else 1.0)).backward()
    sync.finish()
    norm = sync.clip_gradients(1.0)
    assert not torch.isfinite(norm)
    optimizer.zero_grad(set_to_none=True)
    norm = one_step(sync, call, optimizer, ranks, 0)
    assert norm == norm, "nothing of the NaN is left in the next step"


@check()
def check_agreement(ranks: Ranks) -> None:
    current = Ranks.current()
    assert replace(current, timeout_s=ranks.timeout_s) == ranks
    assert current.store is not None
    last = ranks.rank == ranks.world_size - 1
    assert not agree(ranks)
    assert agree(ranks, stop=last)
    assert on_any_rank(ranks, ranks.is_first, False, last) == (True, False, True)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    mixed = [torch.full((3,), ranks.rank, dtype=dtype) for dtype in dtypes]
    for tensor in Averager(ranks, Traffic()).all_reduce([x.to(ranks.device) for x in mixed]).wait():
        assert tensor.tolist() == [(ranks.world_size - 1) / 2] * 3
    numbers = torch.tensor([-5, ranks.rank, -ranks.rank], dtype=torch.int32, device=ranks.device)
    largest_on_any_rank(numbers, ranks)
    assert numbers.tolist() == [-5, ranks.world_size - 1, 0]


@check(strategy=(*OURS, "fsdp"))
def check_forgotten(ranks: Ranks, strategy: str) -> None:
    """Nothing of a training is left when nobody holds it, whatever hooks it had."""
    model = seeded_model(0, ranks, kind=kind_for(strategy))
    sync, call, optimizer = start(strategy, model, ranks)
    for step in range(3):
        one_step(sync, call, optimizer, ranks, step)
    sync.wait_for_weights()
    forgotten = [weakref.ref(thing) for thing in (model, sync, optimizer, *model.parameters())]
    del model, sync, call, optimizer
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    release_collectives(ranks)
    assert [reference() for reference in forgotten] == [None] * len(forgotten)


@check(difference=("shape", "frozen", "untied", "tied otherwise"))
def check_models_that_differ_are_refused(ranks: Ranks, difference: str) -> None:
    """Otherwise broadcasts and reductions would pair different tensors."""
    model = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(3)]).to(ranks.device)
    model[1].weight = model[0].weight
    check_same_model(model, ranks)
    if ranks.rank == 1 and difference == "frozen":
        model[2].requires_grad_(False)
    elif ranks.rank == 1:
        other = nn.Parameter(torch.zeros(3, 4 if difference == "shape" else 3, device=ranks.device))
        model[1].weight = model[2].weight if difference == "tied otherwise" else other
        model[0].weight = other if difference == "shape" else model[0].weight
    with raises(LmkitError, "parallel.ranks_differ", "rank 1", "model"):
        check_same_model(model, ranks)


@check()
def check_recipes_that_differ_are_refused(ranks: Ranks) -> None:
    for strategy in STRATEGIES:
        model = nn.Linear(3, 3).to(ranks.device)
        with raises(LmkitError, "parallel.ranks_differ", "rank 1", "recipe"):
            build(strategy, ranks).attach(model, fingerprint=f"lr = {ranks.rank == 1}")


@check()
def check_the_first_rank_gives_tensors_of_any_strides_and_dtype(ranks: Ranks) -> None:
    base = torch.full((3, 6), float(ranks.rank), device=ranks.device)
    model = nn.Module()
    model.window = nn.Parameter(base[:, 1:5])
    model.transposed = nn.Parameter(torch.full((4, 3), 5.0 + ranks.rank, device=ranks.device).T)
    for dtype in (torch.int16, torch.bool, torch.complex64, torch.bfloat16):
        model.register_buffer(
            f"of_{str(dtype)[6:]}", torch.full((2,), ranks.rank, dtype=dtype, device=ranks.device)
        )
    model.register_buffer("scalar", torch.tensor(ranks.rank, device=ranks.device))
    broadcast_tensors((*model.named_parameters(), *model.named_buffers()))
    assert bool((model.window == 0).all())
    assert bool((model.transposed == 5).all())
    assert all(not bool(buffer.any()) for buffer in model.buffers())
    assert bool((base[:, [0, 5]] == ranks.rank).all()), "the memory around the window must stay as it is"


def memory_that_collectives_keep(num_bytes: int) -> int:
    """Bytes that stay allocated for a collective that has ended and whose future alone was waited for, as PyTorch's
    DDP does. Run on every rank, by itself."""
    with process_group("cuda", timeout_s=60) as ranks:
        release_collectives(ranks)
        before = torch.cuda.memory_allocated(ranks.device)
        tensor = torch.ones(num_bytes, dtype=torch.uint8, device=ranks.device)
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        torch.cuda.synchronize(ranks.device)
        del tensor
        release_collectives(ranks)
        return torch.cuda.memory_allocated(ranks.device) - before


def launches_ahead() -> int:
    """How many kernels fit behind one that is at work until the host has to wait for it. Run on every rank."""
    with process_group("cuda", timeout_s=60) as ranks:
        number = torch.zeros(1, device=ranks.device)
        number.add_(1)  # loaded and compiled
        torch.cuda.synchronize(ranks.device)
        at_work = torch.cuda.Event()
        torch.cuda._sleep(4_000_000_000)  # cycles: some 2 s
        at_work.record()
        launched = 0
        while not at_work.query():
            number.add_(1)
            launched += 1
        return launched


@check(strategy=(*OURS, "fsdp"), tidy=(True, False))
def check_exception_in_backward(ranks: Ranks, strategy: str, tidy: bool) -> None:
    """Half of the hooks have run when backward raises (on every rank); the next step is as if nothing was.

    In the second step, ranks whose gradients came in different orders in the first have the same buckets under way:
    otherwise the next collectives would not pair up.
    """
    oracle, model = (seeded_model(0, ranks, kind=kind_for(strategy)) for _ in range(2))
    joined_run(oracle, ranks.world_size, [1, 1])
    sync, call, optimizer = start(strategy, model, ranks)
    for step in range(2):
        # Under fsdp tensors, not parameters, keep their hooks while weights come and go.
        handle = model.layers[1].down.register_forward_pre_hook(
            lambda _, args: args[0].register_hook(explode) and None
        )
        with pytest.raises(ZeroDivisionError):
            call.loss(*batch(step, 0), 0).backward()
        handle.remove()
        if tidy:
            sync.reset()
        optimizer.zero_grad(set_to_none=True)
        one_step(sync, call, optimizer, ranks, step)
    sync.wait_for_weights()
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)


@check(strategy=STRATEGIES)
def check_passes_without_no_sync(ranks: Ranks, strategy: str) -> None:
    """Who forgets `no_sync` gets the sum of both passes, or an error before a gradient is lost; never less."""

    def two_passes(model: nn.Module, step: int, rank: int) -> None:
        for micro in range(2):
            model.loss(*batch(step, rank, micro), rank).backward()

    oracle, model = (seeded_model(0, ranks, kind=EasyModel) for _ in range(2))
    sync, call, optimizer = start(strategy, model, ranks, sgd)
    reference = sgd(groups_of(oracle))
    for step in range(3):  # before and after the order is settled
        for rank in range(ranks.world_size):
            two_passes(oracle, step, rank)
        for parameter in oracle.parameters():
            parameter.grad /= ranks.world_size
        if strategy in INSIDE:
            with raises(LmkitError, "parallel.unfinished_backward"):
                two_passes(call, step, ranks.rank)
            with raises(LmkitError, "parallel.unfinished_backward"), sync.no_sync():
                pass
            sync.reset()
            optimizer.zero_grad()
        with sync.no_sync() if strategy in INSIDE else nullcontext():
            two_passes(call, step, ranks.rank)
        sync.finish()
        for either in (optimizer, reference):
            either.step()
            either.zero_grad()
    sync.wait_for_weights()
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)


OF_FSDP = ("fsdp in float32", "fsdp dtypes", "fsdp without", "joined batch: fsdp, 2, adamw, plain")
for name, function in list(CHECKS.items()):
    if "zero1" in name or name in ("traffic", "peers wait for one another: fsdp") or name.startswith(OF_FSDP):
        by_the_other = partial(rank_shard_checks.by_the_other_gather, check=function)
        CHECKS[f"by the other gather: {name}"] = by_the_other
