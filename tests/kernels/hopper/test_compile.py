"""Every Hopper kernel that the launchers choose compiles for sm_90, within its registers and unserialised.

Gluon kernels cannot be interpreted, so without a Hopper GPU this is all that can be known about them. It is not
little: a spill in the main loop, or ptxas giving up the overlap of the tensor cores' products (its notes C7510 to
C7519), costs more speed than any other mistake, and both show here.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="the Hopper kernels need triton")

from lmkit.kernels.versions import INSTALLED_MINOR

# Spilled bytes a thread that are known: values that are stored once and loaded outside of the main loops or at their
# rim. Other kernels spill nothing.
KNOWN_SPILLS = {
    ("dqdkdv_staggered_kernel", torch.bfloat16): 36,
    ("dqdkdv_staggered_kernel", torch.float16): 64,
    ("dqdkdv_lockstep_kernel", torch.float16): 12,
}
# The same with `first`: numbers that are loaded once a step.
KNOWN_SPILLS_OF_FIRST = {
    ("dqdkdv_staggered_kernel", torch.bfloat16): 168,
    ("dqdkdv_staggered_kernel", torch.float16): 228,
    ("dqdkdv_lockstep_kernel", torch.bfloat16): 32,
    ("dqdkdv_lockstep_kernel", torch.float16): 36,
}
if INSTALLED_MINOR >= (3, 8):
    for dtype in (torch.bfloat16, torch.float16):
        # four arguments, at head_dim 256 with a causal mask
        KNOWN_SPILLS["forward_kernel", dtype] = KNOWN_SPILLS_OF_FIRST["forward_kernel", dtype] = 16
    KNOWN_SPILLS["dqdkdv_staggered_kernel", torch.float16] = 80
if INSTALLED_MINOR == (3, 8):  # 3.6 and 3.9 spill at most 168
    KNOWN_SPILLS_OF_FIRST["dqdkdv_staggered_kernel", torch.bfloat16] = 204


@pytest.fixture
def compile_pass(launcher, assembled):
    """Compiles the kernels of a forward and a backward pass: kernel -> Report."""

    def compiled(head_dim, length, causal, dtype, deterministic, first=None):
        assembled.clear()
        q, k, v, dout = (torch.zeros(1, 1, length, head_dim, dtype=dtype) for _ in range(4))
        options = {"causal": causal, "scale": 0.125, "first": first}
        out, lse = launcher.forward(q, k, v, **options)
        launcher.backward(dout, q, k, v, out, lse, **options, deterministic=deterministic)
        return dict(assembled)

    return compiled


def check(reports, dtype, known=KNOWN_SPILLS):
    assert "forward_kernel" in reports
    reports.pop("last_queries_kernel", None)
    assert len(reports) in (3, 4)
    for kernel, report in reports.items():
        assert not report.serialised, kernel
        assert report.spills <= known.get((kernel, dtype), 0), kernel


BF16, FP16 = torch.bfloat16, torch.float16
# Lengths with and without a tail; at head_dim 64, and 128 without a mask, long sequences have kernels of their own.
CASES = [
    *itertools.product([64], [128, 200, 2048, 2100], [False, True], [BF16], [False, True]),
    *itertools.product([128], [128, 200], [False, True], [BF16], [False, True]),
    *itertools.product([128], [2048, 2100], [False], [BF16], [False]),
    *itertools.product([256], [128, 200], [False, True], [BF16], [True]),
    *itertools.product([64], [2100], [True, False], [FP16], [False, True]),
    *itertools.product([128], [200], [True], [FP16], [False, True]),
    *itertools.product([256], [200], [True], [FP16], [True]),
]


HIDING = itertools.product([64, 128, 256], [200, 2048], [True], [BF16, FP16], [False, True])


@pytest.mark.full
@pytest.mark.parametrize(
    ("head_dim", "length", "causal", "dtype", "deterministic", "known"),
    [*((*case, KNOWN_SPILLS) for case in CASES), *((*case, KNOWN_SPILLS_OF_FIRST) for case in HIDING)],
    ids=str,
)
def test_all_kernels(compile_pass, head_dim, length, causal, dtype, deterministic, known):
    """Also those that hide documents."""
    first = torch.zeros(1, length, dtype=torch.int32) if known is KNOWN_SPILLS_OF_FIRST else None
    check(compile_pass(head_dim, length, causal, dtype, deterministic, first), dtype, known)


@pytest.mark.full
@pytest.mark.parametrize(("head_dim", "width"), [(40, 64), (80, 128), (96, 128), (136, 256), (192, 256)])
def test_heads_between_widths(compile_pass, head_dim, width):
    """They take fewer products than the full width: those of zeros are left out of S and dP."""
    narrow = compile_pass(head_dim, 200, True, torch.bfloat16, True)
    check(narrow, torch.bfloat16)
    full = compile_pass(width, 200, True, torch.bfloat16, True)
    for kernel, report in narrow.items():
        assert report.products < full[kernel].products, kernel
