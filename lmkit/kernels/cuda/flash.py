"""Call the CUDA kernels: tensors -> arguments -> launch on the current stream."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lmkit.errors import LmkitError
from lmkit.kernels.cuda.build import HEAD_DIMS, library
from lmkit.kernels.launch import capability, empty_in_order_of, selected

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
    arguments = of_call({"q": q, "k": k, "v": v, "out": out}, causal, scale, lse)
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
    """Return (dq, dk, dv), in the memory order of q, k, v; the same bits on every run.

    Args:
        dout, out, lse: of `flash_forward`; the others as there.
    """
    dout, q, k, v, out = (in_place(x) for x in (dout, q, k, v, out))
    dq, dk, dv = (empty_in_order_of(x) for x in (q, k, v))
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    arguments = of_call(tensors, causal, scale, lse)
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


def of_call(tensors: dict[str, Tensor], causal: bool, scale: float, lse: Tensor) -> Arguments:
    """Return the arguments of a call, without scratch memory."""
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
