"""`[bench]`: a table for every registered bench. The keys of a table are defined in the file of its bench."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import create_model

from lmkit.recipe.tables import Table
from lmkit.registry import BENCHES


class BenchConfig(Table):
    """The tables of benches; None where the recipe has none.

    Its fields are made from the registry, see `bench_config`.
    """

    def table(self, name: str) -> Any:
        """Return [bench.NAME]; the defaults of its keys if the recipe has none."""
        return getattr(self, name, None) or BENCHES.options(name)()

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle cannot find a class that was made while running.
        return _make, ({name: getattr(self, name) for name in self.model_fields_set},)


def bench_config() -> type[BenchConfig]:
    """Return the schema of [bench], with a field for every registered bench."""
    return _bench_config(tuple((name, BENCHES.options(name)) for name in BENCHES.names))


@cache
def _bench_config(tables: tuple[tuple[str, type[Table]], ...]) -> type[BenchConfig]:
    fields: dict[str, Any] = {name: (table | None, None) for name, table in tables}
    return create_model("BenchConfig", __base__=BenchConfig, **fields)


def _make(tables: dict[str, Table]) -> BenchConfig:
    return bench_config()(**tables)
