"""Print one error under torchrun, although every rank could print one.

torchrun ends all ranks a moment after the first has exited, and then prints a summary. So the rank that caused the
error prints at once, the others wait, and the summary gets the same line instead of a traceback. The ranks of one
machine coordinate through files in torchrun's folder for errors.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NoReturn

from lmkit.errors import LmkitError

PATIENCE_S = 3.0
"""How long an error waits for a better one: the same error on rank 0, or the cause of a lost connection."""
END_S = 30.0
"""How long a rank that stays silent waits for torchrun to end it."""
_LOOK_S = 0.05


def speak_for_ranks(error: LmkitError) -> LmkitError:
    """Under torchrun: wait for the ranks that should print first, name this rank, and tell torchrun.

    If another rank prints, this does not return: torchrun's SIGTERM ends the process.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        return error
    folder = _common_folder()
    if folder is not None and not error.is_consequence:
        (folder / "lmkit-cause").touch()
    waits = (os.environ.get("LOCAL_RANK") != "0") + 2 * error.is_consequence
    deadline = time.monotonic() + waits * PATIENCE_S
    while time.monotonic() < deadline:
        if folder is not None and _has_better_error(error, folder):
            _stay_silent(error)
        time.sleep(_LOOK_S)
    if folder is not None and not _is_first_to_print(folder):
        _stay_silent(error)
    if not error.message.startswith("rank "):
        error = type(error)(error.code, f"rank {os.environ.get('RANK')}: {error.message}", hint=error.hint)
    _tell_torchrun(error)
    return error


def _common_folder() -> Path | None:
    """Return the folder of this attempt, where torchrun has one folder per rank of this machine."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or Path(path).parent.name != os.environ.get("LOCAL_RANK"):
        return None
    return Path(path).parent.parent


def _has_better_error(error: LmkitError, folder: Path) -> bool:
    """Return whether another rank has printed, or will print the cause of this consequence."""
    return (folder / "lmkit-said").exists() or (error.is_consequence and (folder / "lmkit-cause").exists())


def _is_first_to_print(folder: Path) -> bool:
    try:
        (folder / "lmkit-said").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _stay_silent(error: LmkitError) -> NoReturn:
    time.sleep(END_S)
    raise SystemExit(error.exit_code)


def _tell_torchrun(error: LmkitError) -> None:
    """Write the file from which torchrun reads the "traceback" (the format of torch's ErrorHandler)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    when = {"timestamp": str(int(time.time()))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": error.message, "extraInfo": when}}, file)
