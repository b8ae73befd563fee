"""Add a layer's output to the residual stream and normalise the sum, in one pass over memory.

    h = x + delta        y = h r gain        r = 1 / sqrt(mean(h^2) + eps)

(RMSNorm: Zhang and Sennrich 2019, eq. 4.) The function returns h, to which the next layer adds, and y, which this
layer reads. So the backward pass gets two gradients: dy, through the norm, and dh, past it. With u = h r:

    dx = ddelta = dh + r (g - u mean(g u)),   g = dy gain        dgain = sum over rows of dy u

Statistics are float32. Each program adds up the gain's gradient over its rows, and one sum over the programs follows:
the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.core.autograd import differentiable_once
from lmkit.kernels.launch import LaunchCache, Start, count_sms, prepare_launch
from lmkit.kernels.operators import as_rows, define

SECOND = "torch.nn.functional.rms_norm has a second derivative"


def add_rms_norm(
    x: Tensor, delta: Tensor, gain: Tensor, *, eps: float = 1e-5, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return (x + delta, its RMSNorm times gain). Differentiable once in x, delta and gain.

    Args:
        x: (..., d_model), the residual stream; the sum has its dtype.
        delta: shaped as x, any float dtype.
        gain: (d_model)
        eps: added to the mean square.
        dtype: of the norm; None takes x's.
    """
    if torch.compiler.is_compiling():
        total, normed, _ = forward_operator(x, delta, gain, eps, dtype or x.dtype)
    else:
        normed, total = AddRMSNorm.apply(x, delta, gain, (eps, dtype or x.dtype))
    return total, normed


def rms_norm(x: Tensor, gain: Tensor, *, eps: float = 1e-5, dtype: torch.dtype | None = None) -> Tensor:
    """Return the RMSNorm of x alone, times gain. See `add_rms_norm`."""
    if torch.compiler.is_compiling():
        return forward_operator(x, None, gain, eps, dtype or x.dtype)[1]
    return AddRMSNorm.apply(x, None, gain, (eps, dtype or x.dtype))[0]


