"""The head's matrix product and the cross-entropy after it, without ever holding all logits.

For a chunk of tokens at a time: logits z = h W^T; then one kernel that computes the losses and writes their gradient
in the place of the logits; then both products with that gradient.

    loss = log(sum(exp(z))) - z[target]        dz = (softmax(z) - [target]) / tokens that count

Logits have the dtype of the weights. Statistics, losses and the sum of the weight's gradient over several chunks are
float32. A target below zero masks its token: no loss, no gradient, and it does not count in the mean.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmkit.core.autograd import differentiable_once
from lmkit.core.loss import check_targets
from lmkit.kernels.launch import Launch, calls_of, count_tiles
from lmkit.kernels.operators import save_once

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = 2^(x * LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # finite: the difference of two of them is 0, not NaN
BLOCK_BYTES = 16384  # of the row that a program holds at a time
GROUP = 8  # logits
REGISTERS = 40  # most of a thread, so that three programs of 16 warps fit an SM
SCALED_BLOCK = 2048  # elements that a program of `scale_kernel` multiplies
ROW_ALIGNMENT = 16  # elements; aligned rows are loaded in vectors, and multiplied faster


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int | None = None
) -> Tensor:
    """Return the mean over the tokens that count of -log softmax(hidden weight^T)[target], in nats, in float32.

    Differentiable once, in hidden and weight. The forward pass computes the gradients; the backward pass scales them
    in place, so that it runs once.

    Args:
        hidden: (..., d_model)
        weight: (vocab_size, d_model); float32, bfloat16 or float16. Autocast casts it and `hidden`.
        targets: (...) int64 ids below vocab_size; below zero: masked. Without any that counts the loss is 0. A larger
            id makes the loss NaN.
        chunk: tokens whose logits exist at a time; None takes all.

    Raises:
        ValueError: there is not one target for each token.
    """
    check_targets(hidden, targets)
    device_type = weight.device.type
    if torch.is_autocast_enabled(device_type):
        weight = weight.to(torch.get_autocast_dtype(device_type))
    hidden = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype)  # (tokens, d_model)
    targets = targets.reshape(-1)
    chunk = chunk or max(1, len(hidden))
    with_grad = torch.is_grad_enabled()
    of_hidden, of_weight = with_grad and hidden.requires_grad, with_grad and weight.requires_grad
    return LinearCrossEntropy.apply(hidden, weight, targets, (chunk, of_hidden, of_weight))[0]


@triton.jit
def cross_entropy_kernel(
    logits_pointer,  # (rows, stride); each receives its gradient
    targets_pointer,
    scale_pointer,  # one float32 that multiplies the gradient
    losses_pointer, stride, vocab_size,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,  # logits that share a maximum, so that it changes once for all of them
):  # fmt: skip
    """One row a program, in two passes: forwards for the statistics, then backwards for the gradient, because the end
    of the row is still in the cache. From vocab_size to stride a row is padding: that may be overwritten."""
    row = tl.program_id(0)
    logits = logits_pointer + row.to(tl.int64) * stride
    target = tl.load(targets_pointer + row)
    counts = target >= 0
    # Loaded before the reductions' barriers: the second pass stores a gradient there.
    beyond = float("nan")
    of_target = tl.load(logits + target, mask=counts & (target < vocab_size), other=beyond).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    last = vocab_size // BLOCK * BLOCK  # of the one block that may not be full
    inside = last + lanes < stride
    # A maximum and a sum for each group; one reduction at the end.
    z = tl.load(logits + last + lanes, mask=inside, other=0.0).to(tl.float32)
    z = tl.reshape(tl.where(last + lanes < vocab_size, z, LOWEST), (BLOCK // GROUP, GROUP))
    largest = tl.max(z, 1)
    total = tl.sum(tl.exp2((z - largest[:, None]) * LOG2_E), 1)
    for start in range(0, last, BLOCK):
        z = tl.load(logits + start + lanes).to(tl.float32)
        z = tl.reshape(z, (BLOCK // GROUP, GROUP))
        new_largest = tl.maximum(largest, tl.max(z, 1))
        part = tl.sum(tl.exp2((z - new_largest[:, None]) * LOG2_E), 1)
        total = total * tl.exp2((largest - new_largest) * LOG2_E) + part
        largest = new_largest
    most = tl.max(largest)
    sum_exp = tl.sum(total * tl.exp2((largest - most) * LOG2_E))
    tl.store(losses_pointer + row, tl.where(counts, most - of_target + tl.log2(sum_exp) * LN_2, 0.0))
    if GRADIENT:
        kind: tl.constexpr = logits_pointer.dtype.element_ty
        scale = tl.where(counts, tl.load(scale_pointer), 0.0)
        factor = scale / sum_exp
        # Evicted first, so that the rows that are still to be read again stay in the cache.
        for back in range(BLOCK, last + BLOCK, BLOCK):
            places = logits + (last - back) + lanes
            gradient = tl.exp2((tl.load(places).to(tl.float32) - most) * LOG2_E) * factor
            tl.store(places, gradient.to(kind), cache_modifier=".cs")
        z = tl.load(logits + last + lanes, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.exp2((z - most) * LOG2_E) * factor
        tl.store(logits + last + lanes, gradient.to(kind), mask=inside, cache_modifier=".cs")
        tl.debug_barrier()  # the store to this place above comes first
        of_target = tl.exp2((of_target - most) * LOG2_E) * factor - scale
        tl.store(logits + target, of_target.to(kind), mask=counts & (target < vocab_size))


def _launch(options: tuple, logits: Tensor, *_: Tensor) -> Launch:
    rows, vocab_size = logits.shape
    block = min(BLOCK_BYTES // logits.element_size(), triton.next_power_of_2(vocab_size))
    constants = {"GRADIENT": options[0], "BLOCK": block, "GROUP": min(GROUP, block)}
    constants |= {"num_warps": min(max(block // 256, 1), 16), "maxnreg": REGISTERS}
    return (rows, 1), (logits.stride(0), vocab_size), constants


calls = calls_of(cross_entropy_kernel, _launch)


@triton.jit
def scale_kernel(
    x_pointer,
    scale_pointer,  # one float32
    out_pointer, total, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements a program. In place, a scale of 1 moves no memory: that of a step with one micro-batch."""
    scale = tl.load(scale_pointer)
    if IN_PLACE and scale == 1.0:
        return
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + index, mask=index < total, other=0.0).to(tl.float32)
    tl.store(out_pointer + index, (x * scale).to(out_pointer.dtype.element_ty), mask=index < total)


