"""Several linear layers of one input as one matrix product: q, k and v; gate and up.

The layers stay modules with weights of their own. Where their weights lie side by side in memory, the joined matrix
is a view; elsewhere it is a copy. A layer that somebody replaced or hooked into is called by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lmkit.core.model import Linear


def are_plain(*modules: nn.Module) -> bool:
    """Whether nobody replaced these modules or a part of them, or hooked into their calls."""
    for module in modules:
        if (
            module._forward_pre_hooks
            or module._forward_hooks
            or module._backward_pre_hooks
            or module._backward_hooks
            or "forward" in module.__dict__
            or not type(module).__module__.startswith("lmkit.")
        ):
            return False
        for part in module._modules.values():
            if part is not None and not are_plain(part):
                return False
    return True


def is_original(model: Any) -> bool:
    """Whether the weights of a `TransformerLM` tell all that it computes: nobody replaced a layer, or hooked into a
    part of a block.

    Strategies hook into blocks, embedding, last norm and head, and change none of what they compute.
    """
    ends = model.token_embeddings, model.ln_final, model.lm_head
    return all(type(layer).__module__.startswith("lmkit.") for layer in ends) and all(
        are_plain(*block.children()) for block in model.layers
    )


def joined_product(x: Tensor, *layers: Linear) -> Tensor:
    """Return the outputs of linear layers one after the other: (..., in) -> (..., sum of out)."""
    weight = join([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else join([layer.bias for layer in layers])
    return layers[0].product(x, weight, None if bias is None else bias.to(weight.dtype))


def join(parts: Sequence[Tensor]) -> Tensor:
    """Return torch.cat(parts), without a copy if they lie side by side in memory. Differentiable."""
    if torch.compiler.is_compiling() or not lie_side_by_side(parts):
        return torch.cat(list(parts))
    return SideBySide.apply(*parts)


def lie_side_by_side(parts: Sequence[Tensor]) -> bool:
    """Whether each contiguous tensor begins where the one before it ends, in the same memory."""
    first = parts[0]
    end = begin = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.dtype != first.dtype or not part.is_contiguous():
            return False
        end += part.nbytes
    room = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
    return begin != 0 and end - begin <= room


class SideBySide(torch.autograd.Function):
    """`apply(*parts)`: the joined tensor as a view; the gradient is cut into views."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [len(part) for part in parts]
        first = parts[0].detach()
        return first.as_strided((sum(ctx.rows), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = grad.split(ctx.rows)
        return tuple(x if wanted else None for x, wanted in zip(grads, ctx.needs_input_grad, strict=True))


def joined_sets(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that are best placed side by side, in order."""
    for module in model.modules():
        layers = getattr(module, "joined_layers", None)
        if layers is not None and all(type(layer) is Linear for layer in layers()):
            yield [layer.weight for layer in layers()]
            if layers()[0].bias is not None:
                yield [layer.bias for layer in layers()]


@torch.no_grad()
def place_side_by_side(model: nn.Module) -> None:
    """Move parameters so that `join` needs no copy. Parameters without memory of their own stay."""
    for parameters in joined_sets(model):
        first = parameters[0]
        alike = all(x.dtype == first.dtype and x.device == first.device for x in parameters)
        if first.is_meta or not alike or not all(x.is_contiguous() for x in parameters):
            continue
        if not lie_side_by_side(parameters):
            rows = [len(x) for x in parameters]
            together = torch.cat([x.detach() for x in parameters])
            for parameter, part in zip(parameters, together.split(rows), strict=True):
                parameter.data = part


def in_order_of_memory(parameters: Sequence[nn.Parameter], model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in the order in which a flat tensor should hold them: sets of `joined_sets` together."""
    set_of = {parameter: members for members in joined_sets(model) for parameter in members}
    given, placed = set(parameters), dict[nn.Parameter, None]()
    for parameter in parameters:
        placed.update((x, None) for x in set_of.get(parameter, [parameter]) if x in given)
    return list(placed)
