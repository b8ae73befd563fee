"""Checks of what ranks compare and send before the first step, run as those of rank_checks.py are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from rank_training import (
    STRATEGIES,
    build,
    refused,
)
from torch import nn

from lmkit.errors import LmkitError
from lmkit.parallel.protocol import broadcast_model, check_same_model
from lmkit.parallel.ranks import Ranks


def check_different_models_are_refused(ranks: Ranks) -> None:
    model = nn.Linear(3, 4 if ranks.rank == 1 else 5).to(ranks.device)
    for strategy in STRATEGIES:
        with refused("parallel.model_differs", LmkitError, "rank 1"):
            build(strategy, ranks).attach(model)
        with refused("parallel.recipe_differs", LmkitError, "rank 1"):
            build(strategy, ranks).attach(
                nn.Linear(3, 3).to(ranks.device), fingerprint=f"lr = {ranks.rank == 1}"
            )


def check_what_is_frozen_is_part_of_the_model(ranks: Ranks) -> None:
    """Or the ranks' gradients would be of different parameters."""
    model = nn.Linear(3, 3).to(ranks.device)
    model.bias.requires_grad_(ranks.rank != 1)
    with refused("parallel.model_differs", LmkitError, "rank 1"):
        check_same_model(model, ranks)


def check_ties_are_part_of_the_model(ranks: Ranks) -> None:
    """Where one rank has two parameters and another has one twice, broadcasts and gradients would not pair up."""
    model = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(3)]).to(ranks.device)
    model[1].weight = model[0].weight
    check_same_model(model, ranks)
    if ranks.rank == 1:
        model[1].weight = nn.Parameter(torch.zeros_like(model[0].weight))
    with refused("parallel.model_differs", LmkitError, "rank 1"):
        check_same_model(model, ranks)
    model[1].weight = model[2 if ranks.rank == 1 else 0].weight
    with refused("parallel.model_differs", LmkitError, "rank 1"):
        check_same_model(model, ranks)


def check_the_first_rank_gives_parameters_and_buffers(ranks: Ranks) -> None:
    model = nn.BatchNorm1d(3).to(ranks.device)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(7 + ranks.rank)
    broadcast_model(model)
    assert all(bool((value == 7).all()) for value in model.state_dict().values())
    assert len(model.state_dict()) == 5


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
    broadcast_model(model)
    assert bool((model.window == 0).all())
    assert bool((model.transposed == 5).all())
    assert all(not bool(buffer.any()) for buffer in model.buffers())
    assert bool((base[:, [0, 5]] == ranks.rank).all()), "what lies beside the window is nobody's business"

    model.register_buffer("expanded", torch.zeros(1, device=ranks.device).expand(4))
    with refused("parallel.expanded_tensor", LmkitError, "expanded"):
        broadcast_model(model)


START_CHECKS: dict[str, Callable[[Ranks], None]] = {
    "different models are refused": check_different_models_are_refused,
    "what is frozen is part of the model": check_what_is_frozen_is_part_of_the_model,
    "ties are part of the model": check_ties_are_part_of_the_model,
    "the first rank gives parameters and buffers": check_the_first_rank_gives_parameters_and_buffers,
    "the first rank gives any strides and dtype": check_the_first_rank_gives_tensors_of_any_strides_and_dtype,
}
