"""What every attention function does with its arguments before it computes."""

import torch
from torch import Tensor

SECOND_DERIVATIVES = "the attention functions reference and vectorized have second derivatives"


def prepare_inputs(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Checks the shapes, casts as autocast asks for, and fills in the default scale.

    Raises:
        ValueError: shapes, dtypes or devices that do not belong together.
    """
    check_shapes(q, k, v)
    device_type = q.device.type
    if torch.is_autocast_enabled(device_type) and torch.float64 not in (q.dtype, k.dtype, v.dtype):
        # RoPE may hand over float32 queries beside bfloat16 values: one dtype for all three.
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    return q, k, v, q.shape[-1] ** -0.5 if scale is None else float(scale)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless q, k, v are (batch, heads, seq, head_dim) that fit each other."""
    q_shape, k_shape = q.shape, k.shape  # each asked for once: this runs before every call
    if len(q_shape) != 4 or len(k_shape) != 4 or k_shape != v.shape:
        raise ValueError(
            "q must be (batch, heads, num_queries, head_dim), k and v (batch, kv_heads, num_keys, head_dim); "
            f"got {tuple(q_shape)}, {tuple(k_shape)} and {tuple(v.shape)}"
        )
    if q_shape[0] != k_shape[0] or q_shape[3] != k_shape[3]:
        raise ValueError(f"q {tuple(q_shape)} and k {tuple(k_shape)} differ in batch or head_dim")
    heads, kv_heads = q_shape[1], k_shape[1]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"the {heads} query heads are no multiple of the {kv_heads} key/value heads")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """(num_queries, num_keys) booleans: True where query i may see key j, that is j <= i."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril()


def zeros_like_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output where no query sees a key: zeros, with q, k and v still part of the graph."""
    # Sums over nothing, since 0 times an infinite query would be NaN; k and v, or the output, have no elements.
    return torch.zeros_like(q) + (q[..., :0].sum() + k.sum() + v.sum())
