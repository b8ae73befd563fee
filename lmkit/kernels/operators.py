"""Define custom operators: torch.compile takes a call of one as it is and does not look into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmkit.kernels.launch import empty_in_order_of


def define(
    library: torch.library.Library, schema: str, function: Callable[..., Any], shapes: Callable[..., Any]
) -> Callable[..., Any]:
    """Define an operator in the library "lmkit" and return it.

    The schema is given, because `torch.library.custom_op` would look for aliases in every call, which takes the host
    microseconds.

    Args:
        library: of the file that calls this, so that the operators are freed with it: it may be loaded again.
        schema: "name(Tensor x, ...) -> Tensor". No output may share memory with an input.
        function: what the operator does.
        shapes: returns tensors shaped as the outputs (a fake kernel).
    """
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lmkit::{name}", shapes, lib=library)
    return getattr(torch.ops.lmkit, name).default


def as_rows(x: Tensor) -> Tensor:
    """(..., channels) -> (rows, channels) with stride 1 along the channels; a copy only if no view can be that."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def attention_shapes(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the shapes of the output and the log-sum-exp of attention."""
    return empty_in_order_of(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def attention_gradient_shapes(
    _: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shapes of the gradients of q, k and v."""
    return empty_in_order_of(q), empty_in_order_of(k), empty_in_order_of(v)
