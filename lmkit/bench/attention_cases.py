"""What the attention bench measures: its options, the named lengths, the shapes and their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.bench.attention_gate import Inputs
from lmkit.errors import UsageError

TIERS: dict[str, int] = {
    "Small": 128,
    "Medium": 256,
    "Large": 512,
    "XL": 1024,
    "XXL": 2048,
    "4k": 4096,
    "8k": 8192,
    "16k": 16384,
    "32k": 32768,
    "64k": 65536,
    "128k": 131072,
}
DEFAULT_TIERS = ("Small", "Medium", "Large", "XL", "XXL", "4k", "8k", "16k")
DATA = ("normal", "logits x 8", "sink", "late sink", "ramp up", "ramp down")
"""Kinds of input: `normal`, and what trained models make of it (a key 60 nats above the rest, growing maxima)."""
_NATS = 60.0
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class AttentionOptions:
    """What `lmkit bench attention` measures.

    Attributes:
        suite: "sweep": what the other options say; "acceptance": the cases and targets of `attention_acceptance`, of
            which only device, warmup, iters, max_seconds and seed can be chosen.
        tiers: names of `TIERS`, lengths ("4096") or rectangles queries:keys ("128:64").
        kernels: registry names, "sdpa:cudnn|flash|efficient", "flash_triton:portable|hopper|deterministic", each
            with an optional "+compile"; "flash_triton:tf32" multiplies fp32 inputs in tf32; empty: what is usual
            on the device.
        grid_head_dims, grid_lengths: the head_dim x length sweep, forward only; either empty: none.
        grid_kernels: of the sweep; empty: the baseline, ours and PyTorch's.
        backward: also forward + backward, and backward alone.
        baseline: the kernel that speed-ups are relative to.
        projection_layout: q, k, v as strided views of one (batch, seq, 3, heads, head_dim) tensor, as a model's
            projection makes them, instead of contiguous ones.
        data: one of `DATA`.
        cold_cache: overwrite the L2 cache before every sample.
        max_seconds: of timing per case and direction, shared by the variants: slow ones sit out rounds.
        longest_call_seconds: a variant that a shorter case shows to need longer than this for a call is skipped.
    """

    device: str = "cpu"
    suite: str = "sweep"
    dtype: str = "fp32"
    batch: int = 4
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 64
    causal: bool = True
    backward: bool = False
    tiers: tuple[str, ...] = DEFAULT_TIERS
    kernels: tuple[str, ...] = ()
    grid_head_dims: tuple[int, ...] = ()
    grid_lengths: tuple[int, ...] = ()
    grid_kernels: tuple[str, ...] = ()
    baseline: str = "vectorized"
    projection_layout: bool = False
    data: str = "normal"
    warmup: int = 10
    iters: int = 50
    cold_cache: bool = False
    max_seconds: float = 2.0
    longest_call_seconds: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """One shape. `part` is "tiers", "grid" or "memory limit"; `tier` its name, such as "XXL" or "128:64"."""

    part: str
    tier: str
    num_queries: int
    num_keys: int
    head_dim: int

    def forward_flops(self, options: AttentionOptions) -> float:
        """Two matrix products, 2 FLOPs per multiply-add; causal counts the visible triangle (FlashAttention-2)."""
        area = float(self.num_queries) * self.num_keys
        if options.causal:
            square = min(self.num_queries, self.num_keys)
            area = square * square / 2.0 + max(0, self.num_queries - self.num_keys) * self.num_keys
        return 4.0 * options.batch * options.heads * area * self.head_dim

    def flops(self, options: AttentionOptions, direction: str) -> float:
        """Of "forward", "backward" (five products where the forward pass has two) or "fwd+bwd"."""
        return self.forward_flops(options) * {"forward": 1.0, "backward": 2.5, "fwd+bwd": 3.5}[direction]


def build_cases(options: AttentionOptions) -> list[Case]:
    """The tiers in the order given, then the grid.

    Raises:
        UsageError: a tier that is neither a name, a length nor queries:keys.
    """
    cases = []
    for tier in options.tiers:
        num_queries, num_keys = parse_tier(tier)
        cases.append(Case("tiers", tier, num_queries, num_keys, options.head_dim))
    for head_dim in options.grid_head_dims:
        cases += [Case("grid", str(length), length, length, head_dim) for length in options.grid_lengths]
    return cases


def parse_tier(text: str) -> tuple[int, int]:
    """(num_queries, num_keys) of "XXL", "2048" or "128:64".

    Raises:
        UsageError: anything else.
    """
    if text in TIERS:
        return TIERS[text], TIERS[text]
    queries, colon, keys = text.partition(":")
    if queries.isdecimal() and int(queries) > 0 and (not colon or (keys.isdecimal() and int(keys) > 0)):
        return int(queries), int(keys if colon else queries)
    raise UsageError(
        f"bench.attention.tiers: {text!r} is not a tier",
        hint=f"use {', '.join(TIERS)}, a length such as 4096, or queries:keys such as 128:64",
    )


def make_inputs(case: Case, options: AttentionOptions, *, backward: bool) -> Inputs:
    """Random tensors of a case, of the kind `options.data`; the same for the same seed and shape."""
    generator = torch.Generator(device=options.device).manual_seed(options.seed)
    dtype = DTYPES[options.dtype]

    def normal(heads: int, length: int) -> Tensor:
        if options.projection_layout:
            shape = (options.batch, length, heads, case.head_dim)
            whole = torch.randn(shape, generator=generator, device=options.device).to(dtype)
            return whole.transpose(1, 2)  # (batch, heads, length, head_dim), strided
        shape = (options.batch, heads, length, case.head_dim)
        return torch.randn(shape, generator=generator, device=options.device).to(dtype)

    q, k = normal(options.heads, case.num_queries), normal(options.kv_heads, case.num_keys)
    _shape_scores(q, k, options.data)
    return Inputs(
        q=q,
        k=k,
        v=normal(options.kv_heads, case.num_keys),
        dout=normal(options.heads, case.num_queries) if backward else None,
        causal=options.causal,
    )


def _shape_scores(q: Tensor, k: Tensor, data: str) -> None:
    """Changes q and k in place so that the scores look as `data` says; the values stay exact in 16 bits."""
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
        k[:, :, min(3, k.shape[2] - 1) if data == "sink" else k.shape[2] // 2, 0] = _NATS * per_nat
    else:
        ramp = torch.linspace(0.0, _NATS * per_nat, k.shape[2], device=k.device).to(k.dtype)
        k[..., 0] = ramp if data == "ramp up" else ramp.flip(0)
