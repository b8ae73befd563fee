"""The portable kernels compile for the chips that we name, without a GPU, and keep their values in registers."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget

from lmkit.kernels.flash import backward, forward
from lmkit.kernels.flash.tuning import KERNELS, Case, candidate_tilings, shipped_tiling


@pytest.fixture
def compile_pass(stand_in_gpu, assembled):
    """Compiles the kernels of a causal forward and backward pass with these tilings: kernel -> Report."""

    def compiled(head_dim, dtype, precision, tilings, capability=90, first=None):
        stand_in_gpu.target = GPUTarget("cuda", capability, 32)
        options = {"causal": True, "scale": 0.125, "precision": precision, "first": first}
        q, k, v, dout = (torch.zeros(1, 1, 128, head_dim, dtype=dtype) for _ in range(4))
        out, lse = forward.flash_forward(q, k, v, tiling=tilings[0], **options)
        backward.flash_backward(
            dout, q, k, v, out, lse, dq_tiling=tilings[1], dkdv_tiling=tilings[2], **options
        )
        searched = set() if first is None else {"last_queries_kernel"}
        assert set(assembled) == {"forward_kernel", "dq_kernel", "dkdv_kernel"} | searched
        return assembled

    return compiled


def cases(head_dim, dtype, precision, aligned):
    return [Case(kernel, head_dim, True, dtype, precision, 8192, aligned) for kernel in KERNELS]


@pytest.mark.full
@pytest.mark.parametrize(("capability", "head_dim"), [(90, 64), (80, 128), (90, 80), (90, 128)])
def test_first_candidates_stay_in_registers(compile_pass, capability, head_dim):
    chip = (capability // 10, capability % 10)
    shapes = cases(head_dim, torch.bfloat16, "ieee", aligned=capability >= 90)
    tilings = [candidate_tilings(case, chip)[0] for case in shapes]
    for kernel, report in compile_pass(head_dim, torch.bfloat16, "ieee", tilings, capability).items():
        # A few values that live across the two walks, stored and loaded once.
        assert report.spills <= 64, kernel


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "head_dim", "windows", "most"),
    # bfloat16 leaves up to 12 bytes and float32 up to 112, by the minor of Triton; twice the rows, more than 600.
    [*((torch.bfloat16, size, False, 128) for size in (64, 128, 256)), (torch.float32, 64, False, 128),
     (torch.bfloat16, 64, True, 64)],
    ids=str,
)  # fmt: skip
def test_shipped_tilings_stay_in_registers(compile_pass, dtype, head_dim, windows, most):
    precision = "bf16x6" if dtype == torch.float32 else "ieee"
    shapes = cases(head_dim, dtype, precision, dtype == torch.bfloat16)
    tilings = [shipped_tiling(case, (9, 0)) for case in shapes]
    first = torch.zeros(1, 128, dtype=torch.int32) if windows else None
    for kernel, report in compile_pass(head_dim, dtype, precision, tilings, first=first).items():
        assert report.spills <= most, kernel
