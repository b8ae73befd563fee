"""Under torchrun every rank is a process that could print an error; one of them does.

torchrun ends all ranks a moment after the first has left, and then prints a summary of its own. So the rank whose
error it is speaks at once, the others give it time to, and the summary gets the same line instead of a traceback.
Ranks of one machine see what the others are about to do by files beside torchrun's own.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NoReturn

from lmkit.errors import LmkitError

PATIENCE_S = 3.0
"""How long an error waits for one that explains it better: the same on rank 0, or the cause of a lost connection."""
END_S = 30.0
"""How long a rank that leaves the word to another waits for torchrun to end it."""
_LOOK_S = 0.05


def speak_for_ranks(error: LmkitError) -> LmkitError:
    """Under torchrun: wait for the ranks that should speak first, name this rank, and tell torchrun.

    Where another rank speaks, this does not return: torchrun's SIGTERM ends the process.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        return error
    folder = _common_folder()
    if folder is not None and not error.is_consequence:
        (folder / "lmkit-cause").touch()
    waits = (os.environ.get("LOCAL_RANK") != "0") + 2 * error.is_consequence
    deadline = time.monotonic() + waits * PATIENCE_S
    while time.monotonic() < deadline:
        if folder is not None and _is_said_better(error, folder):
            _leave_the_word(error)
        time.sleep(_LOOK_S)
    if folder is not None and not _is_first_to_speak(folder):
        _leave_the_word(error)
    if not error.message.startswith("rank "):
        error = type(error)(error.code, f"rank {os.environ.get('RANK')}: {error.message}", hint=error.hint)
    _tell_torchrun(error)
    return error


def _common_folder() -> Path | None:
    """The folder of this attempt, in which torchrun has one for every rank of this machine."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or Path(path).parent.name != os.environ.get("LOCAL_RANK"):
        return None
    return Path(path).parent.parent


def _is_said_better(error: LmkitError, folder: Path) -> bool:
    """Whether another rank has spoken, or will tell the cause of what this one only sees the consequence of."""
    return (folder / "lmkit-said").exists() or (error.is_consequence and (folder / "lmkit-cause").exists())


def _is_first_to_speak(folder: Path) -> bool:
    try:
        (folder / "lmkit-said").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _leave_the_word(error: LmkitError) -> NoReturn:
    time.sleep(END_S)
    raise SystemExit(error.exit_code)


def _tell_torchrun(error: LmkitError) -> None:
    """Write the file from which torchrun takes what it calls the traceback (the format of torch's ErrorHandler)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    when = {"timestamp": str(int(time.time()))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": error.message, "extraInfo": when}}, file)
