"""`[data]`: how batches are drawn from token files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lmkit.recipe.table import Table, Workers


class DataConfig(Table):
    train: Path | None = None
    """Token file (.npy); without it, the one that `lmkit run` made in the run folder."""
    valid: Path | None = None
    """Held-out token file; without it, the one that `lmkit run` made."""
    source: Literal["tokens", "random"] = "tokens"
    """`random` draws uniform token ids: a source for benchmarks that needs no file."""
    sampling: Literal["windows", "documents"] = "windows"
    """Windows start anywhere in the file, or at the beginning of a document."""
    workers: Workers = 0
    """Threads that encode the corpus; 0: one per CPU. The result does not depend on it."""
