"""Switch the expandable segments of PyTorch's CUDA allocator on and off."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables from which PyTorch reads the allocator's settings."""
_EXPANDABLE = "expandable_segments:True"


def expand_segments() -> None:
    """Let segments grow and shrink, unless the environment decides about it.

    Before memory runs out, gaps between tensors are then given back page by page. Other segments are given back only
    as a whole, so their gaps stay.
    """
    name, settings = _settings()
    if "expandable_segments" in settings or "backend" in settings:
        return
    os.environ[name] = f"{settings},{_EXPANDABLE}" if settings else _EXPANDABLE
    _change(os.environ[name])


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Switch expandable segments off inside the block: PyTorch does not support them in pools of other allocators."""
    _, settings = _settings()
    if _EXPANDABLE not in settings:
        yield
        return
    _change(settings.replace(_EXPANDABLE, "expandable_segments:False"))
    try:
        yield
    finally:
        _change(settings)


def _settings() -> tuple[str, str]:
    """Return the variable that counts, and its value without spaces."""
    name = next((name for name in _VARIABLES if name in os.environ), _VARIABLES[0])
    return name, os.environ.get(name, "").replace(" ", "")


def _change(settings: str) -> None:
    """Change the settings of this process's allocator. The function's name depends on PyTorch's version."""
    change: Callable[[str], None] | None = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(settings)
