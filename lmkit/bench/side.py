"""Run the bench of one of two versions of lmkit that take turns: `python side.py SOCKET bench NAME ...`.

`lmkit bench --against` starts this file once for each version (`against.Side`), with that version's lmkit on the
import path. In place of `measure.timing.time_variants`, the bench calls `time_in_turns`, which announces its variants
and takes samples when told to.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

WARMUP_SECONDS = 1.0


def main() -> None:
    """Run the command line that follows the number of the socket."""
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    link = socket.socket(fileno=int(sys.argv.pop(1)))

    import lmkit.measure.limits  # noqa: F401 (first: what it times needs no turns)
    from lmkit.measure import plots, timing

    plots.png = lambda figure: b""  # nobody looks at the pictures of one side
    timing.time_variants = functools.partial(time_in_turns, Link(link), timing.time_variants)
    runpy.run_module("lmkit", run_name="__main__", alter_sys=True)


class Link:
    """Messages through a socket, one JSON value a line."""

    def __init__(self, link: socket.socket) -> None:
        # Two files: one for both would forget what it has read ahead whenever it writes.
        self._incoming = link.makefile("r", encoding="utf-8")
        self._outgoing = link.makefile("w", encoding="utf-8")

    def send(self, message: Any) -> None:
        """Send one message; nothing happens where the other end is closed."""
        try:
            self._outgoing.write(json.dumps(message) + "\n")
            self._outgoing.flush()
        except OSError:
            pass

    def receive(self) -> Any:
        """Return the next message; None after the last."""
        line = self._incoming.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """Close both files; the socket closes after them."""
        for file in (self._incoming, self._outgoing):
            with suppress(OSError):  # the other end is closed
                file.close()


def time_in_turns(
    link: Link, alone: Callable[..., Any], variants: Mapping[str, Callable[[], object]], **options: Any
) -> Any:
    """Return what `time_variants` returns, with samples taken when the other side takes none.

    With one thread on a CPU, samples are CPU time, and both sides use the same CPU. So other processes, which make a
    sample wait, hardly change it.

    Args:
        alone: the `time_variants` of this version, for cases that the other side does not have.
        options: options of `time_variants`; those for the number of samples are ignored.
    """
    import torch

    from lmkit.measure import timing

    device = torch.device(options.get("device", "cpu"))
    clock = options.get("clock")
    one_thread = clock is None and device.type == "cpu" and torch.get_num_threads() == 1
    if one_thread:
        clock = timing.WallClock(now=time.process_time)
        clock.name = "process_time"
    clock = clock or timing.clock_for(device, options.get("kind", "device"))
    clock = getattr(clock, "cpu_time", None) or clock
    prepare = options.get("prepare") or {}
    flush = [timing.cache_flusher(device)] if options.get("cold_cache") else []
    before = {name: ([prepare[name]] if name in prepare else []) + flush for name in variants}
    turn = options.get("turn", lambda name: None)
    for name, work in variants.items():
        turn(name)
        began = time.monotonic()
        for _ in range(options.get("warmup", 3)):
            for call in (*before[name], work):
                call()
            if time.monotonic() - began > WARMUP_SECONDS:
                break
    shortest = options.get("min_sample_ms", 0.0)
    link.send({"variants": [[name, 0.0 if before[name] else shortest] for name in variants]})
    start = link.receive()
    if start is None:  # who compares is gone
        raise SystemExit(128 + signal.SIGHUP)
    if start["alone"]:
        return alone(variants, **options)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    calls = dict.fromkeys(variants, 1)
    with on_cpu(start["cpu"] if one_thread else None):
        while (message := link.receive()) is not None and message["variant"] is not None:
            name = message["variant"]
            turn(name)
            calls[name] = message["calls"]
            ms = clock.sample_ms(variants[name], calls[name], before=before[name]) / calls[name]
            if message["keep"]:
                samples[name].append(ms)
            link.send({"ms": ms})
    cache = "cold" if flush else "warm"
    return {
        name: timing.Timing(name, tuple(found), tuple(range(len(found))), clock.name, cache, calls[name])
        for name, found in samples.items()
    }


@contextmanager
def on_cpu(number: int | None) -> Iterator[None]:
    """Keep this thread on one CPU, where the system allows it."""
    if number is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {number})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


if __name__ == "__main__":
    main()
