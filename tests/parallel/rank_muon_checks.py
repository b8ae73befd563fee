"""Muon over shards: whole matrices are orthogonalised, wherever the ranks' borders lie."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rank_model import check

from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ModelConfig, OptimizerConfig, ParallelConfig
from lmkit.training.setup import build_step

# Matrices of several shapes, small enough for a border of two shards to lie inside one.
CONFIG = ModelConfig(vocab_size=50, context_length=16, d_model=16, d_ff=24, num_layers=3, num_heads=2)
# With two ranks, the second has no element of a block.
NARROW = CONFIG.model_copy(update={"d_model": 2, "d_ff": 4, "num_heads": 1})
TABLE = OptimizerConfig(name="muon", lr=3e-3)


@check(strategy=("zero1", "fsdp"), weights=("fp32", "bf16"), narrow=(False,))
@check(strategy=("zero1", "fsdp"), weights=("fp32",), narrow=(True,))
# In bf16, in which GPUs compute, a gradient's last bit of float32 may move a direction by 2^-8.
@patch("lmkit.optim.muon._dtype_of_products", lambda device, dtype: dtype)
@patch("lmkit.optim.muon._dtype_of_directions", lambda part: torch.float32)
def check_muon_of_shards_is_muon_of_whole_matrices(
    ranks: Ranks, strategy: str, weights: str, narrow: bool
) -> None:
    """The losses of six steps are those of one rank with the joined batch."""
    parallel = ParallelConfig(strategy=strategy, weights=weights, bucket_mb=0.02)
    precision = "fp32" if weights == "fp32" else "bf16"
    losses = []
    for place, table in ((Ranks(device=ranks.device), ParallelConfig(strategy="none")), (ranks, parallel)):
        torch.manual_seed(0)
        step = build_step(
            NARROW if narrow else CONFIG, place, optimizer=TABLE, parallel=table, precision=precision
        )
        torch.manual_seed(1)
        ids = torch.randint(50, (1, 4, 17))
        told = []
        for _ in range(6):
            own = ids.chunk(place.world_size, dim=1)[place.rank]
            made = step(own[..., :-1], own[..., 1:], lr=3e-3)
            loss = torch.tensor(float(made.loss), device=ranks.device)
            if place.world_size > 1:  # each rank knows its own
                dist.all_reduce(loss)
            told.append(float(loss) / place.world_size)
        losses.append(told)
    # float32 sums in another order, which GPUs also change from run to run, and iterations that amplify the smallest
    # singular values; bf16 weights are rounded to 2^-8, and gradients of half a batch each.
    exact = 2e-6 if ranks.device.type == "cpu" else 2e-5
    assert losses[1] == pytest.approx(losses[0], rel=exact if weights == "fp32" else 3e-3)
    assert losses[0][-1] < losses[0][0] - (0 if narrow else 0.02)  # the matrices have moved
