"""Calls of the fused kernels of a training step beside the model's plain operations; step_checks.py compares them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lmkit.core.loss import linear_cross_entropy
from lmkit.core.model import apply_rope
from lmkit.kernels import cross_entropy, embedding, norm, rope, swiglu
from lmkit.model.operations import PLAIN

Function = Callable[..., "Tensor | tuple[Tensor, ...]"]


class Case(NamedTuple):
    fused: Function
    plain: Function
    # Of the differentiable inputs.
    shapes: Sequence[tuple[int, ...]]


def tuned(*size: int, device: str = "cpu", seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers between 0.2 and 2.2, of either sign."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, size, generator=generator) * 2 - 1
    return ((torch.rand(size, generator=generator) * 2 + 0.2) * signs).to(device, dtype)


def plain_norm(x: Tensor, delta: Tensor, gain: Tensor, *, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    return PLAIN.add_rms_norm(x, delta * 1, gain, eps)  # which may overwrite delta


def normed(*shape: int, past: bool = True, eps: float = 1e-5) -> Case:
    """The sum and its norm; with past=False nothing else uses the sum."""
    part = slice(0 if past else 1, 2)
    return Case(
        lambda *inputs: norm.add_rms_norm(*inputs, eps=eps)[part],
        lambda *inputs: plain_norm(*inputs, eps=eps)[part],
        [shape, shape, shape[-1:]],
    )


def normed_heads(*shape: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    def plain(x: Tensor, q_gain: Tensor, k_gain: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=-2)
        normed = [PLAIN.add_rms_norm(x, None, gain, 1e-5)[1] for x, gain in ((q, q_gain), (k, k_gain))]
        return torch.cat([*normed, v], dim=-2).flatten(-2)

    return Case(
        lambda x, q_gain, k_gain: norm.heads_norm(x, q_gain, k_gain, kv_heads),
        plain,
        [(*shape, (heads + 2 * kv_heads) * head_dim), (head_dim,), (head_dim,)],
    )


def table_of(seq: int, head_dim: int, tables: int) -> Callable[[Tensor], Tensor]:
    """Return a function that makes the table of cosines and sines on the device of a tensor."""
    angles = tuned(tables, seq, head_dim // 2, seed=7)
    both = torch.stack((angles.cos(), angles.sin()), dim=-1)
    return lambda x: (both if tables > 1 else both[0]).to(x.device)


def rotated(
    batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, table: int = 1, **options
) -> Case:
    cos_sin = table_of(seq, head_dim, table)

    def plain(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, head_dim))  # (batch, seq, heads + 2 kv_heads, head_dim)
        turned = apply_rope(x[:, :, :-kv_heads], cos_sin(x))
        return torch.cat((turned, x[:, :, -kv_heads:]), dim=2).flatten(2)

    return Case(
        lambda x: rope.rope_(x * 1, cos_sin(x), kv_heads, **options) * 1,
        plain,
        [(batch, seq, (heads + 2 * kv_heads) * head_dim)],
    )


def targets_of(hidden: Tensor, vocab_size: int, masked: Sequence[int] = ()) -> Tensor:
    ids = torch.randint(vocab_size, (len(hidden),), generator=torch.Generator().manual_seed(5))
    ids[list(masked)] = -100
    return ids.to(hidden.device)


def headed(tokens: int, width: int, vocab_size: int, chunk: int, masked: Sequence[int] = ()) -> Case:
    def scaled(loss: Function) -> Function:
        # A token's gradients are small: measured in units of the typical row, all count alike.
        return lambda h, w, **options: loss(h, w, targets_of(h, vocab_size, masked), **options)

    return Case(
        lambda h, w: scaled(cross_entropy.linear_cross_entropy)(h, w, chunk=chunk),
        scaled(linear_cross_entropy),
        [(tokens, width), (vocab_size, width)],
    )


def looked_up(places: tuple[int, ...], width: int, vocab_size: int, deterministic: bool) -> Case:
    def ids(weight: Tensor) -> Tensor:
        drawn = torch.randint(vocab_size, places, generator=torch.Generator().manual_seed(5))
        return drawn.where(drawn != 1, 0).to(weight.device)  # row 1 stays unused

    def fused(weight: Tensor) -> Tensor:
        return embedding.embedding(ids(weight), weight)

    def with_plain_gradient(weight: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids(weight), weight)

    fused.deterministic = deterministic
    return Case(fused, with_plain_gradient, [(vocab_size, width)])


CASES = {
    "norm": normed(2, 7, 24),
    "norm of many rows and blocks": normed(19, 600),
    "norm of one channel": normed(3, 1, eps=0.5),
    "norm alone is used": normed(10, 17, past=False),
    "norm of heads": normed_heads(2, 70, heads=4, kv_heads=2, head_dim=24),
    "norm of long heads": normed_heads(3, heads=2, kv_heads=1, head_dim=1030),
    "rope": rotated(2, 7, 4, 2, 6),
    "rope with a table for each row": rotated(3, 5, 2, 1, 16, table=3),
    "rope of pairs": rotated(1, 1, 1, 1, 2),
    "rope that reuses the gradient": rotated(2, 5, 3, 1, 8, reuse_grad=True),
    "swiglu": Case(swiglu.swiglu, PLAIN.swiglu, [(3, 5, 2 * 11)]),
    "swiglu in place": Case(lambda x: swiglu.swiglu(x * 1), PLAIN.swiglu, [(3, 5, 2 * 11)]),
    "swiglu across blocks": Case(swiglu.swiglu, PLAIN.swiglu, [(5, 2 * 700)]),
    "swiglu of one": Case(swiglu.swiglu, PLAIN.swiglu, [(7, 2)]),
    "cross-entropy": headed(19, 12, 37, chunk=8),
    "cross-entropy, masked": headed(19, 12, 64, chunk=32, masked=[0, 7, 12]),
    "cross-entropy over two blocks": headed(3, 4, 4096 + 5, chunk=2),
    "embedding": looked_up((4, 25), 12, 9, False),
    "embedding, sorted": looked_up((4, 25), 12, 9, True),
    "embedding, sorted, wide": looked_up((3, 50), 300, 3, True),
}
