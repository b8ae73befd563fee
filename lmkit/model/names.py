"""The names of parameters in checkpoints: without prefixes of wrappers, one for each part of a joined matrix."""

from __future__ import annotations

import torch
from torch import nn

from lmkit.model.layers import Part


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of torch.compile and DDP: the name in checkpoints.

    >>> plain_name("module._orig_mod.layers.0.ln1.weight")
    'layers.0.ln1.weight'
    """
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def parameter_names(model: nn.Module) -> dict[nn.Parameter, dict[str, torch.Size]]:
    """Return the plain name and the shape of everything that checkpoints save of each parameter.

    This is one name, or the names of a `JoinedLinear`'s parts in the order of their rows: flattened, the parameter is
    the parts one after the other.

    >>> from lmkit.model import SwiGLU
    >>> list(parameter_names(SwiGLU(2, 3)).values())
    [{'w1.weight': torch.Size([3, 2]), 'w3.weight': torch.Size([3, 2])}, {'w2.weight': torch.Size([2, 3])}]
    """
    parts: dict[nn.Parameter, dict[str, torch.Size]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Part):
            for key, (joined, view) in module.named_views().items():
                parts.setdefault(joined, {})[plain_name(f"{name}.{key}")] = view.shape
    return {
        parameter: parts.get(parameter) or {plain_name(name): parameter.shape}
        for name, parameter in model.named_parameters()
    }
