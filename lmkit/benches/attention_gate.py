"""The gate in front of the attention bench: what is wrong is not timed.

The full-size output (and gradients) of the very call that will be timed are compared with a float64 oracle on
two of its heads, in blocks of queries so that no length is too long, and with PyTorch's kernel on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.attention.accuracy import NAMES, error_of, run_attention, typical_row_size
from lmkit.attention.sdpa import sdpa

# Elements of one block of float64 scores (0.5 GB): a handful of such blocks live at once.
BLOCK_ELEMENTS = 2**26
ALLOWANCE = 2.0


@dataclass(frozen=True)
class Inputs:
    """One case's tensors: q, dout (batch, heads, num_queries, head_dim), k, v (batch, kv_heads, num_keys, head_dim).

    dout is None for a forward-only case.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    causal: bool

    def of_key_head(self, batch: int, kv_head: int) -> Inputs:
        """The part that belongs to one key/value head: its group of query heads in one batch row."""
        group = self.q.shape[1] // self.k.shape[1]
        rows = slice(batch, batch + 1)
        queries = (rows, slice(kv_head * group, (kv_head + 1) * group))
        keys = (rows, slice(kv_head, kv_head + 1))
        dout = None if self.dout is None else self.dout[queries]
        return Inputs(self.q[queries], self.k[keys], self.v[keys], dout, self.causal)


def exact_in_blocks(inputs: Inputs) -> tuple[Tensor, ...]:
    """(out,) or (out, dq, dk, dv) in float64 for inputs with one key head, never with all scores at once."""
    k, v = inputs.k[0, 0].double(), inputs.v[0, 0].double()  # (num_keys, head_dim)
    num_queries, num_keys = inputs.q.shape[2], k.shape[0]
    scale = inputs.q.shape[3] ** -0.5
    block = max(1, min(num_queries, BLOCK_ELEMENTS // max(1, num_keys)))
    key_index = torch.arange(num_keys, device=k.device)
    out = torch.zeros(inputs.q.shape, dtype=torch.float64, device=k.device)
    dq, dk, dv = torch.zeros_like(out), torch.zeros_like(k), torch.zeros_like(v)
    for head in range(inputs.q.shape[1]):
        for start in range(0, num_queries, block):
            rows = slice(start, min(start + block, num_queries))
            q = inputs.q[0, head, rows].double()  # (block, head_dim)
            scores = q @ k.T * scale  # (block, num_keys)
            if inputs.causal:
                query_index = torch.arange(rows.start, rows.stop, device=k.device)
                scores.masked_fill_(key_index[None, :] > query_index[:, None], -torch.inf)
            p = scores.softmax(dim=-1)
            out[0, head, rows] = p @ v
            if inputs.dout is None:
                continue
            dout = inputs.dout[0, head, rows].double()
            dp = dout @ v.T
            ds = p * (dp - (dp * p).sum(dim=-1, keepdim=True)) * scale
            dq[0, head, rows] = ds @ k
            dk += ds.T @ q
            dv += p.T @ dout
    return (out,) if inputs.dout is None else (out, dq, dk[None, None], dv[None, None])


def largest_score(inputs: Inputs) -> float:
    """The largest |q . k| * scale of inputs with one key head, in blocks."""
    k = inputs.k[0, 0].float()  # (num_keys, head_dim)
    if not inputs.q.numel() or not k.numel():
        return 0.0
    block = max(1, BLOCK_ELEMENTS // k.shape[0])
    blocks = inputs.q[0].float().flatten(0, 1).split(block)  # each (block, head_dim)
    return max(float((q @ k.T).abs().max()) for q in blocks) * inputs.q.shape[3] ** -0.5


class Gate:
    """The oracle of one case: computed once, asked about every variant.

    Args:
        rounding: relative rounding of the products' inputs; above the dtype's own for TF32.
    """

    def __init__(self, inputs: Inputs, *, rounding: float | None = None) -> None:
        self._inputs = inputs
        self._rounding = rounding if rounding is not None else torch.finfo(inputs.q.dtype).eps
        batch, kv_heads = inputs.k.shape[:2]
        self._spots = sorted({(0, 0), (batch - 1, kv_heads - 1)})
        self._exact = [exact_in_blocks(inputs.of_key_head(*spot)) for spot in self._spots]
        self._largest_score = max(largest_score(inputs.of_key_head(*spot)) for spot in self._spots)
        self._rival = run_attention(sdpa, inputs.q, inputs.k, inputs.v, inputs.dout, causal=inputs.causal)

    def faults_of(self, function: Callable[..., Tensor], *, rounds_scores: bool = False) -> list[str]:
        """What `function` gets wrong on this case, one line each; empty: it may be timed.

        Budget: `ALLOWANCE` times the error of PyTorch's kernel on the same inputs, plus one rounding.

        Args:
            rounds_scores: the kernel keeps the scores in the inputs' dtype. A score s is then off by up to s times
                the rounding, and so, relatively, is its probability: the worst row may be that much further off.
        """
        inputs = self._inputs
        got = run_attention(function, inputs.q, inputs.k, inputs.v, inputs.dout, causal=inputs.causal)
        faults = []
        # Where a query sees one key only, dq is exactly zero by cancellation: gradients share one yardstick.
        gradient_size = max((typical_row_size(gradient) for gradient in self._exact[0][1:]), default=0.0)
        floor = self._rounding + 16.0 * torch.finfo(torch.float32).eps
        for index, (name, mine, theirs) in enumerate(zip(NAMES, got, self._rival, strict=False)):
            if mine.shape != theirs.shape:
                faults.append(f"{name}: shape {tuple(mine.shape)}, not {tuple(theirs.shape)}")
                continue
            if not bool(torch.isfinite(mine).all()):
                faults.append(f"{name}: not finite")
                continue
            typical = typical_row_size(self._exact[0][0]) if name == "out" else gradient_size
            budget = 0.0
            for spot, exact in zip(self._spots, self._exact, strict=True):
                part = self._heads_at(spot, mine)
                error = error_of(mine[part], exact[index], typical)
                allowed = error_of(theirs[part], exact[index], typical)
                budget = max(budget, allowed.overall)
                for measure in ("overall", "worst_row"):
                    value, limit = getattr(error, measure), ALLOWANCE * getattr(allowed, measure) + floor
                    if rounds_scores and measure == "worst_row":
                        limit += self._rounding * self._largest_score
                    if not value <= limit:
                        faults.append(f"{name}: {measure} error {value:.2g} at {spot}, allowed {limit:.2g}")
            # The heads between the spots: as close to PyTorch's as two kernels within the budget can be.
            apart = _largest_distance_of_a_head(mine, theirs) / typical
            limit = (ALLOWANCE + 1.0) * 1.5 * budget + 2.0 * floor
            if not apart <= limit:
                faults.append(f"{name}: a head is {apart:.2g} from PyTorch's, allowed {limit:.2g}")
        return faults

    def _heads_at(self, spot: tuple[int, int], tensor: Tensor) -> tuple[slice, slice]:
        batch, kv_head = spot
        width = tensor.shape[1] // self._inputs.k.shape[1]
        return slice(batch, batch + 1), slice(kv_head * width, (kv_head + 1) * width)


def _largest_distance_of_a_head(mine: Tensor, theirs: Tensor) -> float:
    """The largest root mean square row distance of a (batch, head) pair."""
    distances = (mine.float() - theirs.float()).norm(dim=-1)  # (batch, heads, seq)
    return float(distances.square().mean(dim=-1).sqrt().max())
