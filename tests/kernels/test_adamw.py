"""The one-pass AdamW: what it computes, in Triton's interpreter, and what it compiles to, without a GPU.

The checks of what it computes are in adamw_checks.py, which tests/gpu runs too.
"""

import os
import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from adamw_checks import CHECKS
from marking import full_but
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lmkit.kernels.adamw import BLOCK, WARPS, adamw_kernel, decide
from lmkit.optim import adamw

THREADS = 32 * WARPS
FAST = CHECKS.keys() - {"equals_torch"}  # a thousand steps


@pytest.mark.interpreter
@pytest.mark.parametrize("name", full_but(FAST, CHECKS))
def test_one_pass_adamw(name, monkeypatch):
    monkeypatch.setattr(adamw, "ONE_PASS_DEVICES", {"cpu"})
    CHECKS[name]("cpu")


def compile_kernel(capability, gradient, copy, factor, decided=False):
    """PTX of the kernel for float32 weights, as AdamWLaunch asks for it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on: nothing is compiled")
    constants = {"WEIGHT": tl.float32, "GRADIENT": gradient, "COPY": copy, "BLOCK": BLOCK}
    given = {"factor_pointer": factor, "decided_pointer": decided}
    constants |= {name: None for name, is_given in given.items() if not is_given}
    signature = dict.fromkeys(adamw_kernel.arg_names, "fp32") | dict.fromkeys(given, "*fp32")
    signature |= {"table_pointer": "*i64", "owner_pointer": "*i32", **dict.fromkeys(constants, "constexpr")}
    places = {(adamw_kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(index,): [["tt.divisibility", 16]] for index in (0, 1)}
    source = ASTSource(adamw_kernel, signature, places, aligned)
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("gradient", "copy", "factor"),
    [(tl.float32, None, False), (tl.float32, None, True), (tl.bfloat16, tl.bfloat16, True)],
    ids=str,
)
def test_whole_blocks_are_loaded_and_stored_16_bytes_at_a_time(capability, gradient, copy, factor):
    ptx = compile_kernel(capability, gradient, copy, factor)
    floats = BLOCK // THREADS // 4  # instructions a thread needs for its part of a float32 array
    halves = BLOCK // THREADS // 8
    of_gradient = floats if gradient == tl.float32 else halves
    assert len(re.findall(r"ld\.global\.v4", ptx)) == 3 * floats + of_gradient
    assert len(re.findall(r"st\.global\.v4", ptx)) == 3 * floats + (halves if copy else 0)


def test_the_decision_and_scalars_of_the_device(stand_in_gpu, assembled):
    """Compile, for sm_90; float64 until the scalars are rounded once."""
    scalars = [torch.zeros(()), torch.zeros(()), torch.zeros((), dtype=torch.float64)]
    decide(*scalars, torch.zeros(4, dtype=torch.float64))
    assert assembled["decide_kernel"].spills == 0
    assert "ld.global.b32" in compile_kernel(90, tl.float32, None, True, decided=True)


def test_arithmetic_is_ieee_and_unfused():
    """Roots, quotients and bf16 copies are correctly rounded; no multiply-add rounds once instead of twice."""
    ptx = compile_kernel(90, tl.bfloat16, tl.bfloat16, True)
    arithmetic = set(re.findall(r"\b((?:div|sqrt|fma|rcp|rsqrt|ex2)\.[a-z0-9.]+)", ptx))
    assert arithmetic == {"div.rn.f32", "sqrt.rn.f32"}
    conversions = set(re.findall(r"\b(cvt\.[a-z0-9.]+bf16x?2?\.f32)", ptx))
    assert conversions
    assert all(conversion.startswith("cvt.rn.") for conversion in conversions)
