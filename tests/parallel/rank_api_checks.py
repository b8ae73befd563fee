"""Checks of `DataParallel`, `ShardedOptimizer` and `FSDP` inside a process group."""

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from raising import raises
from rank_model import (
    FLOAT64_TOLERANCE,
    adamw,
    assert_close_models,
    assert_same_on_all_ranks,
    batch,
    check,
    explode,
    gathered_when_waited_for,
    groups_of,
    joined_run,
    seeded_model,
)
from rank_shard_checks import TINY, tokens
from torch import nn

from lmkit.core.adamw import decay_groups
from lmkit.core.step import clip_gradients
from lmkit.errors import UsageError
from lmkit.measure.memory import claim_workspaces
from lmkit.model.transformer import TransformerLM
from lmkit.optim.adamw import AdamW
from lmkit.parallel import FSDP, DataParallel, Ranks, ShardedOptimizer, gather_full_parameters
from lmkit.parallel.ranks import process_group
from lmkit.recipe.tables import ModelConfig, ParallelConfig
from lmkit.training.setup import build_step


@check(strategy=("naive", "flat", "overlap", "bucketed", "torch_ddp"), explicit=(False,), sharded=(False,))
@check(strategy=("bucketed", "torch_ddp"), explicit=(True,), sharded=(True,))
def check_data_parallel(ranks: Ranks, strategy: str, explicit: bool, sharded: bool) -> None:
    """As training on the joined batch, whoever averages the gradients; PyTorch's DDP is one of the strategies."""
    oracle = seeded_model(0, ranks)
    joined_run(oracle, ranks.world_size, [2] * 4)
    options: dict[str, Any] = {"bucket_mb": 0.0003}
    if strategy == "torch_ddp":
        options["find_unused_parameters"] = True
    model = DataParallel(seeded_model(ranks.rank, ranks), strategy, **options)  # rank 0's values must win
    assert_same_on_all_ranks(model, ranks)
    groups = groups_of(model)
    optimizer = adamw(groups)
    if sharded:
        optimizer = ShardedOptimizer(groups, torch.optim.AdamW, lr=0.02, betas=(0.9, 0.95), eps=1e-6)
    for step in range(4):
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                (model(*batch(step, ranks.rank, micro), ranks.rank) / 2).backward()
        if explicit:
            model.finish_gradient_synchronization()
        assert model.module.never.grad is None
        optimizer.step()
        optimizer.zero_grad()
        assert not any(parameter.grad is not None for parameter in model.parameters())
    assert_close_models(model.module, oracle, FLOAT64_TOLERANCE)
    assert_same_on_all_ranks(model, ranks)


@check()
def check_data_parallel_averages_once(ranks: Ranks) -> None:
    """At the end of the pass, or by the call: never the pass of one step with the call of another."""
    model = DataParallel(nn.Linear(3, 1, bias=False).to(ranks.device, torch.float64), "overlap")
    weight, mean = model.module.weight, (ranks.world_size + 1) / 2
    for number in range(3):
        weight.grad = None
        (model(torch.ones(3, dtype=torch.float64, device=ranks.device)) * (ranks.rank + 1)).sum().backward()
        assert weight.grad.tolist() == [[mean] * 3]
        weight.grad.add_(ranks.rank)  # would be averaged, too
        if number:
            model.finish_gradient_synchronization()
        assert weight.grad.tolist() == [[mean + ranks.rank] * 3]
    weight.grad = torch.full_like(weight, ranks.rank + 1.0)  # no pass made it
    model.finish_gradient_synchronization()
    assert weight.grad.tolist() == [[mean] * 3]


@check()
def check_data_parallel_forgets_a_pass_that_raised_in_the_next_forward(ranks: Ranks) -> None:
    """No pass follows that would tell: the gradients that were under way must leave again, with new values."""
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)]).to(ranks.device)
    model = DataParallel(layers, "overlap")
    handle = layers[1].weight.register_hook(explode)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(4, device=ranks.device)).sum().backward()
    handle.remove()
    model(torch.ones(4, device=ranks.device))
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, ranks.rank + 1.0)
    model.finish_gradient_synchronization()
    mean = torch.full((4, 4), (ranks.world_size + 1) / 2, device=ranks.device)
    assert all(torch.equal(weight.grad, mean) for weight in model.parameters())


