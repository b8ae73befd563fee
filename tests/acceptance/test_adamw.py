"""One AdamW update of a model on a GPU, and nothing else: ours, compared with PyTorch's.

    pytest tests/acceptance/test_adamw.py -s

prints milliseconds, bandwidth and the ratio to torch's fused update.
"""

from collections.abc import Callable

import pytest
import torch

from lmkit.core.adamw import decay_groups
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.tables import Column, terminal_table
from lmkit.measure.timing import time_variants, without_garbage_collection
from lmkit.model.transformer import TransformerLM
from lmkit.optim.adamw import AdamW
from lmkit.recipe.tables import PRESETS, ModelConfig

BYTES_PER_PARAMETER = 7 * 4  # weight, gradient and two moments are read, all but the gradient written; fp32
NUMBERS = ("update_ms", "gb_per_s", "times_as_fast", "low", "high")
COLUMNS = (Column("way", "AdamW"), *(Column(number, number, ".4g") for number in NUMBERS))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the target is that of a GPU")
def test_our_update_is_as_fast_as_torchs_fused(capsys):
    config = ModelConfig(preset="small", **PRESETS["small"], vocab_size=32_000)  # type: ignore[arg-type]
    with torch.no_grad():
        parameters = list(TransformerLM(config, device=torch.device("cuda")).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    settings = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8}
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "ours": AdamW,
        "torch fused": lambda groups, **options: torch.optim.AdamW(groups, fused=True, **options),
        "torch foreach": lambda groups, **options: torch.optim.AdamW(groups, foreach=True, **options),
    }
    groups = decay_groups(parameters, 0.1)
    ways = {name: make([dict(group) for group in groups], **settings) for name, make in makers.items()}
    with without_garbage_collection():
        timings = time_variants(
            {name: optimizer.step for name, optimizer in ways.items()},
            device="cuda",
            repeats=20,
            min_sample_ms=20.0,  # enough calls that the device, not the CPU, sets their pace
        )
    elements = sum(parameter.numel() for parameter in parameters)
    rows = []
    for name, timing in timings.items():
        ratio = paired_ratio(timing.samples_ms, timings["torch fused"].samples_ms)
        rate = elements * BYTES_PER_PARAMETER / timing.median_ms / 1e6
        numbers = {"times_as_fast": ratio.speedup, "low": ratio.low, "high": ratio.high}
        rows.append({"way": name, "update_ms": timing.median_ms, "gb_per_s": rate} | numbers)
    with capsys.disabled():
        print("\n" + terminal_table(rows, COLUMNS))
    assert rows[0]["high"] >= 1.0
