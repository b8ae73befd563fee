"""Scaled dot-product attention behind one signature, chosen by name.

Every function here is stateless and has the signature

    attention(q, k, v, *, causal, scale=None) -> out

with q `(batch, heads, num_queries, head_dim)`, k and v `(batch, kv_heads, num_keys, head_dim)`, out shaped as q:

- `causal` lets query i see the keys j <= i, also when num_queries != num_keys;
- `heads` is a multiple of `kv_heads` (grouped-query attention: query head h reads key head h // group);
- `scale` multiplies the scores; None means head_dim ** -0.5;
- a row that sees no key (num_keys = 0) gives zeros;
- under `torch.autocast`, inputs are cast to the autocast dtype, except float64, as PyTorch's own attention does.
"""

from collections.abc import Callable
from importlib import import_module

from torch import Tensor

from lmkit.errors import UsageError
from lmkit.recipe import aliases

# name -> "module:function"; imported when asked for, so that `reference` works where Triton is missing.
ATTENTION: dict[str, str] = {
    "reference": "lmkit.attention.reference:reference",
    "vectorized": "lmkit.attention.vectorized:vectorized",
    "flash_torch": "lmkit.attention.flash_torch:flash_torch",
    "flash_triton": "lmkit.attention.flash_triton:flash_triton",
    "sdpa": "lmkit.attention.sdpa:sdpa",
}


def attention_function(name: str) -> Callable[..., Tensor]:
    """The attention function of that name, one of ATTENTION or a spelling that recipes accept beside them.

    Raises:
        UsageError: no such name, or the kernel needs a package that is not installed.
    """
    name = aliases.ATTENTION.get(name, name)
    if name not in ATTENTION:
        raise UsageError(f"no attention kernel is called {name!r}", hint="there are: " + ", ".join(ATTENTION))
    module_name, function_name = ATTENTION[name].split(":")
    return getattr(import_module(module_name), function_name)
