"""`lmkit run`: corpus -> tokenizer -> token files -> training -> evaluation -> stories, in one run folder.

Each stage has a key: a hash of the recipe tables and the upstream keys that it depends on. A finished stage whose
key has not changed, and whose outputs are still there, is skipped. The record is `stages.json` in the run folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str, int, int], None]

STAGES = ("corpus", "tokenizer", "encode", "train", "evaluate", "generate")
DATA_STAGES = ("corpus", "tokenizer", "encode")
# What may change under the same run name: it does not touch what earlier stages made.
FREE_TABLES = ("generate", "wandb")


@dataclass(frozen=True)
class RunFiles:
    """Where a run keeps its things."""

    folder: Path

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.toml"

    @property
    def stages(self) -> Path:
        return self.folder / "stages.json"

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"

    def tokens(self, part: str) -> Path:
        return self.folder / "tokens" / f"{part}.npy"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def evaluation(self) -> Path:
        return self.folder / "evaluation.json"

    @property
    def stories(self) -> Path:
        return self.folder / "stories.txt"
