"""Gradient accumulation: passes whose gradients are not communicated yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from lmkit.parallel.gradient_watch import GradientWatch


class Accumulates:
    """Gives a strategy `no_sync`, and what launches buckets in its backward passes the answer to `is_paused`."""

    _watch: GradientWatch | None = None
    """None where nothing is communicated inside a backward pass."""
    _accumulating = False
    _accumulated = False
    """Whether `no_sync` was ever used."""

    def no_sync(self) -> AbstractContextManager[None]:
        self._accumulated = True
        if self._watch is not None:
            self._watch.check_nothing_is_left()
            if not self._watch.watches_all:
                self._watch.watch_all()
        return self._without_communication()

    @contextmanager
    def _without_communication(self) -> Iterator[None]:
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def _is_paused(self) -> bool:
        return self._accumulating
