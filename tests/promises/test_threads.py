"""`train` called as a function: from another thread, and without a trace in the caller's process."""

import os
import random
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from tiny import RANDOM_TOKENS, TINY

from lmkit.errors import UsageError
from lmkit.parallel import Ranks
from lmkit.recipe.load import load_recipe
from lmkit.recipe.tables import RunConfig
from lmkit.training import TrainResult, train
from lmkit.training.process import numerics


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lmkit.training.metrics.draw_losses", lambda *arguments, **options: None
    )  # matplotlib takes seconds


def train_tiny(folder: Path, *changes: str) -> TrainResult | None:
    settings = ("train.steps=2", "train.batch_size=4", f'run.folder="{folder}"', "run.seed=11")
    return train(load_recipe(None, [*TINY, *RANDOM_TOKENS, *settings, *changes]))


def settings() -> dict[str, Any]:
    """Of this process, all that Python code reads and changes."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "precision": torch.get_float32_matmul_precision(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomalies": torch.is_anomaly_enabled(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "filters": list(warnings.filters),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[union-attr, index]
    }


@pytest.mark.parametrize("deterministic", ["false", "true"])
def test_training_leaves_generators_and_settings_as_they_were(tmp_path: Path, deterministic: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before, generator = settings(), torch.Generator().manual_seed(5)
        expected = torch.rand(8, generator=generator)
        torch.manual_seed(5)
        found = [torch.rand(3)]
        train_tiny(tmp_path, f"run.deterministic={deterministic}", "run.threads=2")
        found.append(torch.rand(5))
        assert torch.equal(torch.cat(found), expected)
        assert settings() == before
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_callers_default_dtype_and_gradient_mode_change_nothing(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    expected = train_tiny(tmp_path / "plain")
    torch.set_default_dtype(dtype)
    try:
        with torch.inference_mode():
            found = train_tiny(tmp_path / "other")
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert expected is not None
    assert found is not None
    assert found.loss == expected.loss


def test_two_trainings_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would draw from PyTorch's default generator, so that neither had the numbers of its seed."""
    with numerics(RunConfig(), Ranks()), ThreadPoolExecutor(1) as pool:
        second = pool.submit(train_tiny, tmp_path)
        with raises(UsageError, "run.one_at_a_time"):
            second.result()
    assert train_tiny(tmp_path) is not None


def test_training_in_another_thread_gives_what_the_main_thread_gives(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    here = train_tiny(tmp_path / "here")
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(train_tiny, tmp_path / "there").result()
    assert here is not None
    assert there is not None
    assert (there.status, there.step, there.loss) == ("finished", 2, here.loss)
    assert signal.getsignal(signal.SIGTERM) is handler
