"""Gradient accumulation: passes whose gradients are not communicated yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class Accumulates:
    """Gives a strategy `no_sync`, and its hooks the answer to "is this pass to be communicated?"."""

    _accumulating = False
    _accumulated = False
    """Whether `no_sync` was ever used."""

    def no_sync(self) -> AbstractContextManager[None]:
        self._accumulated = True
        return self._without_communication()

    @contextmanager
    def _without_communication(self) -> Iterator[None]:
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before
