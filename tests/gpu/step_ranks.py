"""What `test_step.py` runs on every rank."""

from collections.abc import Callable
from typing import Any

import torch

from lmkit.core.batches import RandomTokens
from lmkit.parallel.ranks import Ranks, process_group
from lmkit.recipe.tables import ModelConfig, ParallelConfig
from lmkit.training.precision import autocast
from lmkit.training.setup import build_step
from lmkit.training.step import Step

CONFIG = ModelConfig(vocab_size=256, context_length=64, d_model=128, d_ff=256, num_layers=2, num_heads=2)


# The graph's note, the losses with and without it, and whether the weights are the same.
Found = tuple[str, list[list[float]], list[list[float]], bool]


def compared(wish: str, keys: dict[str, Any], run: Callable[[Step, Ranks], list[list[float]]]) -> Found:
    """Run a step with the wish for a graph, and one without."""
    torch.use_deterministic_algorithms(True)
    with process_group("cuda", timeout_s=120) as ranks:
        steps, losses = [], []
        for mode in (wish, "off"):
            torch.manual_seed(ranks.rank)
            parallel = ParallelConfig(**keys)
            step = build_step(
                CONFIG, ranks, parallel=parallel, precision="bf16", max_skips=0, cuda_graph=mode
            )
            losses.append(run(step, ranks))
            steps.append(step)
        graph, eager = steps
        assert graph.graph is not None
        return graph.graph.note, *losses, same_weights(graph, eager)


def batches_of(ranks: Ranks, accumulation: int) -> RandomTokens:
    return RandomTokens(
        256, batch_size=8, context_length=64, seed=0, rank=ranks.rank, world_size=2, accumulation=accumulation
    )


def goes_on_without(strategy: str, place: str) -> Found:
    """As `captured_like_eager`, of a step that waits for the GPU, so that it cannot be captured: in its backward
    pass, while gradients are reduced, there on the second rank only, or at its end."""

    def wait(*_: object) -> None:
        torch.ones((), device="cuda").item()

    def run(step: Step, ranks: Ranks) -> list[list[float]]:
        if place == "end":
            step.optimizer.register_step_post_hook(wait)
        elif place == "backward" or not ranks.is_first:
            step.model.layers[0].register_full_backward_pre_hook(wait)
        batches = batches_of(ranks, 1)
        outcomes = [step(*batches.batch(number), lr=1e-3) for number in range(6)]
        return [outcome.losses.tolist() for outcome in outcomes]

    return compared("on", {"strategy": strategy, "bucket_mb": 0.1}, run)


def same_weights(left: Step, right: Step) -> bool:
    pairs = zip(*(step.model.state_dict().values() for step in (left, right)), strict=True)
    return all(one.is_meta or torch.equal(one, other) for one, other in pairs)  # fsdp gives them to rank 0


def captured_like_eager(strategy: str, wish: str, keys: dict[str, Any]) -> Found:
    """After some steps one has another shape; then the optimizer's state is loaded, so that a new graph is captured.
    In the end weights are read between steps."""

    def run(step: Step, ranks: Ranks) -> list[list[float]]:
        batches = batches_of(ranks, 2)
        outcomes = [step(*batches.batch(number), lr=1e-3 / (number + 1)) for number in range(8)]
        inputs, targets = batches.batch(8)
        outcomes += [step(inputs[:1], targets[:1], lr=1e-3), step(*batches.batch(9), lr=1e-3)]
        step.optimizer.load_state_dict(step.optimizer.state_dict())
        outcomes += [step(*batches.batch(number), lr=1e-3) for number in range(10, 20)]
        read = []
        for number in range(20, 26):
            with torch.no_grad(), autocast(ranks.device, "bf16"):
                read.append(step.call.loss(inputs[0].to(ranks.device), targets[0].to(ranks.device)))
            outcomes.append(step(*batches.batch(number), lr=1e-3))
            if number % 2:
                step.sync.wait_for_weights()
        assert wish == "auto" or step.graph is None or step.graph._graph is not None
        return [*(outcome.losses.tolist() for outcome in outcomes), [loss.item() for loss in read]]

    return compared(wish, {"strategy": strategy, **keys}, run)
