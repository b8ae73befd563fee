"""torch.compile, applied in place: names in the state dict stay as they are."""

from __future__ import annotations

from typing import Literal

import torch

from lmkit.model.loss import cross_entropy_slice
from lmkit.model.transformer import TransformerLM


def compile_model(
    model: TransformerLM, how: Literal["none", "block", "whole"], *, backend: str = "inductor"
) -> None:
    """Let the model's layers and its loss run compiled from the next call on.

    "block" compiles a block once and uses it for all of them: the first step starts soon. "whole" compiles the
    stack of blocks as one graph: more fusion, a first step that takes longer with every layer. Compilation
    itself happens in the first call of each shape.
    """
    if how == "none":
        return
    if how == "block":
        for block in model.layers:
            block.compile(backend=backend)
    else:
        model.layers.compile(backend=backend)
    model.slice_loss = torch.compile(cross_entropy_slice, backend=backend)