@triton.jit
def add_norm_kernel(
    x_pointer,
    delta_pointer,
    gain_pointer,
    total_pointer,
    normed_pointer,
    inverse_rms_pointer,
    x_stride,
    delta_stride,
    width,
    eps,
    ADD: tl.constexpr,  # there is a delta, and the sum is stored
    BLOCK: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    h = tl.load(x_pointer + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        h += tl.load(delta_pointer + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
        h = h.to(total_pointer.dtype.element_ty)  # the norm sees what backward will read
        tl.store(total_pointer + row * width + columns, h, mask=inside)
        h = h.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(h * h) / width + eps)
    gain = tl.load(gain_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    normed = h * inverse_rms * gain
    tl.store(normed_pointer + row * width + columns, normed.to(normed_pointer.dtype.element_ty), mask=inside)
    tl.store(inverse_rms_pointer + row, inverse_rms)


@triton.jit
def norm_gradient_kernel(
    grad_pointer,  # of the norm
    past_pointer,  # of the sum
    total_pointer,
    gain_pointer,
    inverse_rms_pointer,
    grad_x_pointer,
    grad_gain_pointer,  # (width), or (programs, width): the sums of each program
    grad_stride,
    past_stride,
    total_stride,
    rows,
    width,
    PAST: tl.constexpr,  # the sum has a gradient
    ATOMIC: tl.constexpr,  # the gain's gradient is added up here, in any order
    BLOCK: tl.constexpr,
):
    """A program takes every num_programs-th row."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(gain_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        grad = tl.load(grad_pointer + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(total_pointer + row * total_stride + columns, mask=inside, other=0.0).to(tl.float32)
        inverse_rms = tl.load(inverse_rms_pointer + row)
        if PAST:
            past = tl.load(past_pointer + row * past_stride + columns, mask=inside, other=0.0)
        unit *= inverse_rms
        sums += grad * unit
        grad *= gain
        grad = (grad - unit * (tl.sum(grad * unit) / width)) * inverse_rms
        if PAST:
            grad += past.to(tl.float32)
        tl.store(
            grad_x_pointer + row * width + columns, grad.to(grad_x_pointer.dtype.element_ty), mask=inside
        )
    if ATOMIC:
        tl.atomic_add(grad_gain_pointer + columns, sums, mask=inside, sem="relaxed")
    else:
        tl.store(grad_gain_pointer + tl.program_id(0) * width + columns, sums, mask=inside)


def block_constants(width: int) -> dict[str, int]:
    """Return a row's block and its warps: at most 16 elements a thread from 4 warps on."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": 1 if block <= 512 else min(max(4, block // 512), 16)}


def _prepare_forward(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    x, delta, *_ = tensors
    eps, add, _ = options
    numbers = (x.stride(0), delta.stride(0), x.shape[1], eps)
    constants = {"ADD": add, **block_constants(x.shape[1])}
    return prepare_launch(add_norm_kernel, (len(x), 1), tensors, numbers, constants)


def _prepare_backward(tensors: tuple[Tensor, ...], options: tuple) -> Start:
    grad, past, total, *_ = tensors
    with_past, programs, atomic = options
    rows, width = grad.shape
    numbers = (grad.stride(0), past.stride(0), total.stride(0), rows, width)
    constants = {"PAST": with_past, "ATOMIC": atomic, **block_constants(width)}
    return prepare_launch(norm_gradient_kernel, (programs, 1), tensors, numbers, constants)


forward_calls = LaunchCache(_prepare_forward)
backward_calls = LaunchCache(_prepare_backward)


def forward(
    x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sum, norm, inverse RMS in float32 (rows)); without delta the sum is empty, because it is x."""
    shape, x = x.shape, as_rows(x)
    total = x.new_empty(shape if delta is not None else 0)
    normed = x.new_empty(shape, dtype=dtype)
    inverse_rms = x.new_empty(len(x), dtype=torch.float32)
    if len(x):
        inputs = (x, x if delta is None else as_rows(delta), gain.contiguous())
        forward_calls(inputs, (total, normed, inverse_rms), (eps, delta is not None, dtype))
    return total, normed, inverse_rms


def backward(
    grad: Tensor, past: Tensor | None, total: Tensor, gain: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (which is delta's too) and of gain, in their dtypes.

    Unless algorithms have to be deterministic, the gain's is a sum in an order that changes from run to run.

    Args:
        grad, past: of the norm and of the sum (None: it has none).
    """
    shape, dtype = total.shape, total.dtype
    grad, total = as_rows(grad), as_rows(total)
    rows, width = total.shape
    per_sm = 8 if width <= 1024 else 4  # too few programs cannot keep the memory busy
    programs = min(rows, per_sm * (count_sms(grad.device) if grad.is_cuda else 1))
    grad_x = grad.new_empty(shape, dtype=dtype)
    atomic = not torch.are_deterministic_algorithms_enabled()
    make = grad.new_zeros if atomic else grad.new_empty
    sums = make((width,) if atomic else (programs, width), dtype=torch.float32)
    if rows:
        inputs = (grad, grad if past is None else as_rows(past), total, gain.contiguous(), inverse_rms)
        backward_calls(inputs, (grad_x, sums), (past is not None, programs, atomic))
    return grad_x, (sums if atomic else sums.sum(dim=0)).to(gain.dtype)


class AddRMSNorm(torch.autograd.Function):
    """`apply(x, delta, gain, (eps, dtype))` returns (norm, sum). Without delta the sum is empty."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, gain: Tensor, options: tuple[float, torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        total, normed, inverse_rms = forward(x, delta, gain, *options)
        ctx.set_materialize_grads(False)  # the sum often has no gradient
        ctx.save_for_backward(x if delta is None else None, total, gain, inverse_rms)
        ctx.delta_dtype = None if delta is None else delta.dtype
        return normed, total

    @staticmethod
    @differentiable_once("RMSNorm", instead=SECOND)
    def backward(ctx: Any, saved: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, total, *others = saved
        return *_gradients(backward, grads, (total if x is None else x, *others), ctx.delta_dtype), None


def _gradients(
    run: Callable[..., tuple[Tensor, Tensor]],
    grads: tuple[Tensor | None, ...],
    saved: tuple[Tensor, ...],
    delta_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, delta and gain; `run` computes them.

    Args:
        grads: of the norm and of the sum.
        saved: sum, gain and inverse RMS.
        delta_dtype: None: there is no delta.
    """
    grad, past = grads
    grad_x, grad_gain = (past, None) if grad is None else run(grad, past, *saved)
    if grad_x is None or delta_dtype is None:
        return grad_x, None, grad_gain
    return grad_x, grad_x.to(delta_dtype), grad_gain


_LIBRARY = torch.library.Library("lmkit", "FRAGMENT")
forward_operator = define(
    _LIBRARY,
    "add_rms_norm(Tensor x, Tensor? delta, Tensor gain, float eps, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    forward,
    lambda x, delta, gain, eps, dtype: (
        x.new_empty(0 if delta is None else x.shape),
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape[:-1].numel(), dtype=torch.float32),
    ),
)
backward_operator = define(
    _LIBRARY,
    "add_rms_norm_backward(Tensor grad, Tensor? past, Tensor total, Tensor gain, Tensor inverse_rms) "
    "-> (Tensor, Tensor)",
    backward,
    lambda grad, past, total, gain, inverse_rms: (
        grad.new_empty(total.shape, dtype=total.dtype),
        gain.new_empty(gain.shape),
    ),
)


def _save_for_operator(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, delta, gain, *_ = inputs
    total, _, inverse_rms = output
    ctx.mark_non_differentiable(inverse_rms)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if delta is None else total, gain, inverse_rms)
    ctx.delta_dtype = None if delta is None else delta.dtype


def _backward_of_operator(ctx: Any, past: Tensor | None, grad: Tensor | None, _: None) -> tuple:
    gradients = _gradients(backward_operator, (grad, past), ctx.saved_tensors, ctx.delta_dtype)
    return *gradients, None, None


torch.library.register_autograd(
    "lmkit::add_rms_norm", _backward_of_operator, setup_context=_save_for_operator, lib=_LIBRARY
)
