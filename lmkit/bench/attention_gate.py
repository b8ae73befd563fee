"""Check attention kernels before they are timed: `Gate`.

Every variant is compared twice, on the inputs that it will be timed with:

- with float64, on two of the heads (`faults_at_spots`). Up to `FULL_CHECK_LENGTH` queries and keys every row is
  compared. Longer cases compare a sample of query rows; with an output gradient that is zero outside the sample, the
  gradients of all keys stay exact and affordable at any length;
- with PyTorch's kernel (`faults_against_pytorch`): every head as a whole and each of its rows, with the dense output
  gradient.

The budget is the error of an honest kernel of the same precision on the same inputs, never a fixed number. Errors are
relative to the size of the exact rows, or of the terms that cancel in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmkit.attention.run import NAMES, run_attention
from lmkit.attention.sdpa import sdpa

if TYPE_CHECKING:
    from lmkit.bench.attention import Options

FULL_CHECK_LENGTH = 1024
SAMPLED_ROWS = 128
BLOCK_ELEMENTS = 2**26  # float64 scores of one block (0.5 GB): a handful of such blocks live at once
ALLOWANCE = 2.0
NATS = 60.0
"""How far the dominant key of a sink stands above the others."""
TINY = 1e-30
MEASURES = ("overall", "worst_row")
ROWS_ALLOWANCE = 2.0
"""The worst of all rows of all heads is this much less lucky than the worst of the rows that make the budget."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TENSORS = ("q", "k", "v", "dout")
Results = tuple[Tensor, ...]
"""(out,) or (out, dq, dk, dv), in the order of `NAMES`."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of one case.

    Attributes:
        q, dout: (batch, heads, num_queries, head_dim); dout is None for a forward-only case.
        k, v: (batch, kv_heads, num_keys, head_dim).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    causal: bool

    def of_key_head(self, batch: int, kv_head: int) -> Inputs:
        """Return the part of one key head in one batch row: the key head and its group of query heads."""
        q, dout = (None if x is None else self.at(x, batch, kv_head) for x in (self.q, self.dout))
        assert q is not None
        return Inputs(q, self.at(self.k, batch, kv_head), self.at(self.v, batch, kv_head), dout, self.causal)

    def at(self, x: Tensor, batch: int, kv_head: int) -> Tensor:
        """Return the heads of `x` that belong to one key head in one batch row."""
        width = x.shape[1] // self.k.shape[1]
        return x[batch : batch + 1, kv_head * width : (kv_head + 1) * width]

    def copy_(self, other: Inputs) -> None:
        """Take the numbers of other inputs; the tensors stay where they are."""
        for name in TENSORS:
            if (tensor := getattr(self, name)) is not None:
                tensor.copy_(getattr(other, name))

    def run(self, function: Callable[..., Tensor]) -> Results:
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
        shape = [options.batch, heads, length, head_dim]
        if options.projection_layout:
            shape[1], shape[2] = length, heads
        x = torch.randn(shape, generator=generator, device=device).to(dtype)
        return x.transpose(1, 2) if options.projection_layout else x  # (batch, heads, length, head_dim)

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
    """Return x with the 10 bits of mantissa that tensor cores read of a float32; the rest is cut off, as they do.

    Some chips round to nearest instead, with half the error. Cutting always errs towards zero, so its errors do not
    average out.
    """
    return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double()


@dataclass(frozen=True)
class Arithmetic:
    """Where a precision rounds: the operands of matrix products; scores, probabilities and their gradient."""

    operands: Callable[[Tensor], Tensor] = _as_it_is
    scores: Callable[[Tensor], Tensor] = _as_it_is


EXACT = Arithmetic()
TF32 = Arithmetic(operands=cut_to_tf32)


@cache
def arithmetic_of(precision: str, *, keeps_scores: bool) -> Arithmetic:
    """Return where a variant rounds, beyond the rounding of every kernel of its dtype.

    Args:
        keeps_scores: whether the kernel writes scores and probabilities to memory, in 16 bits if its inputs have 16.
    """
    if precision == "tf32":
        return TF32
    dtype = DTYPES[precision]
    if not keeps_scores or dtype.itemsize != 2:
        return EXACT

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    return Arithmetic(operands=rounded, scores=rounded)


def exact_at(inputs: Inputs, rows: Tensor, arithmetic: Arithmetic = EXACT) -> Results:
    """Return the results in float64 for inputs with one key head, by the formulas of the chain rule.

    Args:
        rows: (n,) query indices. out and dq are those of these rows; dk and dv are what these rows contribute.

    Returns:
        out and dq (1, group, n, head_dim), dk and dv (1, 1, num_keys, head_dim).
    """
    operand = arithmetic.operands
    shape = (*inputs.q.shape[:2], len(rows), inputs.q.shape[3])
    out, dq = torch.zeros(2, *shape, dtype=torch.float64, device=rows.device)
    dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (inputs.k, inputs.v))
    for head, part, q, k, v, p, dout, dp in _blocks(inputs, rows, arithmetic):
        out[0, head, part] = operand(p) @ v
        if inputs.dout is not None:
            ds = operand(p * (dp - (dp * p).sum(dim=-1, keepdim=True)) * q.shape[-1] ** -0.5)
            dq[0, head, part] = ds @ k
            dk[0, 0] += ds.T @ q
            dv[0, 0] += operand(p).T @ dout
    return (out,) if inputs.dout is None else (out, dq, dk, dv)


def terms_at(inputs: Inputs, rows: Tensor, arithmetic: Arithmetic = EXACT) -> Results:
    """Return for each row of `exact_at` the root of the sum of squares of its terms, rounding errors of which add up.

    Terms may cancel: a row that sees one key has dq = p (dp - D) k = 0, where dp and D = dout . out are each rounded.
    Hence D counts as out's elements and as the products p dp, and dp as the products of dout and v. An error of a
    score, a sum of products in float32 and rounded where `arithmetic` says so, changes all probabilities of its row.
    """
    width = torch.finfo(torch.float32).eps / torch.finfo(inputs.q.dtype).eps
    rounds_scores = arithmetic.scores is not _as_it_is
    out = torch.zeros((*inputs.q.shape[:2], len(rows)), dtype=torch.float64, device=rows.device)
    dq, dk = torch.zeros_like(out), torch.zeros(inputs.k.shape[:3], dtype=torch.float64, device=rows.device)
    dv = torch.zeros_like(dk)
    for head, part, q, k, v, p, dout, dp in _blocks(inputs, rows, EXACT):
        of_score = width**2 * (q.square() @ k.square().T) / q.shape[-1]
        if rounds_scores:
            of_score += (q @ k.T).square() / q.shape[-1]
        of_row = (p.square() * of_score).sum(dim=-1, keepdim=True)
        squares = p.square() * (1.0 + (of_score * (1.0 - 2.0 * p) + of_row).clamp(min=0.0))
        out[0, head, part] = squares @ v.square().sum(-1)
        if inputs.dout is not None:
            d = (dp * p).sum(dim=-1, keepdim=True)
            of_d = ((dout * (p @ v)).square().sum(-1) + (p * dp).square().sum(-1))[:, None]
            of_ds = squares * ((dp - d).square() + dout.square() @ v.square().T)
            common = of_d[:, 0] * (p @ k).square().sum(-1)  # an error of D is the same for all keys
            dq[0, head, part] = (of_ds @ k.square().sum(-1) + common) / q.shape[-1]
            dk[0, 0] += (of_ds + squares * of_d).T @ q.square().sum(-1) / q.shape[-1]
            dv[0, 0] += squares.T @ dout.square().sum(-1)
    found = (out,) if inputs.dout is None else (out, dq, dk, dv)
    return tuple(x.sqrt().flatten() for x in found)


def _blocks(inputs: Inputs, rows: Tensor, arithmetic: Arithmetic) -> Iterator[tuple[Any, ...]]:
    """Yield head, part of `rows`, q, k, v, probabilities, dout and its products with v, in float64."""
    operand, score = arithmetic.operands, arithmetic.scores
    k, v = operand(inputs.k[0, 0].double()), operand(inputs.v[0, 0].double())  # (num_keys, head_dim)
    block = max(1, BLOCK_ELEMENTS // max(1, len(k)))
    key_index = torch.arange(len(k), device=k.device)
    for head in range(inputs.q.shape[1]):
        for start in range(0, len(rows), block):
            part = slice(start, start + block)
            q = operand(inputs.q[0, head, rows[part]].double())  # (block, head_dim)
            scores = score(q @ k.T * k.shape[-1] ** -0.5)  # (block, num_keys)
            if inputs.causal:
                scores.masked_fill_(key_index[None, :] > rows[part, None], -torch.inf)
            p = score(scores.softmax(dim=-1))
            dout = dp = None
            if inputs.dout is not None:
                dout = operand(inputs.dout[0, head, rows[part]].double())
                dp = score(dout @ v.T)
            yield head, part, q, k, v, p, dout, dp


def rows_to_check(num_queries: int, num_keys: int, device: torch.device, seed: int = 0) -> Tensor:
    """Return sorted indices of the query rows that are compared with float64.

    All rows of a short case; else the first, the middle, the last, and others at random in strata, so that no gap is
    longer than a 64th of the rows.
    """
    if max(num_queries, num_keys) <= FULL_CHECK_LENGTH or num_queries <= SAMPLED_ROWS:
        return torch.arange(num_queries, device=device)
    run, middle = SAMPLED_ROWS // 8, num_queries // 2
    borders = [*range(run), *range(middle, middle + run), *range(num_queries - run, num_queries)]
    strata = SAMPLED_ROWS - len(borders)
    generator = torch.Generator().manual_seed(seed)
    shift, jitter = torch.rand(1, generator=generator), torch.rand(strata, generator=generator)
    places = torch.arange(strata) + 0.75 * shift + 0.25 * jitter  # at most 1.25 strata apart
    scattered = (places * (num_queries / strata)).long().tolist()
    return torch.tensor(sorted({*borders, *scattered}), device=device)


class Gate:
    """Judge the variants of one case against references that are computed once.

    Attributes:
        inputs: the inputs of the case.
        probe: the inputs for `faults_at_spots`: like `inputs`, with dout zero outside the compared rows, which `seed`
            chooses.
    """

    def __init__(self, inputs: Inputs, seed: int = 0) -> None:
        self.inputs = self.probe = inputs
        self._rows = rows_to_check(inputs.q.shape[2], inputs.k.shape[2], inputs.q.device, seed)
        self._is_short = max(inputs.q.shape[2], inputs.k.shape[2]) <= FULL_CHECK_LENGTH
        if not self._is_short and inputs.dout is not None:
            dout = torch.zeros_like(inputs.dout)
            dout[:, :, self._rows] = inputs.dout[:, :, self._rows]
            self.probe = replace(inputs, dout=dout)
        given = [*((name, getattr(inputs, name)) for name in TENSORS), ("dout", self.probe.dout)]
        self._kept = [(name, tensor, tensor.clone()) for name, tensor in given if tensor is not None]
        batch, kv_heads = inputs.k.shape[:2]
        self._spots = sorted({(0, 0), (batch - 1, kv_heads - 1)})
        self._exact = self._at_spots(exact_at, EXACT)
        self._terms = self._at_spots(terms_at, EXACT)
        self._pytorch = inputs.run(sdpa)
        self._pytorch_errors = self._errors(self._cut_out(self.probe.run(sdpa)))
        self._budgets = {EXACT: self._pytorch_errors}
        # One rounding of a result to the inputs' dtype, and float32 sums.
        self._floor = torch.finfo(inputs.q.dtype).eps + 16.0 * torch.finfo(torch.float32).eps

    def restore(self) -> str:
        """Return which inputs are not what they were, and put them back."""
        written = [(name, tensor, kept) for name, tensor, kept in self._kept if not torch.equal(tensor, kept)]
        for _, tensor, kept in written:
            tensor.copy_(kept)
        return ", ".join(dict.fromkeys(name for name, *_ in written))

    def errors(self, got: Results) -> dict[str, float]:
        """Return name -> distance from float64 over its size, for results of `probe`; the worse of the two heads."""
        if self._malformed(got):
            return {}
        return dict(zip(NAMES, self._errors(self._cut_out(got))[:, 0].tolist(), strict=False))

    def faults_at_spots(self, got: Results, arithmetic: Arithmetic | None = EXACT) -> list[str]:
        """Return what is wrong with a variant's results for `probe`, one line each; empty if they are exact enough.

        Budget: `ALLOWANCE` times the error of PyTorch's kernel on the same inputs, or of exact arithmetic that only
        rounds where `arithmetic` says, plus one rounding to the inputs' dtype. None: only form is checked.
        """
        if (faults := self._malformed(got)) or arithmetic is None:
            return faults
        errors = self._errors(self._cut_out(got)).tolist()
        limits = (ALLOWANCE * self._budget(arithmetic) + self._floor).tolist()
        return [
            f"{name}: {measure} error {value:.2g}, allowed {limit:.2g}"
            for name, *both in zip(NAMES, errors, limits, strict=False)
            for measure, value, limit in zip(MEASURES, *both, strict=False)
            if not value <= limit
        ]

    def faults_against_pytorch(self, got: Results, arithmetic: Arithmetic | None = EXACT) -> list[str]:
        """Return the heads and rows that are further from PyTorch's than two kernels within their budgets can be.

        Args:
            got: a variant's results for `inputs`, with the dense dout.
        """
        if (faults := self._malformed(got)) or arithmetic is None:
            return faults
        of_terms = [[float(x.square().mean().sqrt()) for x in terms] for terms in self._terms]
        # 1.5: the budget was measured on two heads, and others are somewhat less lucky.
        limits = 1.5 * (ALLOWANCE * self._budget(arithmetic) + self._pytorch_errors) + 2.0 * self._floor
        faults = []
        for i, (mine, theirs, *terms) in enumerate(zip(got, self._pytorch, *of_terms, strict=True)):
            rows, apart = (x.norm(dim=-1) for x in (theirs.float(), mine.float() - theirs.float()))
            size = max(float(_head_sizes(rows).mean()), *terms, TINY)
            found = {
                "head": (float(_head_sizes(apart).max()) / size, float(limits[i, 0])),
                "row": (float((apart / rows.clamp(min=size)).max()), ROWS_ALLOWANCE * float(limits[i, 2])),
            }
            faults += [
                f"{NAMES[i]}: a {part} relative error {error:.2g} against PyTorch, allowed {limit:.2g}"
                for part, (error, limit) in found.items()
                if not error <= limit
            ]
        return faults

    def _malformed(self, got: Results) -> list[str]:
        faults = []
        for name, mine, theirs in zip(NAMES, got, self._pytorch, strict=False):
            if not isinstance(mine, Tensor):
                faults.append(f"{name}: {type(mine).__name__}, not a tensor")
            elif mine.dtype != theirs.dtype:
                faults.append(f"{name}: {mine.dtype}, not {theirs.dtype}")
            elif mine.shape != theirs.shape:
                faults.append(f"{name}: shape {tuple(mine.shape)}, not {tuple(theirs.shape)}")
            elif not bool(torch.isfinite(mine).all()):
                faults.append(f"{name}: not finite")
        return faults

    def _at_spots(self, compute: Callable[..., Results], arithmetic: Arithmetic) -> list[Results]:
        return [compute(self.probe.of_key_head(*spot), self._rows, arithmetic) for spot in self._spots]

    def _cut_out(self, got: Results) -> list[Results]:
        """Return, for each spot, what `exact_at` returns of it: the compared rows of out and dq, all of dk and dv."""
        return [
            tuple(
                x[:, :, self._rows] if i < 2 else x
                for i, x in enumerate(self.inputs.at(tensor, *spot) for tensor in got)
            )
            for spot in self._spots
        ]

    def _budget(self, arithmetic: Arithmetic) -> Tensor:
        if arithmetic not in self._budgets:
            errors = self._errors(self._at_spots(exact_at, arithmetic))
            emulated = torch.maximum(errors, self._pytorch_errors)
            half = 0.5 * torch.finfo(self.inputs.q.dtype).eps
            terms = [[half * x for x in of_spot] for of_spot in self._at_spots(terms_at, arithmetic)]
            self._budgets[arithmetic] = torch.maximum(emulated, self._relative(terms))
        return self._budgets[arithmetic]

    def _errors(self, of_spots: Iterable[Results]) -> Tensor:
        """Return (tensors, 3), see `_relative`: errors of each tensor, the larger of the spots."""
        return self._relative(
            [_row_sizes(mine.double() - truth) for mine, truth in zip(got, exact, strict=True)]
            for got, exact in zip(of_spots, self._exact, strict=True)
        )

    def _relative(self, of_spots: Iterable[Sequence[Tensor]]) -> Tensor:
        """Return (tensors, 3) for the distances of rows: over the size of the exact tensor, of the worst row, and of
        the worst row where none counts as smaller than the size of the tensor.

        A row's distance is relative to the row's size, or that of its terms if these cancel, but at least to a
        quarter of the median row's size: early rows of a causal output are far larger than late ones, and a fault in
        a late row must show.
        """
        found = []
        for distances, exact, terms in zip(of_spots, self._exact, self._terms, strict=True):
            of_tensors = []
            for distance, truth, of_terms in zip(distances, exact, terms, strict=True):
                sizes = torch.maximum(_row_sizes(truth), of_terms)
                units = sizes.clamp(min=max(0.25 * float(sizes.median()), TINY))
                size = sizes.square().mean().sqrt().clamp(min=TINY)
                overall = distance.square().mean().sqrt() / size
                worst = [(distance / unit).max() for unit in (units, torch.maximum(_row_sizes(truth), size))]
                of_tensors.append(torch.stack((overall, *worst)))
            found.append(torch.stack(of_tensors))
        return torch.stack(found).amax(0).cpu()


def _row_sizes(x: Tensor) -> Tensor:
    return x.norm(dim=-1).flatten()


def _head_sizes(rows: Tensor) -> Tensor:
    """Return the root mean square of the rows' sizes: (batch, heads, rows) -> (batch, heads)."""
    return rows.square().mean(dim=-1).sqrt()
