"""`Context`, which a bench gets: options, rank, journal of its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmkit.errors import LmkitError, first_line
from lmkit.measure.limits import Limits, measure_limits
from lmkit.measure.tables import Rows, json_lines
from lmkit.recipe.tables import ModelConfig, TrainConfig
from lmkit.storage.inputs import read_input
from lmkit.streams import Progress

if TYPE_CHECKING:
    import torch

    from lmkit.parallel.ranks import Ranks
    from lmkit.recipe.recipe import Recipe

Item = TypeVar("Item")


@dataclass(frozen=True)
class Journal:
    """JSON lines that grow while a bench runs: a killed bench loses no finished row. Several processes may append."""

    path: Path

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json_lines(rows))  # one write: lines of several processes do not mix

    def rows(self) -> Rows:
        lines = read_input(self.path).decode().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines]


def storable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in JSON types: tensors of one element as numbers, paths as text; another value, or text
    that is not Unicode, fails the row."""
    if not isinstance(row, Mapping):
        raise LmkitError("bench.not_a_row", f"a bench returned a {type(row).__name__} as a row, not a dict")
    found: dict[str, Any] = {}
    fault: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Path):
            value = str(value)
        elif getattr(value, "shape", None) == ():
            value = value.item()
        try:
            found[str(key)] = json.loads(json.dumps(value, ensure_ascii=False).encode())
        except (TypeError, ValueError) as error:
            fault = {"status": "failed", "detail": f"{key}: {first_line(error)}"}
    return found | fault


@dataclass
class Context:
    """What a running bench gets; `options` is its table, [bench.NAME] of the recipe."""

    recipe: Recipe
    options: Any
    ranks: Ranks
    report: Progress
    journal: Journal
    _limits: Limits | None = None

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def recipe_of(self, model: ModelConfig, *, lr: float = 3e-4, **train: Any) -> Recipe:
        """Return the recipe of a training of the bench's own, with the recipe's optimizer at rate `lr`."""
        return self.recipe.changed(model=model, optimizer={"lr": lr}, train=TrainConfig().changed(**train))

    @property
    def optimizer_field(self) -> dict[str, str]:
        """The field of a row that names an optimizer other than AdamW, which older rows do not name."""
        name = self.recipe.optimizer.name
        return {} if name == "adamw" else {"optimizer": name}

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report progress; only the first rank does."""
        if self.ranks.is_first:
            self.report(stage, done, total)

    def each(self, stage: str, items: Sequence[Item]) -> Iterator[Item]:
        """Yield the items, and report how many are done."""
        for done, item in enumerate(items):
            self.progress(stage, done, len(items))
            yield item
        self.progress(stage, len(items), len(items))

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to the journal; only the first rank does."""
        if self.ranks.is_first:
            self.journal.add([storable(row) for row in rows])

    def rows_of(self, stage: str, items: Sequence[Item], measure: Callable[[Item], Rows]) -> Rows:
        """Return the rows of all items; report progress, and keep each item's rows once it is measured."""
        rows: Rows = []
        for item in self.each(stage, items):
            found = measure(item)
            self.keep(found)
            rows += found
        return rows

    def limits(self, dtypes: Sequence[str]) -> Limits:
        """Measure what the device can do, and note it in the environment."""
        self._limits = measure_limits(self.device, dict.fromkeys(dtypes))
        return self._limits

    def known_limits(self, dtypes: Sequence[str]) -> Limits | None:
        """Return the limits on the first rank, measured once: the others wait for it at the first collective."""
        return (self._limits or self.limits(dtypes)) if self.ranks.is_first else None

    def facts(self) -> dict[str, Any]:
        """Return what `environment.json` says besides the machine, when the bench has ended."""
        return {"limits": self._limits.as_dict()} if self._limits is not None else {}
