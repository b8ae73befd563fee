"""What a command does under torchrun: print one error, although every rank could print one, and lead or follow.

torchrun ends all ranks a moment after the first has exited, and then prints a summary. So rank 0 prints at once, the
others wait, longer if they only lost the connection, and the summary gets the same line instead of a traceback.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from lmkit.errors import LmkitError
from lmkit.parallel.place import read_place

PATIENCE_S = 3.0
"""How long an error waits for a better one: the same error on a lower rank, or the cause of a lost connection."""
_LOOK_S = 0.2
_SIGNAL = "lmkit run"


def speak_for_ranks(error: LmkitError) -> LmkitError:
    """Under torchrun: wait for the ranks that should print first, name this rank, and tell torchrun.

    If another rank prints, this does not return: torchrun's SIGTERM ends the process.
    """
    if os.environ.get("WORLD_SIZE") == "1":
        return error
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    time.sleep(PATIENCE_S * ((local_rank > 0) + 2 * error.is_consequence + local_rank / 4))
    if not error.message.startswith("rank "):
        error = type(error)(error.code, f"rank {os.environ.get('RANK')}: {error.message}", hint=error.hint)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun prints this as the traceback (the format of torch's ErrorHandler)
        content = {"message": error.message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": content}), "utf-8")
    return error


@contextmanager
def leading() -> Iterator[Callable[[str], None]]:
    """On rank 0: yield the function that tells the waiting ranks a word; at the end it tells "done" or "failed"."""
    store = _shared_store()

    def tell(word: str) -> None:
        if not store.check([_SIGNAL]):
            store.set(_SIGNAL, word)

    try:
        yield tell
    except BaseException:
        tell("failed")
        raise
    tell("done")


def follow() -> str:
    """On ranks other than 0: wait, however long it takes, for the word of rank 0 and return it."""
    from lmkit.parallel.ranks import RankLost

    store = _shared_store()
    while not store.check([_SIGNAL]):  # torchrun ends this rank if rank 0 dies
        time.sleep(_LOOK_S)
    word = store.get(_SIGNAL).decode()
    if word == "failed":
        raise RankLost("ranks.first_failed", "rank 0 failed before the training", hint="look for its error")
    return word


@contextmanager
def alone() -> Iterator[None]:
    """Hide the environment of torchrun: the code inside runs in one process and waits for no other rank."""
    names = os.environ.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _shared_store() -> Any:
    """Join the key-value store of torchrun's ranks."""
    from torch.distributed.rendezvous import rendezvous

    rank, world_size, _ = read_place()
    store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timedelta(minutes=10))))
    return store
