"""Table `[corpus]`: the source of the text and the part to hold out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from lmkit.errors import did_you_mean
from lmkit.recipe.table import Count, PositiveFloat, Table
from lmkit.registry import DATASETS


def _source(value: str) -> str:
    names = ("synth", "files", *DATASETS.names)
    if value not in names:
        raise ValueError(f'"{value}" is not one of {", ".join(names)}{did_you_mean(value, names)}')
    return value


class CorpusConfig(Table):
    source: Annotated[str, AfterValidator(_source)] = "synth"
    """`synth`: generated stories, offline. `files`: your own. A dataset (`tinystories`, `owt`): downloaded once."""
    folder: Path = Path("artifacts/data")
    """Where downloads are kept, shared by all runs."""

    size_mb: PositiveFloat = 20.0
    """Size of the generated training text, in 10^6 bytes (`synth`)."""
    seed: Count = 0
    """Seed of the generator (`synth`)."""

    train: tuple[Path, ...] = ()
    """Text files, or JSON lines files ending in `.jsonl` (`files`)."""
    valid: tuple[Path, ...] = ()
    """Held-out files (`files`); without them the last `valid_fraction` of the documents is held out."""
    valid_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The part held out where no files are named for it."""
    field: str = "text"
    """The key of a JSON line that holds the text (`files`)."""
    errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8: stop with the byte offset, or replace it by U+FFFD."""

    @model_validator(mode="after")
    def _files_are_named(self) -> CorpusConfig:
        if self.source == "files" and not self.train:
            raise ValueError('source = "files" needs train = ["some/file.txt"]')
        if self.source != "files" and (self.train or self.valid):
            raise ValueError(f'train and valid belong to source = "files", not "{self.source}"')
        return self
