"""`Context`, which a bench gets: options, rank, journal of its rows.

Errors of variants become rows: a variant may be the user's code, and the others complete.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmkit.errors import LmkitError, UsageError, first_line
from lmkit.measure.limits import Limits, measure_limits
from lmkit.measure.memory import is_out_of_memory, release_memory
from lmkit.measure.tables import Rows, json_lines
from lmkit.measure.timing import global_state_kept
from lmkit.recipe.tables import ModelConfig, TrainConfig
from lmkit.storage.inputs import read_input
from lmkit.streams import Progress

if TYPE_CHECKING:
    import torch

    from lmkit.parallel.ranks import Ranks
    from lmkit.recipe.schema import Recipe


class RankGaveUp(LmkitError):
    """A variant failed on one rank only; the journal has the row.

    Other ranks may wait for it inside a collective, so all ranks end. `--nproc` starts its ranks again; they measure
    the rows that the journal lacks.
    """


@dataclass(frozen=True)
class Journal:
    """JSON lines that grow while a bench runs: a killed bench loses no finished row. Several processes may append."""

    path: Path

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json_lines(rows))  # one write: lines of several processes do not mix

    def rows(self) -> Rows:
        """Return the rows so far."""
        lines = read_input(self.path).decode().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines]


def storable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a bench in JSON types: tensors of one element as numbers, paths as text.

    A row with another value has failed: it says so in place of the value.
    """
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
            json.dumps(value)
        except (TypeError, ValueError) as error:
            fault = {"status": "failed", "detail": f"{key}: {first_line(error)}"}
        else:
            found[key] = value
    return found | fault


@dataclass
class Context:
    """The options, ranks, journal and environment of a running bench.

    Attributes:
        options: its table, [bench.NAME] of the recipe.
        ranks: this process's rank and device.
    """

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
        """Return the recipe of a training that the bench's own table describes, with the recipe's optimizer.

        Args:
            lr: the constant learning rate, in place of the recipe's.
        """
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


Item = TypeVar("Item")
REFUSALS = ("No available kernel", "No viable backend", "No working C++ compiler")
"""Texts in errors of PyTorch that refuse a pinned backend, on a GPU and on a CPU, or to compile."""
PATIENCE_S = 2.0
"""Seconds that a rank on which a variant failed waits for the others, which may wait for it inside a collective."""


@contextmanager
def failure_is_a_row(row: dict[str, Any], device: torch.device | str) -> Iterator[None]:
    """Turn an error of the block into the row's status, and give its memory back; also restore torch's global state.

    Errors of a lost device or rank pass: every further call would fail. So do signals.
    """
    try:
        with global_state_kept():
            yield
    except BaseException as error:
        if _ends_the_bench(error):
            raise
        row |= _status_of(error)
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the calls that ended
        release_memory(device)


@contextmanager
def failure_on_any_rank_is_a_row(row: dict[str, Any], context: Context, note: str = "") -> Iterator[None]:
    """Turn an error of the block on any rank into the row's status on every rank. Collective.

    Args:
        row: "ok" before the block; has the keys that identify it.
        note: added to the detail of a row that is out of memory.

    Raises:
        RankGaveUp: another rank does not end the block in `PATIENCE_S`, because it waits for this rank.
    """
    import torch.distributed as dist

    from lmkit.parallel.ranks import absent_ranks

    ranks = context.ranks
    with failure_is_a_row(row, ranks.device):
        yield
    if row["status"] == "out of memory":
        row["detail"] += note
    if ranks.world_size == 1:
        return
    assert ranks.store is not None
    end = f"end {ranks.store.add(f'ends/{ranks.rank}', 1)}"  # the number is equal on all ranks
    ranks.store.set(f"{end}/{ranks.rank}", "")
    if row["status"] != "ok" and absent_ranks(ranks.store, end, ranks.world_size, PATIENCE_S):
        context.journal.add([row])
        raise RankGaveUp(
            "bench.rank_failed",
            f"rank {ranks.rank}: {row['status']}: {row.get('detail', '')}",
            hint="leave the variant out, or let --nproc start the ranks: it goes on with the other variants",
        )
    of_ranks: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(of_ranks, {key: row.get(key, "") for key in ("status", "detail")})
    if failed := next((other for other in of_ranks if other["status"] != "ok"), None):
        row |= failed


def _ends_the_bench(error: BaseException) -> bool:
    import torch

    from lmkit.parallel.ranks import is_communication

    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return True
    if isinstance(error, SystemExit):
        return isinstance(error.code, int) and error.code > 128  # of a signal
    is_lost = isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
    return is_lost or isinstance(error, RankGaveUp) or is_communication(error)


def _status_of(error: BaseException) -> dict[str, Any]:
    """Return the status and detail of a row whose variant raised an error."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and is_out_of_memory(error)):
        return not_enough_memory(str(error) or "of the host")
    refused = isinstance(error, UsageError | NotImplementedError) or any(x in str(error) for x in REFUSALS)
    detail = error.message if isinstance(error, UsageError) else first_line(error)
    return {"status": "unsupported" if refused else "failed", "detail": detail}


def not_enough_memory(reason: BaseException | str) -> dict[str, Any]:
    """Return the status and detail of a row that does not fit; the detail of an error is its first sentence."""
    return {"status": "out of memory", "detail": str(reason).split(". ")[0].partition("\n")[0]}


def wrong_result(why: str) -> dict[str, Any]:
    """Return the status and detail of a variant that computes something else than it should."""
    return {"status": "wrong result", "detail": why}
