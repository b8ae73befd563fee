"""Whole runs in this process: `train`, `plan`, and what they leave in the run folder."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from raising import raises
from run_folders import losses, newest, records, saved, train_here

from lmkit.cli.generate import continue_prompts
from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.load import load_recipe
from lmkit.tokenizer import Tokenizer
from lmkit.training import trainer
from lmkit.training.checkpoint import MODEL, DamagedCheckpoint, newest_checkpoint
from lmkit.training.judging import evaluate_run
from lmkit.training.metrics import draw_losses
from lmkit.training.session import plan
from lmkit.training.weights import weights_of


def test_it_learns_and_leaves_a_whole_run_folder(tiny, monkeypatch):
    monkeypatch.setattr("lmkit.training.metrics.draw_losses", draw_losses)
    recipe = tiny("train.steps=60", "optimizer.lr=0.01")
    result = train_here(recipe)
    assert result.status == "finished"
    # The data is a permutation with noise: a drop by 0.7 is easily learnt.
    assert losses(recipe)[-1][1] < losses(recipe)[0][1] - 0.5
    folder = recipe.run.path
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "recipe.toml", "environment.json", "metrics.jsonl", "checkpoints", "loss.png", "stages.json",
    }  # fmt: skip
    assert load_recipe(folder / "recipe.toml") == recipe
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    loss = losses(recipe, "final")[0][1]
    assert result.evaluation.loss == loss
    assert result.evaluation.bits_per_byte == pytest.approx(loss / math.log(2) / 3)  # 3 bytes a token
    json.dumps(dataclasses.asdict(result))
    assert "finished at step 60 of 60" in str(result)


def test_epochs_count_the_tokens_of_the_file(tiny):
    recipe = tiny("train.epochs=0.5", "train.steps=3")  # half of 4000 tokens, 64 a step: 31.25 steps
    assert plan(recipe).steps == 32
    result = train_here(recipe)
    assert (result.step, result.tokens) == (32, 32 * 64)
    assert losses(recipe)[-1][0] == 32
    assert load_recipe(recipe.run.path / "recipe.toml") == recipe
    longer = train_here(tiny("train.epochs=1"))
    assert (longer.resumed_from, longer.step) == (32, 63)
    with raises(LmkitError, "train.endless_epoch"):
        plan(tiny("train.epochs=1", 'data.source="random"', "model.vocab_size=64", "run.name=other"))


def test_the_result_reports_the_last_evaluation_as_lmkit_evaluate_does(tiny):
    recipe = tiny()
    result = train_here(recipe)
    for path in (recipe.run.path, newest(recipe).path):
        assert evaluate_run(path) == result.evaluation
    assert result.evaluation.tokens == 700
    assert result.evaluation.checkpoint == result.checkpoint
    assert train_here(recipe).evaluation == result.evaluation  # nothing to do
    assert train_here(tiny("run.name=part"), stop_at_step=2).evaluation is None


def test_the_best_is_saved_when_it_is_seen_and_kept(tiny, monkeypatch):
    recipe = tiny("checkpoint.keep_best=1", "checkpoint.keep_last=1", "train.eval_interval=2")
    found = iter([4.0, 3.0, 3.5, 3.6, 3.7, 3.8])
    monkeypatch.setattr(trainer, "evaluate", lambda *a, **b: trainer.Evaluation(next(found), 1.0, None, 10))
    train_here(recipe)
    assert saved(recipe) == [4, 10]
    assert newest(recipe).state.best_loss == 3.0


@pytest.mark.parametrize("step", [2, 10])
def test_a_held_out_loss_that_is_not_finite_ends_the_run(tiny, monkeypatch, step):
    """No evaluation of it is recorded or reported, and the checkpoints stay."""
    recipe = tiny("train.eval_interval=2", "checkpoint.interval=1")
    found = iter([1.0 if number != step // 2 else math.nan for number in range(1, 7)])
    monkeypatch.setattr(trainer, "evaluate", lambda *a, **b: trainer.Evaluation(next(found), 1.0, None, 10))
    with raises(LmkitError, "train.nonfinite", f"step {step}"):
        train_here(recipe)
    assert [record["step"] for record in records(recipe, "valid")] == list(range(2, step, 2))
    assert not records(recipe, "final")
    assert saved(recipe)[-1] == step - 1


def test_a_time_box_ends_the_run_at_the_end_of_its_schedule(tiny):
    recipe = tiny("train.steps=1000000", "train.max_minutes=0.01", "train.eval_interval=0")
    first = train_here(recipe)
    assert first.status == "finished"
    assert 2 < first.step < 1000000
    rates = [record["lr"] for record in records(recipe)]
    assert rates[-1] < 0.05 * max(rates)
    fraction = newest(recipe).state.time_fraction
    assert fraction >= 1
    assert train_here(recipe).status == "nothing to do"
    # A last evaluation that was cut short is made up for.
    metrics = recipe.run.path / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines(keepends=True) if '"final"' not in line]
    metrics.write_text("".join(kept))
    assert "only the last evaluation is left" in plan(recipe).status
    again = train_here(recipe)
    expected = ("finished", first.step, first.evaluation.loss)
    assert (again.status, again.step, again.evaluation.loss) == expected


def test_a_trained_model_is_found_and_loaded(tiny):
    recipe = tiny()
    train_here(recipe, stop_at_step=1)
    checkpoint = newest_checkpoint(recipe.run.path)
    assert checkpoint == newest_checkpoint(newest(recipe).path)
    assert checkpoint.state.model.vocab_size == 64
    model = weights_of(checkpoint).model("cpu")
    assert not model.training
    assert weights_of(checkpoint).tokenizer is None
    (recipe.run.path / "tokenizer.json").write_text("{}")
    assert weights_of(checkpoint).tokenizer == (recipe.run.path / "tokenizer.json").resolve()
    with raises(UsageError, "checkpoint.not_found", recipe.run.path / "nothing"):
        newest_checkpoint(recipe.run.path / "nothing")
    with raises(UsageError, "checkpoint.not_found", recipe.run.folder):
        newest_checkpoint(recipe.run.folder)
    # A model of a kernel for GPUs runs on a CPU with another one.
    config = checkpoint.state.model.model_copy(update={"attention": "flash_triton"})
    state = checkpoint.state.model_copy(update={"model": config})
    ids = torch.arange(8)[None]
    assert torch.equal(weights_of(dataclasses.replace(checkpoint, state=state)).model("cpu")(ids), model(ids))
    # A checkpoint that is named is verified when its weights are opened.
    file = checkpoint.path / MODEL
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with raises(DamagedCheckpoint, "checkpoint.damaged", file):
        weights_of(newest_checkpoint(checkpoint.path))


def test_a_plan_says_what_train_would_do_and_writes_nothing(tiny, caplog):
    recipe = tiny()
    made = plan(recipe, nproc=2)
    assert (made.step, made.steps) == (0, 10)
    assert "starting from scratch" in str(made)
    for refused in ({"recipe": recipe, "nproc": 3}, {"recipe": tiny("run.folder=/proc/nowhere")}):
        with pytest.raises(UsageError):  # three ranks do not divide the batch
            plan(**refused)
    assert not recipe.run.path.exists()
    train_here(tiny(), stop_at_step=4)
    made = plan(tiny("optimizer.lr=0.5"), stop_at_step=8)
    assert made.status.startswith("resuming from")
    assert "optimizer.lr" in caplog.text
    assert plan(tiny(), stop_at_step=4).status == "nothing to do"
    plan(tiny(), nproc=2)
    assert "saved by 1 rank" in caplog.text


def test_recipes_that_do_not_fit_their_data_are_refused_before_anything_is_written(tiny):
    for attempt in (plan, train_here):  # the held-out file has 701 tokens
        with raises(UsageError, "tokens.too_short", "701", "801"):
            attempt(tiny("model.context_length=800", "train.batch_size=2"))
    with raises(UsageError, "recipe.missing_table", "[train]"):
        train_here(load_recipe(None, ["model.d_model=16", "model.num_heads=2"]))
    command = "lmkit data encode TEXT 'not there.npy'"
    with raises(UsageError, "data.no_tokens", "not there.npy", "data.train", hint=command):
        train_here(tiny('data.train="not there.npy"'))
    with raises(UsageError, "data.vocab_size", "model.vocab_size: 63", "64"):
        train_here(tiny("model.vocab_size=63"))
    assert not tiny().run.path.exists()


def test_fault_32_a_tokenizer_that_did_not_make_the_tokens_is_refused_with_both_hashes(tiny, tmp_path):
    train_here(tiny(), stop_at_step=1)  # on tokens of tokenizer aaa...
    other = Tokenizer(vocab={i: bytes([i]) for i in range(256)}, merges=[], special_tokens=())
    given = tmp_path / "other.json"
    other.save(given)

    def refuse(attempt: Callable[[], Any]) -> None:
        with pytest.raises(UsageError) as caught:
            attempt()
        assert other.sha256[:12] in caught.value.message
        assert "a" * 12 in caught.value.message

    refuse(lambda: train_here(tiny("run.name=new", f'tokenizer.path="{given}"')))
    refuse(lambda: continue_prompts(tiny().run.path, tokenizer=given))
    assert not (tiny().run.folder / "new").exists()
    other.save(tiny().run.path / "tokenizer.json")
    refuse(lambda: train_here(tiny()))
    refuse(lambda: continue_prompts(tiny().run.path))
