"""`lmkit run` from text to story, on a corpus that takes seconds."""

import json
import sys
from pathlib import Path

import pytest
from programs import run_program
from sessions import PATIENCE_S, TORCHRUN, losses
from tiny import tiny_recipe

ROOT = Path(__file__).parents[2]

RECIPE = tiny_recipe(
    *('run.name="tiny"', 'run.folder="artifacts/runs"', "corpus.size_mb=0.2", "corpus.valid_fraction=0.1"),
    *("tokenizer.vocab_size=300", "model.context_length=32", "train.steps=20", "train.batch_size=4"),
    *("train.log_interval=1", "train.eval_interval=10", "train.eval_batches=2"),
    *('generate.prompts=["One day"]', "generate.max_new_tokens=12"),
)
RUN = Path("artifacts/runs/tiny")


def redone(summary: str) -> list[str]:
    """The stages that were not up to date."""
    return [stage for stage, state in json.loads(summary)["stages"].items() if state != "up to date"]


def made_at(run: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.suffix in (".npy", ".safetensors")}


def test_text_becomes_a_story_and_a_second_run_recomputes_nothing(terminal, recipe):
    summary = json.loads(terminal("run tiny.toml --json"))
    assert summary["story"].startswith("One day")
    assert summary["steps"] == 20
    assert 0 < summary["bits_per_byte"] < 8
    assert len(losses(RUN)) == 20
    before = made_at(RUN)

    again = terminal("run tiny.toml --json")
    assert redone(again) == []
    assert json.loads(again)["story"] == summary["story"]
    assert made_at(RUN) == before

    # A run, the checkpoints in it and the last of them are continued by the run's [generate] table alike.
    places = [RUN, RUN / "checkpoints", max((RUN / "checkpoints").iterdir())]
    texts = [terminal("generate", place, "--json") for place in places]
    (sample,) = json.loads(texts[0])["samples"]
    assert sample["prompt"] + sample["text"] == summary["story"].removesuffix("\n")
    assert texts[1:] == texts[:1] * 2

    # Another prompt redoes the story alone.
    assert redone(terminal("run", "tiny.toml", "--json", "--set", 'generate.prompts=["The"]')) == ["generate"]

    # --from redoes a stage and all after it; the same seed gives the same losses.
    earlier = losses(RUN)
    assert redone(terminal("run tiny.toml --from train --json")) == ["train", "evaluate", "generate"]
    assert losses(RUN) == earlier


@pytest.mark.full
@pytest.mark.parametrize("way", [(*TORCHRUN, "lmkit", "run"), ("-m", "lmkit", "run", "--nproc", "2")])
def test_the_literal_torchrun_lmkit_and_nproc_make_the_data_once_and_train_on_all_ranks(
    recipe, tmp_path, monkeypatch, way
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    options = (recipe, "--set", f"run.folder={tmp_path}", "--json")
    done = run_program(sys.executable, *way, *options, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 20  # one object: rank 0 alone prints
    assert done.stderr.count("corpus: done") == 1
    (state,) = tmp_path.glob("tiny/checkpoints/*/state.json")
    assert json.loads(state.read_text())["world_size"] == 2


def test_fault_33_a_damaged_token_file_costs_no_checkpoint_and_the_hint_mends_it(terminal, recipe):
    terminal("run tiny.toml")
    tokens, newest = RUN / "tokens" / "train.npy", RUN / "checkpoints" / "step-00000020"
    before = newest.stat().st_mtime_ns
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-100])
    again = f"lmkit run {RUN / 'recipe.toml'}"
    changed = terminal.refuses("train tiny.toml --steps 21", code="data.changed", says=[str(tokens)])
    assert again in changed.hint
    damaged = terminal.refuses(
        "run tiny.toml --skip-data --from train", code="tokens.damaged", exit_code=1, says=[str(tokens)]
    )
    assert f"move {tokens} away" in damaged.hint
    assert again in damaged.hint
    assert newest.stat().st_mtime_ns == before
    terminal("run", RUN / "recipe.toml")
    assert tokens.read_bytes() == whole
    for description in ("{}", "{", None):  # of the file that is deleted
        tokens.unlink()
        if description is not None:
            tokens.with_suffix(".json").write_text(description)
        terminal("run", RUN / "recipe.toml")
        assert tokens.read_bytes() == whole
    terminal("run tiny.toml --dry-run")
    assert newest.stat().st_mtime_ns == before


def test_dry_run_touches_nothing(terminal, recipe, tmp_path):
    stages = json.loads(terminal("run tiny.toml --dry-run --json"))["stages"]
    assert set(stages.values()) == {"would run"}
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.full
def test_a_corpus_too_small_for_the_vocabulary_is_trained_on_evaluated_and_resumed(terminal, recipe):
    Path("corpus.txt").write_text("the cat sat on the mat\n" * 99)
    files = ["--set", "corpus.source=files", "--set", 'corpus.train=["corpus.txt"]']
    options = [*files, "--set", "tokenizer.vocab_size=1000"]
    assert json.loads(terminal("run", recipe, *options, "--json"))["vocab_size"] < 300
    assert json.loads(terminal("train", recipe, *options, "--steps", "21", "--json"))["resumed_from"] == 20
    terminal("evaluate", RUN)
