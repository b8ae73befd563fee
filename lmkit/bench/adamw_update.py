"""One AdamW update of a model, and nothing else: our ways to make it, beside PyTorch's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lmkit.bench.ddp_clock import without_garbage_collection
from lmkit.bench.ddp_contenders import ADAMW, WEIGHT_DECAY
from lmkit.measure.progress import Progress
from lmkit.measure.statistics import median, paired_ratio
from lmkit.measure.timing import time_variants
from lmkit.model.transformer import TransformerLM
from lmkit.optim.adamw import AdamW, Scalars, Update, decay_groups, sweeps
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ModelConfig

BYTES_PER_PARAMETER = 7 * 4
"""What an update must move: weight, gradient and two moments are read, all but the gradient written; fp32."""

BASELINE = "torch fused"
HOST_REPEATS = 10


def update_rows(
    model: ModelConfig, ranks: Ranks, *, rounds: int = 10, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """One row per way, for the model's parameters in fp32 on this rank's device; rank 0's rows count.

    The ways take turns on the same weights and gradients, each with moments of its own. `update_ms` is time on the
    device; `host_ms` is how long the CPU is busy before it can go on (on a CPU the same).
    """
    with torch.no_grad():
        parameters = list(TransformerLM(model, device=ranks.device).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    groups = decay_groups(parameters, WEIGHT_DECAY)
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "operations": AdamWByOperations,
        BASELINE: lambda groups, **settings: torch.optim.AdamW(groups, fused=True, **settings),
        "torch foreach": lambda groups, **settings: torch.optim.AdamW(groups, foreach=True, **settings),
    }
    if ranks.device.type == "cuda":
        makers = {"one pass": AdamW, **makers}
    ways = {name: make([dict(group) for group in groups], **ADAMW) for name, make in makers.items()}

    def tell(number: int) -> None:
        if progress is not None and ranks.is_first:
            progress("update alone", number, rounds)

    with without_garbage_collection():
        timings = time_variants(
            {name: optimizer.step for name, optimizer in ways.items()},
            device=ranks.device,
            repeats=rounds,
            min_sample_ms=20.0,  # enough calls that the device, not the CPU, sets their pace
            before_round=tell,
        )
        host = {name: _host_ms(optimizer, ranks.device) for name, optimizer in ways.items()}
    tell(rounds)
    elements = sum(parameter.numel() for parameter in parameters)
    baseline = timings[BASELINE].samples_ms
    rows = []
    for name, timing in timings.items():
        ratio = paired_ratio(timing.samples_ms, baseline)
        rows.append(
            {
                "way": name,
                "parameters": elements,
                "tensors": len(parameters),
                "update_ms": timing.median_ms,
                "host_ms": host[name],
                "gb_per_s": elements * BYTES_PER_PARAMETER / timing.median_ms / 1e6,
                "times_as_fast": ratio.speedup,
                "low": ratio.low,
                "high": ratio.high,
                "samples_ms": list(timing.samples_ms),
            }
        )
    return rows


class AdamWByOperations(AdamW):
    """Ours without its kernel."""

    def _update_in_one_pass(self, updates: list[Update], scalars: Scalars) -> None:
        for sweep in sweeps(updates):
            self._update_by_operations(sweep, scalars)


def _host_ms(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Median time of a step that finds the device idle and waits for nothing."""
    samples = []
    for _ in range(HOST_REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        optimizer.step()
        samples.append((time.perf_counter() - start) * 1e3)
    return median(samples)
