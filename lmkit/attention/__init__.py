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

from torch import Tensor

from lmkit.registry import ATTENTION


def attention_function(name: str) -> Callable[..., Tensor]:
    """Return the attention function of that name, or of an alias of it.

    Raises:
        UsageError: no such name, or the kernel needs a package that is not installed.
    """
    function: Callable[..., Tensor] = ATTENTION.load(name)
    return function
