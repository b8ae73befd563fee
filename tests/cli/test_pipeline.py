"""What `lmkit run` refuses, it refuses before anything is made or deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmkit.cli import pipeline
from lmkit.errors import UsageError
from lmkit.recipe.load import load_recipe, recipe_to_toml
from lmkit.recipe.schema import Recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe("quickstart", [f'run.folder="{tmp_path}"'])


def made_by_hand(recipe: Recipe) -> Path:
    """A run folder whose data stages are done, with a file of theirs."""
    run = pipeline.Pipeline(recipe, progress=lambda *_: None)
    tokens = run.folder / "tokens" / "train.npy"
    tokens.parent.mkdir(parents=True)
    tokens.write_bytes(b"tokens")
    for stage in pipeline.DATA_STAGES:
        run.record.finish(stage, {"train": [tokens]})
    return tokens


def nothing_else(**changes: Any) -> dict[str, Any]:
    return {"from_stage": None, "skip_data": True, "force": False} | changes


def run_now(recipe: Recipe, **options: Any) -> Any:
    return pipeline.run(recipe, progress=lambda *_: None, **options)


def refusal(code: str, refuse: Callable[..., Any], recipe: Recipe, **changes: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        refuse(recipe, **nothing_else(**changes))
    assert caught.value.code == code
    assert caught.value.hint
    return caught.value


def made_by_longer(recipe: Recipe) -> Path:
    """The recipe in the run folder: one of more steps."""
    own = recipe.run.path / "recipe.toml"
    recipe.run.path.mkdir(parents=True)
    longer = load_recipe("quickstart", [f'run.folder="{recipe.run.folder}"', "train.steps=1260"])
    own.write_text(recipe_to_toml(longer))
    return own


def test_a_run_that_train_took_further_is_refused_with_the_command_that_goes_on(recipe: Recipe) -> None:
    own = made_by_longer(recipe)
    (recipe.run.path / "checkpoints" / "step-00000001").mkdir(parents=True)
    for refuse in (run_now, pipeline.plan):  # --dry-run promises the same
        error = refusal("run.other_recipe", refuse, recipe, skip_data=False)
        assert "train.steps: 1260 -> " in error.message
        assert f"lmkit run {own};" in error.hint
    forced = pipeline.plan(recipe, **nothing_else(skip_data=False, force=True))
    assert set(forced.stages.values()) == {"would run"}


def test_a_run_that_failed_before_there_was_anything_of_a_training_goes_on_with_the_mended_recipe(
    recipe: Recipe,
) -> None:
    made_by_longer(recipe)
    run = pipeline.Pipeline(recipe, progress=lambda *_: None)
    (run.folder / "stages.json").write_text(
        json.dumps({stage: {"key": "key", "before": "", "done": False} for stage in ("corpus", "train")})
    )
    (run.folder / "checkpoints").mkdir()
    run.open(force=False, from_stage=None, skip_data=False)
    assert (run.folder / "recipe.toml").read_text() == recipe_to_toml(recipe)
    made = pipeline.plan(recipe, **nothing_else(skip_data=False))
    assert set(made.stages.values()) == {"would run"}


def test_a_run_that_was_trained_and_whose_checkpoints_are_gone_is_still_that_of_its_recipe(
    recipe: Recipe,
) -> None:
    made_by_longer(recipe)
    pipeline.Pipeline(recipe, progress=lambda *_: None).record.finish("train", {})
    refusal("run.other_recipe", pipeline.plan, recipe, skip_data=False)


def test_the_commands_that_are_said_can_be_pasted_where_a_path_has_a_space(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [f'run.folder="{tmp_path}/my runs"'])
    own = made_by_longer(recipe)
    (recipe.run.path / "checkpoints" / "step-00000001").mkdir(parents=True)
    error = refusal("run.other_recipe", pipeline.plan, recipe, skip_data=False)
    assert f"lmkit run '{own}';" in error.hint
    numbers = dict.fromkeys(
        ("corpus_bytes", "vocab_size", "train_tokens", "valid_tokens", "parameters", "steps"), 1
    )
    losses = dict.fromkeys(("tokens_per_second", "loss", "perplexity", "bits_per_byte"), 1.0)
    done = pipeline.RunSummary(folder="my runs/own", stages={}, **numbers, **losses, files={}, story="")
    assert str(done).endswith("another story: lmkit generate 'my runs/own' --seed 1")


def test_force_empties_no_folder_but_a_runs(recipe: Recipe) -> None:
    run = pipeline.Pipeline(recipe, progress=lambda *_: None)
    run.folder.mkdir(parents=True)
    (run.folder / "thesis.tex").write_text("precious")
    for refuse in (pipeline.plan, run_now):
        error = refusal("run.not_a_run_folder", refuse, recipe, skip_data=False, force=True)
        assert "thesis.tex" in error.message
    assert [path.name for path in run.folder.iterdir()] == ["thesis.tex"]
    (run.folder / "thesis.tex").unlink()
    run.open(force=True, from_stage=None, skip_data=False)  # an empty one may be a run's


@pytest.mark.parametrize("mark", ["recipe.toml", "stages.json"])
def test_force_empties_the_folder_of_a_run_that_got_no_further_than_this(recipe: Recipe, mark: str) -> None:
    run = pipeline.Pipeline(recipe, progress=lambda *_: None)
    run.folder.mkdir(parents=True)
    for name in (mark, "corpus.txt"):
        (run.folder / name).write_text("{}")
    run.open(force=True, from_stage=None, skip_data=False)
    assert {path.name for path in run.folder.iterdir()} == {".lock", "recipe.toml"}


def test_an_empty_prompt_without_end_of_text_is_refused_up_front(tmp_path: Path) -> None:
    where, other = f'run.folder="{tmp_path}"', 'tokenizer.special_tokens=["<x>"]'
    for prompts in ([], ['generate.prompts=["Once", ""]']):
        with pytest.raises(UsageError, match=r"generate\.prompts: .* which tokenizer\.special_tokens lacks"):
            pipeline.plan(
                load_recipe("quickstart", [where, other, *prompts]), **nothing_else(skip_data=False)
            )
    given = tmp_path / "tokenizer.json"  # may have it
    given.write_text("{}")
    for fine in ('generate.prompts=["Once"]', f'tokenizer.path="{given}"'):
        pipeline.plan(load_recipe("quickstart", [where, other, fine]), **nothing_else(skip_data=False))


def test_starting_over_removes_links_to_folders_not_what_they_lead_to(recipe: Recipe, tmp_path: Path) -> None:
    elsewhere = tmp_path / "big disk"
    elsewhere.mkdir()
    (elsewhere / "weights").write_bytes(b"precious")
    run = pipeline.Pipeline(recipe, progress=lambda *_: None)
    run.folder.mkdir(parents=True)
    (run.folder / "checkpoints").symlink_to(elsewhere)
    (run.folder / "tokens").mkdir()
    (run.folder / "stages.json").write_text("{}")
    run.open(force=True, from_stage=None, skip_data=False)
    assert {path.name for path in run.folder.iterdir()} == {".lock", "recipe.toml"}
    assert (elsewhere / "weights").read_bytes() == b"precious"


def test_skip_data_without_data_makes_no_folder(recipe: Recipe) -> None:
    for refuse in (pipeline.plan, run_now):
        refusal("run.no_data", refuse, recipe)
    assert not recipe.run.path.exists()


@pytest.mark.parametrize("change", [{"force": True}, {"from_stage": "encode"}])
def test_skip_data_and_what_would_remove_the_data_exclude_each_other(
    recipe: Recipe, change: dict[str, Any]
) -> None:
    tokens = made_by_hand(recipe)
    before = (recipe.run.path / "stages.json").read_bytes()
    for refuse in (pipeline.plan, run_now):
        assert "--skip-data" in refusal("run.options_exclude", refuse, recipe, **change).message
    assert tokens.read_bytes() == b"tokens"
    assert (recipe.run.path / "stages.json").read_bytes() == before
    assert pipeline.plan(recipe, **nothing_else()).stages["encode"] == "up to date"


def test_an_unknown_stage_is_refused_with_the_stages_that_exist(recipe: Recipe) -> None:
    error = refusal("run.unknown_stage", pipeline.plan, recipe, from_stage="trian", skip_data=False)
    assert all(stage in error.hint for stage in pipeline.STAGES)


def test_ranks_are_started_once(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refusal("ranks.started_twice", run_now, recipe, nproc=2, skip_data=False)
    assert not recipe.run.path.exists()


def test_the_evaluation_of_the_training_is_the_runs_unless_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmkit.training import evaluation

    evaluated: list[Path] = []
    original = evaluation.evaluate_run
    monkeypatch.setattr(
        evaluation,
        "evaluate_run",
        lambda path, **options: evaluated.append(path) or original(path, **options),
    )
    recipe = load_recipe(
        "quickstart",
        [
            f'run.folder="{tmp_path}"',
            "corpus.size_mb=0.1",
            "tokenizer.vocab_size=300",
            "model.d_model=16",
            "model.d_ff=32",
            "model.num_layers=1",
            "model.num_heads=2",
            "model.context_length=16",
            "train.steps=2",
            "generate.max_new_tokens=1",
        ],
    )
    once = run_now(recipe)
    assert evaluated == []
    found = json.loads((recipe.run.path / "evaluation.json").read_text())
    assert found == json.loads((recipe.run.path / "training.json").read_text())["evaluation"]
    again = run_now(recipe, from_stage="evaluate")
    assert evaluated == [recipe.run.path]
    assert (again.loss, again.bits_per_byte) == (once.loss, once.bits_per_byte)
    assert json.loads((recipe.run.path / "evaluation.json").read_text())["tokens"] == found["tokens"]
