"""Check and complete the arguments of an attention kernel."""

import torch
from torch import Tensor

SECOND_DERIVATIVES = "the attention kernels reference and vectorized have second derivatives"


def prepare_inputs(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Check the shapes, cast under autocast, and fill in the default scale.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    check_shapes(q, k, v)
    device_type = q.device.type
    if torch.is_autocast_enabled(device_type) and torch.float64 not in (q.dtype, k.dtype, v.dtype):
        # RoPE may return float32 queries while the values are bfloat16: cast all three to one dtype.
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    return q, k, v, q.shape[-1] ** -0.5 if scale is None else float(scale)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k, v are (batch, heads, seq, head_dim) and fit together."""
    q_shape, k_shape = q.shape, k.shape  # read once: this runs before every call
    if len(q_shape) != 4 or len(k_shape) != 4 or k_shape != v.shape:
        raise ValueError(
            "q must be (batch, heads, num_queries, head_dim), k and v (batch, kv_heads, num_keys, head_dim); "
            f"got {tuple(q_shape)}, {tuple(k_shape)} and {tuple(v.shape)}"
        )
    if q_shape[0] != k_shape[0] or q_shape[3] != k_shape[3]:
        raise ValueError(f"q {tuple(q_shape)} and k {tuple(k_shape)} differ in batch or head_dim")
    heads, kv_heads = q_shape[1], k_shape[1]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return (num_queries, num_keys) booleans: True where query i may see key j, that is, j <= i."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril()


def visible_keys(
    q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, first: Tensor | None = None
) -> Tensor | None:
    """Return booleans, True where a query sees a key: (num_queries, num_keys), or (batch, heads, num_queries,
    num_keys) if there is a mask. None means that every query sees every key.

    Raises:
        ValueError: `mask` is not boolean, or does not broadcast; `first` without `causal`, or of another shape.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    if first is not None:
        check_first(q, k, first, causal)
        after = torch.arange(num_keys, device=q.device) >= first[:, None, :, None]
        mask = after if mask is None else mask & after  # (batch or 1, 1, num_queries, num_keys)
    below_diagonal = causal_mask(num_queries, num_keys, q.device) if causal else None
    if mask is None:
        return below_diagonal
    full = (*q.shape[:2], num_queries, num_keys)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean, got {mask.dtype}")
    trailing = full[len(full) - mask.dim() :]
    if mask.dim() > 4 or any(
        size not in (1, wanted) for size, wanted in zip(mask.shape, trailing, strict=True)
    ):
        raise ValueError(f"mask {tuple(mask.shape)} does not broadcast to {full}")
    return (mask if below_diagonal is None else mask & below_diagonal).expand(full)


def check_first(q: Tensor, k: Tensor, first: Tensor, causal: bool) -> None:
    """Raise ValueError unless `first` is (batch or 1, num_queries) and causal attention uses it."""
    if not causal or k.shape[2] < q.shape[2]:
        raise ValueError("first= needs causal=True, and as many keys as queries")
    if first.dim() != 2 or first.shape[0] not in (1, q.shape[0]) or first.shape[1] != q.shape[2]:
        raise ValueError(f"first {tuple(first.shape)} does not fit queries {tuple(q.shape)}")


def first_in_document(begins: Tensor) -> Tensor:
    """Return the first token that each token sees if documents do not see one another: (batch, seq) int32.

    Args:
        begins: (batch, seq), whether a document begins at a token.
    """
    places = torch.arange(begins.shape[1], device=begins.device, dtype=torch.int32)
    return torch.where(begins, places, 0).cummax(dim=1).values


def latest(*firsts: Tensor | None) -> Tensor | None:
    """Return the `first` of tokens that see only what all of `firsts` let them see; None: every earlier token."""
    given = [first for first in firsts if first is not None]
    return None if not given else given[0] if len(given) == 1 else torch.maximum(*given)


def first_in_window(window: int | None, seq: int, device: torch.device) -> Tensor | None:
    """Return the first token that each token sees, itself and those before it being `window`: (1, seq) int32."""
    if window is None:
        return None
    return (torch.arange(seq, device=device, dtype=torch.int32) - (window - 1)).clamp_min(0)[None]


def zeros_like_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output where no query sees a key: zeros, with q, k and v part of the graph."""
    # Sum over empty slices, since 0 times an infinite query would be NaN; k and v, or the output, have no elements.
    return torch.zeros_like(q) + (q[..., :0].sum() + k.sum() + v.sum())
