"""Cross-entropy: of logits, and of hidden states without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lmkit.core.autograd import differentiable_once, is_transformed

SliceGradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Computes (logits, targets) -> (losses, their gradient): a `SliceLoss`, perhaps compiled."""
SLICE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 28}
"""Logits that are held at a time. 4 MiB of float32 stay in a core's cache; a GPU wants large matrix products."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over targets that count of -log softmax(logits)[target], in nats, as a scalar.

    >>> cross_entropy(torch.zeros(4, 10), torch.tensor([1, 2, 3, 4]))  # ln 10
    tensor(2.3026)

    Args:
        logits: (..., vocab_size)
        targets: (...) int64 ids below vocab_size; those below zero are ignored. The loss is 0 if all are.

    Training uses `linear_cross_entropy`, which never holds all logits.

    Raises:
        ValueError: there is not one target for each token.
    """
    check_targets(logits, targets)
    shifted = logits - logits.amax(dim=-1, keepdim=True)  # (..., vocab_size); exp cannot overflow
    of_target = shifted.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)  # (...)
    losses, is_target = shifted.exp().sum(dim=-1).log() - of_target, targets >= 0
    # `where`: the loss of a token that does not count may be infinite, and 0 times infinity is NaN.
    return torch.where(is_target, losses, 0).sum() / is_target.sum().clamp(min=1)


def check_targets(x: Tensor, targets: Tensor) -> None:
    """Raise ValueError unless there is one target (...) for each token of x (..., features)."""
    if x.shape[:-1] != targets.shape:
        raise ValueError(f"targets {tuple(targets.shape)} do not fit tokens {tuple(x.shape[:-1])}")


class SliceLoss(nn.Module):
    """Losses of a slice of tokens, with their gradient. A module without parameters, so that it can be compiled in
    place.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return (losses (tokens) in float32 or wider, d losses / d logits in the dtype of the logits).

        Args:
            logits: (tokens, vocab_size)
            targets: (tokens) ids; the loss of one below zero is 0, its gradient is of no use
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_p = logits.log_softmax(dim=-1, dtype=wide)  # (tokens, vocab_size)
        wanted = targets.clamp(min=0)
        of_target = log_p.gather(1, wanted.unsqueeze(1)).squeeze(1)  # (tokens)
        losses = torch.where(targets >= 0, -of_target, 0)
        # d loss / d logit_j = p_j - [j is the target]
        if torch.compiler.is_compiling():
            ids = torch.arange(logits.shape[1], device=logits.device)  # (vocab_size)
            gradient = log_p.exp() - (ids == wanted.unsqueeze(1)).to(wide)  # fuses; a scatter would not
        else:
            gradient = log_p.exp_()  # (tokens, vocab_size)
            gradient.scatter_add_(1, wanted.unsqueeze(1), gradient.new_full((len(targets), 1), -1.0))
        return losses, gradient.to(logits.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    slice_loss: SliceGradient | None = None,
    rows: int | None = None,
) -> Tensor:
    """Return the mean over the tokens that count of -log softmax(hidden weight^T)[target], in nats, as a float32 (or
    wider) scalar.

    Logits (tokens, vocabulary) are by far the largest tensor of a small model's training step. This function computes
    a slice of them at a time, and forms its gradient while the slice is there: the same result with the same number
    of matrix products, in memory that stays in a CPU's cache.

    Differentiable once, in hidden and weight; `torch.func` differentiates it as often as wanted, with all logits in
    memory. Under autocast the products run in the autocast dtype; softmax, loss
    and the sums over slices stay in float32.

    Args:
        hidden: (..., d_model)
        weight: (vocab_size, d_model)
        targets: (...) int64 ids below vocab_size; those below zero are ignored. The loss is 0 if all are.
        slice_loss: None makes a `SliceLoss`.
        rows: tokens of a slice; None: as many as have `SLICE_ELEMENTS` logits.

    Raises:
        ValueError: there is not one target for each token.
    """
    check_targets(hidden, targets)
    if is_transformed():
        logits = torch.nn.functional.linear(hidden, weight)  # (..., vocab_size)
        return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
    if not torch.is_grad_enabled():
        weight = weight.detach()  # a parameter requires grad even then, and its gradient would be computed
    hidden = hidden.reshape(-1, hidden.shape[-1])  # (tokens, d_model); `flatten(0, -2)` fails for one token
    elements = SLICE_ELEMENTS.get(hidden.device.type, SLICE_ELEMENTS["cuda"])
    if rows is None:  # a power of two divides the usual batches evenly
        rows = 1 << (max(1, elements // len(weight)).bit_length() - 1)
    return _LinearCrossEntropy.apply(hidden, weight, targets.flatten(), slice_loss or SliceLoss(), rows)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, slice_loss: SliceGradient, rows: int
    ) -> tuple[Tensor, Tensor]:
        device_type = hidden.device.type
        under_autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if under_autocast else weight.dtype
        wide = torch.promote_types(dtype, torch.float32)
        h, w = hidden.to(dtype), weight.to(dtype)  # (tokens, d_model), (vocab_size, d_model)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(h) if wants_hidden else None
        grad_weight = torch.zeros_like(w, dtype=wide) if wants_weight else None
        total = torch.zeros((), device=hidden.device, dtype=wide)
        is_target = (targets >= 0).unsqueeze(1)  # (tokens, 1)
        num_targets = is_target.sum().clamp(min=1)

        with torch.autocast(device_type, enabled=False) if under_autocast else nullcontext():
            for start in range(0, len(h), rows):
                part = slice(start, start + rows)
                logits = h[part] @ w.t()  # (slice, vocab_size)
                losses, grad_logits = slice_loss(logits, targets[part])  # (slice), (slice, vocab_size)
                total += losses.sum()
                if grad_hidden is not None:
                    torch.mm(grad_logits, w, out=grad_hidden[part]).mul_(is_target[part])
                if grad_weight is not None:
                    of_targets = h[part] * is_target[part]
                    if dtype == wide:
                        grad_weight.addmm_(grad_logits.t(), of_targets)
                    else:
                        grad_weight += grad_logits.t() @ of_targets

        # Backward divides by the number of tokens that count. A division here would underflow float16 gradients: the
        # caller's loss scale reaches them as `grad` in backward.
        # `differentiable_once` needs an output among the saved tensors; the loss may be written to in place.
        empty = total.new_empty(0)
        ctx.set_materialize_grads(False)  # or autograd would allocate zeros as the gradient of `empty`
        ctx.save_for_backward(grad_hidden, grad_weight, empty, num_targets)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        return total / num_targets, empty

    @staticmethod
    @differentiable_once(
        "linear_cross_entropy", instead="F.cross_entropy of all logits has a second derivative"
    )
    def backward(
        ctx: Any, saved: Any, grad: Tensor, _: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_weight, _, num_targets = saved  # (tokens, d_model), (vocab_size, d_model), ...
        hidden_dtype, weight_dtype = ctx.dtypes
        scale = grad / num_targets
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden_dtype) * scale
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(weight_dtype)
        return grad_hidden, grad_weight, None, None, None
