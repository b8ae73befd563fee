"""What a user meets where the CUDA kernels cannot be compiled."""

import pytest
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.kernels.cuda import flash as build


@pytest.fixture(autouse=True)
def _a_machine_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def test_without_nvcc_the_hint_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name, path=None: None)
    with raises(UsageError, "attention.no_compiler", "nvcc", hint="CUDA_HOME"):
        build.library(64, bf16=True, capability=(9, 0))


def test_an_nvcc_that_fails_is_quoted_in_one_line(tmp_path):
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\necho "$@" > "$0.log"\necho fine\necho "x.cu(3): error: too new" >&2\nexit 2\n'
    )
    nvcc.chmod(0o755)
    with raises(LmkitError, "attention.build_failed", "too new"):
        build.library(80, bf16=False, capability=(8, 6), build="FORWARD_KEYS=32")
    given = (tmp_path / "bin" / "nvcc.log").read_text()
    for flag in ("arch=compute_86,code=sm_86", "-DHEAD_DIM=96", "-DBF16=0", "-DFORWARD_KEYS=32"):
        assert flag in given


@pytest.mark.parametrize("head_dim", build.HEAD_DIMS)
@pytest.mark.parametrize(("arch", "limit"), [(75, 64), (80, 163), (86, 99), (90, 227), (120, 99)])
def test_tiles_fit_into_shared_memory(head_dim, arch, limit):
    tiles = build.tiling(head_dim, arch)
    row = head_dim * 2
    queries = tiles["FORWARD_WARPS"] * tiles["FORWARD_BLOCKS"] * 16
    forward = row * (queries + 2 * tiles["FORWARD_STAGES"] * tiles["FORWARD_KEYS"])
    split, queries = tiles["BACKWARD_SPLIT"], tiles["BACKWARD_QUERIES"]
    keys = tiles["BACKWARD_WARPS"] // split * tiles["BACKWARD_BLOCKS"] * 16
    stage = queries * (2 * row + 8)
    backward = 2 * row * keys + 2 * keys * queries * split + tiles["BACKWARD_STAGES"] * stage
    assert forward <= limit * 1024
    assert backward + 128 <= limit * 1024  # its ticket has 128 bytes of its own
