"""What `lmkit run` refuses, it refuses before anything is made or deleted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lmkit.cli import pipeline
from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.load import load_recipe, recipe_to_toml
from lmkit.recipe.run_folder import mark_run
from lmkit.recipe.schema import Recipe
from lmkit.storage import FolderLock


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe("quickstart", [f'run.folder="{tmp_path}"'])


def pipeline_of(recipe: Recipe, **options: Any) -> pipeline.Pipeline:
    return pipeline.Pipeline(recipe, progress=lambda *_: None, **options)


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


def with_data(recipe: Recipe) -> Path:
    """A run folder whose data stages are done, with a file of theirs."""
    run = pipeline_of(recipe)
    tokens = run.folder / "tokens" / "train.npy"
    tokens.parent.mkdir(parents=True)
    tokens.write_bytes(b"tokens")
    for stage in pipeline.DATA_STAGES:
        run.record.finish(stage, {"train": [tokens]})
    return tokens


def with_longer_recipe(recipe: Recipe, *, checkpoint: bool = True) -> Path:
    """The recipe in the run folder: one of more steps and another model."""
    own = recipe.run.path / "recipe.toml"
    (recipe.run.path / "checkpoints" / ("step-00000001" if checkpoint else "")).mkdir(parents=True)
    longer = load_recipe(
        "quickstart", [f'run.folder="{recipe.run.folder}"', "train.steps=1260", "model.d_ff=64"]
    )
    own.write_text(recipe_to_toml(longer))
    mark_run(recipe.run.path)
    return own


def test_a_run_of_another_recipe_is_refused_with_the_command_that_continues_it(tmp_path):
    recipe = load_recipe("quickstart", [f'run.folder="{tmp_path}/my runs"'])
    own = with_longer_recipe(recipe)
    error = refused("run.other_recipe", recipe)
    assert "model.d_ff: 64 -> " in error.message
    assert f"lmkit run '{own}';" in error.hint  # can be pasted
    assert states(recipe, force=True) == {"would run"}


def test_a_run_without_a_training_continues_with_a_changed_recipe(recipe):
    with_longer_recipe(recipe, checkpoint=False)
    begun = {stage: {"key": "key", "before": "", "done": False} for stage in ("corpus", "train")}
    (recipe.run.path / "stages.json").write_text(json.dumps({**begun, "lmkit": {}}))
    with pipeline_of(recipe).opened():
        pass
    assert (recipe.run.path / "recipe.toml").read_text() == recipe_to_toml(recipe)
    assert states(recipe) == {"would run"}


def test_a_finished_training_without_its_checkpoints_keeps_its_recipe(recipe):
    with_longer_recipe(recipe, checkpoint=False)
    pipeline_of(recipe).record.finish("train", {})
    refused("run.other_recipe", recipe)


def test_force_empties_no_folder_but_a_runs(recipe):
    run = pipeline_of(recipe, force=True)
    run.folder.mkdir(parents=True)
    (run.folder / "thesis.tex").write_text("precious")
    assert "thesis.tex" in refused("run.not_a_run_folder", recipe, force=True).message
    assert [path.name for path in run.folder.iterdir()] == ["thesis.tex"]
    (run.folder / "thesis.tex").unlink()
    with run.opened():  # an empty one may be a run's
        pass


def test_force_on_a_folder_that_another_process_has_just_made(recipe):
    run = pipeline_of(recipe, force=True)
    run.folder.mkdir(parents=True)
    (run.folder / "recipe.toml.lmkit-partial").touch()
    with FolderLock(run.folder), raises(LmkitError, "storage.folder_busy"):
        run_now(recipe, force=True)
    (run.folder / "thesis.tex").write_text("precious")
    assert "thesis.tex" in refused("run.not_a_run_folder", recipe, force=True).message


def test_force_moves_a_link_of_a_run_but_not_what_it_leads_to(recipe, tmp_path):
    elsewhere = tmp_path / "big disk"
    elsewhere.mkdir()
    (elsewhere / "weights").write_bytes(b"precious")
    folder = recipe.run.path
    folder.mkdir()
    (folder / "checkpoints").symlink_to("../big disk")  # from `old-<time>` this would lead elsewhere
    mark_run(folder)
    with pipeline_of(recipe, force=True).opened():
        (aside,) = folder.glob("old-*")
        assert (aside / "checkpoints" / "weights").read_bytes() == b"precious"
        assert {path.name for path in folder.iterdir()} == {".lock", "recipe.toml", "stages.json", aside.name}
    assert [path.name for path in elsewhere.iterdir()] == ["weights"]


def test_a_tokenizer_without_end_of_text_is_refused_up_front(tmp_path):
    where, other = f'run.folder="{tmp_path}"', 'tokenizer.special_tokens=["<x>"]'
    refused("tokenizer.no_end_of_text", load_recipe("quickstart", [where, other]))
    named = load_recipe("quickstart", [where, other, 'tokenizer.end_of_text="<x>"'])
    assert pipeline.Pipeline(named, progress=print).mark == "<x>"
    pipeline.plan(named)


def test_fp8_weights_that_cannot_be_used_are_refused_before_the_training(recipe):
    changed = recipe.changed(generate={"weights": "fp8"})
    for refuse in (run_now, pipeline.plan):
        with raises(UsageError, "generate.weights", "sm_89", hint='"same"'):
            refuse(changed)
    assert not (recipe.run.path / "corpus.txt").exists()


@pytest.mark.parametrize(
    ("table", "code", "said"),
    [
        ({"name": "muon", "options": {"momentum": 2.0}}, "optimizer.wrong_option", "momentum must be in"),
        ({"name": "muon", "options": {"iterations": 0}}, "optimizer.wrong_option", "iterations must be 1"),
        ({"name": "sgd", "options": {"momentum": 1.0}}, "optimizer.momentum", "optimizer.options.momentum"),
    ],
)
def test_what_an_optimizer_refuses_is_refused_before_the_corpus(table, code, said, recipe):
    changed = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update=table)})
    for refuse in (run_now, pipeline.plan):
        with raises(UsageError, code, said):
            refuse(changed)
    assert not (recipe.run.path / "corpus.txt").exists()


def test_skip_data_needs_data_and_excludes_what_would_remove_it(recipe):
    refused("run.no_data", recipe, skip_data=True)
    assert not recipe.run.path.exists()
    tokens = with_data(recipe)
    before = (recipe.run.path / "stages.json").read_bytes()
    for change in ({"force": True}, {"from_stage": "encode"}):
        assert "--skip-data" in refused("run.options_exclude", recipe, skip_data=True, **change).message
    assert tokens.read_bytes() == b"tokens"
    assert (recipe.run.path / "stages.json").read_bytes() == before
    assert pipeline.plan(recipe, skip_data=True).fields["stages"]["encode"] == "up to date"


def test_an_unknown_stage_is_refused_with_the_stages_that_exist(recipe):
    error = refused("run.unknown_stage", recipe, from_stage="trian")
    assert all(stage in error.hint for stage in pipeline.STAGES)


def test_ranks_are_started_once(recipe, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    refused("ranks.started_twice", recipe, run_now, nproc=2)
    assert not recipe.run.path.exists()


def test_a_run_takes_the_evaluation_of_its_training_unless_asked_for_another(tmp_path, monkeypatch):
    from lmkit.training import judging

    evaluated: list[Path] = []
    original = judging.evaluate_run
    monkeypatch.setattr(
        judging, "evaluate_run", lambda path, **options: evaluated.append(path) or original(path, **options)
    )
    small = (
        "corpus.size_mb=0.1 tokenizer.vocab_size=300 model.d_model=16 model.d_ff=32 model.num_layers=1 "
        "model.num_heads=2 model.context_length=16 train.steps=2 generate.max_new_tokens=1"
    )
    recipe = load_recipe("quickstart", [f'run.folder="{tmp_path}/my runs"', *small.split()])
    once = run_now(recipe)
    assert evaluated == []
    assert once.text.endswith(f"lmkit generate '{recipe.run.path}' --seed 1")  # can be pasted
    found = json.loads((recipe.run.path / "evaluation.json").read_text())
    assert found == json.loads((recipe.run.path / "training.json").read_text())["evaluation"]
    assert states(recipe) == {"up to date"}
    again = run_now(recipe, from_stage="evaluate")
    assert evaluated == [recipe.run.path]
    assert (again.fields["loss"], again.fields["steps"]) == (once.fields["loss"], 2)
    assert json.loads((recipe.run.path / "evaluation.json").read_text())["tokens"] == found["tokens"]


def test_what_will_not_fit_is_said_before_data_are_made(recipe, monkeypatch, caplog):
    monkeypatch.setattr("lmkit.training.plan.misfit", lambda recipe, *, ranks: f"no fit on {ranks}")
    monkeypatch.setattr(pipeline.Pipeline, "bring_up_to_date", lambda self, stage: {}[stage])
    with pytest.raises(KeyError, match="corpus"):
        run_now(recipe, nproc=2)
    assert "no fit on 2" in caplog.text


@pytest.mark.parametrize(("name", "mark"), [("a.txt", "--"), ("a.jsonl", "<|endoftext|>")])
def test_a_separator_ends_documents_of_text_files_only(name, mark, tmp_path):
    (tmp_path / name).write_text("")
    values = ['corpus.source="files"', f'corpus.train=["{tmp_path / name}"]', 'corpus.separator="--"']
    assert pipeline_of(load_recipe("quickstart", values)).mark == mark


@pytest.mark.parametrize("again", ["a.txt", "./a.txt", "link.txt", "hard.txt"])
def test_a_file_that_is_named_twice_is_refused(again, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one<|endoftext|>two<|endoftext|>")
    Path("link.txt").symlink_to("a.txt")
    Path("hard.txt").hardlink_to("a.txt")
    named = ['corpus.source="files"', f'corpus.train=["a.txt", "{again}"]']
    error = refused("corpus.named_twice", load_recipe("quickstart", named))
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