@check(optimizer_class=(torch.optim.SGD, AdamW))
def check_sharded_optimizer(ranks: Ranks, optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Tied, frozen, unused and tiny parameters; groups, one added later; a schedule: as the optimizer itself."""
    options = (
        {"lr": 0.01, "betas": (0.9, 0.95)} if optimizer_class is AdamW else {"lr": 0.01, "momentum": 0.9}
    )
    model, reference = seeded_model(0, ranks, torch.float32), seeded_model(0, ranks, torch.float32)
    optimizers = []
    for trained, make in ((model, ShardedOptimizer), (reference, None)):
        matrices, vectors = groups_of(trained)
        groups = [{**matrices, "params": [*matrices["params"], *trained.frozen.parameters()]}]
        optimizer = make(groups, optimizer_class, **options) if make else optimizer_class(groups, **options)
        optimizer.add_param_group({**vectors, "lr": 0.005})
        optimizers.append(optimizer)
    mine, theirs = optimizers
    assert [len(g["params"]) for g in mine.param_groups] == [len(g["params"]) for g in theirs.param_groups]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    generator = torch.Generator().manual_seed(7)
    for step in range(8):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            if q.requires_grad and q is not reference.never:
                q.grad = torch.randn(q.shape, generator=generator).to(q)
                p.grad = q.grad.clone()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            with gathered_when_waited_for():
                optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step == 3:  # another optimizer goes on from the state
            saved = mine.state_dict()
            copy = ShardedOptimizer([dict(g) for g in mine.param_groups], optimizer_class, **options)
            copy.load_state_dict(saved)
            schedules[0].optimizer = mine = optimizers[0] = copy
        # Element-wise arithmetic on the same numbers, in other vector lanes.
        assert_close_models(model, reference, 1e-6)
    assert_same_on_all_ranks(model, ranks)
    held = sum(value.numel() for state in mine.state.values() for value in state.values() if value.ndim)
    whole = sum(value.numel() for state in theirs.state.values() for value in state.values() if value.ndim)
    padding = 128 * 2 * len(mine.shard_layout["buckets"])
    assert held <= whole / ranks.world_size + padding


@check(dtype=(None, torch.bfloat16, torch.float16))
def check_fsdp_module(ranks: Ranks, dtype: torch.dtype | None) -> None:
    """As training on the joined batch; the optimizer knows nothing of ranks. A norm is frozen, the head tied."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = TransformerLM(TINY.changed(tie_embeddings=True), device=ranks.device)
        model.layers[1].ln2.requires_grad_(False)
        return model

    def loss(module: nn.Module, rank: int, step: int, part: int) -> torch.Tensor:
        ids, wanted = tokens(Ranks(rank, device=ranks.device), step)
        logits = module(ids[part : part + 1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted[part])

    oracle = make(0)
    model = FSDP(make(ranks.rank), dtype)  # rank 0's values must win
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    trained = {name: p for name, p in oracle.named_parameters() if p.requires_grad}
    held = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert held.keys() == trained.keys()
    share = sum(p.numel() for p in trained.values()) / ranks.world_size
    # The padding of seven layers may lie on one rank.
    assert abs(sum(p.numel() for p in held.values()) - share) < 128 * ranks.world_size * 7
    whole = gather_full_parameters(model)
    assert all(torch.equal(whole[name], value) for name, value in oracle.state_dict().items())
    optimizers = [torch.optim.SGD(either.parameters(), lr=0.5) for either in (model, oracle)]
    for step in range(4):
        for rank, part in itertools.product(range(ranks.world_size), range(2)):
            (loss(oracle, rank, step, part) / 2 / ranks.world_size).backward()
            if rank == ranks.rank:
                (loss(model, rank, step, part) / 2).backward()  # accumulates
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    tolerance = 1e-6 if dtype is None else 0.02  # bf16: updates of 0.5 times gradients rounded by 2^-8
    for name, value in gather_full_parameters(model).items():
        assert value.dtype == torch.float32
        assert (value - oracle.state_dict()[name]).abs().max() <= tolerance, name
    with torch.no_grad():
        difference = (loss(model, 0, 9, 0) - loss(oracle, 0, 9, 0)).abs()
    assert difference <= (1e-5 if dtype is None else 0.2)  # of logits of about 3


def memory_of_steps() -> tuple[list[int], int, int, int]:
    """The peaks of three steps, the bytes held after the last one, those of one copy of the shards, and of the slots
    through which they are read, on a GPU. Run on every rank, by itself."""
    config = ModelConfig(
        vocab_size=8192, context_length=128, d_model=512, d_ff=2048, num_layers=8, num_heads=8
    )
    with process_group("cuda", timeout_s=60) as ranks:
        claim_workspaces(ranks.device)
        before = torch.cuda.memory_allocated(ranks.device)
        step = build_step(config, ranks, parallel=ParallelConfig(strategy="fsdp"))
        peaks = []
        ids = torch.zeros(1, 1, 128, dtype=torch.int64)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats(ranks.device)
            assert step(ids, ids, lr=1e-3).applied
            peaks.append(torch.cuda.max_memory_allocated(ranks.device) - before)
        torch.cuda.synchronize(ranks.device)
        flats = step.sync._flats  # type: ignore[attr-defined]
        slots = 2 * max(flat.sent_bytes for flat in flats) if step.sync.gather == "reads peers" else 0
        held = torch.cuda.memory_allocated(ranks.device) - before
        return peaks, held, sum(flat.shard.nbytes for flat in flats), slots


@check()
def check_fsdp_clips_the_joint_norm_and_decays_matrices(ranks: Ranks) -> None:
    """Whatever share of a parameter a rank holds, and where it holds none."""
    torch.manual_seed(0)
    oracle = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double().to(ranks.device)
    model = FSDP(copy.deepcopy(oracle))
    inputs = torch.randn(ranks.world_size, 4, 7, dtype=torch.float64).to(ranks.device)
    oracle(inputs).square().sum().div(ranks.world_size).backward()
    model(inputs[ranks.rank]).square().sum().backward()
    with pytest.raises(ValueError, match="clip_grad_norm_"):
        clip_gradients(model.parameters(), 0.01)
    for foreach in (True, False, None):
        with raises(UsageError, "parallel.norm_of_part", hint="clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
    norms = model.clip_grad_norm_(0.01), clip_gradients(oracle.parameters(), 0.01)
    torch.testing.assert_close(*norms)
    for either in (model, oracle):
        groups = decay_groups(either.parameters(), 0.5)
        assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(2, 0.5), (2, 0.0)]
        torch.optim.SGD(groups, lr=0.1).step()
    for name, value in gather_full_parameters(model).items():
        torch.testing.assert_close(value, oracle.state_dict()[name], msg=name)
