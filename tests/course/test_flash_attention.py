"""What a course asks of a FlashAttention `autograd.Function`, through the public API."""

import math

import torch
from torch.testing import assert_close

from lmkit.attention import FlashAttention

FLOAT64 = {"rtol": 0.0, "atol": 1e-12}


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp, with all scores in memory."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def test_output_log_sum_exp_and_gradients_are_those_of_plain_attention():
    """200 x 150 positions: several tiles, the last of each row and column cut."""
    torch.manual_seed(0)
    for causal in (False, True):
        q = torch.randn(2, 3, 200, 16, dtype=torch.float64, requires_grad=True)
        k, v = (torch.randn(2, 3, 150, 16, dtype=torch.float64, requires_grad=True) for _ in "kv")
        dout = torch.randn_like(q)
        out = FlashAttention.apply(q, k, v, causal)
        right, lse = plain(q, k, v, causal)
        assert_close(out, right, **FLOAT64)
        assert_close(
            torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(right, (q, k, v), dout), **FLOAT64
        )
        saved = [
            tensor
            for tensor in FlashAttention.apply(q, k, v, causal).grad_fn.saved_tensors
            if tensor.ndim == 3
        ]
        assert_close(saved[0], lse, **FLOAT64)


def test_no_matrix_of_all_scores_is_kept_for_the_backward_pass():
    q, k, v = torch.randn(3, 1, 1, 1024, 8, requires_grad=True).unbind()
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.shape) or tensor, lambda t: t
    ):
        FlashAttention.apply(q, k, v, True)
    assert saved
    assert max(shape.numel() for shape in saved) == 1024 * 8
