"""Replicas at the start: the same model on every rank, or an error that says who differs."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from lmkit.errors import LmkitError
from lmkit.parallel.process_group import Ranks


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that get gradients, in the order of registration; tied ones once (by identity)."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_same_model(model: nn.Module, ranks: Ranks, fingerprint: str = "") -> None:
    """Compare names, ties, shapes, dtypes and what is frozen (and `fingerprint`, of recipe and data) with rank 0's.

    Raises:
        LmkitError: on every rank, naming the ranks that differ.
    """
    first_name: dict[torch.Tensor, str] = {}  # tied names are one tensor, which is sent once
    described = "\n".join(
        f"{name} {first_name.setdefault(tensor, name)} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        for named in (model.named_parameters(remove_duplicate=False), model.named_buffers())
        for name, tensor in named
    )
    for what, text in (("model", described), ("recipe or data", fingerprint)):
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
        digest = digest.to(ranks.device)
        digests = [torch.empty_like(digest) for _ in range(ranks.world_size)]
        dist.all_gather(digests, digest)
        differing = [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]
        if differing:
            raise LmkitError(
                f"rank {', '.join(map(str, differing))}: {what} differs from rank 0's",
                hint="start every rank with the same recipe, overrides, token files and version of lmkit",
            )


@torch.no_grad()
def broadcast_model(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, of any dtype and strides.

    Raises:
        LmkitError: elements of a tensor share memory (`expand`), which cannot be written to.
    """
    sent = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise LmkitError(
                f"{name}: its elements share memory, so that no rank can be given its own",
                hint="make it contiguous() before the model is attached",
            )
        flat = tensor.detach().reshape(-1)  # collectives ignore strides: a copy where the memory has gaps
        # As bytes: backends do not know every dtype.
        sent.append((tensor, flat, dist.broadcast(flat.view(torch.uint8), src=0, async_op=True)))
    for tensor, flat, work in sent:
        work.wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
