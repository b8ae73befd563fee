"""Under torchrun every rank is a process that could print an error; one of them does.

torchrun ends all ranks a moment after the first has left, and then prints a summary of its own. So the rank whose
error it is speaks at once, the others give it time to, and the summary gets the same line instead of a traceback.
"""

from __future__ import annotations

import json
import os
import time

from lmkit.errors import LmkitError

PATIENCE_S = 3.0
"""How long an error waits for one that explains it better: the same on rank 0, or the cause of a lost connection."""


def speak_for_ranks(error: LmkitError) -> LmkitError:
    """Under torchrun: wait for the ranks that should speak first, name this rank, and tell torchrun.

    Where another rank has spoken, torchrun's SIGTERM ends this process while it waits.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        return error
    waits = (os.environ.get("LOCAL_RANK") != "0") + 2 * error.is_consequence
    time.sleep(waits * PATIENCE_S)
    if not error.message.startswith("rank "):
        error = type(error)(f"rank {os.environ.get('RANK')}: {error.message}", hint=error.hint)
    _tell_torchrun(error)
    return error


def _tell_torchrun(error: LmkitError) -> None:
    """Write the file from which torchrun takes what it calls the traceback (the format of torch's ErrorHandler)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    when = {"timestamp": str(int(time.time()))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": error.message, "extraInfo": when}}, file)
