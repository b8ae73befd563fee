"""What each rank does in test_ranks.py. Raises where a rank departs from training on the joined batch."""

import torch
from torch.testing import assert_close

from lmkit.model import ModelConfig, TransformerLM
from lmkit.optim import AdamW
from lmkit.parallel import FSDP, DataParallel, Ranks, ShardedOptimizer, gather_full_parameters, process_group

TINY = ModelConfig(
    vocab_size=30, context_length=8, d_model=16, d_ff=32, num_layers=2, num_heads=2, tie_embeddings=True
)
STEPS, ROWS = 5, 4
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
# Float32 sums in another order. AdamW divides small gradients by their own size: 2% of a step of lr = 0.01.
TOLERANCE = {"rtol": 0.0, "atol": 2e-4}


def fresh(seed: int) -> TransformerLM:
    """Return a model with tied embeddings and a weight that is not trained."""
    torch.manual_seed(seed)
    model = TransformerLM(TINY)
    model.layers[1].ln2.weight.requires_grad_(False)
    return model


def batches() -> torch.Tensor:
    return torch.randint(30, (STEPS, ROWS, 9), generator=torch.Generator().manual_seed(5))


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def alone() -> dict[str, torch.Tensor]:
    """Return the weights after training on whole batches in one process."""
    model = fresh(0)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    for ids in batches():
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()
    return model.state_dict()


def train_together() -> None:
    whole = alone()
    with process_group("cpu") as ranks:
        for strategy in ("naive", "flat", "overlap", "bucketed"):
            model = DataParallel(fresh(ranks.rank), strategy)  # rank 0's values must win
            train(model, torch.optim.AdamW(model.parameters(), **SETTINGS), ranks)
            check(strategy, model.module.state_dict(), whole)

        model = DataParallel(fresh(ranks.rank), "bucketed")
        optimizer = ShardedOptimizer(model.parameters(), AdamW, **SETTINGS)
        train(model, optimizer, ranks)
        check("sharded optimizer", model.module.state_dict(), whole)
        moments = sum(x.numel() for state in optimizer.state.values() for x in state.values() if x.ndim)
        elements = sum(weight.numel() for weight in model.parameters())
        assert moments <= 1.1 * 2 * elements / ranks.world_size  # its own share, with some padding

        sharded = FSDP(fresh(ranks.rank))
        train(sharded, torch.optim.AdamW(sharded.parameters(), **SETTINGS), ranks)
        check("fsdp", gather_full_parameters(sharded), whole)
        assert sum(part.numel() for part in sharded.parameters()) <= 1.1 * elements / ranks.world_size


def train(model: DataParallel | FSDP, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    for ids in batches():
        optimizer.zero_grad()
        loss_of(model, ids.chunk(ranks.world_size)[ranks.rank]).backward()
        optimizer.step()


def check(what: str, trained: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    for name, weight in whole.items():
        if name in trained or name != "lm_head.weight":  # tied: some list it once
            label = f"{what}, {name}: "
            assert_close(trained[name].detach(), weight, **TOLERANCE, msg=label.__add__)
