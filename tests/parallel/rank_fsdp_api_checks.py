"""Checks of the module `FSDP`, of whole weights in and out of shards, and of the rival `torch_fsdp`."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from raising import raises
from rank_fsdp_checks import TINY, sharded, tokens
from rank_model import adamw, check, groups_of, sgd, start
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


@check(dtype=(None,), tied=(False, True))
@check(dtype=(torch.bfloat16, torch.float16), tied=(False,))
def check_fsdp_module(ranks: Ranks, dtype: torch.dtype | None, tied: bool) -> None:
    """As training on the joined batch, with an optimizer that knows nothing of ranks."""
    config = TINY.model_copy(update={"tie_embeddings": tied})
    torch.manual_seed(0)
    oracle = TransformerLM(config, device=ranks.device)
    torch.manual_seed(ranks.rank)  # rank 0's values must win
    model = FSDP(TransformerLM(config, device=ranks.device), dtype)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    share = sum(p.numel() for p in oracle.parameters()) / ranks.world_size
    # The padding of seven layers may lie on one rank.
    assert abs(sum(p.numel() for p in model.parameters()) - share) < 128 * ranks.world_size * 7
    whole = gather_full_parameters(model)
    assert all(torch.equal(whole[name], value) for name, value in oracle.state_dict().items())
    make = partial(torch.optim.SGD, lr=0.5)
    optimizer, reference = make(model.parameters()), make(oracle.parameters())
    for step in range(4):
        for rank in range(ranks.world_size):
            ids, wanted = tokens(Ranks(rank, device=ranks.device), step)
            loss = nn.functional.cross_entropy(oracle(ids).flatten(0, 1), wanted.flatten())
            (loss / ranks.world_size).backward()
            if rank == ranks.rank:
                for part in range(2):  # accumulates
                    logits = model(ids[part : part + 1]).float()
                    (nn.functional.cross_entropy(logits.flatten(0, 1), wanted[part]) / 2).backward()
        for either in (optimizer, reference):
            either.step()
            either.zero_grad()
    tolerance = 1e-6 if dtype is None else 0.02  # bf16: updates of 0.5 times gradients rounded by 2^-8
    for name, value in gather_full_parameters(model).items():
        assert value.dtype == torch.float32
        assert (value - oracle.state_dict()[name]).abs().max() <= tolerance, name
    with torch.no_grad():
        ids, _ = tokens(Ranks(device=ranks.device), 9)
        difference = (model(ids).float() - oracle(ids)).abs().max()
    assert difference <= (1e-5 if dtype is None else 0.2)  # logits of about 3


class Bare(nn.Linear):
    """A model without layers."""

    def __init__(self) -> None:
        super().__init__(3, 3)


class Beside(Bare):
    """A frozen layer and parameters of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layer(x))


@check(make=(Bare, Beside))
def check_fsdp_module_without_layers_that_train(ranks: Ranks, make: Callable) -> None:
    """Its few elements are all on rank 0, and the others' optimizer has none to update."""
    torch.manual_seed(0)
    oracle = make().to(ranks.device)
    model = FSDP(copy.deepcopy(oracle))
    names = [name for name, parameter in oracle.named_parameters() if parameter.requires_grad]
    assert [name for name, _ in model.named_parameters()] == names
    optimizers = [torch.optim.SGD(either.parameters(), lr=0.5) for either in (model, oracle)]
    x = torch.randn(4, ranks.world_size, 3, generator=torch.Generator().manual_seed(1)).to(ranks.device)
    for step in range(4):
        model(x[step, ranks.rank]).square().sum().backward()
        (oracle(x[step]).square().sum() / ranks.world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in gather_full_parameters(model).items():
        torch.testing.assert_close(value, oracle.state_dict()[name], rtol=0, atol=1e-6)


@check()
def check_fsdp_refuses_a_state_of_another_dtype(ranks: Ranks) -> None:
    with raises(UsageError, "parallel.wrong_option", "state_dtype", "fp8"):
        build_strategy(ParallelConfig(strategy="fsdp", options={"state_dtype": "fp8"}), ranks)


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
