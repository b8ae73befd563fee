"""Strategies that do not average the gradients, or not always, or fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmkit.parallel.strategy import Strategy
from lmkit.registry import STRATEGIES


class Planted(Strategy):
    _step = 0

    def _reduce(self, unused: Any, *, wait: bool) -> list[int]:
        self._step += 1
        gradients = [parameter.grad for parameter in self.parameters]
        if gradients := self.averaged(gradients):
            self._averager.all_reduce(gradients).wait()
        self.after(gradients)
        return []

    def averaged(self, gradients: list[Any]) -> list[Any]:
        return gradients

    def after(self, gradients: list[Any]) -> None: ...


class EveryOther(Planted):
    """The example of CONTRIBUTING.md, and with it weights that meet again."""

    def averaged(self, gradients: list[Any]) -> list[Any]:
        if self._step % 2:
            return []
        self._averager.all_reduce([parameter.detach() for parameter in self.parameters]).wait()
        return gradients


class FirstOnly(Planted):
    """Right in the first step."""

    def averaged(self, gradients: list[Any]) -> list[Any]:
        return gradients if self._step == 1 else []


class Forgets(Planted):
    """Leaves out one small parameter."""

    def averaged(self, gradients: list[Any]) -> list[Any]:
        return gradients[:-1]


class Sums(Planted):
    """Adds up, where the mean is wanted: AdamW alone would not notice."""

    def after(self, gradients: list[Any]) -> None:
        for gradient in gradients:
            gradient *= self.ranks.world_size


class Stops(Planted):
    """Right as long as it is checked."""

    def averaged(self, gradients: list[Any]) -> list[Any]:
        return gradients if self._step <= 3 else []


class Raises(Planted):
    def averaged(self, gradients: list[Any]) -> list[Any]:
        raise RuntimeError("broken\nlong story")


class Tires(Planted):
    """Fails while it is timed."""

    def averaged(self, gradients: list[Any]) -> list[Any]:
        if self._step > 10:
            raise RuntimeError("tired")
        return gradients


class Right(Planted):
    """What all the others should be."""


WRONG = ("every_other", "first_only", "forgets", "sums", "stops")
FAILED = ("raises", "tires")
KINDS = (EveryOther, FirstOnly, Forgets, Sums, Stops, Raises, Tires, Right)
NAMES = dict(zip((*WRONG, *FAILED, "right"), KINDS, strict=True))


@contextmanager
def registered() -> Iterator[None]:
    for name, strategy in NAMES.items():
        STRATEGIES.register(name, steps_alike=False)(strategy)
    try:
        yield
    finally:
        for name in NAMES:
            STRATEGIES.unregister(name)
