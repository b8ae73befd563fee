"""A finished run of a tiny model."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import tiny_recipe

from lmkit.cli.app import run_command_line

RECIPE = tiny_recipe(
    *('run.name="fish"', 'corpus.source="files"', 'corpus.train=["corpus.txt"]', "tokenizer.vocab_size=260"),
    *("train.steps=2", "train.batch_size=2", "generate.max_new_tokens=1"),
)
FISH = "one fish two fish red fish blue fish<|endoftext|>\n" * 50


@pytest.fixture(scope="session")
def run_in() -> Callable[..., list[int]]:
    """run_in(folder, *commands) -> the exit codes of `lmkit COMMAND` in a folder."""

    def run(folder: Path, *commands: str) -> list[int]:
        before = Path.cwd()
        os.chdir(folder)
        try:
            return [run_command_line(command.split()) for command in commands]
        finally:
            os.chdir(before)

    return run


@pytest.fixture(scope="session")
def made(run_in, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its corpus and its finished run."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "corpus.txt").write_text(FISH)
    (folder / "fish.toml").write_text(RECIPE)
    assert run_in(folder, "run fish.toml") == [0]
    return folder


@pytest.fixture
def run(made: Path, terminal, tmp_path: Path) -> Path:
    """The current folder is a copy of that folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return Path("runs/fish")
