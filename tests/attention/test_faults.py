"""Faults 80, 81 and 83 as a user meets them: no GPU, no Triton, a shape that no kernel takes."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from raising import raises
from tiny import RANDOM_TOKENS, tiny_recipe

from lmkit.attention import attention, check_kernel
from lmkit.errors import UsageError

RECIPE = tiny_recipe(*RANDOM_TOKENS, 'run.device="auto"', "train.steps=2", "train.batch_size=2")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error")
    assert hint.startswith("hint")
    assert all(word in done.stderr for word in words)


@pytest.mark.full
def test_every_command_refuses_cuda_without_a_gpu_and_auto_takes_the_cpu(lmkit, recipe):
    for command in (
        "train tiny.toml --device cuda --dry-run",
        "train tiny.toml --device cuda --nproc 2",
        "generate runs/run --device cuda --tokenizer none.json",
        "bench attention bench_attention_cpu --set run.device=cuda",
        "profile kineto tiny.toml --set run.device=cuda",
    ):
        assert_refused(lmkit(*command.split(), **NO_GPU), "cuda")
    auto = lmkit("train", recipe, "--device", "auto", "--json", **NO_GPU)
    assert auto.returncode == 0, auto.stderr
    assert json.loads(auto.stdout)["status"] == "finished"


@pytest.fixture
def without_triton(tmp_path: Path) -> None:
    # `-m` puts the current folder first
    (tmp_path / "triton.py").write_text("""raise ModuleNotFoundError("No module", name="triton")""")


@pytest.mark.full
@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("setting", ["model.attention=flash_triton", "model.operations=fused"])
def test_without_triton_what_needs_it_is_refused(setting, lmkit, recipe, tmp_path):
    refused = lmkit("train", recipe, "--set", setting)
    assert_refused(refused, "registry.not_installed", setting.partition("=")[2], "pip install triton")
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
@pytest.mark.usefixtures("without_triton")
def test_without_triton_all_else_works(lmkit, recipe):
    done = lmkit("train", recipe, "--set", "model.attention=flash_torch")
    assert done.returncode == 0, done.stderr
    facts = lmkit("env")
    assert facts.returncode == 0, facts.stderr
    assert "flash_torch" in facts.stdout


@pytest.mark.parametrize(
    ("head_dim", "dtype", "wrong"), [(258, torch.float32, "head_dim 258"), (16, torch.float64, "float64")]
)
def test_an_unsupported_head_dim_or_dtype_lists_what_is_supported(head_dim, dtype, wrong):
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    q = torch.randn(1, 1, 4, head_dim, dtype=dtype)
    for call in (check_kernel, lambda name, q: attention(q, q, q, kernel=name)):
        with raises(
            UsageError, "attention.unsupported", wrong, hint="head_dim 1 to 256; float32, float16, bfloat16"
        ):
            call("flash_triton", q)
