"""The names of parameters in checkpoints: without prefixes of wrappers."""

from __future__ import annotations

import torch
from torch import nn


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of torch.compile and DDP: the name in checkpoints.

    >>> plain_name("module._orig_mod.layers.0.ln1.weight")
    'layers.0.ln1.weight'
    """
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def parameter_names(model: nn.Module) -> dict[nn.Parameter, dict[str, torch.Size]]:
    """Return the plain name and the shape of every parameter, a tied one under its first name.

    >>> from lmkit.model import SwiGLU
    >>> list(parameter_names(SwiGLU(2, 3)).values())[:2]
    [{'w1.weight': torch.Size([3, 2])}, {'w2.weight': torch.Size([2, 3])}]
    """
    return {parameter: {plain_name(name): parameter.shape} for name, parameter in model.named_parameters()}
