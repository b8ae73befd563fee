"""PyTorch's own attention, the baseline."""

from typing import Literal

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmkit.core.attention import prepare_inputs, reference, visible_keys, zeros_like_queries
from lmkit.core.autograd import is_transformed
from lmkit.errors import UsageError
from lmkit.registry import ATTENTION

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@ATTENTION.register(
    "sdpa",
    order=5,
    masks=True,
    windows=True,
    variants={
        "cudnn": {"backend": "cudnn"},
        "flash": {"backend": "flash"},
        "efficient": {"backend": "efficient"},
    },
)
def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    mask: Tensor | None = None,
    first: Tensor | None = None,
    backend: Literal["cudnn", "flash", "efficient"] | None = None,
) -> Tensor:
    """Call `torch.nn.functional.scaled_dot_product_attention`.

    Its `is_causal` aligns the mask with the top left corner (query i sees j <= i), which is our convention.
    See `lmkit.attention` for shapes.

    Args:
        backend: None lets PyTorch choose.

    Raises:
        UsageError: no such backend.
        RuntimeError: from PyTorch, where the named backend does not support the inputs or the device.
    """
    if backend is not None:
        if backend not in BACKENDS:
            message = f"sdpa has no backend {backend!r}"
            raise UsageError("attention.unknown_backend", message, hint="there are: " + ", ".join(BACKENDS))
        with sdpa_kernel(BACKENDS[backend]):
            return sdpa(q, k, v, causal=causal, scale=scale, mask=mask, first=first)
    if is_transformed():  # PyTorch's kernels have no forward-mode derivative
        return reference(q, k, v, causal=causal, scale=scale, mask=mask, first=first)
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    if k.shape[2] == 0:
        return zeros_like_queries(q, k, v)
    if scale <= 0:
        # PyTorch's flash kernels mask before they scale, which gives NaN or counts masked keys.
        q, scale = q * scale, 1.0
    if mask is not None or first is not None:  # PyTorch takes either a mask or is_causal
        mask, causal = visible_keys(q, k, causal, mask, first), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
