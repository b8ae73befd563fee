"""Call the CUDA kernels, and compile them on first use: a library for each head_dim, dtype and architecture.

nvcc alone is needed. The library has a C interface and is called through ctypes, so that no header of PyTorch is
read: a build takes seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lmkit.errors import LmkitError, UsageError
from lmkit.kernels.launch import capability, empty_in_order_of, selected
from lmkit.storage.compiled import load_compiled

HEAD_DIMS = (32, 64, 96, 128)
"""What the kernels are compiled for; others are padded with zeros to the next one."""

SOURCES = Path(__file__).parent

STEPS = {"SWIZZLE": 1, "CAUSAL_SKIP": 1, "FORWARD_LAG": 0}
"""Steps of README.md that can be left out or added, to see what each gives."""


def tiling(head_dim: int, arch: int) -> dict[str, int]:
    """Return the tile sizes for a padded head_dim on an architecture (75, 80, 90...), as macros; see the kernels."""
    wide = head_dim > 64
    found = {
        "FORWARD_WARPS": 4, "FORWARD_BLOCKS": 2, "FORWARD_KEYS": 64, "FORWARD_STAGES": 2, "FORWARD_CTAS": 2,
        "FORWARD_Q_KEPT": int(not wide),
        "BACKWARD_WARPS": 8, "BACKWARD_BLOCKS": 1 if wide else 2, "BACKWARD_QUERIES": 64, "BACKWARD_PART": 32,
        "BACKWARD_DQ_BLOCKS": 2 if head_dim in (64, 128) else 1, "BACKWARD_STAGES": 2, "BACKWARD_CTAS": 1,
        "BACKWARD_SPLIT": 1, "BACKWARD_HELPERS": 0, "BACKWARD_LATE": int(wide),
    }  # fmt: skip
    if arch == 90:
        found |= {"BACKWARD_HELPERS": 4, "BACKWARD_STAGES": 3}
        if wide:
            found |= {"BACKWARD_BLOCKS": 2, "BACKWARD_SPLIT": 2}
        elif head_dim == 64:
            found |= {"BACKWARD_QUERIES": 128, "BACKWARD_STAGES": 2}
    if arch not in (80, 87, 90, 100, 101, 103):  # less shared memory: 99 KiB for a CTA, or 64 on sm_75
        stages = 1 if arch < 80 else 2
        found |= {
            "FORWARD_STAGES": stages, "FORWARD_CTAS": 1, "BACKWARD_WARPS": 4, "BACKWARD_QUERIES": 32,
            "BACKWARD_DQ_BLOCKS": 1, "BACKWARD_STAGES": stages, "BACKWARD_CTAS": 1,
        }  # fmt: skip
    return found


def macros(head_dim: int, *, bf16: bool, arch: int, build: str) -> Mapping[str, str | int]:
    """Return what the source is compiled with; `build` names exceptions: "SWIZZLE=0,FORWARD_KEYS=32"."""
    given = dict(part.split("=") for part in build.split(",") if part)
    return {"HEAD_DIM": head_dim, "BF16": int(bf16), **STEPS, **tiling(head_dim, arch), **given}


@cache
def library(head_dim: int, *, bf16: bool, capability: tuple[int, int], build: str = "") -> ctypes.CDLL:
    """Return the compiled kernels; compile them if this machine has not yet. UsageError: nvcc is missing; LmkitError:
    it failed.

    Args:
        head_dim: of the inputs, at most the last of HEAD_DIMS.
        build: exceptions from the macros; "PTX=75" among them compiles for sm_75, as PTX that newer GPUs run, too.
    """
    padded = next(size for size in HEAD_DIMS if size >= head_dim)
    arch = 10 * capability[0] + capability[1]
    suffix = "a" if arch == 90 else ""  # setmaxnreg
    target = f"arch=compute_{arch}{suffix},code=sm_{arch}{suffix}"
    ptx, _, rest = build.partition("PTX=75")
    if rest or ptx != build:
        arch, target, build = 75, "arch=compute_75,code=compute_75", (ptx + rest).strip(",")
    flags = ["-shared", "-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-gencode", target]
    defined = macros(padded, bf16=bf16, arch=arch, build=build)
    flags += [f"-D{name}={value}" for name, value in defined.items()]
    compiler = nvcc()
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cu", ".cuh"))
    ingredients = [compiler, *flags, platform.platform(), *(source.read_text("utf-8") for source in sources)]
    name = f"flash-{padded}-{hashlib.sha256('0'.join(ingredients).encode()).hexdigest()[:16]}"

    def compile_to(path: Path) -> None:
        command = [compiler, *flags, "-o", str(path), str(SOURCES / "flash.cu")]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            lines = (done.stderr + done.stdout).splitlines() or ["it said nothing"]
            words = next((line for line in lines if "error" in line.lower()), lines[-1])
            message = f"flash_cuda: {compiler} failed with exit code {done.returncode}: {words.strip()[:200]}"
            hint = "the toolkit has to know this GPU and this C++ compiler; or choose flash_triton or sdpa"
            raise LmkitError("attention.build_failed", message, hint=hint)

    code = load_compiled(name, compile_to, what="flash_cuda")
    for name in ("forward", "backward", "naive_forward", "naive_backward"):
        getattr(code, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    code.error_text.restype, code.error_text.argtypes = ctypes.c_char_p, [ctypes.c_int]
    return code


def nvcc() -> str:
    """Return the path of nvcc: below CUDA_HOME, on the PATH, or where the toolkit installs itself."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [shutil.which("nvcc", path=f"{home}/bin") for home in homes if home]
    path = found[0] or shutil.which("nvcc") or found[-1]
    if path is None:
        message = "flash_cuda needs nvcc, the compiler of the CUDA toolkit, which was not found"
        hint = "install the toolkit and set CUDA_HOME, or choose flash_triton or sdpa"
        raise UsageError("attention.no_compiler", message, hint=hint)
    return path


