"""Whether the Hopper kernels can take a request; every reason is one line for the user."""

import torch

from lmkit.kernels.hopper.devices import capability
from lmkit.kernels.hopper.tensors import suits_copy_engine
from lmkit.kernels.versions import INSTALLED_MINOR, SUPPORTED_MINORS

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (9, 0)


def unsupported_reason(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why these kernels cannot run on q, k, v ((batch, heads, seq, head_dim) each), or None if they can."""
    if INSTALLED_MINOR not in SUPPORTED_MINORS:
        return f"triton {INSTALLED_MINOR[0]}.{INSTALLED_MINOR[1]} is not one of {_listed(SUPPORTED_MINORS)}"
    if not (q.is_cuda and k.device == v.device == q.device):
        return f"q, k, v are on {q.device}, {k.device}, {v.device}, not on one CUDA device"
    if capability(q.device) != CAPABILITY:
        return f"{torch.cuda.get_device_name(q.device)} is not a Hopper GPU (compute capability 9.0)"
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES):
        return f"dtypes are {q.dtype}, {k.dtype}, {v.dtype}; bfloat16 or float16 is supported"
    if not (q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] in HEAD_DIMS):
        return f"head_dim is {q.shape[-1]}; 64, 128 and 256 are supported"
    if k.shape != v.shape or q.shape[0] != k.shape[0] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} do not belong together"
    if q.numel() == 0 or k.numel() == 0:
        return "there are no queries or no keys"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not suits_copy_engine(tensor):
            return f"strides {tensor.stride()} of {name} do not suit the copy engine (16-byte multiples, unit last)"
    return None


def _listed(minors: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in minors)
