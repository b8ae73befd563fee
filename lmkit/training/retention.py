"""Which checkpoints stay: the last N and the best K of those that are good; the others go after a new one came."""

from __future__ import annotations

from pathlib import Path

from lmkit.errors import LmkitError
from lmkit.training.checkpoint_folder import STATE, DamagedCheckpoint, remove_folder, saved_steps, verify
from lmkit.training.state import parse_state
from lmkit.training.tensor_files import read_verified


class Retention:
    """Deletes what is no longer wanted. Damaged checkpoints never count as kept ones.

    Every checkpoint is read in full once before it counts, except those that this process wrote itself.

    Args:
        keep_last: this many with the highest steps, at least 1.
        keep_best: and this many with the lowest validation loss, of those that have one.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_best: int) -> None:
        self._folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._losses: dict[int, float | None] = {}  # of the good ones seen so far
        self._foreign: set[int] = set()  # of a format that we do not know: not ours to judge

    def remember(self, step: int, valid_loss: float | None) -> None:
        """Count this checkpoint as good: it was just written and synced."""
        self._losses[step] = valid_loss

    def prune(self) -> list[Path]:
        """Delete the others; return them. Damaged ones go once a good one with a higher step exists."""
        saved = saved_steps(self._folder)
        good = [item.step for item in saved if self._is_good(item.step, item.path)]
        kept = set(good[-self._keep_last :])
        rated = [(loss, step) for step in good if (loss := self._losses[step]) is not None]
        kept.update(step for _, step in sorted(rated)[: self._keep_best])
        newest = good[-1] if good else -1
        kept |= self._foreign
        doomed = [item.path for item in saved if item.step not in kept and item.step < newest]
        for path in doomed:
            remove_folder(path)
        return doomed

    def _is_good(self, step: int, path: Path) -> bool:
        if step not in self._losses:
            try:
                entries = verify(path)
                state = parse_state(read_verified(path / STATE, entries[STATE]), path=path / STATE)
            except DamagedCheckpoint:
                return False
            except LmkitError:  # whole, but of a later version
                self._foreign.add(step)
                return False
            self._losses[step] = state.valid_loss
        return True
