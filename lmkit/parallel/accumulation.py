"""Gradient accumulation: passes whose gradients are not communicated yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from lmkit.parallel.gradient_watch import GradientWatch


class Accumulates:
    """Gives a strategy `no_sync`, and tells what watches its backward passes."""

    _watch: GradientWatch | None = None
    """What launches buckets inside a backward pass; None where nothing is communicated there."""
    _accumulated = False
    """Whether `no_sync` was ever used."""

    def no_sync(self) -> AbstractContextManager[None]:
        self._accumulated = True
        if self._watch is not None and not self._watch.watches_all:
            self._watch.watch_all()
        return self._without_communication()

    @contextmanager
    def _without_communication(self) -> Iterator[None]:
        if self._watch is None:
            yield
            return
        before, self._watch.paused = self._watch.paused, True
        try:
            yield
        finally:
            self._watch.paused = before
