"""lmkit's training step with one idea taken out, to measure what it brings: variants of `lmkit bench step`.

* `no_graph` takes no CUDA graph, and neither do the others: compare them with it;
* `plain` has all operations around the matrix products by PyTorch, `plain_norm` and so on one of them;
* `sdpa` attends by PyTorch's kernels;
* `waits` lets the host wait for every step;
* `autocast` has float32 weights, which are cast in every pass.

All but `autocast` train one model in turns, so that they need no memory of their own.
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
"""Variant -> the method of `Operations` that PyTorch's takes the place of."""


class Ablated:
    """A training without one idea, on weights that it shares with others."""

    def __init__(self, variant: str, training: TrainingStep) -> None:
        self.model = training.model
        self._variant = variant
        self._training = training
        self._operations = operations_of(variant, training.model.operations)

    def run(self) -> torch.Tensor:
        """Make one step; return its loss."""
        with _swapped(self.model, self._operations, self._variant == "lmkit:sdpa"):
            return self._training.run(wait=self._variant == "lmkit:waits")


def operations_of(variant: str, full: Operations) -> Operations:
    """Return the operations of a variant, given those of the whole step."""
    if variant == "lmkit:plain":
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
