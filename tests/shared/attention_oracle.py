"""How wrong an attention function is: a float64 oracle, two error measures and a budget derived from the data.

An implementation may be at most `allowance` times as wrong as a baseline that computes in the same precision on
the same inputs. Zeros, a scale that is off by 2 percent, a mask that is off by one and a skipped tile all fail
(test_accuracy.py). The bench has a gate of its own, which samples what is too long to compare whole:
lmkit/bench/attention_gate.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lmkit.attention.run import NAMES, AttentionFunction, run_attention
from lmkit.core.attention import reference


class Error(NamedTuple):
    """Distance of a tensor from the exact one: root mean square over its rows (vectors of a head), and the largest of
    a row, which shows a fault in one row of thousands."""

    overall: float
    worst_row: float


def draw_inputs(
    *,
    batch=1,
    heads=2,
    kv_heads=None,
    queries=16,
    keys=None,
    head_dim=16,
    dtype=torch.float32,
    seed=0,
    device="cpu",
):
    """(q, k, v, dout), normal, never zero; (batch, heads, seq, head_dim)."""
    generator = torch.Generator(device).manual_seed(seed)
    mine = (batch, heads, queries, head_dim)
    theirs = (batch, kv_heads or heads, queries if keys is None else keys, head_dim)
    shapes = (mine, theirs, theirs, mine)
    return tuple(torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)


def first_keys(kind: str, batch: int, length: int) -> Tensor:
    """(batch, length) int32: the first key that each query sees, on a GPU; other documents in every text."""
    place = torch.arange(length, device="cuda").expand(batch, -1)
    starts = torch.zeros(batch, length, dtype=torch.bool, device="cuda")
    for b in range(batch):
        generator = torch.Generator().manual_seed(b)
        mean = {"documents": 100, "short documents": 7, "long documents": 700}.get(kind, 100)
        starts[b, torch.randperm(length, generator=generator)[: length // mean]] = True
    documents = torch.where(starts, place, 0).cummax(1).values
    window = (place - 99).clamp_min(0)
    first = {"window": window, "both": torch.maximum(window, documents), "none": 0 * place}
    return first.get(kind, documents).to(torch.int32)


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    *,
    causal: bool,
    scale: float | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(out,) or (out, dq, dk, dv) of the kernel `reference` in float64, one head at a time."""
    group = q.shape[1] // max(k.shape[1], 1)
    exact = [torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q, q, k, v)]
    for b in range(q.shape[0]):
        hides = first if first is None or len(first) == 1 else first[b : b + 1]
        for h in range(q.shape[1]):
            own = (slice(b, b + 1), slice(h, h + 1))
            shared = (slice(b, b + 1), slice(h // group, h // group + 1))
            places = (own, own, shared, shared)  # of out, dq, dk, dv
            inputs = (
                None if x is None else x[place].double()
                for x, place in zip((q, k, v, dout), (own, shared, shared, own), strict=True)
            )
            results = run_attention(reference, *inputs, causal=causal, scale=scale, first=hides)
            for total, place, result in zip(exact, places, results, strict=False):
                total[place] += result
    return tuple(exact if dout is not None else exact[:1])


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


def beyond(error: Error, budget: Error, *, times: float, floor: float) -> list[str]:
    """Name each measure of an error that is more than so many times its budget and a floor."""
    limits = [times * allowed + floor for allowed in budget]
    return [
        f"{measure} error {value:.3g}, allowed {limit:.3g}"
        for measure, value, limit in zip(Error._fields, error, limits, strict=True)
        if not value <= limit
    ]


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
    first: Tensor | None = None,
    allowance: float = 2.0,
) -> list[str]:
    """What `function` gets wrong, one line per tensor and measure; empty if it is within the budget.

    The budget of each tensor is `allowance` times the baseline's own error against float64, plus one rounding to
    the dtype and sixteen units in float32's last place (a baseline can be exact by luck, say with a single key).
    """
    options = {"causal": causal, "scale": scale} | ({} if first is None else {"first": first})
    exact = exact_attention(q, k, v, dout, causal=causal, scale=scale, first=first)
    got = run_attention(function, q, k, v, dout, **options)
    rival = run_attention(baseline, q, k, v, dout, **options)
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
        faults += [f"{name}: {fault}" for fault in beyond(error, budget, times=allowance, floor=floor)]
    return faults
