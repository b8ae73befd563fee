"""A small model with everything that makes synchronising gradients hard, and the run that is its oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from lmkit.optim.adamw import AdamW

VOCABULARY, WIDTH = 13, 6


class Layer(nn.Module):
    """`up` and `gate` are multiplied as one matrix: their gradients are slices of one tensor."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joint = nn.functional.linear(self.norm(x), torch.cat((self.up.weight, self.gate.weight)))
        up, gate = joint.chunk(2, dim=-1)
        return x + self.down(torch.tanh(up + self.up.bias) * gate)


class HardModel(nn.Module):
    """Tied head, frozen layer, a scalar, a parameter of three elements, one that is never used, one that only
    some ranks use, and layers whose order differs between ranks."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, 5 + i) for i in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(3))
        self.never = nn.Parameter(torch.randn(4, 2))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor, rank: int) -> torch.Tensor:
        ids, targets = ids.to(self.scale.device), targets.to(self.scale.device)
        x = self.embedding(ids)  # (rows, width)
        for layer in self.layers if rank % 2 == 0 else reversed(self.layers):
            x = layer(x)
        x = self.frozen(x)
        x = torch.cat([x[:, :3] + self.shift, x[:, 3:]], dim=1) * self.scale
        if rank == 1:
            x = x + self.sometimes(x)
        return nn.functional.cross_entropy(self.head(x), targets)

    forward = loss


def batch(step: int, rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    ids = torch.randint(0, VOCABULARY, (8,), generator=generator)
    return ids, torch.randint(0, VOCABULARY, (8,), generator=generator)


def groups_of(model: nn.Module) -> list[dict]:
    """Matrices decay, the rest does not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def adamw(groups: Iterable[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(groups), lr=0.02, betas=(0.9, 0.95), eps=1e-6)


def our_adamw(groups: Iterable[dict]) -> torch.optim.Optimizer:
    return AdamW(list(groups), lr=0.02, betas=(0.9, 0.95), eps=1e-6)


def sgd(groups: Iterable[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(groups), lr=0.05, momentum=0.9, nesterov=True)


def joined_run(
    model: nn.Module,
    *,
    world_size: int,
    steps: int,
    accumulation: int,
    max_norm: float,
    make: Callable[[list[dict]], torch.optim.Optimizer] = adamw,
) -> list[float]:
    """One process trains on all ranks' batches at once; returns the gradient norms."""
    optimizer = make(groups_of(model))
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for step in range(steps):
        for rank in range(world_size):
            for micro in range(accumulation):
                loss = model.loss(*batch(step, rank, micro), rank)
                (loss / (world_size * accumulation)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, max_norm)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms
