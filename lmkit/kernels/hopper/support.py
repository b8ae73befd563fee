"""Decide whether the Hopper kernels can take a call; every reason is one line for the user.

Head sizes. The kernels are written for heads of 64, 128 and 256 numbers. Others take the next of these WIDTHS: TMA
knows the tensors' true shape, fills the boxes up with zeros, which add nothing to any product, and does not write
beyond the head. The price is products with zeros, at worst half of them (136 in 256). Products whose sum goes over
the columns, S = Q K^T and dP = dO V^T, leave most of the zeros out (`used_of`).

* Multiples of 8: dense tensors of such heads, the outputs among them, have the 16-byte strides that TMA takes.
* From 40 on: below, the portable kernels are faster.
"""

import functools

import torch

from lmkit.kernels.hopper.tma import ALIGNMENT_BYTES, tma_strides
from lmkit.kernels.launch import capability

WIDTHS = (64, 128, 256)  # of the heads that the kernels are written for
HEAD_DIMS = range(40, WIDTHS[-1] + 1, 8)
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (9, 0)


def width_of(head_dim: int) -> int:
    """Return the width that heads of this supported size take in the kernels; columns beyond head_dim are zeros."""
    return next(width for width in WIDTHS if head_dim <= width)


def used_of(head_dim: int) -> int:
    """Return how many of `width_of(head_dim)` columns the products that sum over columns take
    (`wgmma.issue_scores`).

    Half of them plus a power of two, at least the 16 of one wgmma.
    """
    half = width_of(head_dim) // 2
    return half + next(rest for rest in (16, 32, 64, 128) if head_dim <= half + rest)


def unsupported_reason(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Return why these kernels cannot run on q, k, v ((batch, heads, seq, head_dim) each), or None if they can."""
    reason = _unsupported_kind(
        *((q.device, k.device, v.device), (q.dtype, k.dtype, v.dtype)),
        *((q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())),
    )
    if reason is None and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT_BYTES:
        return f"the addresses of q, k, v are not all multiples of {ALIGNMENT_BYTES} bytes"
    return reason


@functools.lru_cache(maxsize=1024)  # every call asks, and the answers cost microseconds
def _unsupported_kind(
    devices: tuple[torch.device, ...],
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
) -> str | None:
    """Return why no call with such q, k, v can run, whatever their addresses. Each argument has an entry for
    each."""
    (device, *_), (dtype, *_), (q, k, v) = devices, dtypes, shapes
    if device.type != "cuda" or len(set(devices)) > 1:
        return f"q, k, v are on {', '.join(map(str, devices))}, not on one CUDA device"
    if capability(device) != CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is not a Hopper GPU (compute capability 9.0)"
    if dtype not in DTYPES or len(set(dtypes)) > 1:
        return f"dtypes are {', '.join(map(str, dtypes))}; bfloat16 or float16 is supported"
    if not (q[-1] == k[-1] == v[-1] and q[-1] in HEAD_DIMS):
        listed = f"multiples of {HEAD_DIMS.step} from {HEAD_DIMS.start} to {HEAD_DIMS[-1]}"
        return f"head_dim is {q[-1]}; {listed} are supported"
    if k != v or q[0] != k[0] or k[1] == 0 or q[1] % k[1]:
        return f"shapes {tuple(q)}, {tuple(k)}, {tuple(v)} do not belong together"
    if q.numel() == 0 or k.numel() == 0:
        return "there are no queries or no keys"
    for name, shape, stride in zip("qkv", shapes, strides, strict=True):
        if tma_strides(shape, stride, dtype.itemsize) is None:
            return f"strides {stride} of {name} do not suit TMA (multiples of 16 bytes, unit last)"
    return None
