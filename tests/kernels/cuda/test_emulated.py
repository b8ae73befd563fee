"""The CUDA kernels on a CPU: their source, compiled by g++ with `emulator.h` in place of the GPU's instructions."""

import ctypes
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from attention_oracle import draw_inputs, faults_of

from lmkit.attention import attention_function, reference
from lmkit.attention.run import run_attention
from lmkit.kernels.cuda import flash

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator switches threads as Linux does"),
]


@pytest.fixture
def emulate(tmp_path, monkeypatch):
    """Make flash_cuda run in the emulator, compiled for a head_dim, a dtype and an architecture."""

    def compile_and_use(head_dim, dtype, arch):
        padded = next(size for size in flash.HEAD_DIMS if size >= head_dim)
        macros = flash.macros(padded, bf16=dtype == torch.bfloat16, arch=arch, build="")
        # Without _FORTIFY_SOURCE, which takes a jump to another stack for an error.
        flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing"]
        flags += [f"-D{name}={value}" for name, value in macros.items()]
        library = tmp_path / "emulated.so"
        source = ["-I", str(flash.SOURCES), str(HERE / "emulated.cpp")]
        subprocess.run(["g++", *flags, *source, "-o", str(library)], check=True)
        code = ctypes.CDLL(str(library))

        def run(function, arguments, q, build):
            assert getattr(code, function)(ctypes.byref(arguments), None) == 0, "too much shared memory"

        monkeypatch.setattr(flash, "library_of", lambda q, build: code)
        monkeypatch.setattr(flash, "run", run)
        module = sys.modules[attention_function("flash_cuda").__module__]
        monkeypatch.setattr(module, "refuse_unsupported", lambda q: None)
        return code

    return compile_and_use


BF16, FP16 = torch.bfloat16, torch.float16
CASES = [(64, BF16, 90), (96, FP16, 90), (128, BF16, 90), (128, BF16, 80), (80, FP16, 75), (40, BF16, 86)]


@pytest.mark.parametrize(("head_dim", "dtype", "arch"), CASES, ids=str)
def test_kernels_equal_the_oracle(emulate, head_dim, dtype, arch):
    code = emulate(head_dim, dtype, arch)
    kernel = attention_function("flash_cuda")
    for causal, (queries, keys) in ((False, (70, 129)), (True, (129, 200)), (True, (200, 40))):
        sizes = {"queries": queries, "keys": keys, "head_dim": head_dim}
        inputs = draw_inputs(heads=2, kv_heads=1, **sizes, dtype=dtype)
        assert faults_of(kernel, reference, *inputs, causal=causal) == []
    assert code.take_conflicts() == 0  # of banks, in ldmatrix
    ascending = run_attention(kernel, *inputs, causal=True)
    code.set_descending(True)  # warps in another order: a missing barrier would show
    assert all(map(torch.equal, ascending, run_attention(kernel, *inputs, causal=True)))
    assert faults_of(partial(kernel, naive=True), reference, *inputs, causal=True) == []
