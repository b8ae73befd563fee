"""The settings of PyTorch's CUDA allocator: what it is told, in place of a GPU."""

import os

import pytest
import torch

from lmkit.measure.memory import expand_segments, without_expandable_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(params=[True, False], ids=["torch 2.13", "torch 2.10"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator was told, by the function's present and former name."""
    settings: list[str] = []
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    if request.param:
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    else:
        monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return settings


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["True", "False"])
def test_they_are_switched_off_with_all_other_settings_as_they_are(monkeypatch, told, name, value):
    """And are back whatever happens."""
    monkeypatch.setenv(name, f"max_split_size_mb:64, expandable_segments:{value}")

    def allocate() -> None:
        with without_expandable_segments():
            raise MemoryError(len(told))

    with pytest.raises(MemoryError, match=str(int(value == "True"))):
        allocate()
    settings = [f"max_split_size_mb:64,expandable_segments:{now}" for now in ("False", "True")]
    assert told == (settings if value == "True" else [])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "expandable_segments:True"),
        ("max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
        ("expandable_segments:False", None),
        ("backend:cudaMallocAsync", None),
    ],
)
def test_segments_expand_unless_the_environment_decides(monkeypatch, told, given, expected):
    """Later processes, and `without_expandable_segments`, read it from the environment."""
    monkeypatch.setenv(NAMES[0], given or "")
    if given is None:
        monkeypatch.delenv(NAMES[0])
    expand_segments()
    assert told == ([] if expected is None else [expected])
    assert os.environ[NAMES[0]] == (expected or given)
