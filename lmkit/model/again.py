"""Compute parts of the model again in the backward pass instead of keeping what they saved (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def again(function: Callable[..., Any], *inputs: Tensor | None, draws: bool = False, **options: Any) -> Any:
    """Return function(*inputs); its backward pass keeps only the inputs and computes the function again, with the
    same random numbers if it `draws` any. `options`: of `torch.utils.checkpoint.checkpoint`."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=draws, **options)


def again_but_products(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Do as `again`, but let the compiler, too, compute no matrix product at the end of the function again."""
    if not torch.compiler.is_compiling():
        return again(function, *inputs)
    return again(function, *inputs, context_fn=_PRODUCTS_KEPT)


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


_PRODUCTS_KEPT = partial(create_selective_checkpoint_contexts, _keep_products)


def attend_again(
    project: Callable[[Tensor], tuple[Tensor, ...]], attend: Callable[[tuple[Tensor, ...]], Tensor], x: Tensor
) -> Tensor:
    """Return attend(project(x)); keep x and what `attend` saves beside its inputs: its output and statistics.

    The backward pass computes `project` again, whose results may share memory, and `attend` never. Under
    torch.compile the compiler decides what it computes again.
    """
    if torch.compiler.is_compiling():
        return attend(again(project, x))
    inputs = again(lambda x: _Saved.apply(*project(x)), x)
    node = inputs[0].grad_fn
    if node is None:  # no gradient is asked for
        return attend(inputs)
    index_of = {tensor.untyped_storage().data_ptr(): index for index, tensor in enumerate(inputs)}
    recomputed: list[Tensor] = []

    def pack(saved: Tensor) -> Any:
        index = index_of.get(saved.untyped_storage().data_ptr())
        if index is None:
            return saved.detach()  # the output of `attend` refers to the node that saves it
        return index, saved.shape, saved.stride(), saved.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not recomputed:
            recomputed.extend(node.saved_tensors)  # once: checkpointing hands them out once
        index, *place = packed
        return recomputed[index].as_strided(*place)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return attend(inputs)


class _Saved(torch.autograd.Function):
    """Return the inputs, which the node of the graph saves."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads
