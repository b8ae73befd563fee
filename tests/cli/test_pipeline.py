"""What `lmkit run` refuses, it refuses before anything is made or deleted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lmkit.cli import pipeline
from lmkit.cli.pipeline import StageRecord
from lmkit.errors import UsageError
from lmkit.recipe.load import load_recipe, recipe_to_toml
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.run_folder import save_record


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe("quickstart", [f'run.folder="{tmp_path}/my runs"'])


def run_now(recipe: Recipe, **options: Any) -> Any:
    return pipeline.run(recipe, progress=lambda *_: None, **options)


def refused(code: str, recipe: Recipe, by: Callable[..., Any] | None = None, **options: Any) -> UsageError:
    """The error of the run; --dry-run gives the same."""
    for refuse in (run_now, pipeline.plan) if by is None else (by,):
        with raises(UsageError, code) as caught:
            refuse(recipe, **options)
    return caught.value


def states(recipe: Recipe, **options: Any) -> set[str]:
    return set(pipeline.plan(recipe, **options).fields["stages"].values())


def with_longer_recipe(recipe: Recipe, *, checkpoint: bool = True) -> Path:
    """The recipe in the run folder: one of more steps and another model."""
    own = recipe.run.path / "recipe.toml"
    (recipe.run.path / "checkpoints" / ("step-00000001" if checkpoint else "")).mkdir(parents=True)
    own.write_text(recipe_to_toml(recipe.changed(train={"steps": 1260}, model={"d_ff": 64})))
    save_record(recipe.run.path, {})
    return own


def test_a_run_of_another_recipe_is_refused_with_the_command_that_continues_it(recipe):
    own = with_longer_recipe(recipe)
    error = refused("run.other_recipe", recipe)
    assert "model.d_ff: 64 -> " in error.message
    assert f"lmkit run '{own}';" in error.hint  # can be pasted
    assert states(recipe, force=True) == {"would run"}


def test_a_run_without_a_training_continues_with_a_changed_recipe(recipe, monkeypatch):
    own = with_longer_recipe(recipe, checkpoint=False)
    begun = {stage: {"key": "key", "before": "", "done": False} for stage in ("corpus", "train")}
    (recipe.run.path / "stages.json").write_text(json.dumps({**begun, "lmkit": {}}))
    assert states(recipe) == {"would run"}
    monkeypatch.setattr(pipeline, "STAGES", {})
    with pytest.raises(FileNotFoundError):  # nothing was made
        run_now(recipe)
    assert own.read_text() == recipe_to_toml(recipe)
    StageRecord(recipe.run.path, recipe).finish("train", {})
    own.write_text(recipe_to_toml(recipe.changed(train={"steps": 1260})))
    refused("run.other_recipe", recipe)  # a finished training without its checkpoints keeps its recipe


def test_force_moves_a_link_of_a_run_but_not_what_it_leads_to(recipe, tmp_path, monkeypatch):
    elsewhere, folder = tmp_path / "big disk", recipe.run.path
    elsewhere.mkdir()
    (elsewhere / "weights").write_bytes(b"precious")
    folder.mkdir(parents=True)
    (folder / "checkpoints").symlink_to("../../big disk")  # from `old-<time>` this would lead elsewhere
    save_record(folder, {})
    monkeypatch.setattr(pipeline, "STAGES", dict.fromkeys(pipeline.STAGES, lambda run: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        run_now(recipe, force=True)
    (aside,) = folder.glob("old-*")
    assert (aside / "checkpoints" / "weights").read_bytes() == b"precious"
    assert {path.name for path in folder.iterdir()} == {".lock", "recipe.toml", "stages.json", aside.name}
    assert [path.name for path in elsewhere.iterdir()] == ["weights"]


def test_a_tokenizer_without_end_of_text_is_refused_up_front(recipe):
    table = recipe.tokenizer.changed(special_tokens=("<x>",))
    refused("tokenizer.no_end_of_text", recipe.changed(tokenizer=table))
    named = recipe.changed(tokenizer=table.changed(end_of_text="<x>"))
    assert StageRecord(named.run.path, named).mark == "<x>"
    pipeline.plan(named)


def test_options_that_cannot_be_obeyed(recipe, monkeypatch):
    refused("run.no_data", recipe, skip_data=True)
    assert "--skip-data" in refused("run.options_exclude", recipe, skip_data=True, force=True).message
    refused("run.options_exclude", recipe, skip_data=True, from_stage="encode")
    error = refused("run.unknown_stage", recipe, from_stage="trian")
    assert all(stage in error.hint for stage in pipeline.STAGES)
    monkeypatch.setenv("RANK", "0")
    refused("ranks.started_twice", recipe, run_now, nproc=2)
    assert not recipe.run.path.exists()


def test_a_run_takes_the_evaluation_of_its_training_unless_asked_for_another(run, terminal, monkeypatch):
    from lmkit.training import judging

    evaluated: list[Path] = []
    original = judging.evaluate_run
    monkeypatch.setattr(
        judging, "evaluate_run", lambda path, **options: evaluated.append(path) or original(path, **options)
    )
    found = json.loads((run / "evaluation.json").read_text())
    assert found == json.loads((run / "training.json").read_text())["evaluation"]
    terminal("run fish.toml --from train")
    assert evaluated == []
    again = json.loads(terminal("run fish.toml --from evaluate --json"))
    assert evaluated == [run]
    assert (again["loss"], again["steps"]) == (found["loss"], 2)


def test_what_will_not_fit_is_said_before_data_are_made(recipe, monkeypatch, caplog):
    monkeypatch.setattr("lmkit.training.session.misfit", lambda recipe, *, ranks: f"no fit on {ranks}")
    monkeypatch.setattr(pipeline, "STAGES", dict.fromkeys(pipeline.STAGES, lambda run: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        run_now(recipe, nproc=2)
    assert "no fit on 2" in caplog.text


def test_a_file_that_is_named_twice_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one<|endoftext|>two<|endoftext|>")
    Path("link.txt").symlink_to("a.txt")
    Path("hard.txt").hardlink_to("a.txt")
    for again in ("a.txt", "./a.txt", "link.txt", "hard.txt"):
        named = ['corpus.source="files"', f'corpus.train=["a.txt", "{again}"]']
        error = refused("corpus.named_twice", load_recipe("quickstart", named), pipeline.plan)
        assert "corpus.train" in error.message
        pipeline.plan(load_recipe("quickstart", [*named, 'corpus.valid=["a.txt"]']))


@pytest.mark.parametrize(
    ("key", "files"), [("train", '["corpus.txt", "copy.txt"]'), ("valid", '["other.txt", "copy.txt"]')]
)
def test_a_copy_of_a_text_that_is_learned_is_told(key, files, run, terminal):
    Path("copy.txt").write_bytes(Path("corpus.txt").read_bytes())
    Path("other.txt").write_text("green fish")
    terminal("run", "fish.toml", "--set", f"corpus.{key}={files}", "--set", "run.name=new")
    (warning,) = [line for line in terminal.err.splitlines() if "copy.txt" in line]
    assert f"corpus.{key}" in warning
    assert "other.txt" not in warning


def test_every_folder_of_seeds_is_checked_before_the_first_run_starts(run, terminal):
    Path("runs/many/seed-2").mkdir(parents=True)
    Path("runs/many/seed-2/tokenizer.json").write_text("{}")
    command = "run fish.toml --seeds 3 --set run.name=many"
    terminal.refuses(command, code="run.not_a_run_folder", says=["seed-2"])
    assert [path.name for path in Path("runs/many").iterdir()] == ["seed-2"]


def test_the_files_of_a_glob_count_by_content(recipe, tmp_path):
    (tmp_path / "b.txt").write_text("two")
    recipe = recipe.changed(corpus={"source": "files", "train": (tmp_path / "*.txt",)})
    planned = pipeline.Pipeline(recipe, progress=lambda *_: None)
    planned.check()
    assert planned.corpus.train == (tmp_path / "b.txt",)
    planned.record.finish("corpus", {})
    planned.record.save()
    (tmp_path / "a.txt").write_text("one")
    assert StageRecord(recipe.run.path, planned.recipe, reads_sources=False).damaged("corpus") == []
    again = pipeline.Pipeline(recipe, progress=lambda *_: None)
    again.check()
    assert (again.why("corpus"), [path.name for path in again.corpus.train]) == ("", ["a.txt", "b.txt"])
    refused("corpus.empty_glob", recipe.changed(corpus={"train": (tmp_path / "*.md",)}))
