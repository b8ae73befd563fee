"""Turn a rank that dies or hangs into an error that names the rank and the step, within the timeout.

With gloo, a broken or late collective raises in the caller. The surviving ranks then ask the store which ranks are
alive. With NCCL, the caller only waits for the GPU, so a thread watches the clock instead.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lmkit.errors import LmkitError
from lmkit.parallel.ranks import Ranks, absent_ranks

ROLL_CALL_S = 2.0
"""How long survivors wait for one another's sign of life before they report the others as silent."""
GLOO_SIGNS = ("gloo/", "pair closure")
"""Texts in gloo's plain RuntimeErrors: its source path, or "Application timeout caused pair closure"."""


class RankLost(LmkitError):
    """Communication broke: another rank died, hangs, or ended with an error of its own."""

    is_consequence = True


class StepWatch:
    """Name the step in errors of communication, and on GPUs bound its time.

        with StepWatch(ranks) as watch:
            for step in ...:
                with watch.step(step):
                    ...  # forward, backward, finish, optimizer

    A collective that fails inside `step(n)` becomes a `RankLost`, see `losses_named`. On GPUs, a step that is not
    finished after `ranks.timeout_s` seconds ends the process with exit code 1 and one line on stderr, because no
    exception can reach a thread that waits for the GPU.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._armed: tuple[int, float] | None = None  # (step, deadline): replaced whole, so it needs no lock
        self._stopped = threading.Event()
        self._clock: threading.Thread | None = None
        if ranks.world_size > 1 and ranks.device.type == "cuda":
            self._clock = threading.Thread(target=self._watch, name="lmkit-step-watch", daemon=True)

    def __enter__(self) -> StepWatch:
        if self._clock is not None:
            self._clock.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._clock is not None:
            self._stopped.set()
            self._clock.join()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Name the step; raise RankLost if a collective inside it breaks."""
        self._armed = (number, time.monotonic() + self._ranks.timeout_s)
        try:
            with losses_named(self._ranks, f"step {number}"):
                yield
        finally:
            self._armed = None

    def _watch(self) -> None:
        ranks = self._ranks
        while not self._stopped.wait(min(1.0, ranks.timeout_s / 8)):
            armed = self._armed
            if armed is not None and time.monotonic() > armed[1]:
                sys.stderr.write(
                    f"error[parallel.step_hangs]: rank {ranks.rank}, step {armed[0]}: unfinished after "
                    f"{ranks.timeout_s:g} s; this rank or one that it waits for hangs\n"
                )
                sys.stderr.flush()
                os._exit(1)


def is_communication(error: BaseException) -> bool:
    """Return whether an error says that a collective broke."""
    return isinstance(error, (RankLost, dist.DistError)) or any(sign in str(error) for sign in GLOO_SIGNS)


@contextmanager
def losses_named(ranks: Ranks, moment: str) -> Iterator[None]:
    """Turn a collective that breaks inside into a `RankLost` with this rank, the moment, and the silent ranks."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if ranks.world_size == 1 or not is_communication(error):
            raise
        timed_out = "imed out" in text or "imeout" in text
        what = f"no answer within {ranks.timeout_s:g} s" if timed_out else "the connection broke"
        raise RankLost(
            "parallel.rank_lost",
            f"rank {ranks.rank}, {moment}: {what}; {_roll_call(ranks)}",
            hint="look for the error or signal of the silent rank; a slow one needs a longer parallel.timeout_s",
        ) from error


def _roll_call(ranks: Ranks) -> str:
    """Name the ranks that do not report the broken collective: they died, hang, or have not noticed it yet."""
    assert ranks.store is not None
    try:
        ranks.store.set(f"survivor/{ranks.rank}", "yes")
        silent = absent_ranks(ranks.store, "survivor", ranks.world_size, ROLL_CALL_S)
    except dist.DistNetworkError:
        return "the rendezvous store is gone, too"  # the rank that died may have hosted it
    if not silent:
        return "all ranks are still there"
    return f"no sign of rank {', '.join(map(str, silent))} in {ROLL_CALL_S:g} s more"
