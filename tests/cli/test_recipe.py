"""`lmkit recipe`: the list fits a terminal, and a copy comes with the command that uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmkit.cli.app import run_command_line
from lmkit.measure.tables import TERMINAL_WIDTH


def test_the_list_fits_a_terminal_in_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["recipe", "list"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= TERMINAL_WIDTH
        assert line.endswith(".")


@pytest.mark.parametrize(
    ("recipe", "command"),
    [
        ("quickstart", "run"),
        ("text_files", "run"),
        ("bench_attention_cpu", "bench attention"),
        ("lm_matrix_cpu", "bench lm-matrix"),
        ("bench_ddp_cpu", "bench ddp"),
        ("profile", "profile kineto"),
        ("own.toml", "train"),
    ],
)
def test_a_copy_comes_with_its_command(
    recipe: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(
        '[data]\ntrain = "tokens.npy"\n[model]\npreset = "tiny"\n[train]\nsteps = 1\nbatch_size = 1\n'
    )
    assert run_command_line(["recipe", "copy", recipe, "a copy.toml", "--json"]) == 0
    ranks = " --nproc 2" if command == "bench ddp" else ""
    assert json.loads(capsys.readouterr().out)["command"] == f"lmkit {command} 'a copy.toml'{ranks}"
    assert run_command_line(["recipe", "validate", "a copy.toml"]) == 0
    assert run_command_line(["recipe", "copy", recipe, "a copy.toml"]) == 2
    assert run_command_line(["recipe", "copy", recipe, "a copy.toml", "--force"]) == 0


def test_print_recipe_prints_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command_line(["run", "quickstart", "--set", "train.steps=7", "--print-recipe"]) == 0
    Path("printed.toml").write_text(capsys.readouterr().out)
    assert run_command_line(["recipe", "show", "printed.toml"]) == 0
    shown = capsys.readouterr().out
    assert "\nsteps = 7 " in shown
    assert shown.startswith("# parameters: ")
