"""What a Transformer computes around its matrix products, by operations of PyTorch: the form to read, and for CPUs.

`fused` has the same operations as kernels. `choose_operations` finds those that run on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lmkit.attention.dispatch import runs_on
from lmkit.core.loss import linear_cross_entropy
from lmkit.core.model import rms_norm, rotate_joint
from lmkit.registry import OPERATIONS


@OPERATIONS.register("plain", order=2)
class Operations:
    """The operations by name. Another set is a subclass, registered under its `name`."""

    name = "plain"

    embedding: Callable[[Tensor, Tensor], Tensor] = staticmethod(F.embedding)
    """Return the rows of weight (vocab_size, d_model) for ids (...): (..., d_model)."""
    linear_cross_entropy: Callable[..., Tensor] = staticmethod(linear_cross_entropy)
    """Return the mean cross-entropy of hidden weight^T, see `lmkit.core.loss`."""

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (x + delta, its RMSNorm times gain (d_model)), both (..., d_model); `delta` may be overwritten."""
        if delta is None:
            total = x
        elif x.dtype == delta.dtype:
            total = delta.add_(x)  # new memory costs a CPU more than the sum
        else:
            total = x + delta  # under autocast
        return total, rms_norm(total, gain, eps)

    def heads_norm(self, qkv: Tensor, q_norm: Any, k_norm: Any, kv_heads: int) -> Tensor:
        """Return the projection q|k|v (..., (heads + 2 kv_heads) * head_dim) with queries and keys normalised by two
        `RMSNorm` of head_dim channels, a new tensor."""
        heads = qkv.unflatten(-1, (-1, len(q_norm.weight)))  # (..., heads + 2 kv_heads, head_dim)
        q, k, v = heads.split((heads.shape[-2] - 2 * kv_heads, kv_heads, kv_heads), dim=-2)
        return torch.cat([q_norm(q).to(v.dtype), k_norm(k).to(v.dtype), v], dim=-2).flatten(-2)

    def rotated(self, qkv: Tensor, cos_sin: Tensor, kv_heads: int, *, joined: bool) -> tuple[Tensor, ...]:
        """Rotate q and k in the projection q|k|v.

        Args:
            qkv: (batch, seq, (heads + 2 kv_heads) * head_dim); may be overwritten.
            cos_sin: of the positions, see `apply_rope`.
            joined: the attention kernel has a form that takes the projection as it is.

        Returns:
            q (batch, heads, seq, head_dim), k and v (batch, kv_heads, seq, head_dim), as views where they can be. If
            `joined`, it may be the projection alone, shaped as qkv.
        """
        return rotate_joint(qkv, cos_sin, kv_heads)

    def swiglu(self, joint: Tensor, *, casts: bool = False) -> Tensor:
        """Return silu(gate) * up of gate|up, which may be overwritten: (..., 2 d_ff) -> (..., d_ff). If it `casts`,
        it keeps casts for fp8 products before and after it."""
        gate, up = joint.chunk(2, dim=-1)  # (..., d_ff)
        return F.silu(gate) * up


PLAIN = Operations()


def choose_operations(name: str, weight: Tensor) -> Operations:
    """Return a registered set of operations for a model with this weight; on the device "meta" always "plain". "auto"
    takes the first set that runs on the weight's device and in its dtype.

    Raises:
        UsageError: the named set does not run there, or needs a package that is not installed.
    """
    if weight.is_meta:
        return PLAIN
    if name == "auto":
        name = next(name for name in OPERATIONS.names if runs_on(OPERATIONS, name, weight))
    elif (check := OPERATIONS.facts(name).check) is not None:
        OPERATIONS.function_of(name, check)(weight)
    made: Operations = OPERATIONS.load(name)()
    made.name = OPERATIONS.entry(name).name
    return made
