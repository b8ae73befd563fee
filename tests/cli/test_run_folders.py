"""A run folder may be moved, renamed and copied: the recipe in it belongs to it."""

import json
import shutil
from pathlib import Path

import pytest

from lmkit.recipe.load import load_recipe


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def newest(folder: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*"))


@pytest.fixture
def moved(run: Path) -> Path:
    """The run folder in another place, under another name."""
    Path("elsewhere").mkdir()
    return run.rename("elsewhere/fish (copy)")


def test_fault_97_a_moved_run_is_where_its_recipe_lies(moved, terminal):
    recipe, before = moved / "recipe.toml", content(moved / "checkpoints")
    for options in ("--dry-run", ""):
        ended = json.loads(terminal("run", recipe, "--json", *options.split()))
        assert set(ended["stages"].values()) == {"up to date"}
    assert ended["folder"] == str(moved)
    assert content(moved / "checkpoints") == before
    assert "resuming from" in terminal("train", recipe, "--steps", "4", "--dry-run")
    trained = json.loads(terminal("train", recipe, "--steps", "4", "--json"))
    assert (trained["folder"], trained["resumed_from"], newest(moved)) == (str(moved), 2, 4)
    assert json.loads(terminal("evaluate", moved, "--json"))["tokens_file"] == str(moved / "tokens/valid.npy")
    for command in ("evaluate", "generate", "verify"):
        terminal(command, moved)
    terminal("verify", recipe)
    terminal("verify", recipe, "--resume", "--steps", "1")
    assert not Path("runs/fish").exists()


def test_fault_97_a_moved_run_goes_on_from_inside_its_folder(moved, terminal, monkeypatch):
    monkeypatch.chdir(moved)
    assert json.loads(terminal("train recipe.toml --steps 3 --json"))["resumed_from"] == 2
    assert newest(Path()) == 3
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", ["run", "train"])
def test_fault_97_training_a_copy_leaves_the_original_alone(command, run, terminal):
    copy = shutil.copytree(run, Path("copy"))
    (copy / "checkpoints").rename(copy / "old")  # there is something to train
    before = content(run)
    terminal(command, f"{copy}/recipe.toml")
    assert newest(copy) == 2
    assert content(run) == before


def test_fault_97_paths_inside_a_run_move_with_it(run, terminal):
    recipe = run / "recipe.toml"
    data = '[data]\ntrain = "runs/fish/tokens/train.npy"\nvalid = "runs/fish/tokens/valid.npy"\n'
    recipe.write_text(recipe.read_text().replace("[data]\n", data))
    terminal("train", recipe, "--steps", "3")
    copy = shutil.copytree(run, Path("copy"))
    assert load_recipe(copy / "recipe.toml").data.train == copy / "tokens/train.npy"
    assert load_recipe(copy / "recipe.toml").corpus.train == (Path("corpus.txt"),)
    evaluated = json.loads(terminal("evaluate", copy, "--json"))
    assert evaluated["tokens_file"] == str(copy / "tokens/valid.npy")


def test_a_recipe_that_lies_in_no_run_folder_names_its_own(run, terminal):
    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    shutil.copy(run / "recipe.toml", elsewhere)
    assert load_recipe(elsewhere / "recipe.toml").run.path == run
