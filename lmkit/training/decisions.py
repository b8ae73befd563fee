"""What rank 0 finds out on behalf of all: one looks at the disk, everybody acts on the same answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from lmkit.errors import LmkitError, UsageError
from lmkit.parallel.process_group import Ranks


def decided_by_first(ranks: Ranks, name: str, decide: Callable[[], Any]) -> Any:
    """Call `decide` on rank 0 only, and return its answer (a JSON value) on every rank.

    Args:
        name: used once per process group.

    Raises:
        LmkitError: what `decide` raised, on every rank.
    """
    if ranks.world_size == 1:
        return decide()
    assert ranks.store is not None
    key = f"decision/{name}"
    if ranks.is_first:
        try:
            answer = decide()
        except LmkitError as error:
            ranks.store.set(key, json.dumps({"error": [error.exit_code, error.message, error.hint]}))
            raise
        ranks.store.set(key, json.dumps({"answer": answer}))
        return answer
    told = json.loads(ranks.store.get(key))
    if "error" in told:
        exit_code, message, hint = told["error"]
        raise (UsageError if exit_code == UsageError.exit_code else LmkitError)(message, hint=hint)
    return told["answer"]
