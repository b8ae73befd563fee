"""How wrong an attention function is: a float64 oracle, two error measures and a budget derived from the data.

An implementation may be at most `allowance` times as wrong as a baseline that computes in the same precision on
the same inputs. Zeros, a scale that is off by 2 percent, a mask that is off by one and a skipped tile all fail
(test_accuracy.py). The bench has a gate of its own, which samples what is too long to compare whole:
lmkit/bench/attention_gate.py.
"""

import torch
from torch import Tensor

from lmkit.attention.accuracy import NAMES, AttentionFunction, Error, run_attention
from lmkit.attention.inputs import causal_mask


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, *, causal: bool, scale: float | None = None
) -> tuple[Tensor, ...]:
    """(out,) or (out, dq, dk, dv) in float64, by the formulas of the chain rule, one head at a time."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // max(k.shape[1], 1)
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    dq, dk, dv = (
        torch.zeros_like(out),
        torch.zeros_like(k, dtype=out.dtype),
        torch.zeros_like(v, dtype=out.dtype),
    )
    hidden = ~causal_mask(q.shape[2], k.shape[2], q.device) if causal else None
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            q_h, k_h, v_h = q[b, h].double(), k[b, h // group].double(), v[b, h // group].double()
            scores = q_h @ k_h.T * scale  # (num_queries, num_keys)
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            p = scores.softmax(dim=-1)
            out[b, h] = p @ v_h
            if dout is not None:
                do_h = dout[b, h].double()
                dp = do_h @ v_h.T
                ds = p * (dp - (dp * p).sum(dim=-1, keepdim=True)) * scale
                dq[b, h] = ds @ k_h
                dk[b, h // group] += ds.T @ q_h
                dv[b, h // group] += p.T @ do_h
    return (out,) if dout is None else (out, dq, dk, dv)


def row_size(x: Tensor) -> float:
    """The root mean square norm of the rows of x (vectors along the last axis)."""
    return float(x.norm(dim=-1).square().mean().sqrt()) if x.numel() else 0.0


def typical_row_size(exact: Tensor) -> float:
    """The same over the rows that are not zero: keys that no query sees have zero gradients."""
    return row_size(exact[exact.norm(dim=-1) > 0])


def error_of(got: Tensor, exact: Tensor, typical: float | None = None) -> Error:
    """The error of `got` in units of `typical` (None: the row size of `exact`).

    NaN or infinity where the exact tensor is finite counts as infinite.
    """
    if exact.numel() == 0:
        return Error(0.0, 0.0)
    difference = got.double() - exact
    if not bool(torch.isfinite(difference).all()):
        return Error(torch.inf, torch.inf)
    typical = max(typical_row_size(exact) if typical is None else typical, torch.finfo(torch.float64).tiny)
    return Error(row_size(difference) / typical, float(difference.norm(dim=-1).max()) / typical)


def faults_of(
    function: AttentionFunction,
    baseline: AttentionFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    *,
    causal: bool,
    scale: float | None = None,
    allowance: float = 2.0,
) -> list[str]:
    """What `function` gets wrong, one line per tensor and measure; empty if it is within the budget.

    The budget of each tensor is `allowance` times the baseline's own error against float64, plus one rounding to
    the dtype and sixteen units in float32's last place (a baseline can be exact by luck, say with a single key).
    """
    exact = exact_attention(q, k, v, dout, causal=causal, scale=scale)
    got = run_attention(function, q, k, v, dout, causal=causal, scale=scale)
    rival = run_attention(baseline, q, k, v, dout, causal=causal, scale=scale)
    floor = 0.5 * torch.finfo(q.dtype).eps + 16.0 * torch.finfo(torch.float32).eps
    # Where a query sees one key only, dq is exactly zero by cancellation; what it is small against is dv.
    gradient_size = max((typical_row_size(gradient) for gradient in exact[1:]), default=0.0)
    faults = []
    for name, mine, theirs, truth in zip(NAMES, got, rival, exact, strict=False):
        if mine.shape != truth.shape or mine.dtype != q.dtype:
            faults.append(f"{name}: is {mine.dtype} {tuple(mine.shape)}, not {q.dtype} {tuple(truth.shape)}")
            continue
        typical = typical_row_size(truth) if name == "out" else gradient_size
        error, budget = error_of(mine, truth, typical), error_of(theirs, truth, typical)
        for measure in ("overall", "worst_row"):
            value, limit = getattr(error, measure), allowance * getattr(budget, measure) + floor
            if not value <= limit:
                faults.append(f"{name}: {measure} error {value:.3g}, allowed {limit:.3g}")
    return faults
