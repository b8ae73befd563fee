"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RotaryTable(nn.Module):
    """The rotation of each position and pair of channels: `table[p, i] = (cos, sin)(p theta^(-2i / head_dim))`,
    shape (context_length, head_dim / 2, 2) (Su et al. 2021, "RoFormer", eq. 15).

    One table serves all layers. It is no part of a checkpoint, and it stays in float32 when the model is cast to a
    narrower type: in bfloat16 neighbouring positions beyond 256 would fall together.
    """

    table: Tensor

    def __init__(
        self, *, head_dim: int, context_length: int, theta: float, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim {head_dim} is odd: RoPE rotates pairs of channels")
        self.head_dim = head_dim
        self.context_length = context_length
        self.theta = theta
        self.register_buffer("table", self._compute().to(device), persistent=False)

    def _compute(self) -> Tensor:
        # float64, since a float32 angle of 100,000 radians is off by 0.004 before its cosine is taken.
        channels = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device="cpu")
        positions = torch.arange(self.context_length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.theta ** (-channels / self.head_dim))  # (context, head_dim / 2)
        return torch.stack((angles.cos(), angles.sin()), dim=-1).float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        # nn.Module's hook behind .to(), .half(), .to_empty(): follow the device, not the dtype.
        super()._apply(fn, recurse)
        self.table = self._compute().to(self.table.device)
        return self

    def forward(self, seq: int) -> Tensor:
        """The rotations of positions 0 ... seq - 1, (seq, head_dim / 2, 2).

        Raises:
            ValueError: the sequence is longer than the context.
        """
        if seq > self.context_length:
            raise ValueError(
                f"a sequence of {seq} tokens is longer than the context of {self.context_length}"
            )
        return self.table[:seq]

    def at(self, positions: Tensor) -> Tensor:
        """The rotations of these positions, (..., head_dim / 2, 2)."""
        return self.table[positions]


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate each pair of neighbouring channels (2i, 2i + 1) of x by the angle of its position.

    Args:
        x: (batch, seq, heads, head_dim), any strides.
        rotations: (cos, sin) per position and pair, (seq, head_dim / 2, 2) or (batch, seq, head_dim / 2, 2).

    Returns:
        As x, in x's dtype; computed in float32 or wider.
    """
    rotations = rotations.unsqueeze(-3)  # (..., seq, 1, head_dim / 2, 2)
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling() or not _lies_as_complex(pairs):
        # The compiler fuses real arithmetic and cannot look into complex products.
        even, odd = pairs.unbind(-1)  # (batch, seq, heads, head_dim / 2)
        cos, sin = rotations.unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:
        # A rotation of the plane is a complex product: one pass over memory in place of seven.
        turned = torch.view_as_complex(pairs) * torch.view_as_complex(rotations.to(pairs.dtype))
        rotated = torch.view_as_real(turned)
    return rotated.flatten(-2).to(x.dtype)  # (batch, seq, heads, head_dim)


def _lies_as_complex(pairs: Tensor) -> bool:
    """Whether (..., 2) can be seen as complex numbers where it is: whole pairs from the start of memory."""
    *strides, last = pairs.stride()
    return last == 1 and not any(step % 2 for step in (pairs.storage_offset(), *strides))
