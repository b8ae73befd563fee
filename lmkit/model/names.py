"""The names of parameters in checkpoints: without prefixes of wrappers."""

from __future__ import annotations

from torch import nn


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of torch.compile and DDP: the name in checkpoints.

    >>> plain_name("module._orig_mod.layers.0.ln1.weight")
    'layers.0.ln1.weight'
    """
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the plain name of every parameter, of a tied one the first.

    >>> from lmkit.model import SwiGLU
    >>> list(parameter_names(SwiGLU(2, 3)).values())
    ['w1.weight', 'w2.weight', 'w3.weight']
    """
    return {parameter: plain_name(name) for name, parameter in model.named_parameters()}
