"""Checks that run inside a process group: every function `check_*` runs on every rank of one spawned group.

Starting processes costs seconds, the checks milliseconds: so all of them share one group, and the tests read the
outcome by name.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import traceback
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from rank_model import HardModel, adamw, batch, groups_of, joined_run, our_adamw, sgd
from torch import nn

from lmkit.errors import LmkitError
from lmkit.optim.adamw import AdamW
from lmkit.parallel import overlap, zero1
from lmkit.parallel.agreement import agree
from lmkit.parallel.peer_memory import PeerMemory, check_pairing
from lmkit.parallel.process_group import Ranks, let_go_of_collectives, process_group
from lmkit.parallel.strategies import GradientSync, SyncOptions, build_strategy
from lmkit.parallel.torch_ddp import TorchDDP
from lmkit.parallel.zero1 import Zero1

SMALL_BUCKETS = SyncOptions(bucket_mb=0.0003)  # about 300 bytes: several buckets even in this model
STRATEGIES = ("naive", "flat", "overlap", "bucketed", "torch_ddp", "zero1")

# The same sums in another order, in float64: rounding of 1e-16 that Adam's division and clipping amplify.
FLOAT64_TOLERANCE = 1e-10


def run_all(names: list[str], device: str = "cpu") -> dict[str, list[str]]:
    """Run the named checks; name -> what failed, per rank ("" where nothing did)."""
    torch.set_num_threads(1)
    outcome: dict[str, list[str]] = {}
    with process_group(device, timeout_s=240) as ranks:
        for name in names:
            try:
                CHECKS[name](ranks)
                mine = ""
            except Exception:  # noqa: BLE001 (whatever fails is the outcome)
                mine = traceback.format_exc()
            # By the store: after a failure the ranks' collectives may be out of step.
            ranks.store.set(f"{name}/{ranks.rank}", mine)
            outcome[name] = [ranks.store.get(f"{name}/{rank}").decode() for rank in range(ranks.world_size)]
            if any(outcome[name]):
                break
    return outcome


def build(strategy: str, ranks: Ranks, options: SyncOptions = SMALL_BUCKETS) -> GradientSync:
    if strategy == "torch_ddp":
        return TorchDDP(ranks, options, find_unused=True)
    return build_strategy(strategy, ranks, options)


def train(
    sync: GradientSync,
    model: nn.Module,
    ranks: Ranks,
    *,
    steps: int,
    accumulation: int = 1,
    max_norm: float = float("inf"),
    make: Callable = adamw,
) -> tuple[list[float], torch.optim.Optimizer]:
    call = sync.attach(model)
    optimizer = sync.build_optimizer(make, groups_of(model))
    norms = [
        one_step(sync, call, optimizer, ranks, step, accumulation=accumulation, max_norm=max_norm)
        for step in range(steps)
    ]
    sync.wait_for_weights()
    return norms, optimizer


def one_step(sync, call, optimizer, ranks, step, *, accumulation=1, max_norm=float("inf")) -> float:
    for micro in range(accumulation):
        with nullcontext() if micro == accumulation - 1 else sync.no_sync():
            loss = call.loss(*batch(step, ranks.rank, micro), ranks.rank)
            (loss / accumulation).backward()
    sync.finish()
    norm = float(sync.clip_gradients(max_norm))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def seeded_model(seed: int, ranks: Ranks, dtype: torch.dtype = torch.float64) -> HardModel:
    torch.manual_seed(seed)
    return HardModel(dtype).to(ranks.device)


def assert_same_on_all_ranks(model: nn.Module, ranks: Ranks) -> None:
    for name, value in model.state_dict().items():
        everyone = [torch.empty_like(value) for _ in range(ranks.world_size)]
        dist.all_gather(everyone, value.contiguous())
        for rank, other in enumerate(everyone):
            assert torch.equal(other, everyone[0]), f"{name} of rank {rank} differs from rank 0's"


def assert_close_models(mine: nn.Module, oracle: nn.Module, tolerance: float) -> None:
    expected = dict(oracle.named_parameters())
    for name, value in mine.named_parameters():
        difference = (value.detach() - expected[name].detach()).abs().max().item()
        assert difference <= tolerance, f"{name} is off by {difference:.3g}"


def check_joined_batch(ranks: Ranks, strategy: str, make: Callable, accumulation: int) -> None:
    oracle = seeded_model(0, ranks)
    before = {name: value.clone() for name, value in oracle.state_dict().items()}
    expected = joined_run(
        oracle, world_size=ranks.world_size, steps=4, accumulation=accumulation, max_norm=0.7, make=make
    )
    model = seeded_model(ranks.rank, ranks)  # rank 0's values must win
    sync = build(strategy, ranks)
    norms, _ = train(sync, model, ranks, steps=4, accumulation=accumulation, max_norm=0.7, make=make)
    assert norms == pytest.approx(expected, rel=1e-9)
    assert min(expected) > 0.7, "clipping must have been at work"
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)
    assert_same_on_all_ranks(model, ranks)
    state = model.state_dict()
    assert torch.equal(state["never"], before["never"])
    assert torch.equal(state["frozen.weight"], before["frozen.weight"])
    assert not torch.equal(state["embedding.weight"], before["embedding.weight"])


def check_zeroed_gradients(ranks: Ranks, strategy: str) -> None:
    """zero_grad(set_to_none=False): gradients are there before they are complete, and must not leave early."""
    oracle, model = seeded_model(0, ranks), seeded_model(0, ranks)
    # Without weight decay: a gradient of zero and none at all are then the same to SGD.
    make = partial(torch.optim.SGD, lr=0.05)
    joined_run(oracle, world_size=ranks.world_size, steps=4, accumulation=1, max_norm=1e9, make=plain(make))
    sync = build(strategy, ranks)
    call = sync.attach(model)
    optimizer = sync.build_optimizer(plain(make), groups_of(model))
    for step in range(4):
        call.loss(*batch(step, ranks.rank, 0), ranks.rank).backward()
        sync.finish()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    sync.wait_for_weights()
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)


def plain(make: Callable) -> Callable:
    """The groups without their options."""
    return lambda groups: make([{"params": group["params"]} for group in groups])


class EveryParameterUsed(nn.Module):
    """Where nothing is unused, the embedding's gradient is the last and may come late."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)], nn.Linear(6, 13))
        self.double()

    def loss(self, ids: torch.Tensor, targets: torch.Tensor, rank: int) -> torch.Tensor:
        device = self.embedding.weight.device
        return nn.functional.cross_entropy(self.layers(self.embedding(ids.to(device))), targets.to(device))


