"""Strategies that do not average the gradients, or not always, or fail."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lmkit.parallel.strategy import Strategy
from lmkit.registry import STRATEGIES


class Planted(Strategy):
    """Averages what `chosen(self, gradients)` returns, and multiplies it by `factor(self)`."""

    chosen: Callable[["Planted", list[Any]], list[Any]]
    factor: Callable[["Planted"], float] = lambda self: 1.0
    step = 0

    def _reduce(self, unused: Any, *, wait: bool) -> list[int]:
        self.step += 1
        if gradients := self.chosen([parameter.grad for parameter in self.parameters]):
            self._averager.all_reduce(gradients).wait()
        for gradient in gradients:
            gradient *= self.factor()
        return []


class Halves(Planted):
    """Right unless a step accumulates."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        self.factor = lambda: 0.5


class SumsLater(Planted):
    """Right as long as it is checked before timing."""

    def factor(self) -> float:
        return 1.0 if self.step <= 4 else self.ranks.world_size


class NeverClips(Planted):
    """Measures the norm, and no more."""

    def clip_gradients(self, max_norm: float) -> Any:
        return super().clip_gradients(float("inf"))


BASES: dict[str, type[Planted]] = {"halves": Halves, "never_clips": NeverClips, "sums_later": SumsLater}


def every_other(self: Planted, gradients: list[Any]) -> list[Any]:
    """The example of CONTRIBUTING.md, and with it weights that meet again."""
    if self.step % 2:
        return []
    self._averager.all_reduce([parameter.detach() for parameter in self.parameters]).wait()
    return gradients


def fails(self: Planted, gradients: list[Any], message: str = "broken\nlong story") -> list[Any]:
    raise RuntimeError(message)


def tires(self: Planted, gradients: list[Any]) -> list[Any]:
    """Fails while it is timed."""
    return fails(self, gradients, "tired") if self.step > 10 else gradients


CHOSEN: dict[str, Callable[[Planted, list[Any]], list[Any]]] = {
    "every_other": every_other,
    "first_only": lambda self, gradients: gradients if self.step == 1 else [],
    "forgets": lambda self, gradients: gradients[:-1],  # one small parameter
    "sums": lambda self, gradients: gradients,  # where the mean is wanted: AdamW alone would not notice
    "halves": lambda self, gradients: gradients,
    "never_clips": lambda self, gradients: gradients,
    "stops": lambda self, gradients: gradients if self.step <= 3 else [],  # right as long as it is checked
    "sums_later": lambda self, gradients: gradients,  # on all ranks alike
    "raises": fails,
    "tires": tires,
    "right": lambda self, gradients: gradients,
}
WRONG, FAILED, NAMES = (*CHOSEN,)[:8], (*CHOSEN,)[8:10], tuple(CHOSEN)


def register() -> None:
    for name, chosen in CHOSEN.items():
        made = {"chosen": chosen} | ({"factor": lambda self: self.ranks.world_size} if name == "sums" else {})
        STRATEGIES.register(name, steps_alike=False)(type(name, (BASES.get(name, Planted),), made))
