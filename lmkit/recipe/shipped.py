"""The recipes that travel with lmkit: inside the wheel when installed, in `recipes/` of a source tree."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped_folder() -> Path:
    """The folder that holds the shipped recipes."""
    installed = _PACKAGE / "shipped_recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Shipped recipes: name -> file, sorted by name."""
    return {path.stem: path for path in sorted(shipped_folder().glob("*.toml"))}


def shipped_with(table: str) -> list[str]:
    """The names of the shipped recipes that have a table, `bench.ddp` say."""
    return [
        name
        for name, path in shipped_recipes().items()
        if any(line.startswith(f"[{table}]") for line in path.read_text("utf-8").splitlines())
    ]


def headline(path: Path) -> str:
    """The first comment line of a recipe: what it is for, short enough for one line of `lmkit recipe list`."""
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").strip()
    return ""
