"""Rotary position embedding, RoPE (Su et al. 2021, "RoFormer")."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

AT_FIRST = 1 << 17
"""Positions of a table before it grows: 64 MiB with 128 channels."""


def scale_frequencies(config: Any, frequencies: Tensor) -> Tensor:
    """Slow rotations down as `rope_scaling` says; radians per position in and out, any shape.

    "linear" divides all of them by `rope_factor` (Chen et al. 2023, "Extending Context Window of Large Language
    Models via Position Interpolation"). "llama3" leaves a share of each as it is, which grows from 0 to 1 with the
    number of turns in the original context (Llama 3.1; `apply_scaling` of its reference code).

    Args:
        config: has the keys `rope_scaling`, `rope_factor`, `rope_low_freq_factor`, `rope_high_freq_factor` and
            `rope_original_context` of a recipe's table [model].

    Raises:
        ValueError: `rope_scaling` has another name.
    """
    if config.rope_scaling == "none":
        return frequencies
    kept = torch.zeros_like(frequencies)
    if config.rope_scaling == "llama3":
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        turns = config.rope_original_context * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    elif config.rope_scaling != "linear":
        raise ValueError(f"rope_scaling must be none, linear or llama3, got {config.rope_scaling}")
    return frequencies * ((1 - kept) / config.rope_factor + kept)


def plain_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return radians per position of each pair of channels, (head_dim / 2) in float64 on the CPU."""
    return theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)


class RotaryEmbedding(nn.Module):
    """A table of cosines and sines of every position and pair of channels (Su et al. 2021, eq. 15).

    `cos_sin[p, i] = (cos(a), sin(a))` with the angle `a = p theta^(-2i / head_dim)`, shape
    (positions, head_dim / 2, 2), float32. `scale` changes the angles per position. The positions are those of the
    context, of a context longer than `AT_FIRST` those that are used: `reserve` adds more.

    One table serves all layers. Checkpoints do not contain it, and it stays in float32 when the model is cast to a
    narrower type: bfloat16 cannot tell positions beyond 256 from their neighbours.

    >>> rope = RotaryEmbedding(head_dim=64, context_length=256)
    >>> q = torch.randn(2, 10, 4, 64)  # (batch, seq, heads, head_dim)
    >>> apply_rope(q, rope(10)).shape
    torch.Size([2, 10, 4, 64])
    """

    cos_sin: Tensor

    def __init__(
        self,
        *,
        head_dim: int,
        context_length: int,
        theta: float = 10_000.0,
        scale: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim {head_dim} is odd: RoPE rotates pairs of channels")
        self.head_dim = head_dim
        self.context_length = context_length
        self.theta = theta
        self.scale = scale
        table = self._compute(0, min(context_length, AT_FIRST))
        wanted = torch.get_default_device() if device is None else torch.device(device)
        # A default of "meta" defers the weights, and what loads them does not bring the table along.
        self.register_buffer(
            "cos_sin",
            table if wanted.type == "meta" and device is None else table.to(wanted),
            persistent=False,
        )

    def _compute(self, begin: int, end: int) -> Tensor:
        # In float64: a float32 angle of 100,000 radians is off by 0.004.
        positions = torch.arange(begin, end, dtype=torch.float64, device="cpu")
        frequencies = plain_frequencies(self.head_dim, self.theta)
        if self.scale is not None:
            frequencies = self.scale(frequencies)
        angles = torch.outer(positions, frequencies)  # (positions, head_dim / 2)
        return torch.stack((angles.cos(), angles.sin()), dim=-1).float()  # (positions, head_dim / 2, 2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        # nn.Module calls this in .to(), .half() and .to_empty(): follow the device, ignore the dtype.
        super()._apply(fn, recurse)
        self.cos_sin = self._compute(0, len(self.cos_sin)).to(self.cos_sin.device)
        return self

    def reserve(self, seq: int) -> None:
        """Extend the table to `seq` positions. A longer table has new memory: call this with the longest sequence
        before a CUDA graph reads the table.

        Raises:
            ValueError: the sequence is longer than the context.
        """
        if seq <= len(self.cos_sin):
            return
        if seq > self.context_length:
            raise ValueError(
                f"a sequence of {seq} tokens is longer than the context of {self.context_length}"
            )
        size = min(max(seq, 2 * len(self.cos_sin)), self.context_length)
        starts = range(len(self.cos_sin), size, AT_FIRST)
        with torch.inference_mode(False):  # training may read the table later
            parts = [self._compute(start, min(start + AT_FIRST, size)) for start in starts]
            self.cos_sin = torch.cat([self.cos_sin, *(part.to(self.cos_sin.device) for part in parts)])

    def forward(self, seq: int) -> Tensor:
        """Return cosines and sines of the positions 0 ... seq - 1, (seq, head_dim / 2, 2).

        Raises:
            ValueError: the sequence is longer than the context.
        """
        self.reserve(seq)
        return self.cos_sin[:seq]

    def at(self, positions: Tensor) -> Tensor:
        """Return cosines and sines of positions that are reserved: (...) -> (..., head_dim / 2, 2)."""
        return self.cos_sin[positions]


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each pair of neighbouring channels (2i, 2i + 1) of x by the angle of its position.

    Args:
        x: (batch, seq, heads, head_dim), any strides.
        cos_sin: of each position and pair, (seq, head_dim / 2, 2) or (batch, seq, head_dim / 2, 2).

    Returns:
        A tensor of x's shape and dtype, computed in float32 or wider.
    """
    cos_sin = cos_sin.unsqueeze(-3)  # (..., seq, 1, head_dim / 2, 2)
    # (batch, seq, heads, head_dim / 2, 2)
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling() or not _can_be_viewed_as_complex(pairs):
        # The compiler fuses real arithmetic and does not fuse complex products.
        even, odd = pairs.unbind(-1)  # (batch, seq, heads, head_dim / 2)
        cos, sin = cos_sin.unbind(-1)  # (..., seq, 1, head_dim / 2)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:
        # A rotation of the plane is a complex product, which passes over memory once instead of seven times.
        product = torch.view_as_complex(pairs) * torch.view_as_complex(cos_sin.to(pairs.dtype))
        rotated = torch.view_as_real(product)  # (batch, seq, heads, head_dim / 2, 2)
    return rotated.flatten(-2).to(x.dtype)  # (batch, seq, heads, head_dim)


def _can_be_viewed_as_complex(pairs: Tensor) -> bool:
    """Whether every pair (..., 2) is contiguous and starts at an even element of the storage."""
    *strides, last = pairs.stride()
    return last == 1 and not any(step % 2 for step in (pairs.storage_offset(), *strides))
