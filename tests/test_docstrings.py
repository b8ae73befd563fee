"""The examples in docstrings run."""

import doctest
import importlib
from pathlib import Path

import pytest

import lmkit

ROOT = Path(lmkit.__file__).parent
EXAMPLES = [
    *("attention.dispatch", "core.attention", "core.bpe", "core.sampling", "model.accounting", "core.model"),
    *("core.step", "core.loss", "model.transformer", "core.adamw", "core.schedule", "tokenizer"),
    *(f"tokenizer.{path.stem}" for path in ROOT.glob("tokenizer/[a-z]*.py")),
]
# core.bpe has one of learning; a vocabulary is read from recipes and files.
WITHOUT = ("tokenizer.merge_learner", "tokenizer.vocabulary")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    globs = {}
    if not name.startswith("tokenizer"):
        globs["torch"] = pytest.importorskip("torch")
        globs["torch"].manual_seed(0)
    done = doctest.testmod(importlib.import_module(f"lmkit.{name}"), extraglobs=globs)
    assert done.attempted or name in WITHOUT, "no example left"
    assert not done.failed
