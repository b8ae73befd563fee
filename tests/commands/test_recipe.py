"""`lmkit recipe copy` names the command that takes the copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkit.commands.recipe import copy_recipe


@pytest.mark.parametrize(
    ("recipe", "command"),
    [
        ("quickstart", "run"),
        ("text_files", "run"),
        ("bench_attention_cpu", "bench attention"),
        ("lm_matrix_cpu", "bench lm-matrix"),
        ("bench_ddp_cpu", "bench ddp"),
        ("profile", "profile kineto"),
    ],
)
def test_a_copy_of_a_shipped_recipe(recipe: str, command: str, tmp_path: Path) -> None:
    copied = copy_recipe(recipe, tmp_path / "a copy.toml", force=False)
    ranks = " --nproc 2" if command == "bench ddp" else ""
    assert copied.command == f"lmkit {command} '{tmp_path}/a copy.toml'{ranks}"


def test_a_recipe_for_token_files_that_are_there_is_trained(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        '[data]\ntrain = "tokens.npy"\n[model]\npreset = "tiny"\n[train]\nsteps = 1\nbatch_size = 1\n'
    )
    copied = copy_recipe(str(own), tmp_path / "copy.toml", force=False)
    assert copied.command == f"lmkit train {tmp_path}/copy.toml"
    assert (tmp_path / "copy.toml").read_text() == own.read_text()
