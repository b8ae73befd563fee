"""Faults 80, 81 and 83 as a user meets them: no GPU, no Triton, a shape that no kernel takes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Lmkit = Callable[..., "subprocess.CompletedProcess[str]"]

RECIPE = """
[run]
folder = "runs"
[data]
source = "random"
[model]
vocab_size = 64
d_model = 16
d_ff = 32
num_layers = 1
num_heads = 2
context_length = 8
[train]
steps = 2
batch_size = 2
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "hint"], done.stderr
    for word in words:
        assert word in done.stderr


def test_fault_80_cuda_without_a_gpu_is_refused_and_auto_takes_the_cpu(
    lmkit: Lmkit, recipe: Path, tmp_path: Path
) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    for more in (("--dry-run",), ("--nproc", "2")):
        refused = lmkit("train", recipe, "--device", "cuda", *more, **hidden)
        assert_refused(refused, "cuda was asked for", "no GPU", "--device cpu")
    assert list(tmp_path.iterdir()) == [recipe]
    auto = lmkit("train", recipe, "--device", "auto", "--json", **hidden)
    assert auto.returncode == 0, auto.stderr
    assert json.loads(auto.stdout)["status"] == "finished"
    for command in (
        ("generate", "runs/run", "--device", "cuda", "--tokenizer", "none.json"),
        ("bench", "attention", "bench_attention_cpu", "--set", "run.device=cuda"),
        ("bench", "model", "bench_model_cpu", "--set", "run.device=cuda"),
        ("profile", "kineto", recipe, "--set", "run.device=cuda"),
    ):
        assert_refused(lmkit(*command, **hidden), "cuda was asked for", "no GPU")


def test_fault_81_without_triton_flash_triton_is_refused_and_all_else_works(
    lmkit: Lmkit, recipe: Path, tmp_path: Path
) -> None:
    # Stands before the installed one (`-m` puts the current folder first), and fails as a missing module does.
    (tmp_path / "triton.py").write_text(
        'raise ModuleNotFoundError("No module named \'triton\'", name="triton")\n'
    )
    refused = lmkit("train", recipe, "--set", 'model.attention="flash_triton"')
    assert_refused(refused, "flash_triton needs Triton", "pip install triton")
    assert not (tmp_path / "runs").exists()
    done = lmkit("train", recipe, "--set", 'model.attention="flash_torch"')
    assert done.returncode == 0, done.stderr
    facts = lmkit("env")
    assert facts.returncode == 0, facts.stderr
    assert "flash_torch" in facts.stdout


def test_fault_83_an_unsupported_head_dim_or_dtype_lists_what_is_supported(
    lmkit: Lmkit, recipe: Path, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    kernel = ("--set", 'model.attention="flash_triton"')
    refused = lmkit("train", recipe, *kernel, "--set", "model.d_model=516")
    assert_refused(refused, "head_dim 258", "head_dim 1 to 256; float32, float16, bfloat16")
    assert list(tmp_path.iterdir()) == [recipe]
    import torch

    from lmkit.attention import attention_function
    from lmkit.errors import UsageError

    q = torch.randn(1, 1, 4, 16, dtype=torch.float64)
    with pytest.raises(UsageError, match="float64") as caught:
        attention_function("flash_triton")(q, q, q, causal=True)
    assert "float32, float16, bfloat16" in caught.value.hint
