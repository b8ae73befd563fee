"""Checks of `zero1`, and of the memory that GPUs read from one another, inside a process group."""

import gc
import io
import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

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
    sgd,
    start,
)
from torch import nn

from lmkit.errors import LmkitError
from lmkit.parallel import gather
from lmkit.parallel.collectives import agree
from lmkit.parallel.gather import PeerMemory, check_pairing
from lmkit.parallel.ranks import Ranks, process_group


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


@check()
def check_zero1_after_others_were_dropped(ranks: Ranks) -> None:
    """Ranks drop what they shared at different times: what is shared next is the right piece all the same.

    Memory that is used again by some ranks only would be another piece than is meant.
    """
    oracle = Run(ranks, gather="collective")
    for step in range(3):
        oracle.step(step)
    oracle.sync.wait_for_weights()
    gc.disable()
    try:
        runs = []
        for number in range(6):
            runs.append(Run(ranks))
            if number % 2 == 0:
                runs[-1].step(0)  # its weights are still on their way
            if ranks.rank == number % ranks.world_size:
                forgotten = weakref.ref(runs[-1].sync)
                runs.clear()
                gc.collect()
                assert forgotten() is None
        del runs
        run = Run(ranks)
        for step in range(3):
            run.step(step)
            if ranks.rank == step:
                gc.collect()
    finally:
        gc.enable()
    run.sync.wait_for_weights()
    assert_close_models(run.model, oracle.model, 0.0)
    assert_same_on_all_ranks(run.model, ranks)


@check(make=(adamw, our_adamw, sgd))
def check_zero1_equals_unsharded(ranks: Ranks, make: Callable) -> None:
    run, reference = Run(ranks, make), seeded_model(0, ranks, torch.float32)
    optimizer = make(groups_of(reference))
    for step in range(20):
        for parameter, gradient in zip(trained(reference), run.feed(step), strict=True):
            parameter.grad = gradient
        for group in (*optimizer.param_groups, *run.optimizer.param_groups):
            group["lr"] = 0.01 / (1 + step)  # as a schedule does
        optimizer.step()
        run.optimizer.step()
        run.sync.wait_for_weights()
        # Element-wise arithmetic on the same numbers; only vector lanes may differ, which our kernel has none of.
        exact = make is our_adamw and ranks.device.type == "cuda"
        assert_close_models(run.model, reference, 0.0 if exact else 1e-7)
    buckets = run.optimizer.shard_layout["buckets"]
    key = "momentum_buffer" if make is sgd else "exp_avg"
    held = sum(state[key].numel() for state in run.optimizer.state.values())
    assert held == sum(bucket["shard_size"] for bucket in buckets)
    named = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    assert {name for bucket in buckets for name in bucket["names"]} == set(named)
    for bucket in buckets:  # matrices decay, vectors do not
        assert len({named[name].ndim >= 2 for name in bucket["names"]}) == 1


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
def check_zero1_bf16_unused(ranks: Ranks) -> None:
    """A parameter that no rank used keeps its value, in the master and in the weights; all others move."""
    run = Run(ranks, frozen_bf16=True, weights="bf16")
    before = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
    for step in range(2):
        run.step(step, max_norm=0.7)
    run.sync.wait_for_weights()
    after = dict(run.model.named_parameters())
    assert [name for name, value in before.items() if torch.equal(value, after[name])] == ["never"]
    for bucket in run.buckets:
        assert torch.equal(bucket.own_weights, bucket.shard.bfloat16())
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
    """Whole fp32 weights become masters as they are, and bf16 weights rounded once."""
    run = Run(ranks, frozen_bf16=True, weights="bf16")
    weights = {name: p.detach() for name, p in seeded_model(1, ranks, torch.float32).named_parameters()}
    run.model.load_state_dict(
        {name: weights.get(name, value) for name, value in run.model.state_dict().items()}
    )
    run.optimizer.load_masters(weights)
    for bucket in run.buckets:
        whole = torch.cat([weights[name].flatten() for name in bucket.names])
        padded = nn.functional.pad(whole, (0, bucket.weights.numel() - whole.numel()))
        assert torch.equal(bucket.shard, bucket.own_of(padded))
        assert torch.equal(bucket.own_weights, bucket.shard.bfloat16())


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
    file = io.BytesIO()
    torch.save(state, file)
    files: list = [None] * ranks.world_size
    dist.all_gather_object(files, file.getvalue())
    states = [torch.load(io.BytesIO(content), map_location="cpu") for content in files]
    for run, load in (
        (second, lambda: second.optimizer.load_state_dict(state)),
        (third, lambda: third.optimizer.load_resharded(states)),
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
        assert [b["sizes"] for b in optimizer.shard_layout["buckets"]].count([64 * 64]) == 4


@check()
def check_zero1_weights_are_whole_when_read(ranks: Ranks) -> None:
    """Layers that are bypassed, evaluation and saving all see the step's result, not a half-gathered weight."""
    run, oracle = Run(ranks, adamw, torch.float64), seeded_model(0, ranks)
    joined_run(oracle, ranks.world_size, [1])
    with gathered_when_waited_for():
        run.step(0)
        # No layer's call reads the model's own parameter.
        assert torch.allclose(run.model.scale, oracle.scale)
        with torch.no_grad():
            assert torch.allclose(run.model.loss(*batch(9, 0), 0), oracle.loss(*batch(9, 0), 0))
    assert_close_models(run.model, oracle, FLOAT64_TOLERANCE)


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
