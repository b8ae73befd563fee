"""Benches in this process, on one thread of the CPU, beside known limits."""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmkit.bench import context as bench_context
from lmkit.bench.context import Context, Journal
from lmkit.bench.harness import believed, result_files
from lmkit.bench.summary import terminal_text
from lmkit.measure.limits import Limits
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import validate
from lmkit.registry import BENCHES

LIMITS = Limits("a test", {"fp32": 1e12, "bf16": 2e12, "tf32": 1e12}, 1e10)


@pytest.fixture(autouse=True, scope="session")
def _frozen_modules() -> Iterator[None]:
    """Benches collect garbage between variants; half of the tests' time would go into looking at modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def _planted_kernels() -> None:
    """Register the planted functions as attention kernels."""
    import planted_kernels

    planted_kernels.register()


@pytest.fixture
def _known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_context, "measure_limits", lambda device, dtypes: LIMITS)


@pytest.fixture
def run_bench(_known_limits: None, tmp_path: Path) -> Callable[..., Any]:
    """Run a bench with keys of its table: rows, files, the terminal's table."""

    def run(name: str, journal: Journal | None = None, **keys: Any) -> Any:
        # As TOML has it: tuples are arrays, paths are strings.
        tables = json.loads(json.dumps({"bench": {name: keys}}, default=str))
        recipe = validate(tables, origin="test", benches=True)
        journal = journal or Journal(tmp_path / "rows.partial")
        context = Context(recipe, recipe.bench_table(name), Ranks(), lambda *_: None, journal)
        rows = BENCHES.load(name)(context)
        summary, files = result_files(name, [believed(row) for row in rows], context.facts())
        return SimpleNamespace(rows=rows, files=files, table=terminal_text(summary))

    return run
