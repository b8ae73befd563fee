"""Weights & Biases beside metrics.jsonl. Whatever goes wrong there, training goes on."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from lmkit.recipe.schema import Recipe
from lmkit.training.metrics import Record

log = logging.getLogger("lmkit")

START_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60


class WandbSink:
    """Sends the numbers of every record. At the first failure it says so once and falls silent.

    Everything lies in metrics.jsonl anyway, and `wandb sync` can upload an offline run later.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._run: Any = None
        try:
            import wandb

            self._run = wandb.init(
                project=recipe.wandb.project,
                name=recipe.run.name,
                dir=str(folder),
                mode=recipe.wandb.mode,
                config=recipe.model_dump(mode="json"),
                settings=wandb.Settings(init_timeout=START_TIMEOUT_S, silent=True),
            )
        except ModuleNotFoundError:
            self._give_up("the package is not installed (pip install 'lmkit[wandb]')")
        except Exception as error:  # noqa: BLE001 (a third party's service must never end a training run)
            self._give_up(repr(error))

    def record(self, record: Record) -> None:
        if self._run is None:
            return
        numbers = {
            f"{record['kind']}/{key}": value
            for key, value in record.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        try:
            self._run.log(numbers, step=record["step"])
        except Exception as error:  # noqa: BLE001 (as above)
            self._give_up(repr(error))

    def note(self, text: str) -> None:
        """Text is for people at the terminal."""

    def close(self) -> None:
        """Let it upload what is left, for a minute at most: with a dead network it would wait for ever."""
        if self._run is None:
            return
        run, self._run = self._run, None
        thread = threading.Thread(target=_finish, args=(run,), name="lmkit-wandb-finish", daemon=True)
        thread.start()
        thread.join(FINISH_TIMEOUT_S)
        if thread.is_alive():
            self._give_up(f"still uploading after {FINISH_TIMEOUT_S} s")

    def _give_up(self, reason: str) -> None:
        self._run = None
        log.warning("W&B is off: %s; metrics.jsonl has everything", reason)


def _finish(run: Any) -> None:
    try:
        run.finish()
    except Exception as error:  # noqa: BLE001 (as above)
        log.warning("W&B did not finish: %r; metrics.jsonl has everything", error)