def _scale_launch(options: tuple, x: Tensor, *_: Tensor) -> Launch:
    constants = {"IN_PLACE": options[0], "BLOCK": SCALED_BLOCK, "num_warps": 4}
    return (count_tiles(x.numel(), SCALED_BLOCK), 1), (x.numel(),), constants


scale_calls = calls_of(scale_kernel, _scale_launch)


def empty_logits(rows: int, weight: Tensor) -> Tensor:
    """Return an uninitialised (rows, vocab_size) array with aligned rows, for `cross_entropy_`."""
    padded = -(-len(weight) // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return weight.new_empty(rows, padded)[:, : len(weight)]


def cross_entropy_(
    logits: Tensor, targets: Tensor, scale: Tensor, losses: Tensor, *, gradient: bool = True
) -> None:
    """Write the losses in nats, and in the place of the logits (of `empty_logits`) `scale` times their gradient.

    Targets (rows) int64 and losses (rows) float32 are contiguous; `scale` is a float32 scalar on the device. Without
    `gradient` the logits stay.
    """
    if len(logits):
        calls((logits, targets, scale), (losses,), (gradient,))


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, begin: bool) -> None:
    """Add a b to `total`, which may be wider than the factors; `begin` with nothing in it."""
    if begin and total.dtype == a.dtype:
        torch.mm(a, b, out=total)
    elif begin and total.is_cuda:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    elif begin:
        total.copy_(a @ b)
    elif total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class LinearCrossEntropy(torch.autograd.Function):
    """`apply(hidden, weight, targets, (chunk, of_hidden, of_weight))` returns (loss, an empty tensor)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: tuple[int, bool, bool]
    ) -> tuple[Tensor, Tensor]:
        chunk, of_hidden, of_weight = options
        hidden, targets = hidden.contiguous(), targets.contiguous()
        tokens = len(hidden)
        share = (targets >= 0).sum().clamp(min=1).float().reciprocal()
        one = torch.ones_like(share)
        # In float16 the division by the number of tokens would underflow before the loss scale multiplies the
        # gradients, and a sum over the tokens might overflow.
        late = weight.dtype == torch.float16
        in_half = chunk >= tokens and weight.dtype == torch.bfloat16
        losses = hidden.new_empty(tokens, dtype=torch.float32)
        grad_hidden = hidden.new_empty(hidden.shape if of_hidden else 0)
        make = weight.new_empty if tokens else weight.new_zeros
        sums = make(weight.shape if of_weight else 0, dtype=torch.bfloat16 if in_half else torch.float32)
        buffer = empty_logits(min(chunk, tokens), weight)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            h = hidden[part]
            logits = torch.mm(h, weight.t(), out=buffer[: len(h)])  # (chunk, vocab_size)
            scale = one if late else share
            cross_entropy_(logits, targets[part], scale, losses[part], gradient=of_hidden or of_weight)
            if of_hidden:
                torch.mm(logits, weight, out=grad_hidden[part])
            if of_weight:
                _add_product(sums, logits.t(), h, begin=start == 0)
        loss = losses.sum() * share
        return loss, save_once(ctx, loss, grad_hidden, sums, share if late else one)

    @staticmethod
    @differentiable_once(
        "linear_cross_entropy", instead="F.cross_entropy of all logits has a second derivative"
    )
    def backward(ctx: Any, saved: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        grad_hidden, sums, factor, _ = saved
        scale, dtype = grad * factor, grad_hidden.dtype
        return scaled_(grad_hidden, scale, dtype), scaled_(sums, scale, dtype), None, None


def scaled_(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x times a float32 scalar on the device, in its own memory if that is of the dtype."""
    out = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    if x.numel():
        scale_calls((x, scale), (out,), (x is out, dtype))
        torch.autograd.graph.increment_version(out)  # a second backward pass finds out
    return out
