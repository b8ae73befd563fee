"""Check attention kernels before they are timed: wrong results are not worth a time.

Every variant is compared twice, on the inputs that it will be timed with:

- Against float64 (`Gate.faults_at_spots`), on two of the heads. Up to `FULL_CHECK_LENGTH` queries and keys every row
  is compared. Longer cases compare a sample of query rows (the first, the last, some in the middle, the rest at
  random) and, with an output gradient that is zero outside that sample, the gradients of all keys: exact, and
  affordable at any length.
- Against PyTorch's kernel (`Gate.faults_against_pytorch`): every row of every head, with the dense output gradient.

The budget is what an honest kernel of the same precision makes of the same inputs, never a fixed number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmkit.attention.accuracy import NAMES, Error, run_attention
from lmkit.attention.sdpa import sdpa

if TYPE_CHECKING:
    from lmkit.bench.attention import Options

FULL_CHECK_LENGTH = 1024
SAMPLED_ROWS = 128
# Elements of one block of float64 scores (0.5 GB): a handful of such blocks live at once.
BLOCK_ELEMENTS = 2**26
ALLOWANCE = 2.0
NATS = 60.0
"""How far the dominant key of a sink stands above the others."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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

    def run(self, function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """(out,) or (out, dq, dk, dv) of `function`."""
        return run_attention(function, self.q, self.k, self.v, self.dout, causal=self.causal)


def make_inputs(
    options: Options,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    *,
    device: torch.device,
    seed: int,
    backward: bool,
) -> Inputs:
    """Return random tensors of the kind `options.data`; the same for the same seed and shape."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = DTYPES[options.dtype]

    def normal(heads: int, length: int) -> Tensor:
        if options.projection_layout:
            shape = (options.batch, length, heads, head_dim)
            whole = torch.randn(shape, generator=generator, device=device).to(dtype)
            return whole.transpose(1, 2)  # (batch, heads, length, head_dim), strided
        shape = (options.batch, heads, length, head_dim)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q, k = normal(options.heads, num_queries), normal(options.kv_heads, num_keys)
    _shape_scores(q, k, options.data)
    v = normal(options.kv_heads, num_keys)
    dout = normal(options.heads, num_queries) if backward else None
    return Inputs(q, k, v, dout, options.causal)


def _shape_scores(q: Tensor, k: Tensor, data: str) -> None:
    """Change q and k in place so that the scores look as `data` says; the values stay exact in 16 bits."""
    if data == "normal":
        return
    if data == "logits x 8":
        q.mul_(8.0)
        return
    # Along the first dimension every query is 8, so that a key's first element alone lifts its scores.
    per_nat = math.sqrt(q.shape[-1]) / 8.0
    q[..., 0] = 8.0
    if data in ("sink", "late sink"):
        k[..., 0] = 0.0
        k[:, :, min(3, k.shape[2] - 1) if data == "sink" else k.shape[2] // 2, 0] = NATS * per_nat
    else:
        ramp = torch.linspace(0.0, NATS * per_nat, k.shape[2], device=k.device).to(k.dtype)
        k[..., 0] = ramp if data == "ramp up" else ramp.flip(0)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def cut_to_tf32(x: Tensor) -> Tensor:
    """x with the 10 bits of mantissa that tensor cores read of a float32; the rest is cut off, as they do."""
    return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double()


@dataclass(frozen=True)
class Arithmetic:
    """Where a precision rounds: the operands of matrix products; scores, probabilities and their gradient."""

    operands: Callable[[Tensor], Tensor] = _as_it_is
    scores: Callable[[Tensor], Tensor] = _as_it_is


EXACT = Arithmetic()
TF32 = Arithmetic(operands=cut_to_tf32)
"""All that tensor cores see of a float32. (Some chips round to nearest instead of cutting, which is off by half as
much; cutting always errs towards zero, so that no average removes it.)"""


def scores_kept_in(dtype: torch.dtype) -> Arithmetic:
    """The arithmetic of a kernel that writes scores and probabilities to memory in `dtype`."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    return Arithmetic(operands=rounded, scores=rounded)


@cache
def arithmetic_of(precision: str, *, keeps_scores: bool) -> Arithmetic:
    """Return what the gate has to forgive a variant, beyond the rounding that every kernel of its dtype does."""
    if precision == "tf32":
        return TF32
    dtype = DTYPES[precision]
    return scores_kept_in(dtype) if keeps_scores and dtype.itemsize == 2 else EXACT


def exact_at(inputs: Inputs, rows: Tensor, arithmetic: Arithmetic = EXACT) -> tuple[Tensor, ...]:
    """(out,) or (out, dq, dk, dv) in float64 for inputs with one key head, by the formulas of the chain rule.

    Args:
        rows: (n,) query indices. out and dq are those of these rows; dk and dv are what these rows contribute.

    Returns:
        out and dq (1, group, n, head_dim), dk and dv (1, 1, num_keys, head_dim).
    """
    operand, score = arithmetic.operands, arithmetic.scores
    k, v = operand(inputs.k[0, 0].double()), operand(inputs.v[0, 0].double())  # (num_keys, head_dim)
    num_keys, head_dim = k.shape
    scale = head_dim**-0.5
    block = max(1, BLOCK_ELEMENTS // max(1, num_keys))
    key_index = torch.arange(num_keys, device=k.device)
    shape = (1, inputs.q.shape[1], len(rows), head_dim)
    out = torch.zeros(shape, dtype=torch.float64, device=k.device)
    dq, dk, dv = torch.zeros_like(out), torch.zeros_like(k), torch.zeros_like(v)
    for head in range(inputs.q.shape[1]):
        for start in range(0, len(rows), block):
            part = slice(start, start + block)
            q = operand(inputs.q[0, head, rows[part]].double())  # (block, head_dim)
            scores = score(q @ k.T * scale)  # (block, num_keys)
            if inputs.causal:
                scores.masked_fill_(key_index[None, :] > rows[part, None], -torch.inf)
            p = score(scores.softmax(dim=-1))
            out[0, head, part] = operand(p) @ v
            if inputs.dout is None:
                continue
            dout = operand(inputs.dout[0, head, rows[part]].double())
            dp = score(dout @ v.T)
            ds = operand(p * (dp - (dp * p).sum(dim=-1, keepdim=True)) * scale)
            dq[0, head, part] = ds @ k
            dk += ds.T @ q
            dv += operand(p).T @ dout
    return (out,) if inputs.dout is None else (out, dq, dk[None, None], dv[None, None])


def rows_to_check(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Sorted indices of the query rows that are compared with float64: all of a short case, else a sample."""
    if max(num_queries, num_keys) <= FULL_CHECK_LENGTH:
        return torch.arange(num_queries, device=device)
    run = SAMPLED_ROWS // 8
    middle = num_queries // 2
    borders = [*range(run), *range(middle, middle + run), *range(num_queries - run, num_queries)]
    chosen = {row for row in borders if 0 <= row < num_queries}
    scattered = torch.randperm(num_queries, generator=torch.Generator().manual_seed(0))[:SAMPLED_ROWS]
    for row in scattered.tolist():
        if len(chosen) < SAMPLED_ROWS:
            chosen.add(row)
    return torch.tensor(sorted(chosen), device=device)


class Gate:
    """Judge the variants of one case. What they are compared with is computed once.

    Attributes:
        inputs: of the case.
        probe: the inputs for `faults_at_spots`: those of the case, dout set to zero outside the compared rows.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._rows = rows_to_check(inputs.q.shape[2], inputs.k.shape[2], inputs.q.device)
        self._is_sample = max(inputs.q.shape[2], inputs.k.shape[2]) > FULL_CHECK_LENGTH
        self.probe = inputs
        if self._is_sample and inputs.dout is not None:
            dout = torch.zeros_like(inputs.dout)
            dout[:, :, self._rows] = inputs.dout[:, :, self._rows]
            self.probe = replace(inputs, dout=dout)
        batch, kv_heads = inputs.k.shape[:2]
        self._spots = sorted({(0, 0), (batch - 1, kv_heads - 1)})
        self._exact = [self._at(spot, EXACT) for spot in self._spots]
        self._pytorch = inputs.run(sdpa)
        self._pytorch_errors = self._errors(self.probe.run(sdpa))
        self._emulated: dict[Arithmetic, list[Error]] = {}
        # One rounding of a result to the inputs' dtype, and float32 sums.
        self._floor = torch.finfo(inputs.q.dtype).eps + 16.0 * torch.finfo(torch.float32).eps

    def errors(self, got: tuple[Tensor, ...]) -> dict[str, float]:
        """Tensor -> distance from float64 over its size, for results of `probe`; the worse of the two heads."""
        return {name: error.overall for name, error in zip(NAMES, self._errors(got), strict=False)}

    def faults_at_spots(self, got: tuple[Tensor, ...], arithmetic: Arithmetic = EXACT) -> list[str]:
        """Return what is wrong with a variant's results for `probe`, one line each; empty if they are exact enough.

        Budget: `ALLOWANCE` times the error of PyTorch's kernel on the same inputs, or of exact arithmetic that only
        rounds where `arithmetic` says, plus one rounding to the inputs' dtype.
        """
        faults = self._malformed(got)
        if faults:
            return faults
        for name, error, budget in zip(NAMES, self._errors(got), self._budgets(arithmetic), strict=False):
            for measure in ("overall", "worst_row"):
                value, limit = getattr(error, measure), ALLOWANCE * getattr(budget, measure) + self._floor
                if not value <= limit:
                    faults.append(f"{name}: {measure} error {value:.2g}, allowed {limit:.2g}")
        return faults

    def faults_against_pytorch(self, got: tuple[Tensor, ...], arithmetic: Arithmetic = EXACT) -> list[str]:
        """Return the heads that are further from PyTorch's, as a whole, than two kernels within their budgets can be.

        Args:
            got: what a variant made of the inputs themselves, with the dense dout.
        """
        faults = self._malformed(got)
        if faults:
            return faults
        sizes = [float(_head_sizes(theirs).mean()) for theirs in self._pytorch]
        if not self._is_sample:
            sizes[1:] = [max(sizes[1:], default=0.0)] * len(sizes[1:])  # see `_errors_of`
        for name, mine, theirs, size, budget, its_error in zip(
            NAMES, got, self._pytorch, sizes, self._budgets(arithmetic), self._pytorch_errors, strict=False
        ):
            apart = float(_head_sizes(mine.float() - theirs.float()).max()) / max(size, 1e-30)
            # 1.5: the budget was measured on two heads, and others are somewhat less lucky.
            limit = 1.5 * (ALLOWANCE * budget.overall + its_error.overall) + 2.0 * self._floor
            if not apart <= limit:
                faults.append(f"{name}: a head is {apart:.2g} from PyTorch's, allowed {limit:.2g}")
        return faults

    def _malformed(self, got: tuple[Tensor, ...]) -> list[str]:
        faults = []
        for name, mine, theirs in zip(NAMES, got, self._pytorch, strict=False):
            if mine.shape != theirs.shape:
                faults.append(f"{name}: shape {tuple(mine.shape)}, not {tuple(theirs.shape)}")
            elif not bool(torch.isfinite(mine).all()):
                faults.append(f"{name}: not finite")
        return faults

    def _at(self, spot: tuple[int, int], arithmetic: Arithmetic) -> tuple[Tensor, ...]:
        return exact_at(self.probe.of_key_head(*spot), self._rows, arithmetic)

    def _budgets(self, arithmetic: Arithmetic) -> list[Error]:
        if arithmetic is EXACT:
            return self._pytorch_errors
        if arithmetic not in self._emulated:
            emulated = self._compare([self._at(spot, arithmetic) for spot in self._spots])
            self._emulated[arithmetic] = [
                Error(max(a.overall, b.overall), max(a.worst_row, b.worst_row))
                for a, b in zip(emulated, self._pytorch_errors, strict=True)
            ]
        return self._emulated[arithmetic]

    def _errors(self, got: tuple[Tensor, ...]) -> list[Error]:
        """Per tensor the larger error of the spots."""
        parts = []
        for spot in self._spots:
            mine = [tensor[self._heads_at(spot, tensor)] for tensor in got]
            parts.append(tuple(x[:, :, self._rows] if i < 2 else x for i, x in enumerate(mine)))
        return self._compare(parts)

    def _compare(self, parts: list[tuple[Tensor, ...]]) -> list[Error]:
        """Per tensor the larger error of `parts`, one tuple per spot."""
        by_spot = [
            _errors_of(mine, exact, short=not self._is_sample)
            for mine, exact in zip(parts, self._exact, strict=True)
        ]
        return [
            Error(max(e.overall for e in errors), max(e.worst_row for e in errors))
            for errors in zip(*by_spot, strict=True)
        ]

    def _heads_at(self, spot: tuple[int, int], tensor: Tensor) -> tuple[slice, slice]:
        batch, kv_head = spot
        width = tensor.shape[1] // self.inputs.k.shape[1]
        return slice(batch, batch + 1), slice(kv_head * width, (kv_head + 1) * width)


def _errors_of(got: tuple[Tensor, ...], exact: tuple[Tensor, ...], *, short: bool) -> list[Error]:
    """Per tensor: `overall`, the distance over the size of the exact tensor; `worst_row`, the same of single rows.

    A row is measured against its own size, or against a quarter of the median row's where it is smaller than that:
    early rows of a causal output are far larger than late ones, and a fault in the late ones has to show. Where a
    query sees one key only, dq is zero by cancellation; in short cases, where that counts, the gradients are
    measured against the largest of them.
    """
    rows = [_row_sizes(tensor) for tensor in exact]
    medians = [float(sizes[sizes > 0].median()) if bool((sizes > 0).any()) else 0.0 for sizes in rows]
    totals = [float(sizes.square().mean().sqrt()) for sizes in rows]
    if short:
        medians[1:] = [max(medians[1:], default=0.0)] * len(medians[1:])
        totals[1:] = [max(totals[1:], default=0.0)] * len(totals[1:])
    errors = []
    tiny = torch.finfo(torch.float64).tiny
    for mine, truth, sizes, median, total in zip(got, exact, rows, medians, totals, strict=True):
        if mine.shape != truth.shape:
            errors.append(Error(torch.inf, torch.inf))
            continue
        distances = _row_sizes(mine.double() - truth)
        units = sizes.clamp(min=max(0.25 * median, tiny))
        overall = float(distances.square().mean().sqrt()) / max(total, tiny)
        errors.append(Error(overall, float((distances / units).max())))
    return errors


def _row_sizes(x: Tensor) -> Tensor:
    return x.norm(dim=-1).flatten()


def _head_sizes(x: Tensor) -> Tensor:
    """(batch, heads): the root mean square row of each head."""
    return x.float().norm(dim=-1).square().mean(dim=-1).sqrt()
