"""PyTorch's own attention: the baseline that a user would pick instead of ours."""

from torch import Tensor
from torch.nn import functional as F

from lmkit.attention.inputs import prepare_inputs, zeros_like_queries
from lmkit.registry import ATTENTION


@ATTENTION.register("sdpa", order=5)
def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`; PyTorch picks the backend.

    Its `is_causal` aligns the mask with the top left corner (query i sees j <= i), which is our convention.
    See `lmkit.attention` for shapes.
    """
    q, k, v, scale = prepare_inputs(q, k, v, scale)
    if k.shape[2] == 0:
        return zeros_like_queries(q, k, v)
    if scale <= 0:
        # PyTorch's flash kernels mask before they scale, which gives NaN, or counts masked keys.
        q, scale = q * scale, 1.0
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
