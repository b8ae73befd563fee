"""The examples of CONTRIBUTING.md work: each is one file, named on the command line."""

import re
from pathlib import Path

import pytest
import torch
from tiny import tiny_recipe

from lmkit.plugins import load_plugin
from lmkit.registry import ATTENTION, STRATEGIES

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\w+\.py) -->\n```python\n(.*?)```", TEXT, re.DOTALL))
RECIPE = tiny_recipe(
    *('run.folder="artifacts/runs"', 'corpus.source="synth"', "corpus.size_mb=0.2"),
    *("tokenizer.vocab_size=300", "model.context_length=16"),
    *("train.steps=4", "train.batch_size=4", "train.eval_batches=1", "generate.max_new_tokens=8"),
)


@pytest.fixture
def example(tmp_path):
    """Write an example and a small recipe; return the example's path."""
    (tmp_path / "small.toml").write_text(RECIPE)

    def write(name: str) -> Path:
        (tmp_path / name).write_text(EXAMPLES[name])
        return tmp_path / name

    return write


@pytest.mark.full
def test_a_kernel_is_one_file(example, lmkit):
    path = example("sliding_window.py")
    load_plugin(path)
    try:
        kernel = ATTENTION.load("sliding_window")
        q, k, v = (torch.randn(2, heads, 100, 8, dtype=torch.float64) for heads in (4, 2, 2))
        # Within the window it is causal attention; a key outside the window changes nothing.
        exact = ATTENTION.load("reference")(q, k, v, causal=True)
        torch.testing.assert_close(kernel(q, k, v, causal=True)[:, :, :64], exact[:, :, :64])
        changed = v.clone()
        changed[:, :, 0] += 1
        torch.testing.assert_close(
            kernel(q, k, v, causal=True)[:, :, 64:], kernel(q, k, changed, causal=True)[:, :, 64:]
        )
    finally:
        ATTENTION.unregister("sliding_window")
    result = lmkit("run", "small.toml", "--plugin", path, "--set", "model.attention=sliding_window")
    assert result.returncode == 0, result.stderr
    refused = lmkit("run", "small.toml", "--set", "model.attention=sliding_window")
    assert (refused.returncode, "sliding_window" in refused.stderr) == (2, True)


@pytest.mark.full
def test_a_strategy_is_one_file(example, lmkit):
    path = example("every_other.py")
    data = lmkit("run", "small.toml")
    assert data.returncode == 0, data.stderr
    trained = lmkit(
        "train",
        "small.toml",
        "--nproc",
        "2",
        "--steps",
        "8",
        "--plugin",
        path,
        "--set",
        "parallel.strategy=every_other",
    )
    assert trained.returncode == 0, trained.stderr
    assert "every_other" not in STRATEGIES.names