def check_late_gradients(ranks: Ranks, strategy: str, make: Callable, clips: bool) -> None:
    """`finish(wait=False)`: the optimizer steps what has arrived and then the rest; the weights are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "LATE_BYTES", 0)
        torch.manual_seed(0)
        oracle, model = EveryParameterUsed().to(ranks.device), EveryParameterUsed().to(ranks.device)
        model.load_state_dict(oracle.state_dict())
        norm = 0.2 if clips else float("inf")
        norms = joined_run(
            oracle, world_size=ranks.world_size, steps=5, accumulation=1, max_norm=norm, make=plain(make)
        )
        assert not clips or min(norms) > norm, "clipping must have been at work"
        sync = build(strategy, ranks)
        call = sync.attach(model)
        optimizer = sync.build_optimizer(plain(make), groups_of(model))
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        for step in range(5):
            call.loss(*batch(step, ranks.rank, 0), ranks.rank).backward()
            sync.finish(wait=False)
            if clips:
                sync.clip_gradients(norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        sync.wait_for_weights()
        assert_close_models(model, oracle, FLOAT64_TOLERANCE)
        assert_same_on_all_ranks(model, ranks)
        # The first step settles the order and waits for everything; clipping leaves nothing to wait for.
        in_two_parts = strategy in ("overlap", "bucketed") and not clips
        assert len(calls) == (5 + 4 if in_two_parts else 5)


def check_leftover_gradients(ranks: Ranks, which: int) -> None:
    """One parameter's gradient stays from the step before, and every pass adds to it: it must not leave early.

    Its place in its bucket (beginning, middle, end) decides who could notice.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)]).to(ranks.device, torch.float64)
    weights = list(model.parameters())[::-1]  # the order of their gradients
    sync = build("bucketed", ranks, SyncOptions(bucket_mb=3 * 64 * 8 / 2**20))
    sync.attach(model)
    kept = torch.zeros_like(weights[which])
    for step in range(4):
        torch.manual_seed(100 * step + ranks.rank)
        x = torch.randn(2, 8, dtype=torch.float64, device=ranks.device)
        (own,) = torch.autograd.grad(model(x).square().sum(), [weights[which]])
        dist.all_reduce(own)
        model(x).square().sum().backward()
        sync.finish()
        kept += own / ranks.world_size
        assert torch.allclose(weights[which].grad, kept, rtol=FLOAT64_TOLERANCE)
        for position, weight in enumerate(weights):
            if position != which:
                weight.grad = None


