"""`[run]`: what the run is called, where it happens, and what makes it repeatable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import field_validator

from lmkit.recipe.table import Count, Table


class RunConfig(Table):
    name: str = "run"
    """Names the folder `<folder>/<name>`."""
    folder: Path = Path("artifacts/runs")
    """Where run folders are made."""
    seed: Count = 0
    """Initial weights and the order of batches follow from it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one, else the CPU; `cuda` without one is refused."""
    deterministic: bool = False
    """On GPUs: only kernels that give the same bits every time (slower). A CPU run is repeatable anyway."""
    threads: Count = 0
    """CPU threads of torch; 0 leaves its own choice. Bit-for-bit repeats need the same number."""

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is None:
            raise ValueError(
                f"{name[:40]!r} is no name: 1 to 100 letters, digits, '.', '_', '-', and no sign in front"
            )
        return name

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder / self.name
