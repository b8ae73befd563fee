"""`lmkit run` from text to story, in real processes, on a corpus that takes seconds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Lmkit = Callable[..., "subprocess.CompletedProcess[str]"]

RECIPE = """
[run]
name = "tiny"
device = "cpu"
threads = 1
[corpus]
size_mb = 0.2
valid_fraction = 0.1
[tokenizer]
vocab_size = 300
[model]
d_model = 16
d_ff = 32
num_layers = 1
num_heads = 2
context_length = 32
[train]
steps = 20
batch_size = 4
log_interval = 1
eval_interval = 10
eval_batches = 2
[generate]
prompts = ["One day"]
max_new_tokens = 12
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def test_text_becomes_a_story_and_a_second_run_recomputes_nothing(
    lmkit: Lmkit, recipe: Path, tmp_path: Path
) -> None:
    first = lmkit("run", recipe, "--json")
    assert first.returncode == 0, first.stderr
    summary = json.loads(first.stdout)
    run = tmp_path / "artifacts" / "runs" / "tiny"
    assert summary["story"].startswith("One day")
    assert summary["steps"] == 20
    assert 0 < summary["bits_per_byte"] < 8
    assert len(losses(run)) == 20
    before = {
        path: path.stat().st_mtime_ns for path in run.rglob("*") if path.suffix in (".npy", ".safetensors")
    }

    second = lmkit("run", recipe, "--json")
    assert second.returncode == 0, second.stderr
    again = json.loads(second.stdout)
    assert set(again["stages"].values()) == {"up to date"}
    assert again["story"] == summary["story"]
    after = {
        path: path.stat().st_mtime_ns for path in run.rglob("*") if path.suffix in (".npy", ".safetensors")
    }
    assert after == before
    assert before

    # A run, the checkpoints in it and the last of them are continued by the run's [generate] table alike.
    last = max((run / "checkpoints").iterdir())
    texts = [lmkit("generate", place, "--json").stdout for place in (run, run / "checkpoints", last)]
    (sample,) = json.loads(texts[0])["samples"]
    assert sample["prompt"] + sample["text"] == summary["story"].removesuffix("\n")
    assert texts[1:] == texts[:1] * 2

    # Another prompt redoes the story alone.
    third = lmkit("run", recipe, "--json", "--set", 'generate.prompts=["The"]')
    states = json.loads(third.stdout)["stages"]
    assert [stage for stage, state in states.items() if state != "up to date"] == ["generate"]

    # Another model under the same name is refused, its difference named, and nothing is touched.
    refused = lmkit("run", recipe, "--set", "model.d_model=32")
    assert refused.returncode == 2
    assert "model.d_model: 16 -> 32" in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before

    # What a stage wrote about itself was damaged since: one line says how to make it again.
    evaluation = run / "evaluation.json"
    evaluation.write_text(evaluation.read_text()[:20])
    damaged = lmkit("run", recipe)
    assert damaged.returncode == 1
    assert "evaluation.json: missing or damaged" in damaged.stderr
    assert "--from evaluate" in damaged.stderr
    assert "Traceback" not in damaged.stderr

    # --from redoes a stage and all after it; the same seed gives the same losses.
    earlier = losses(run)
    redone = lmkit("run", recipe, "--from", "train", "--json")
    states = json.loads(redone.stdout)["stages"]
    assert [stage for stage, state in states.items() if state != "up to date"] == [
        "train",
        "evaluate",
        "generate",
    ]
    assert losses(run) == earlier


