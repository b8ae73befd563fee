import contextlib
import importlib
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def launcher(stand_in_gpu, monkeypatch):
    """`lmkit.kernels.hopper`, which takes tensors of the CPU. What is prepared here is forgotten."""
    from lmkit.kernels import hopper

    # The package has functions of these names.
    modules = [importlib.import_module(f"lmkit.kernels.hopper.{name}") for name in ("forward", "backward")]
    for module in modules:
        monkeypatch.setattr(module, "selected", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(module, "count_sms", lambda device: 132)
    for name in ("_COUNTERS", "_STOCK"):
        monkeypatch.setattr(modules[0], name, {})
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    yield hopper
    for module in modules:
        module._prepare.cache_clear()
