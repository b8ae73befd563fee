"""A finished run of a tiny model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lmkit.cli.app import run_command_line

RECIPE = """
[run]
name = "fish"
folder = "runs"
device = "cpu"
threads = 1
[corpus]
source = "files"
train = ["corpus.txt"]
[tokenizer]
vocab_size = 260
[model]
d_model = 16
d_ff = 32
num_layers = 1
num_heads = 2
context_length = 8
[train]
steps = 2
batch_size = 2
[generate]
max_new_tokens = 1
"""


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its corpus and its finished run."""
    folder = tmp_path_factory.mktemp("made")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("corpus.txt").write_text("one fish two fish red fish blue fish<|endoftext|>\n" * 50)
        Path("fish.toml").write_text(RECIPE)
        assert run_command_line(["run", "fish.toml"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def run(made: Path, terminal, tmp_path: Path) -> Path:
    """The current folder is a copy of that folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return Path("runs/fish")
