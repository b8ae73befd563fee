"""Products of linear layers in fp8: `train.precision = "fp8"`.

Of the three products of a layer, y = x W^T and dx = dy W are computed in fp8 (e4m3) with float32 sums, and dW = dy^T
x, whose errors the optimizer would add up, in bf16. Weights and activations stay bf16. A factor is cast right before
its product (or by SwiGLU's kernel, which has computed it), with scales of what it holds, see `lmkit.kernels.fp8`: x,
dy and W in y = x W^T by rows, W in dx = dy W as a whole. So there is no state, and a pass that is computed again has
the same bits.

Passes without gradients, such as evaluations, are computed in bf16, as they will be after training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit.core.autograd import differentiable_once
from lmkit.core.model import Linear
from lmkit.errors import UsageError
from lmkit.model.transformer import SwiGLU

FP8_LEAST_WIDTH = 1024
"""Of both sides of a matrix whose products are computed in fp8: the casts of narrower ones take as long as their
products save."""
FP8_MULTIPLE = 16
"""Both sides have to be multiples of it, as cuBLAS wants."""


def use_fp8(blocks: nn.Module) -> int:
    """Compute the matrix products of the blocks in fp8 where that is faster; return how many."""
    products = 0
    for module in blocks.modules():
        joined: tuple[Linear, ...] = getattr(module, "joined_layers", tuple)()
        others = [x for x in module.children() if isinstance(x, Linear) and x not in joined]
        for layers in [joined, *([layer] for layer in others)]:
            if layers and suits_fp8(sum(x.out_features for x in layers), layers[0].in_features):
                products += 1
                for layer in layers:
                    layer.product = fp8_linear
        if isinstance(module, SwiGLU):
            module.casts = module.w1.product is module.w2.product is fp8_linear
    return products


def suits_fp8(rows: int, columns: int) -> bool:
    """Return whether fp8 is faster for the products of a matrix, and possible."""
    return min(rows, columns) >= FP8_LEAST_WIDTH and not (rows % FP8_MULTIPLE or columns % FP8_MULTIPLE)


def check_fp8(device: torch.device) -> None:
    """Raise UsageError unless the device multiplies fp8."""
    wrong = ""
    if device.type != "cuda":
        wrong = "needs a GPU"
    elif torch.cuda.get_device_capability(device) < (9, 0):
        wrong = f"needs sm_90 or newer; {torch.cuda.get_device_name(device)} is older"
    if wrong:
        raise UsageError("train.wrong_device", f'train.precision: "fp8" {wrong}', hint='use "bf16"')


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias as `torch.nn.functional.linear`; (..., in) -> (..., out). Differentiable once."""
    if not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    out = Fp8Linear.apply(x, weight)[0]
    return out if bias is None else out + bias


class Fp8Linear(torch.autograd.Function):
    """`apply(x, weight)` returns (x W^T, the scales of the rows of W)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        cast_rows, take_cast, _, multiply = kernels_for(x)
        low_x, x_scale = take_cast(x) or cast_rows(x.reshape(-1, x.shape[-1]))
        low_w, w_scale = cast_rows(weight)
        out = multiply(low_x, low_w, x_scale, w_scale.view(1, -1))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, w_scale)
        # Not a view: RoPE turns its input in place, and autograd would copy the gradient of a view.
        return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], len(weight))), w_scale

    @staticmethod
    @differentiable_once("an fp8 product", instead='train.precision = "bf16" has second derivatives')
    def backward(ctx: Any, saved: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight, w_scale = saved
        cast_rows, take_cast, cast_transposed, multiply = kernels_for(x)
        grad = grads[0].reshape(-1, len(weight))
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            low_grad, grad_scale = take_cast(grads[0]) or cast_rows(grad)
            low_w, scales = cast_transposed(weight, w_scale.amax())
            grad_x = multiply(low_grad, low_w, grad_scale, scales).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_w = grad.t() @ x.reshape(-1, x.shape[-1])
        return grad_x, grad_w


def kernels_for(x: Tensor) -> tuple[Callable[..., Any], ...]:
    """Return (cast_rows, take_cast, cast_transposed, multiply) for the device of x; on a CPU, which has no fp8
    products, a simulation for tests."""
    from lmkit.kernels import fp8

    if x.device.type == "cpu":
        return fp8.plain_cast_rows, fp8.take_cast, fp8.plain_cast_transposed, simulate
    return fp8.cast_rows, fp8.take_cast, fp8.cast_transposed, multiply


def multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """Return a b^T in bf16, of fp8 factors (rows, n) and (columns, n) and their scales (rows, 1) and (1, columns)."""
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def simulate(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """Compute `multiply` with float32 products, which are exact, and sums: the form to read."""
    return ((a.float() @ b.float().t()) * a_scale * b_scale).bfloat16()