def check_accumulation_that_starts_later(ranks: Ranks) -> None:
    """The first steps communicate every pass, the next ones do not: the hooks follow."""
    for strategy in ("overlap", "bucketed"):
        oracle, model = seeded_model(0, ranks), seeded_model(0, ranks)
        optimizer = adamw(groups_of(oracle))
        sync = build(strategy, ranks)
        call = sync.attach(model)
        mine = sync.build_optimizer(adamw, groups_of(model))
        for step in range(6):
            passes = 1 if step < 3 else 3
            for rank in range(ranks.world_size):
                for micro in range(passes):
                    loss = oracle.loss(*batch(step, rank, micro), rank)
                    (loss / (ranks.world_size * passes)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            one_step(sync, call, mine, ranks, step, accumulation=passes)
        assert_close_models(model, oracle, FLOAT64_TOLERANCE)


def check_unused_gradients_are_none(ranks: Ranks, strategy: str) -> None:
    """PyTorch DDP's meaning: used somewhere, a gradient everywhere; used nowhere, none."""
    model = seeded_model(0, ranks)
    sync = build(strategy, ranks)
    call = sync.attach(model)
    for step in range(3):  # before and after the order was recorded
        call.loss(*batch(step, ranks.rank, 0), ranks.rank).backward()
        sync.finish()
        assert model.never.grad is None
        assert model.frozen.weight.grad is None
        assert model.sometimes.weight.grad is not None
        model.zero_grad(set_to_none=True)


def check_none_communicates_nothing(ranks: Ranks) -> None:
    model = seeded_model(ranks.rank, ranks)
    sync = build("none", ranks)
    train(sync, model, ranks, steps=2)
    assert sync.traffic.calls == 0
    weights = [torch.empty_like(model.embedding.weight) for _ in range(ranks.world_size)]
    dist.all_gather(weights, model.embedding.weight.detach())
    assert not torch.equal(weights[0], weights[1])


def check_bf16_wire(ranks: Ranks, strategy: str) -> None:
    """fp32 gradients that travel as bf16: each is off by at most two roundings of 2^-9, and stays fp32."""
    gradients = {}
    for wire in ("fp32", "bf16"):
        model = seeded_model(0, ranks, torch.float32)
        sync = build(strategy, ranks, SyncOptions(bucket_mb=0.0003, wire_dtype=wire))
        call = sync.attach(model)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            sync.traffic.reset()
            call.loss(*batch(0, ranks.rank, 0), ranks.rank).backward()
            sync.finish()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients[wire] = (grads, sync.traffic.payload_bytes)
    for name, exact in gradients["fp32"][0].items():
        coarse = gradients["bf16"][0][name]
        assert coarse.dtype == torch.float32
        # Relative to the largest summand, not to the sum: contributions of the ranks may cancel.
        assert (coarse - exact).abs().max() <= 2**-7 * exact.abs().max() + 2**-7 * 0.1
        assert exact.numel() == 1 or not torch.equal(coarse, exact), f"{name} did not travel as bf16"
    assert gradients["bf16"][1] < 0.7 * gradients["fp32"][1]


def check_mixed_dtypes(ranks: Ranks, strategy: str) -> None:
    """fp32 and bf16 parameters side by side: never in one bucket, both averaged."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4).bfloat16(), nn.Linear(3, 4)]).to(ranks.device)
    sync = build(strategy, ranks, SyncOptions())
    sync.attach(model)
    if strategy == "zero1":
        optimizer = sync.build_optimizer(sgd, groups_of(model))
        before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss = sum(layer.weight.float().sum() for layer in model) * (ranks.rank + 1.0)
        loss = loss + sum(layer.bias.float().sum() for layer in model)
        loss.backward()
        sync.finish()
        if strategy != "zero1":
            mean = (ranks.world_size + 1) / 2
            for layer in model:
                assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, mean))
                assert torch.equal(layer.bias.grad, torch.ones_like(layer.bias))
    if strategy == "zero1":
        optimizer.step()
        sync.wait_for_weights()
        assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert_same_on_all_ranks(model, ranks)


def check_exception_in_backward(ranks: Ranks, strategy: str, tidy: bool) -> None:
    """Half of the hooks have run when backward raises (on every rank); the next step is as if nothing was."""
    oracle, model = seeded_model(0, ranks), seeded_model(0, ranks)
    joined_run(oracle, world_size=ranks.world_size, steps=2, accumulation=1, max_norm=float("inf"))
    sync = build(strategy, ranks)
    call = sync.attach(model)
    optimizer = sync.build_optimizer(adamw, groups_of(model))
    for step in range(2):

        def explode(gradient: torch.Tensor) -> None:
            raise ZeroDivisionError

        handle = model.layers[1].up.weight.register_hook(explode)
        with pytest.raises(ZeroDivisionError):
            call.loss(*batch(step, 0, 0), 0).backward()
        handle.remove()
        if tidy:
            sync.reset()
        optimizer.zero_grad(set_to_none=True)
        one_step(sync, call, optimizer, ranks, step)
    sync.wait_for_weights()
    assert_close_models(model, oracle, FLOAT64_TOLERANCE)


def check_nonfinite_reaches_everybody(ranks: Ranks, strategy: str) -> None:
    """One rank's NaN is in every rank's norm: all can refuse the step by the same number."""
    model = seeded_model(0, ranks)
    sync = build(strategy, ranks)
    call = sync.attach(model)
    optimizer = sync.build_optimizer(adamw, groups_of(model))
    loss = call.loss(*batch(0, ranks.rank, 0), ranks.rank)
    (loss * (float("nan") if ranks.rank == 1 else 1.0)).backward()
    sync.finish()
    norm = sync.clip_gradients(1.0)
    assert not torch.isfinite(norm)
    assert agree(ranks, nonfinite=~torch.isfinite(norm)).nonfinite
    optimizer.zero_grad(set_to_none=True)
    norm = one_step(sync, call, optimizer, ranks, 0)
    assert norm == norm, "nothing of the NaN is left in the next step"


def check_agreement(ranks: Ranks) -> None:
    last = ranks.rank == ranks.world_size - 1
    nothing = agree(ranks)
    assert (nothing.stop, nothing.nonfinite) == (False, False)
    stop = agree(ranks, stop=last)
    assert (stop.stop, stop.nonfinite) == (True, False)
    both = agree(ranks, stop=ranks.is_first, nonfinite=torch.tensor(last, device=ranks.device))
    assert (both.stop, both.nonfinite) == (True, True)


def check_different_models_are_refused(ranks: Ranks) -> None:
    model = nn.Linear(3, 4 if ranks.rank == 1 else 5).to(ranks.device)
    for strategy in STRATEGIES:
        with pytest.raises(LmkitError, match=r"rank 1: model differs from rank 0's"):
            build(strategy, ranks).attach(model)
        with pytest.raises(LmkitError, match=r"rank 1: recipe or data differs from rank 0's"):
            build(strategy, ranks).attach(
                nn.Linear(3, 3).to(ranks.device), fingerprint=f"lr = {ranks.rank == 1}"
            )


def check_traffic(ranks: Ranks) -> None:
    """Bytes and calls against the formula: 2 (W-1)/W of the gradients, or of them and the weights in halves."""
    share = (ranks.world_size - 1) / ranks.world_size
    gradient_bytes = 6 * 64 * 64 * 4
    flags = 6 * 4  # one int32 a parameter: who used it
    options = SyncOptions(bucket_mb=1.5 * 64 * 64 * 4 / 2**20)  # the second matrix closes a bucket
    for strategy, calls in {"naive": 6, "flat": 1, "overlap": 6, "bucketed": 3, "zero1": 2 * 3}.items():
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]).to(ranks.device)
        sync = build(strategy, ranks, options)
        sync.attach(model)
        optimizer = sync.build_optimizer(sgd, [{"params": list(model.parameters())}])
        for _ in range(2):
            sync.traffic.reset()
            model(torch.randn(2, 64, device=ranks.device)).sum().backward()
            sync.finish()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # Where peers' memory is read, each of the step's three parts (a bucket each) is announced with a float.
        announced = 3 if strategy == "zero1" and sync.reads_peers else 0
        # Who used what is told by a call of its own, or rides on the last bucket.
        assert sync.traffic.calls == calls + announced + (strategy in ("naive", "flat", "zero1")), strategy
        small = flags + 4 * announced
        moved = (
            2 if strategy == "zero1" else 1
        )  # gradients one way, weights the other: half an all-reduce each
        assert sync.traffic.payload_bytes == moved * gradient_bytes + small, strategy
        assert sync.traffic.link_bytes == pytest.approx(2 * share * (gradient_bytes + small)), strategy


def feed(sync: GradientSync, parameters: list[nn.Parameter], gradients: list[torch.Tensor]) -> None:
    """The same gradients on every rank: their mean is exactly they (the world is a power of two)."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    sync.finish()


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


def check_memory_that_is_mixed_up_is_refused(ranks: Ranks) -> None:
    """On all ranks, also those that see the right one: here only rank 0 sees another piece than its neighbour's."""
    of_rank = FileMemory(64, ranks).of_rank
    check_pairing(of_rank, ranks)
    assert not of_rank[ranks.rank].any()
    if ranks.is_first:
        of_rank[1] = torch.zeros_like(of_rank[1])
    with pytest.raises(LmkitError, match="different pieces"):
        check_pairing(of_rank, ranks)


def check_by_the_other_gather(ranks: Ranks, check: Callable[[Ranks], None]) -> None:
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


def check_peers_wait_for_one_another(ranks: Ranks) -> None:
    """Ranks that are late, each in turn and anywhere in a step, change no bit of what is gathered from memory."""
    late_by = torch.Generator().manual_seed(ranks.rank)

    def fall_behind(*_: object) -> None:
        if ranks.device.type == "cuda":
            torch.cuda._sleep(int(torch.randint(2_000_000, (), generator=late_by)))  # up to 1 ms

    def run(gather: str) -> list[torch.Tensor]:
        model = seeded_model(0, ranks, torch.float32)
        sync = Zero1(ranks, SyncOptions(bucket_mb=0.0003, gather=gather))
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


def check_forgotten(ranks: Ranks, strategy: str) -> None:
    """Nothing of a training is left when nobody holds it, whatever hooks it had."""
    model = seeded_model(0, ranks)
    sync = build(strategy, ranks)
    _, optimizer = train(sync, model, ranks, steps=3)
    forgotten = [weakref.ref(thing) for thing in (model, sync, optimizer, *model.parameters())]
    del model, sync, optimizer
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    let_go_of_collectives(ranks)
    assert [reference() for reference in forgotten] == [None] * len(forgotten)


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
        Zero1(ranks, SyncOptions(bucket_mb=0.0003, gather="collective")),
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


def check_zero1_state_is_one_share(ranks: Ranks) -> None:
    model = seeded_model(0, ranks, torch.float32)
    sync = Zero1(ranks, SMALL_BUCKETS)
    train(sync, model, ranks, steps=1)
    _, optimizer = train(Zero1(ranks, SMALL_BUCKETS), seeded_model(0, ranks, torch.float32), ranks, steps=1)
    layout = optimizer.layout
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


def check_zero1_bf16_master(ranks: Ranks, make: Callable) -> None:
    """The master shards follow an fp32 AdamW fed the same (bf16) gradients; the weights are their rounding."""
    model, reference = seeded_model(0, ranks, torch.float32), seeded_model(0, ranks, torch.float32)
    optimizer = make(groups_of(reference))
    sync = Zero1(ranks, SyncOptions(bucket_mb=0.0003, weights="bf16"))
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


def check_zero1_bf16_unused(ranks: Ranks) -> None:
    """A parameter that no rank used keeps its value, in the master and in the weights; all others move."""
    model = seeded_model(0, ranks, torch.float32)
    model.frozen.bfloat16()  # what is not trained stays as it is; this model's activations become bf16
    before = {name: p.detach().bfloat16().clone() for name, p in model.named_parameters() if p.requires_grad}
    sync = Zero1(ranks, SyncOptions(bucket_mb=0.0003, weights="bf16"))
    train(sync, model, ranks, steps=2, max_norm=0.7, make=our_adamw)
    kept = {
        name for name, value in before.items() if torch.equal(value, dict(model.named_parameters())[name])
    }
    assert kept == {"never"}
    for bucket in sync._buckets:
        assert torch.equal(bucket.shard, bucket.master.bfloat16())
    assert_same_on_all_ranks(model, ranks)


def check_zero1_bf16_wire(ranks: Ranks) -> None:
    """fp32 weights, gradients that travel as bf16: our AdamW reads them so, PyTorch's gets them cast."""
    after = []
    for make in (our_adamw, adamw):
        model = seeded_model(0, ranks, torch.float32)
        sync = Zero1(ranks, SyncOptions(bucket_mb=0.0003, wire_dtype="bf16"))
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


def check_zero1_resumes(ranks: Ranks, weights: str, make: Callable) -> None:
    """3 + 2 steps from saved state are the 5 steps, bit for bit, weights and masters."""
    options = SyncOptions(bucket_mb=0.0003, weights=weights)
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


def check_zero1_single_parameters(ranks: Ranks) -> None:
    """Parameters that fill buckets of their own, without padding: their gradients are reduced where they lie."""
    torch.manual_seed(0)
    oracle, model = (
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(ranks.device, torch.float64)
        for _ in range(2)
    )
    model.load_state_dict(oracle.state_dict())
    sync = Zero1(ranks, SyncOptions(bucket_mb=64 * 64 * 8 / 2**20))
    call = sync.attach(model)
    optimizer, reference = sync.build_optimizer(adamw, groups_of(model)), adamw(groups_of(oracle))
    alone = [bucket.sizes for bucket in optimizer.layout.buckets if bucket.sizes == (64 * 64,)]
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


_CHECKS: dict[str, Callable[[Ranks], None]] = {
    **{
        f"joined batch: {s}, {a} passes": partial(check_joined_batch, strategy=s, make=adamw, accumulation=a)
        for s in STRATEGIES
        for a in (1, 2)
    },
    "joined batch: zero1, SGD": partial(check_joined_batch, strategy="zero1", make=sgd, accumulation=2),
    **{f"gradients kept and zeroed: {s}": partial(check_zeroed_gradients, strategy=s) for s in STRATEGIES},
    **{
        f"late gradients: {s}, {name}, {'clipped' if clips else 'as they are'}": partial(
            check_late_gradients, strategy=s, make=make, clips=clips
        )
        for s in ("flat", "overlap", "bucketed", "zero1")
        for name, make in (("PyTorch's AdamW", adamw), ("our AdamW", AdamW))
        for clips in (True, False)
    },
    **{f"leftover gradient: number {n}": partial(check_leftover_gradients, which=n) for n in (0, 1, 2, 4, 5)},
    "accumulation that starts later": check_accumulation_that_starts_later,
    **{
        f"unused gradients are None: {s}": partial(check_unused_gradients_are_none, strategy=s)
        for s in STRATEGIES
        if s != "zero1"
    },
    "none communicates nothing": check_none_communicates_nothing,
    **{f"bf16 wire: {s}": partial(check_bf16_wire, strategy=s) for s in ("flat", "bucketed")},
    **{f"mixed dtypes: {s}": partial(check_mixed_dtypes, strategy=s) for s in STRATEGIES if s != "torch_ddp"},
    **{
        f"exception in backward, {'reset' if tidy else 'no reset'}: {s}": partial(
            check_exception_in_backward, strategy=s, tidy=tidy
        )
        for s in ("naive", "flat", "overlap", "bucketed", "zero1")
        for tidy in (True, False)
    },
    **{
        f"NaN reaches everybody: {s}": partial(check_nonfinite_reaches_everybody, strategy=s)
        for s in STRATEGIES
    },
    "agreement": check_agreement,
    **{f"forgotten: {s}": partial(check_forgotten, strategy=s) for s in STRATEGIES if s != "torch_ddp"},
    "different models are refused": check_different_models_are_refused,
    "traffic": check_traffic,
    **{
        f"zero1 equals unsharded: {name}": partial(check_zero1_equals_unsharded, make=make)
        for name, make in (("AdamW", adamw), ("our AdamW", our_adamw), ("SGD", sgd))
    },
    "zero1 after others were dropped": check_zero1_after_others_were_dropped,
    "zero1 state is one share": check_zero1_state_is_one_share,
    **{
        f"zero1 bf16 master: {name}": partial(check_zero1_bf16_master, make=make)
        for name, make in (("AdamW", adamw), ("our AdamW", our_adamw))
    },
    "zero1 bf16 unused": check_zero1_bf16_unused,
    "zero1 bf16 wire": check_zero1_bf16_wire,
    **{
        f"zero1 resumes: {weights}, {name}": partial(check_zero1_resumes, weights=weights, make=make)
        for name, make in (("AdamW", adamw), ("our AdamW", our_adamw))
        for weights in ("fp32", "bf16")
    },
    "zero1 single parameters": check_zero1_single_parameters,
    "zero1 weights are whole when read": check_zero1_weights_are_whole_when_read,
    "peers wait for one another": check_peers_wait_for_one_another,
    "memory that is mixed up is refused": check_memory_that_is_mixed_up_is_refused,
}

CHECKS = _CHECKS | {
    f"by the other gather: {name}": partial(check_by_the_other_gather, check=check)
    for name, check in _CHECKS.items()
    if "zero1" in name or name in ("traffic", "peers wait for one another")
}
