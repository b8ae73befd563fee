"""What rank 0 finds out on behalf of all: one looks at the disk, everybody acts on the same answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lmkit.errors import LmkitError, UsageError
from lmkit.parallel.process_group import Ranks


def decided_by_first(ranks: Ranks, decide: Callable[[], Any]) -> Any:
    """Call `decide` on rank 0 only, and return its answer (a JSON value) on every rank.

    The answer travels by collectives: whoever waits for it notices at once when rank 0 dies.

    Raises:
        LmkitError: what `decide` raised, on every rank.
    """
    if ranks.world_size == 1:
        return decide()
    if not ranks.is_first:
        told = json.loads(_from_first(b""))
        if "error" in told:
            exit_code, message, hint = told["error"]
            raise (UsageError if exit_code == UsageError.exit_code else LmkitError)(message, hint=hint)
        return told["answer"]
    try:
        answer = decide()
    except LmkitError as error:
        _from_first(json.dumps({"error": [error.exit_code, error.message, error.hint]}).encode())
        raise
    _from_first(json.dumps({"answer": answer}).encode())
    return answer


def _from_first(text: bytes) -> bytes:
    """On every rank what rank 0 calls it with."""
    size = torch.tensor(len(text))
    dist.broadcast(size, src=0)
    data = torch.tensor(list(text) or [0] * int(size), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return data.numpy().tobytes()