# Calls: tensors -> arguments -> launch on the current stream

LOG2_E = 1.44269504089


class Matrix(ctypes.Structure):
    """`Matrix` of tiles.cuh: an address, and strides in elements."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row"))]


class Arguments(ctypes.Structure):
    """`Arguments` of tiles.cuh."""

    _fields_ = [
        *((name, Matrix) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("lse", "statistics", "dq_sum", "turns")),
        *((name, ctypes.c_int) for name in ("batch", "heads", "kv_heads", "num_queries", "num_keys")),
        *((name, ctypes.c_int) for name in ("head_dim", "causal")),
        *((name, ctypes.c_float) for name in ("scale", "scale_log2")),
    ]


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, naive: bool = False, build: str = ""
) -> tuple[Tensor, Tensor]:
    """Return the attention of q over k and v, and the log-sum-exp of its scores, (batch, heads, num_queries) float32.

    Args:
        q: (batch, heads, num_queries, head_dim), k and v: (batch, kv_heads, num_keys, head_dim), float16 or bfloat16,
            head_dim a multiple of 8 up to 128, num_keys > 0. Strided inputs are read in place if 16 bytes of a row
            can be read at once, otherwise copied.
        scale: positive.
        naive: run naive.cuh.
        build: see `library`.
    """
    q, k, v = (in_place(x) for x in (q, k, v))
    out = empty_in_order_of(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    arguments = of_call(causal, scale, lse, q=q, k=k, v=v, out=out)
    run("naive_forward" if naive else "forward", arguments, q, build)
    return out, lse


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    naive: bool = False,
    build: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), in the memory order of q, k, v; the same bits on every run. Arguments as `flash_forward`'s
    and what it returned."""
    dout, q, k, v, out = (in_place(x) for x in (dout, q, k, v, out))
    dq, dk, dv = (empty_in_order_of(x) for x in (q, k, v))
    arguments = of_call(causal, scale, lse, q=q, k=k, v=v, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    rows = q.shape[0] * q.shape[1]
    size = library_of(q, build).queries_of_a_tile()
    tiles = rows * -(-q.shape[2] // size)
    head_dim = next(padded for padded in HEAD_DIMS if padded >= q.shape[3])
    scratch = [
        torch.empty(2 * tiles * size, dtype=torch.float32, device=q.device),
        torch.empty(0 if naive else tiles * size * head_dim, dtype=torch.float32, device=q.device),
        torch.empty(1 + tiles, dtype=torch.int32, device=q.device),
    ]
    arguments.statistics, arguments.dq_sum, arguments.turns = (x.data_ptr() for x in scratch)
    run("naive_backward" if naive else "backward", arguments, q, build)
    return dq, dk, dv


def in_place(x: Tensor) -> Tensor:
    """Return x itself if its rows can be read 16 bytes at a time, else a copy."""
    batch, head, row, dim = x.stride()
    if dim == 1 and (batch | head | row) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def of_call(causal: bool, scale: float, lse: Tensor, **tensors: Tensor) -> Arguments:
    """Return the arguments of a call, without scratch memory; `tensors`: the matrices of `Arguments`."""
    arguments = Arguments(causal=causal, scale=scale, scale_log2=scale * LOG2_E, lse=lse.data_ptr())
    for name, x in tensors.items():
        setattr(arguments, name, Matrix(x.data_ptr(), *x.stride()[:3]))
    q, k = tensors["q"], tensors["k"]
    arguments.batch, arguments.heads, arguments.num_queries, arguments.head_dim = q.shape
    arguments.kv_heads, arguments.num_keys = k.shape[1:3]
    return arguments


def library_of(q: Tensor, build: str) -> ctypes.CDLL:
    """Return the library for tensors like q."""
    bf16 = q.dtype == torch.bfloat16
    return library(q.shape[3], bf16=bf16, capability=capability(q.device), build=build)


def run(function: str, arguments: Arguments, q: Tensor, build: str) -> None:
    """Call a function of flash.cu on q's device, on its current stream."""
    code = library_of(q, build)
    with selected(q.device):
        stream = torch.cuda.current_stream(q.device).cuda_stream
        error = getattr(code, function)(ctypes.byref(arguments), stream)
    if error:
        raise LmkitError("attention.launch_failed", f"flash_cuda: {code.error_text(error).decode()}")
