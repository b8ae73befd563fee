"""The portable kernels compile for the chips that we name, without a GPU, and keep their values in registers."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter is on: nothing is compiled", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lmkit.kernels.flash.backward_dkdv import dkdv_kernel
from lmkit.kernels.flash.backward_dq import dq_kernel
from lmkit.kernels.flash.forward import forward_kernel
from lmkit.kernels.flash.tuning import Case, candidate_tilings, kernel_constants, shipped_tiling

KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
READ_BY_ROWS = {"q_source", "dout_source"}


def compile_kernel(case, tiling, capability):
    """The compiled kernel, as a launch on long, aligned, causal inputs would ask for it."""
    kernel, dtype = KERNELS[case.kernel], TYPES[case.dtype]
    constants = dict(kernel_constants(case.head_dim, case.causal, case.precision, tiling))
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    constants["group"] = 1
    if "CUT" in kernel.arg_names:
        constants["CUT"] = True
    if "OF_KEYS" in kernel.arg_names:
        constants |= {"OF_KEYS": True, "OF_VALUES": not tiling.apart}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_source") and tiling.descriptors:
            rows = tiling.rows if name in READ_BY_ROWS else tiling.columns
            signature[name] = f"tensordesc<{dtype}[1, 1, {rows}, {constants['MAIN']}]>"
        elif name in ("lse_pointer", "delta_pointer"):
            signature[name] = "*fp32"
        elif name.endswith(("_source", "_pointer")):
            signature[name] = "*" + dtype
        elif name.startswith("scale"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
        if signature[name].startswith("*") or "stride" in name or name.startswith("num_"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def local_memory(compiled, folder):
    """Bytes of stack per thread: what did not fit into registers."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    report = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", report).group(1))


@pytest.mark.parametrize(("capability", "head_dim"), [(80, 128), (90, 64), (90, 80), (90, 128)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_first_candidate_stays_in_registers(kernel, capability, head_dim, tmp_path):
    case = Case(kernel, head_dim, True, torch.bfloat16, "ieee", 8192, aligned=capability >= 90)
    tiling = candidate_tilings(case, (capability // 10, capability % 10))[0]
    # 64 bytes: a few values that live across the two walks, stored and loaded once.
    assert local_memory(compile_kernel(case, tiling, capability), tmp_path) <= 64


@pytest.mark.full
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 64)],
    ids=str,
)
def test_shipped_tilings_stay_in_registers(kernel, dtype, head_dim, tmp_path):
    precision = "bf16x6" if dtype == torch.float32 else "ieee"
    case = Case(kernel, head_dim, True, dtype, precision, 8192, dtype == torch.bfloat16)
    # Triton 3.6 leaves up to 64 bytes and 3.7 up to 80 (float32); with twice the rows it is more than 600.
    assert local_memory(compile_kernel(case, shipped_tiling(case, (9, 0)), 90), tmp_path) <= 128
