"""Checks of the module `FSDP`, of whole weights in and out of shards, and of the rival `torch_fsdp`."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from raising import raises
from rank_fsdp_checks import TINY, sharded, tokens
from rank_model import OrderlyModel, adamw, batch, check, groups_of, sgd, start
from torch import nn

from lmkit.errors import UsageError
from lmkit.measure.memory import claim_workspaces
from lmkit.model.transformer import TransformerLM
from lmkit.parallel import FSDP, Ranks, gather_full_parameters
from lmkit.parallel.ranks import process_group
from lmkit.parallel.strategy import build_strategy
from lmkit.recipe.tables import ModelConfig, ParallelConfig
from lmkit.training.setup import build_step


@check(make=(adamw, sgd))
def check_joined_batch_by_torch_fsdp(ranks: Ranks, make: Callable) -> None:
    torch.manual_seed(0)
    oracle = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 6))).to(ranks.device)
    model = copy.deepcopy(oracle)
    sync, call, optimizer = start("torch_fsdp", model, ranks, make)
    reference = make(groups_of(oracle))
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(ranks.device)
    for _ in range(4):
        oracle(x).square().mean().backward()
        call(x.chunk(ranks.world_size)[ranks.rank]).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(oracle.parameters(), 0.1)
        sync.finish()
        assert float(sync.clip_gradients(0.1)) == pytest.approx(float(norm), rel=1e-5)
        for either in (reference, optimizer):
            either.step()
            either.zero_grad()
    # float32, four updates of up to 0.02 by AdamW: rounding of 1e-7 in its quotient of moments.
    for mine, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.detach(), rtol=0, atol=1e-5)
    with raises(UsageError, "parallel.rival_saves_nothing", "torch_fsdp"):
        model.state_dict()


@check()
def check_fsdp_loads_state_of_the_whole_model(ranks: Ranks) -> None:
    """`load_state_dict` writes shards; names that are missing keep their values."""
    sync, model, _ = sharded(TINY, ranks)
    torch.manual_seed(5)
    other = TransformerLM(TINY)
    model.load_state_dict(other.state_dict())
    partly = {name: value + 1 for name, value in other.state_dict().items() if name.endswith("w1.weight")}
    model.load_state_dict(partly, strict=False)
    loaded = sync.whole_weights("cpu")
    for name, value in (other.state_dict() | partly).items():
        assert torch.equal(loaded[name], value), name
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


@check(kind=("hard",), dtype=(None,))
@check(kind=("tiny",), dtype=(None, torch.bfloat16, torch.float16))
def check_fsdp_module(ranks: Ranks, kind: str, dtype: torch.dtype | None) -> None:
    """As training on the joined batch, with an optimizer that knows nothing of ranks.

    The hard model has a tied head, a frozen layer and parameters of its own. All its few elements are on rank 0, and
    the others' optimizer has none to update.
    """

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return OrderlyModel().to(ranks.device) if kind == "hard" else TransformerLM(TINY, device=ranks.device)

    def loss(module: nn.Module, rank: int, step: int, part: int) -> torch.Tensor:
        if kind == "hard":
            return module(*batch(step, rank, part), rank)
        ids, wanted = tokens(Ranks(rank, device=ranks.device), step)
        logits = module(ids[part : part + 1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted[part])

    oracle = make(0)
    model = FSDP(make(ranks.rank), dtype)  # rank 0's values must win
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    trained = {name: p for name, p in oracle.named_parameters() if p.requires_grad}
    held = dict(model.named_parameters())
    assert held.keys() == trained.keys()
    if kind == "tiny":
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


@check()
def check_fsdp_names_what_cannot_be_drawn(ranks: Ranks) -> None:
    model = nn.Sequential(nn.PReLU(device="meta"))
    model[0].reset_parameters = lambda: None
    with pytest.raises(ValueError, match="weight of PReLU"):
        build_strategy("fsdp", ranks).attach(model)


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
