"""The examples of CONTRIBUTING.md work: each is one file, named on the command line; a switch of the model, three."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from programs import run_program
from tiny import tiny_recipe

from lmkit.plugins import load_plugin
from lmkit.registry import ATTENTION, STRATEGIES

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: ([\w.]+) -->\n```\w+\n(.*?)```", TEXT, re.DOTALL))
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
    result = lmkit("run", "small.toml", "--plugin", path, "--set", "model.attention=sliding_window")
    assert result.returncode == 0, result.stderr
    refused = lmkit("run", "small.toml", "--set", "model.attention=sliding_window")
    assert (refused.returncode, "sliding_window" in refused.stderr) == (2, True)


@pytest.mark.full
def test_a_strategy_is_one_file(example, lmkit):
    path = example("every_other.py")
    data = lmkit("run", "small.toml")
    assert data.returncode == 0, data.stderr
    options = ("--nproc", "2", "--steps", "8", "--plugin", path, "--set", "parallel.strategy=every_other")
    trained = lmkit("train", "small.toml", *options)
    assert trained.returncode == 0, trained.stderr
    assert "every_other" not in STRATEGIES.names


SWITCHED = """
import sys

import torch
from live_memory import LiveMemory

from lmkit.core.sampling import Sampling
from lmkit.errors import UsageError
from lmkit.generation import Decoder
from lmkit.model import ModelConfig, Operations, TransformerLM, count_parameters, flops_per_token
from lmkit.model.hugging_face import config_json
from lmkit.model.memory import Held, step_memory
from lmkit.registry import OPERATIONS
from lmkit.training.plan import form_of

OPERATIONS.register("others", devices=("cpu",))(type("Others", (Operations,), {}))  # computes blocks in parts
SIZES = {"vocab_size": 80, "context_length": 32, "d_model": 32, "d_ff": 80, "num_layers": 3, "num_heads": 4}
ids, losses = torch.randint(80, (4, 32)), set()
for fields in ({}, {"operations": "others"}, {"activation_checkpointing": "block"}):
    config = ModelConfig(**SIZES, post_norm=True, **fields)
    torch.manual_seed(0)
    model = TransformerLM(config)
    assert count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())
    planned = step_memory(config, form_of(config, "fp32", "cpu"), Held(), tokens=ids.numel())
    with LiveMemory() as memory:
        loss = model.loss(ids, ids)
        assert memory.live - loss.nbytes == sum(planned.activations.values()) + planned.loss
    loss.backward()
    losses.add((loss.item(), model.layers[0].norm1.weight.grad.sum().item()))
assert len(losses) == 1
assert flops_per_token(config, 32) - flops_per_token(config.changed(post_norm=False), 32) == 6 * 2 * 3 * 32
decoder = Decoder(model, 1, sampling=Sampling(0.0), most=9)
decoder.start([0], [ids[0, :9].tolist()], seeds=[0])
with torch.inference_mode():
    torch.testing.assert_close(decoder._step(9), model(ids[:1, :9])[:, -1], rtol=1e-4, atol=1e-4)
try:
    config_json(config, dtype="float32", begin=None, end=None)
    sys.exit("an export was not refused")
except UsageError as error:
    assert "model.post_norm" in str(error)
"""


@pytest.mark.full
def test_a_switch_of_the_model_is_three_files(tmp_path):
    patch = EXAMPLES["post_norm.patch"]
    files = re.findall(r"^\+\+\+ b/(.*)$", patch, re.MULTILINE)
    assert files == ["lmkit/recipe/tables.py", "lmkit/core/model.py", "tests/model/test_post_norm.py"]
    for part in ("lmkit", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "small.toml").write_text(RECIPE)
    path = f"{tmp_path}{os.pathsep}{tmp_path / 'tests' / 'shared'}"

    def run(*command: str, stdin: str | None = None) -> None:
        done = run_program(*command, cwd=tmp_path, stdin=stdin, PYTHONPATH=path)
        assert done.returncode == 0, done.stdout + done.stderr

    run("git", "apply", "-", stdin=patch)
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", files[2])
    run(sys.executable, "-c", SWITCHED)
    run(sys.executable, "-m", "lmkit", "run", "small.toml", "--set", "model.post_norm=true")
