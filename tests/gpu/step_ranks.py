"""What `test_step.py` runs on every rank."""

from __future__ import annotations

import torch

from lmkit.data.batches import RandomTokens
from lmkit.parallel.ranks import process_group
from lmkit.recipe.tables import ModelConfig, ParallelConfig
from lmkit.training.setup import build_step

CONFIG = ModelConfig(vocab_size=256, context_length=64, d_model=128, d_ff=256, num_layers=2, num_heads=2)


def captured_like_eager(strategy: str, wish: str) -> tuple[str, list[float], list[float], bool]:
    """Return the graph's note, the losses with and without it, and whether the weights are the same."""
    torch.use_deterministic_algorithms(True)
    with process_group("cuda", timeout_s=120) as ranks:
        batches = RandomTokens(
            256, batch_size=8, context_length=64, seed=0, rank=ranks.rank, world_size=2, accumulation=2
        )
        steps = []
        for mode in (wish, "off"):
            torch.manual_seed(ranks.rank)
            parallel = ParallelConfig(strategy=strategy)
            step = build_step(
                CONFIG, ranks, parallel=parallel, precision="bf16", max_skips=0, cuda_graph=mode
            )
            outcomes = [step(*batches.batch(number), lr=1e-3) for number in range(8)]
            steps.append((step, [outcome.losses.tolist() for outcome in outcomes]))
        (graph, left), (eager, right) = steps
        same = all(map(torch.equal, graph.model.parameters(), eager.model.parameters()))
        assert graph.graph is not None
        return graph.graph.note, left, right, same
