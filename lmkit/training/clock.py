"""Time: how much of it a run has used over all its sessions, and how fast it goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lmkit.parallel.process_group import Ranks


class TrainingClock:
    """Wall-clock of a run, going on from what earlier sessions used."""

    def __init__(self, *, used_seconds: float, max_minutes: float | None, ranks: Ranks) -> None:
        self._used = used_seconds
        self._limit = None if max_minutes is None else max_minutes * 60
        self._ranks = ranks
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Used so far."""
        return self._used + time.perf_counter() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Until `max_minutes`; None without that limit."""
        return None if self._limit is None else max(0.0, self._limit - self.seconds)

    def fraction(self) -> float | None:
        """Share of `max_minutes` that is used, by the first rank's clock: equal on all ranks, which all call it."""
        if self._limit is None:
            return None
        share = torch.tensor(self.seconds / self._limit, dtype=torch.float64)
        if self._ranks.world_size > 1:
            dist.broadcast(share, src=0)
        return share.item()


class Speedometer:
    """Tokens per second since the last reading, and of the whole session, without the time in `excluded` blocks."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._tokens = 0
        self._earlier_tokens = 0
        self._earlier_seconds = 0.0

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def read(self) -> float:
        """The speed since the last call."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        speed = self._tokens / seconds
        self._earlier_tokens += self._tokens
        self._earlier_seconds += seconds
        self._since, self._tokens = now, 0
        return speed

    @property
    def session(self) -> float | None:
        """The mean speed up to the last reading; None before the first."""
        return self._earlier_tokens / self._earlier_seconds if self._earlier_seconds else None

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time in here does not count: evaluation, say."""
        entered = time.perf_counter()
        yield
        self._since += time.perf_counter() - entered
