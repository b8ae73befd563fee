"""The attention bench's variants: registry kernels, their implementations, pinned SDPA backends, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmkit.attention import attention_function
from lmkit.bench.attention_cases import DTYPES
from lmkit.bench.attention_gate import EXACT, TF32, Arithmetic, Inputs, scores_kept_in
from lmkit.errors import UsageError
from lmkit.registry import ATTENTION

SDPA_BACKENDS = {
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FLASH_TRITON_VARIANTS: dict[str, dict[str, Any]] = {
    "flash_triton:portable": {"implementation": "portable"},
    "flash_triton:hopper": {"implementation": "hopper"},
    "flash_triton:deterministic": {"deterministic": True},
    "flash_triton:tf32": {"fp32_precision": "tf32"},
}
KEEP_SCORES = ("reference", "vectorized")  # in memory, in the dtype of the inputs
SDPA_REFUSALS = ("No available kernel", "No viable backend")  # of a pinned backend, on a GPU and on a CPU
COMPILED = "+compile"
CPU_KERNELS = ("reference", "vectorized", "vectorized+compile", "flash_torch", "sdpa")
GRID_KERNELS = ("flash_torch", "sdpa")
GPU_GRID_KERNELS = ("flash_triton", "sdpa:cudnn")
GPU_KERNELS = (
    "reference",
    "vectorized",
    "vectorized+compile",
    "flash_torch",
    "flash_triton",
    "sdpa:cudnn",
    "sdpa:flash",
)


def check_kernel_name(name: str) -> None:
    """Raises UsageError unless `build_variant` knows the name."""
    known = [*ATTENTION.names, *FLASH_TRITON_VARIANTS, *SDPA_BACKENDS]
    if name.removesuffix(COMPILED) not in known:
        raise UsageError(
            f"bench.attention.kernels: there is no {name!r}",
            hint=f"there are {', '.join(known)}, each with an optional {COMPILED}",
        )


def build_variant(name: str, dtype: str) -> Callable[..., Tensor]:
    """The attention function behind a variant's name ("vectorized+compile", "sdpa:cudnn").

    Args:
        dtype: a name of `DTYPES`; "tf32" has to be asked for where a kernel multiplies by itself.

    Raises:
        UsageError: the kernel needs something that is not installed.
    """
    kernel = name.removesuffix(COMPILED)
    if kernel in SDPA_BACKENDS:
        function: Callable[..., Tensor] = partial(_pinned_sdpa, SDPA_BACKENDS[kernel])
    else:
        function = attention_function(kernel.partition(":")[0])
    if kernel.startswith("flash_triton"):
        precision = {"fp32_precision": "tf32"} if dtype == "tf32" else {}
        function = partial(function, **precision | FLASH_TRITON_VARIANTS.get(kernel, {}))
    return torch.compile(function, dynamic=False) if name.endswith(COMPILED) else function


def precision_of(name: str, dtype: str) -> str:
    """What a row is labelled with: the bench's dtype, or tf32 for a variant that multiplies float32 so."""
    return "tf32" if dtype == "fp32" and name.removesuffix(COMPILED).endswith(":tf32") else dtype


@cache
def arithmetic_of(name: str, dtype: str) -> Arithmetic:
    """What the gate has to forgive a variant, beyond the rounding that every kernel of its dtype does."""
    if precision_of(name, dtype) == "tf32":
        return TF32
    keeps_scores = name.removesuffix(COMPILED) in KEEP_SCORES and DTYPES[dtype].itemsize == 2
    return scores_kept_in(DTYPES[dtype]) if keeps_scores else EXACT


def _pinned_sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def implementation_of(name: str, inputs: Inputs) -> str | None:
    """Which of its implementations a `flash_triton` variant took; None for kernels that have only one."""
    if not name.startswith("flash_triton"):
        return None
    from lmkit.attention.flash_triton import implementation_for

    forced = FLASH_TRITON_VARIANTS.get(name.removesuffix(COMPILED), {}).get("implementation")
    return forced or implementation_for(inputs.q, inputs.k, inputs.v)
