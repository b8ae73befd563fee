"""Scaled dot-product attention: several kernels behind one signature, chosen by name.

`attention` is the function for notebooks and experiments. Every kernel (`reference`, `vectorized`, `flash_torch`,
`flash_triton`, `sdpa`, `flash_cuda`) is a stateless function

    kernel(q, k, v, *, causal, scale=None) -> out

with q (batch, heads, num_queries, head_dim), k and v (batch, kv_heads, num_keys, head_dim), out shaped as q:

- `causal` lets query i see the keys j <= i, also if num_queries != num_keys;
- `heads` is a multiple of `kv_heads` (grouped-query attention): query head h reads key head h // group;
- `scale` multiplies the scores; None means head_dim ** -0.5;
- a row that sees no key gives zeros;
- kernels with the fact `masks` take `mask`, booleans that broadcast to (batch, heads, num_queries, num_keys): True
  where a query may see a key;
- kernels with the fact `windows` take `first` (batch or 1, num_queries), integers that never fall and are at most i:
  with `causal`, query i sees the keys first[i] <= j <= i. Sliding windows and documents are both of this kind;
- under `torch.autocast`, inputs other than float64 are cast to the autocast dtype, as in PyTorch's attention.
"""

from typing import TYPE_CHECKING

from lmkit.lazy import exports

if TYPE_CHECKING:  # a type checker would take the files of the same names
    from lmkit.attention.flash_cuda import flash_cuda as flash_cuda
    from lmkit.attention.flash_triton import flash_triton as flash_triton
    from lmkit.attention.sdpa import sdpa as sdpa
    from lmkit.attention.vectorized import vectorized as vectorized

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "dispatch": ("attention", "attention_function", "check_kernel", "check_values", "joined_function"),
        "lmkit.core.attention": ("reference", "flash_torch", "FlashAttention"),
        "vectorized": ("vectorized",),
        "flash_triton": ("flash_triton", "FlashAttentionTriton"),
        "flash_cuda": ("flash_cuda",),
        "sdpa": ("sdpa",),
    },
)
