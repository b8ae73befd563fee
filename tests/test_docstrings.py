"""The examples in public docstrings run."""

import doctest
import importlib

import pytest
import torch

EXAMPLES = [
    "attention.dispatch",
    "core.attention",
    "core.bpe",
    "core.sampling",
    "model.accounting",
    "core.model",
    "core.step",
    "core.loss",
    "model.transformer",
    "core.adamw",
    "core.schedule",
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    module = importlib.import_module(f"lmkit.{name}")
    torch.manual_seed(0)
    done = doctest.testmod(module, extraglobs={"torch": torch})
    assert done.attempted, "no example left"
    assert not done.failed
