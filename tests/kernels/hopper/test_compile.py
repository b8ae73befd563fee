"""Every shipped Hopper configuration compiles for sm_90 without a GPU, within its registers and unserialised.

Gluon kernels cannot be interpreted, so on a machine without a Hopper GPU this is all that can be known
about them. It is not little: a spill in the main loop, or ptxas giving up the overlap of the tensor cores'
products (its notes C7510 to C7519), costs more speed than any other mistake, and both show here.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="the Hopper kernels need triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from lmkit.kernels.hopper.backward import CONFIGS, CONSUMER_REGISTERS  # noqa: E402
from lmkit.kernels.hopper.backward import REGISTERS as BACKWARD_REGISTERS  # noqa: E402
from lmkit.kernels.hopper.backward_dkdv_d128 import dkdv_d128_kernel  # noqa: E402
from lmkit.kernels.hopper.backward_dkdv_d256 import dkdv_d256_kernel  # noqa: E402
from lmkit.kernels.hopper.backward_dq import dq_kernel  # noqa: E402
from lmkit.kernels.hopper.backward_dqdkdv_d64 import dqdkdv_d64_kernel  # noqa: E402
from lmkit.kernels.hopper.forward import (  # noqa: E402
    HEAD_DIM_64,
    HEAD_DIM_64_SHORT,
    HEAD_DIM_128,
    HEAD_DIM_256,
    REGISTERS,
    forward_kernel,
)
from lmkit.kernels.hopper.support import used_of, width_of  # noqa: E402
from lmkit.kernels.hopper.tma import shared_layout  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

# Spilled bytes a thread, as measured, the larger of both minors (all outside of the main loops or at
# their rim); what is not listed spills nothing. Keys: kernel, head_dim, causal, tail, and its consumers
# (forward), whether dQ is added up (key_value) or the type (narrow).
STATED_SPILLS = {
    ("narrow", 64, False, False, torch.bfloat16): 36,
    ("narrow", 64, False, True, torch.bfloat16): 32,
    ("narrow", 64, True, False, torch.bfloat16): 28,
    ("narrow", 64, True, True, torch.bfloat16): 28,
    ("narrow", 64, False, False, torch.float16): 56,
    ("narrow", 64, False, True, torch.float16): 52,
    ("narrow", 64, True, False, torch.float16): 44,
    ("narrow", 64, True, True, torch.float16): 44,
    ("narrow", 128, False, False, torch.bfloat16): 28,
    ("narrow", 128, False, True, torch.bfloat16): 28,
}
MOST_SPILLS = 64


def descriptor(box, dtype):
    return f"tensordesc<{TYPE_NAMES[dtype]}[{', '.join(map(str, box))}],{shared_layout(box, dtype)!r}>"


def compile_kernel(kernel, types, constants, num_warps, registers):
    """The PTX of a kernel whose parameters have these types, then these constants, in order."""
    names = kernel.arg_names
    assert len(names) == len(types) + len(constants)
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    first = len(types)
    values = {(first + i,): value for i, value in enumerate(constants)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")}
    source = GluonASTSource(kernel, signature, values, aligned)
    options = {"num_warps": num_warps, "maxnreg": registers}
    return triton.compile(source, target=HOPPER, options=options).asm["ptx"]


def compile_forward(head_dim, config, causal, tail, dtype):
    width, used = width_of(head_dim), used_of(head_dim)
    rows, keys = descriptor((1, 1, 64, width), dtype), descriptor((1, 1, config.keys, width), dtype)
    registers, consumer_registers = REGISTERS[config.consumers]
    types = [rows, keys, keys, rows, "*fp32", *["i32"] * 6, "fp32"]
    constants = (width, used, config.keys, config.stages, causal, tail, config.consumers)
    constants += (config.own_o, consumer_registers)
    return compile_kernel(forward_kernel, types, constants, 4, registers)


def compile_key_value_gradient(head_dim, causal, tail, add_dq, dtype):
    width, used = width_of(head_dim), used_of(head_dim)
    config = CONFIGS[width]
    rows, keys = descriptor((1, 1, config.queries, width), dtype), descriptor((1, 1, 128, width), dtype)
    flat = descriptor((config.queries,), torch.float32)
    dq_sum = descriptor((config.queries * width // 32, 32), torch.float32)
    types = [rows, keys, keys, rows, flat, flat, keys, keys, dq_sum, *["i32"] * 9, *["fp32"] * 2]
    constants = (config.queries, width, used, causal, tail, add_dq, config.packed_p)
    return compile_kernel(dkdv_d128_kernel, types, constants, 8, BACKWARD_REGISTERS)


def compile_narrow_gradient(head_dim, causal, tail, dtype):
    step = CONFIGS[head_dim].queries
    queries, keys = descriptor((1, 1, step, head_dim), dtype), descriptor((1, 1, 64, head_dim), dtype)
    flat = descriptor((step,), torch.float32)
    dq_sum = descriptor((128, 32) if head_dim == 64 else (4, 32, 32), torch.float32)
    types = [queries, keys, keys, queries, flat, flat, keys, keys, dq_sum, *["i32"] * 9, *["fp32"] * 2]
    constants = (causal, tail, CONSUMER_REGISTERS)
    return compile_kernel(dqdkdv_d64_kernel, types, constants, 4, BACKWARD_REGISTERS)


def compile_query_gradient(head_dim, causal, tail, dtype):
    width, used = width_of(head_dim), used_of(head_dim)
    config = CONFIGS[width]
    rows = descriptor((1, 1, 128, width), dtype)
    keys = descriptor((1, 1, config.query_keys, width), dtype)
    pointers = ["*fp32", "*fp32", "*fp32", f"*{TYPE_NAMES[dtype]}", "i64", "i64", "i64"]
    types = [rows, keys, keys, rows, rows, *pointers, *["i32"] * 8, *["fp32"] * 2]
    stages = (config.query_k_stages, config.query_v_stages)
    constants = (width, head_dim, used, config.query_keys, *stages, causal, tail)
    return compile_kernel(dq_kernel, types, constants, 8, BACKWARD_REGISTERS)


def compile_wide_gradient(causal, dtype, head_dim=256):
    tile, flat = descriptor((1, 1, 64, 256), dtype), descriptor((64,), torch.float32)
    types = [*[tile] * 4, flat, flat, tile, tile, *["i32"] * 9, *["fp32"] * 2]
    constants = (256, used_of(head_dim), causal, CONSUMER_REGISTERS)
    return compile_kernel(dkdv_d256_kernel, types, constants, 4, BACKWARD_REGISTERS)


def assemble(ptx, folder):
    """(spilled bytes a thread, notes about serialised products) from ptxas."""
    path = folder / "kernel.ptx"
    path.write_text(ptx)
    command = [str(PTXAS), "-v", "-arch=sm_90a", str(path), "-o", str(folder / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = [int(stored) for stored in re.findall(r"(\d+) bytes spill stores", report)]
    assert spills, report
    return max(spills), re.findall(r"C751\d", report)


FORWARD = [
    pytest.param(head_dim, config, causal, tail, id=f"{head_dim}-{name}-{causal}-{tail}")
    for head_dim, name, config in (
        (64, "long", HEAD_DIM_64),
        (64, "short", HEAD_DIM_64_SHORT),
        (128, "all", HEAD_DIM_128),
        (256, "all", HEAD_DIM_256),
    )
    for causal, tail in ((False, False), (False, True), (True, False))
]
BACKWARD = [
    pytest.param(head_dim, causal, tail, id=f"{head_dim}-{causal}-{tail}")
    for head_dim in (64, 128)
    for causal in (False, True)
    for tail in (False, True)
]
NARROW = [(64, causal, dtype) for causal in (False, True) for dtype in (torch.bfloat16, torch.float16)]
NARROW += [(128, False, torch.bfloat16)]
KEY_VALUE = [  # the fast way of head_dim 64 is dqdkdv_d64_kernel's alone
    pytest.param(head_dim, causal, tail, add_dq, id=f"{head_dim}-{causal}-{tail}-{way}")
    for head_dim, add_dq, way in (
        (64, False, "deterministic"),
        (128, False, "deterministic"),
        (128, True, "adding"),
    )
    for causal in (False, True)
    for tail in (False, True)
]
BACKWARD_256 = [
    pytest.param(256, causal, tail, id=f"256-{causal}-{tail}")
    for causal in (False, True)
    for tail in (False, True)
]
FILLED_UP = [40, 80, 96, 136, 192]  # narrower than the kernels: loads of O are masked, products are split


@pytest.mark.parametrize(("head_dim", "config", "causal", "tail"), FORWARD)
def test_forward(head_dim, config, causal, tail, tmp_path):
    spills, serialised = assemble(compile_forward(head_dim, config, causal, tail, torch.bfloat16), tmp_path)
    assert not serialised
    assert spills <= STATED_SPILLS.get(("forward", head_dim, causal, tail, config.consumers), 0)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(("head_dim", "causal", "dtype"), NARROW)
def test_narrow_gradient(head_dim, causal, tail, dtype, tmp_path):
    spills, serialised = assemble(compile_narrow_gradient(head_dim, causal, tail, dtype), tmp_path)
    assert not serialised
    assert spills <= STATED_SPILLS.get(("narrow", head_dim, causal, tail, dtype), 0)


@pytest.mark.parametrize(("head_dim", "causal", "tail", "add_dq"), KEY_VALUE)
def test_key_value_gradient(head_dim, causal, tail, add_dq, tmp_path):
    ptx = compile_key_value_gradient(head_dim, causal, tail, add_dq, torch.bfloat16)
    spills, serialised = assemble(ptx, tmp_path)
    assert not serialised
    assert spills <= STATED_SPILLS.get(("key_value", head_dim, causal, tail, add_dq), 0)


@pytest.mark.parametrize("causal", [False, True])
def test_wide_gradient(causal, tmp_path):
    spills, serialised = assemble(compile_wide_gradient(causal, torch.bfloat16), tmp_path)
    assert not serialised
    assert spills == 0


@pytest.mark.parametrize(("head_dim", "causal", "tail"), [*BACKWARD, *BACKWARD_256])
def test_query_gradient(head_dim, causal, tail, tmp_path):
    spills, serialised = assemble(compile_query_gradient(head_dim, causal, tail, torch.bfloat16), tmp_path)
    assert not serialised
    assert spills <= STATED_SPILLS.get(("query", head_dim, causal, tail), 0)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float16(head_dim, tmp_path):
    config = {64: HEAD_DIM_64, 128: HEAD_DIM_128, 256: HEAD_DIM_256}[head_dim]
    for ptx in (
        compile_forward(head_dim, config, True, False, torch.float16),
        compile_wide_gradient(True, torch.float16)
        if head_dim == 256
        else compile_key_value_gradient(head_dim, True, False, head_dim == 128, torch.float16),
        compile_query_gradient(head_dim, True, False, torch.float16),
    ):
        spills, serialised = assemble(ptx, tmp_path)
        assert spills <= MOST_SPILLS
        assert not serialised


def test_stated_spills_are_small():
    assert max(STATED_SPILLS.values(), default=0) <= MOST_SPILLS


def count_products(ptx):
    return len(re.findall(r"^\s*wgmma.mma_async", ptx, re.MULTILINE))


@pytest.mark.parametrize("head_dim", FILLED_UP)
def test_heads_between_widths(head_dim, tmp_path):
    """They are as good as the full width, with fewer products: that of zeros is left out of S and dP."""
    config = {64: HEAD_DIM_64, 128: HEAD_DIM_128, 256: HEAD_DIM_256}[width_of(head_dim)]

    def compiled(head_dim):
        yield compile_forward(head_dim, config, True, False, torch.bfloat16)
        yield compile_query_gradient(head_dim, True, False, torch.bfloat16)
        if config is HEAD_DIM_256:
            yield compile_wide_gradient(True, torch.bfloat16, head_dim)
        else:
            add_dq = config is HEAD_DIM_128
            yield compile_key_value_gradient(head_dim, True, False, add_dq, torch.bfloat16)

    for ptx, full in zip(compiled(head_dim), compiled(width_of(head_dim)), strict=True):
        assert assemble(ptx, tmp_path) == (0, [])
        assert count_products(ptx) < count_products(full)
