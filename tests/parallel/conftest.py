"""Makes the modules of this folder importable by plain name, here and in spawned ranks (they inherit sys.path)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="session")
def rank_modules() -> Iterator[dict[str, ModuleType]]:
    """The helper modules by name."""
    sys.path.insert(0, HERE)
    yield {name: importlib.import_module(name) for name in ("rank_model", "rank_checks", "rank_faults")}
    sys.path.remove(HERE)