def test_fault_33_a_damaged_token_file_costs_no_checkpoint_and_the_hint_mends_it(
    lmkit: Lmkit, recipe: Path, tmp_path: Path
) -> None:
    assert lmkit("run", recipe).returncode == 0
    run = Path("artifacts/runs/tiny")
    tokens, newest = run / "tokens" / "train.npy", tmp_path / run / "checkpoints" / "step-00000020"
    before = newest.stat().st_mtime_ns
    whole = (tmp_path / tokens).read_bytes()
    (tmp_path / tokens).write_bytes(whole[:-100])
    for command in (("train", recipe, "--steps", "21"), ("run", recipe, "--from", "train")):
        refused = lmkit(*command)
        assert refused.returncode == 1
        error, hint = refused.stderr.splitlines()[-2:]
        assert error.startswith(f"error: {tokens}: ")
        assert hint == f"hint: delete {tokens}, and lmkit run {run / 'recipe.toml'} makes it again"
        assert newest.stat().st_mtime_ns == before
    (tmp_path / tokens).unlink()
    mended = lmkit("run", run / "recipe.toml")
    assert mended.returncode == 0, mended.stderr
    assert (tmp_path / tokens).read_bytes() == whole
    assert lmkit("evaluate", run).returncode == 0


def test_what_train_added_to_a_run_is_kept(lmkit: Lmkit, recipe: Path, tmp_path: Path) -> None:
    assert lmkit("run", recipe).returncode == 0
    assert lmkit("train", recipe, "--steps", "30").returncode == 0
    run = tmp_path / "artifacts" / "runs" / "tiny"
    longer = losses(run)
    result = lmkit("run", run / "recipe.toml", "--json")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["steps"] == 30
    assert [stage for stage, state in summary["stages"].items() if state != "up to date"] == [
        "train",  # has nothing to do
        "evaluate",
        "generate",
    ]
    assert losses(run) == longer
    assert len(longer) == 30
    assert (run / "checkpoints" / "step-00000030").exists()


def test_two_fresh_runs_have_identical_losses(lmkit: Lmkit, recipe: Path, tmp_path: Path) -> None:
    curves = []
    for name in ("one", "two"):
        result = lmkit("run", recipe, "--set", f"run.name={name}")
        assert result.returncode == 0, result.stderr
        curves.append(losses(tmp_path / "artifacts" / "runs" / name))
    assert curves[0] == curves[1]
    assert len(set(curves[0])) == 20


def test_dry_run_touches_nothing(lmkit: Lmkit, recipe: Path, tmp_path: Path) -> None:
    result = lmkit("run", recipe, "--dry-run", "--json")
    assert set(json.loads(result.stdout)["stages"].values()) == {"would run"}
    assert list(tmp_path.iterdir()) == [recipe]


def test_skip_data_needs_data(lmkit: Lmkit, recipe: Path) -> None:
    result = lmkit("run", recipe, "--skip-data")
    assert result.returncode == 2
    assert "--skip-data" in result.stderr


def test_a_changed_source_file_redoes_everything(lmkit: Lmkit, recipe: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    assert lmkit("data", "synth", corpus, "--size-mb", "0.2").returncode == 0
    files = ("--set", "corpus.source=files", "--set", f'corpus.train=["{corpus}"]')
    assert lmkit("run", recipe, *files).returncode == 0
    with corpus.open("a") as file:
        file.write("Then something new happened.\n<|endoftext|>\n")
    result = lmkit("run", recipe, *files, "--json")
    assert result.returncode == 0, result.stderr
    assert "up to date" not in json.loads(result.stdout)["stages"].values()


def test_a_corpus_too_small_for_the_vocabulary_is_trained_on_judged_and_resumed(
    lmkit: Lmkit, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat\n" * 99)
    files = ["--set", "corpus.source=files", "--set", 'corpus.train=["corpus.txt"]']
    options = [*files, "--set", "tokenizer.vocab_size=1000"]
    done = lmkit("run", recipe, *options, "--json")
    assert done.returncode == 0, done.stderr
    assert "not 1000" in done.stderr
    assert json.loads(done.stdout)["vocab_size"] < 300
    longer = lmkit("train", recipe, *options, "--steps", "21")
    assert longer.returncode == 0, longer.stderr
    assert "resuming from" in longer.stderr
    judged = lmkit("evaluate", tmp_path / "artifacts" / "runs" / "tiny")
    assert judged.returncode == 0, judged.stderr


def test_unknown_stage_is_refused(lmkit: Lmkit, recipe: Path) -> None:
    result = lmkit("run", recipe, "--from", "trian")
    assert result.returncode == 2
    assert "stages: corpus, tokenizer" in result.stderr
