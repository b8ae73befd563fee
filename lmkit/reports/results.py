"""Results on disk, whoever wrote them: every row under a folder, sorted by what it measured."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.bench.rows import Kind, kind_of, read_environment, read_rows, read_summary
from lmkit.errors import UsageError

_GET_SOME = "or run a bench: lmkit bench attention bench_attention_cpu"


@dataclass(frozen=True)
class Results:
    """The rows of one kind in one file.

    Attributes:
        path: the file, below the folder that was searched.
        environment: content of the `environment.json` beside it, {} without one.
        pictures: names of the PNG files beside it.
    """

    kind: Kind
    path: Path
    rows: list[dict[str, Any]]
    environment: dict[str, Any]
    pictures: tuple[str, ...] = ()

    @property
    def machine(self) -> str:
        """One line on what it was measured on, as far as `environment.json` says."""
        gpus = [gpu["name"] for gpu in self.environment.get("gpus", ())]
        cpu = self.environment.get("cpu", {}).get("name", "")
        parts = [f"{len(gpus)} x {gpus[0]}" if gpus else f"a CPU ({cpu})" if cpu else "an unnamed machine"]
        version = self.environment.get("packages", {}).get("torch")
        if version:
            parts.append(f"torch {version}")
        if self.environment.get("time_utc"):
            parts.append(self.environment["time_utc"][:10])
        return ", ".join(parts)


def find_results(root: Path, parts: Sequence[str] = ("",)) -> list[Results]:
    """Every file of rows below a folder, in the order of their paths.

    JSON lines whose rows belong to no bench (a training run's metrics, say) are passed over.

    Args:
        parts: folders in `root` to look in, of which not all need exist; `root` itself, if none are named.

    Raises:
        UsageError: there is no folder, or no result in it.
        LmkitError: a file is not JSON lines, or a row has a field of another type.
    """
    folders = [root / part for part in parts if (root / part).is_dir()]
    if not folders:
        missing = in_words(root, parts)
        raise UsageError(f"{missing}: not a folder", hint=f"name one that holds results, {_GET_SOME}")
    found = [results for folder in folders for path in _files(folder) for results in _read(path, root)]
    if not found:
        raise UsageError(
            f"{in_words(root, parts)}: no results of a bench or a profile",
            hint=f"name another, {_GET_SOME}",
        )
    return found


def in_words(root: Path, parts: Sequence[str]) -> str:
    """The folders that are searched."""
    return " and ".join(str(root / part) for part in parts)


def of_kind(found: Sequence[Results], *kinds: Kind) -> list[Results]:
    """Those of the given kinds, in their order."""
    return [results for results in found if results.kind in kinds]


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort(key=_natural)
        for name in sorted(names, key=_natural):
            if name.endswith(".jsonl") or name == "profile_summary.json":
                yield Path(parent) / name


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts numbers in names by their value: step_512 before step_2048."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _read(path: Path, root: Path) -> Iterator[Results]:
    rows = [read_summary(path)] if path.name == "profile_summary.json" else read_rows(path)
    by_kind: dict[Kind, list[dict[str, Any]]] = {}
    for row in rows:
        kind = kind_of(row)
        if kind is not None:
            by_kind.setdefault(kind, []).append(row)
    beside = path.parent / "environment.json"
    environment = read_environment(beside) if by_kind and beside.is_file() else {}
    pictures = tuple(sorted(picture.name for picture in path.parent.glob("*.png")))
    for kind, chosen in by_kind.items():
        yield Results(kind, path.relative_to(root), chosen, environment, pictures)
