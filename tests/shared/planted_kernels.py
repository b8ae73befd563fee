"""Attention kernels that are wrong, refuse, or fail; and honest ones of coarse arithmetic."""

import os
from functools import partial

import torch
from torch.nn import functional as F

from lmkit.attention.vectorized import vectorized
from lmkit.bench.attention_gate import cut_to_tf32
from lmkit.registry import ATTENTION

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 51 GiB. GPU 0 has less")


def zeros(q, k, v, *, causal):
    return q * 0.0 + k.mean() * 0.0 + v.mean() * 0.0


def scaled(q, k, v, *, causal):
    return vectorized(q, k, v, causal=causal) * 1.02


def masked_up_to(q, k, v, offset):
    """Query i sees the keys j <= i + offset."""
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(offset)
    visible[:, 0] = True  # no row without keys
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


def mask_too_wide(q, k, v, *, causal):
    return masked_up_to(q, k, v, 1)


def mask_too_narrow(q, k, v, *, causal):
    return masked_up_to(q, k, v, -1)


def wrong_shape(q, k, v, *, causal):
    return vectorized(q, k, v, causal=causal)[:, :, 1:]


def last_tile_skipped(q, k, v, *, causal):
    return vectorized(q, k[:, :, :-16], v[:, :, :-16], causal=causal)


def rest_forgotten(q, k, v, *, causal):
    """Right at every length that 8 divides."""
    out = vectorized(q, k, v, causal=causal)
    return F.pad(out[:, :, : q.shape[2] // 8 * 8], (0, 0, 0, q.shape[2] % 8))


def heads_in_turn(q, k, v, *, causal):
    """Right where every head has its own key head."""
    k, v = (x.repeat(1, q.shape[1] // k.shape[1], 1, 1) for x in (k, v))
    return vectorized(q, k, v, causal=causal)


def scale_forgotten(q, k, v, *, causal, scale=None):
    return vectorized(q, k, v, causal=causal)


def first_forgotten(q, k, v, *, causal, first=None):
    """Registered with the fact `windows`."""
    return vectorized(q, k, v, causal=causal)


def one_head_forgotten(q, k, v, *, causal):
    """Batch row 0, head 2 belongs to neither of the two heads that are compared with float64."""
    keep = torch.ones((*q.shape[:2], 1, 1), dtype=q.dtype)
    keep[0, 2] = 0.0
    return vectorized(q, k, v, causal=causal) * keep


def rounded_operands(q, k, v, *, causal, rounded):
    """Causal attention in float32, both operands of both products rounded."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = rounded(q) @ rounded(k).mT * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return (rounded(scores.masked_fill(hidden, -torch.inf).softmax(-1)) @ rounded(v)).float()


def nearest(x):
    """The other way to tf32: half a unit of the 10th bit added before the rest is cut off."""
    return cut_to_tf32((x.float().view(torch.int32) + 0x1000).view(torch.float32))


cut_operands = partial(rounded_operands, rounded=cut_to_tf32)
nearest_operands = partial(rounded_operands, rounded=nearest)
bfloat16_operands = partial(rounded_operands, rounded=lambda x: x.bfloat16().float())


def gradient_dropped(q, k, v, *, causal):
    return vectorized(q, k.detach() + 0.0 * k, v, causal=causal)


def returns_none(q, k, v, *, causal):
    return None


def wide(q, k, v, *, causal):
    """Right, in another dtype than that of the inputs."""
    return vectorized(q, k, v, causal=causal).double()


_KEPT = {}


def wrong_without_gradients(q, k, v, *, causal):
    return vectorized(q, k, v, causal=causal and torch.is_grad_enabled())


def leaks(q, k, v, *, causal):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return vectorized(q, k, v, causal=causal)


def remembers(q, k, v, *, causal):
    """The right result of these tensors; from the second call on without computing anything."""
    key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape)
    if key not in _KEPT:
        _KEPT.clear()
        _KEPT[key] = vectorized(q, k, v, causal=causal), (q, k, v)
    return _KEPT[key][0]


CALLS = []


def _calls(q):
    """Return how often a kernel was called with inputs of this shape."""
    if CALLS and CALLS[0] != q.shape:
        CALLS.clear()
    CALLS.append(q.shape)
    return len(CALLS)


def later(name, right, factor):
    """Return a kernel of that name whose results have a factor after so many right calls."""

    def kernel(q, k, v, *, causal):
        return vectorized(q, k, v, causal=causal) * (1.0 if _calls(q) <= right else factor)

    kernel.__name__ = name
    return kernel


wrong_later, halves_later = later("wrong_later", 4, 0.5), later("halves_later", 79, 0.5)
nan_later = later("nan_later", 59, torch.nan)


def backward_halves_later(q, k, v, *, causal):
    out = vectorized(q, k, v, causal=causal)
    return out if _calls(q) < 60 else out.detach() + 0.5 * (out - out.detach())


def without_gradients_on_rank_1(q, k, v, *, causal):
    is_wrong = os.environ["RANK"] == "1" and not torch.is_grad_enabled()
    return vectorized(q, k, v, causal=causal and not is_wrong)


def later_on_rank_1(q, k, v, *, causal):
    return (halves_later if os.environ["RANK"] == "1" else vectorized)(q, k, v, causal=causal)


def tires(q, k, v, *, causal):
    if _calls(q) > 4:
        raise RuntimeError("tired\nlong story")
    return vectorized(q, k, v, causal=causal)


def writes(q, k, v, *, causal):
    out = vectorized(q, k, v, causal=causal)
    k.data.mul_(2.0)
    v.data.zero_()
    return out


def window(q, k, v, *, causal):
    """Each query sees itself and the key before it."""
    return masked_up_to(q, k, v, 0) if k.shape[2] < 3 else masked_up_to(q, k[:, :, :2], v[:, :, :2], 0)


def raising(name, error):
    """Return a kernel of that name that raises."""

    def kernel(q, k, v, *, causal):
        raise error

    kernel.__name__ = name
    return kernel


RAISING = (
    raising("out_of_memory", FULL),
    raising("broken", RuntimeError("ptxas died\nlong story")),
)
# Right as long as they are checked before they are timed.
LATER = (halves_later, nan_later, backward_halves_later)
ON_RANK_1 = (without_gradients_on_rank_1, later_on_rank_1)
WRONG = (zeros, scaled, mask_too_wide, mask_too_narrow, last_tile_skipped, one_head_forgotten)
WRONG_ELSEWHERE = (rest_forgotten, heads_in_turn, scale_forgotten, first_forgotten)
ALL = (
    *(*WRONG, *WRONG_ELSEWHERE, wrong_shape, wide, gradient_dropped, remembers, returns_none, wrong_later),
    *(tires, writes, wrong_without_gradients, leaks, *RAISING, *LATER, *ON_RANK_1),
)


def register():
    CALLS.clear()
    for function in ALL:
        ATTENTION.register(function.__name__, windows=function is first_forgotten)(function)
    ATTENTION.register("window", sees_all=False)(window)
