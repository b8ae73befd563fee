"""The first step of a strategy has the bits of later ones, because a resumed run makes it later."""

from functools import partial

import torch
from rank_model import OURS, check, plain, start
from torch import nn

from lmkit.parallel.ranks import Ranks


class OtherwiseRegistered(nn.Module):
    """The order in which gradients become ready is not that of registration turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(13, 6)  # on a GPU, a real one's gradient is summed in any order
        self.layers = nn.ModuleList([*[nn.Linear(6, 6) for _ in range(4)], nn.Linear(6, 13)])

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(nn.functional.one_hot(ids.to(self.embedding.weight.device), 13).float())
        for number in (2, 0, 3, 1, 4):
            x = self.layers[number](x)
        return nn.functional.cross_entropy(x, targets.to(x.device))


@check(strategy=OURS)
def check_same_bits_in_the_first_step(ranks: Ranks, strategy: str) -> None:
    """With more than two ranks, the order of a sum depends on the buckets."""
    torch.manual_seed(0)
    model = OtherwiseRegistered().to(ranks.device)
    sync, call, optimizer = start(strategy, model, ranks, plain(partial(torch.optim.SGD, lr=0.0)))
    ids = torch.randint(13, (2, 64), generator=torch.Generator().manual_seed(ranks.rank))
    found = []
    for _ in range(3):
        call.loss(*ids).backward()
        sync.finish()
        found.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])
        optimizer.step()
        optimizer.zero_grad()
    sync.wait_for_weights()
    assert all(
        torch.equal(one, other) for later in found[1:] for one, other in zip(found[0], later, strict=True)
    )
