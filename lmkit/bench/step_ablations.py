"""lmkit's training step with one idea taken out, to measure what it brings: variants of `lmkit bench step`.

* `no_graph` uses no CUDA graph; the variants below use none either, so compare them with `no_graph`;
* `plain` runs all operations around the matrix products with PyTorch, `plain_norm` and so on one of them;
* `sdpa` runs PyTorch's attention kernels;
* `waits` lets the host wait for every step;
* `autocast` keeps float32 weights and casts them in every pass;
* `none` is all of these at once.

Those with float32 weights take turns training one model, the others another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lmkit.attention import attention_function, joined_function
from lmkit.model.operations import PLAIN, Operations

if TYPE_CHECKING:
    import torch

    from lmkit.training.setup import TrainingStep

METHODS = {
    "lmkit:plain_embedding": "embedding",
    "lmkit:plain_norm": "add_rms_norm",
    "lmkit:plain_rope": "rotated",
    "lmkit:plain_swiglu": "swiglu",
    "lmkit:plain_loss": "linear_cross_entropy",
}
"""Variant -> the method of `Operations` that PyTorch's form replaces."""


class Ablated:
    """A training without one idea, on weights that it shares with others."""

    def __init__(self, variant: str, training: TrainingStep) -> None:
        self.model = training.model
        self._variant = variant
        self._training = training
        self._operations = operations_of(variant, training.model.operations)

    def run(self) -> torch.Tensor:
        """Make one step; return its loss."""
        with _swapped(self.model, self._operations, self._variant in ("lmkit:sdpa", "lmkit:none")):
            return self._training.run(wait=self._variant in ("lmkit:waits", "lmkit:none"))


def operations_of(variant: str, full: Operations) -> Operations:
    """Return the operations of a variant, given those of the whole step."""
    if variant in ("lmkit:plain", "lmkit:none"):
        return PLAIN
    if (method := METHODS.get(variant)) is None:
        return full
    found: Operations = type("Ablated", (type(full),), {method: getattr(Operations, method)})()
    found.name = full.name
    return found


@contextmanager
def _swapped(model: Any, operations: Operations, sdpa: bool) -> Iterator[None]:
    before = model.operations, [(b.attn.attention, b.attn.joined_attention) for b in model.layers]
    model.operations = operations
    if sdpa:
        _attend_by(model, [(attention_function("sdpa"), joined_function("sdpa"))] * len(model.layers))
    try:
        yield
    finally:
        model.operations = before[0]
        _attend_by(model, before[1])


def _attend_by(model: Any, functions: list[tuple[Any, Any]]) -> None:
    for block, (attention, joined) in zip(model.layers, functions, strict=True):
        block.attn.attention, block.attn.joined_attention = attention, joined
