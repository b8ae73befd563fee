"""Whole runs through `lmkit.training.session`, in this process."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import assert_same_state, losses, newest, saved, train_here

from lmkit.commands import generate
from lmkit.errors import UsageError
from lmkit.measure import plots
from lmkit.recipe.load import load_recipe
from lmkit.recipe.schema import Recipe
from lmkit.tokenizer import Tokenizer
from lmkit.training import evaluation, session, verify
from lmkit.training import trainer as loop_module
from lmkit.training.checkpoint import newest_checkpoint, run_tokenizer
from lmkit.training.metrics import read_metrics
from lmkit.training.model_state import plain_model
from lmkit.training.session import draw_losses

Tiny = Callable[..., Recipe]


def test_two_fresh_runs_of_20_steps_have_identical_losses(tiny: Tiny) -> None:
    one, two = (tiny("train.steps=20", f"run.name={name}") for name in ("one", "two"))
    train_here(one)
    train_here(two)
    assert len(losses(one)) == 20
    assert losses(one) == losses(two)
    assert losses(one, "valid") == losses(two, "valid")
    assert_same_state(newest(one), newest(two))


def test_held_out_tokens_that_are_too_few_are_refused_before_the_first_step(tiny: Tiny) -> None:
    recipe = tiny("model.context_length=800", "train.batch_size=2")  # the held-out file has 701 tokens
    with pytest.raises(UsageError, match=r"valid\.npy: 701 tokens, but model\.context_length \+ 1 = 801"):
        session.plan(recipe)
    with pytest.raises(UsageError, match=r"valid\.npy: 701 tokens"):
        train_here(recipe)
    assert not recipe.run.path.exists()


def test_what_is_left_is_counted_to_the_step_at_which_the_session_ends(tiny: Tiny) -> None:
    recipe = tiny()
    train_here(recipe, stop_at_step=3)
    left = [r["eta_seconds"] for r in read_metrics(recipe.run.path / "metrics.jsonl") if r["kind"] == "train"]
    assert [seconds > 0 for seconds in left] == [True, True, False]


def test_another_seed_is_another_run(tiny: Tiny) -> None:
    one, two = tiny("run.name=one"), tiny("run.name=two", "run.seed=1")
    train_here(one, stop_at_step=2)
    train_here(two, stop_at_step=2)
    assert losses(one)[0] != losses(two)[0]


def test_it_learns_and_leaves_a_whole_run_folder(tiny: Tiny, pictures: None) -> None:
    recipe = tiny("train.steps=60", "optimizer.lr=0.01")
    result = train_here(recipe)
    assert result.status == "finished"
    assert (
        losses(recipe)[-1][1] < losses(recipe)[0][1] - 0.5
    )  # a permutation with noise: 0.7 is easily learnt
    folder = recipe.run.path
    names = {path.name for path in folder.iterdir()}
    assert names == {
        ".lock", "recipe.toml", "environment.json", "metrics.jsonl", "checkpoints", "loss.png",
    }  # fmt: skip
    assert load_recipe(folder / "recipe.toml") == recipe
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert result.valid_loss == losses(recipe, "final")[0][1]
    assert result.bits_per_byte == pytest.approx(result.valid_loss / math.log(2) / 3)  # 3 bytes a token
    json.dumps(dataclasses.asdict(result))
    assert "finished at step 60 of 60" in str(result)


def test_the_picture_shows_every_evaluation_and_the_final_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"kind": "train", "step": step, "loss": 5.0 - step} for step in (1, 2, 3)]
    records += [{"kind": "valid", "step": step, "loss": 5.5 - step} for step in (1, 2)]
    records += [{"kind": "final", "step": 3, "loss": 2.25}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    figures: list[Any] = []
    monkeypatch.setattr(plots, "png", lambda figure: figures.append(figure) or b"")
    draw_losses(tmp_path, title="t")
    (axes,) = figures[0].axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert {label: line.get_xydata().tolist() for label, line in lines.items()} == {
        "training": [[1, 4], [2, 3], [3, 2]],
        "held out": [[1, 4.5], [2, 3.5]],
        "all held-out data": [[3, 2.25]],
    }
    marked = {label: line.get_marker() not in ("None", "", None) for label, line in lines.items()}
    assert marked == {"training": False, "held out": True, "all held-out data": True}


def test_stopping_early_does_not_change_the_schedule(tiny: Tiny) -> None:
    whole, part = tiny("run.name=whole"), tiny("run.name=part")
    train_here(whole)
    train_here(part, stop_at_step=6)
    rates = [
        [
            record["lr"]
            for record in read_metrics(recipe.run.path / "metrics.jsonl")
            if record["kind"] == "train"
        ]
        for recipe in (whole, part)
    ]
    assert rates[0][:6] == rates[1]
    assert rates[0][0] == pytest.approx(rates[0][1] / 2)  # two steps of warm-up


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (("checkpoint.interval=0",), [10]),
        (("checkpoint.interval=-1",), [10]),
        (("checkpoint.interval=4", "checkpoint.keep_last=9"), [4, 8, 10]),
        (("checkpoint.interval=5", "checkpoint.keep_last=9"), [5, 10]),
        (("checkpoint.interval=2", "checkpoint.keep_last=1"), [10]),
        (("checkpoint.checkpointing_interval=3", "checkpoint.keep_last=2"), [9, 10]),
    ],
)
def test_the_cadence_of_checkpoints(changes: tuple[str, ...], expected: list[int], tiny: Tiny) -> None:
    recipe = tiny(*changes)
    train_here(recipe)
    assert saved(recipe) == expected


def test_the_best_is_saved_when_it_is_seen_and_kept(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny("checkpoint.keep_best=1", "checkpoint.keep_last=1", "train.eval_interval=2")
    found = iter([4.0, 3.0, 3.5, 3.6, 3.7, 3.8])

    def pretend(*arguments: Any, **options: Any):
        return loop_module.Evaluation(next(found), 1.0, None, 10)

    monkeypatch.setattr(loop_module, "evaluate", pretend)
    train_here(recipe)
    assert saved(recipe) == [4, 10]
    assert newest(recipe).state.best_loss == 3.0


def test_random_tokens_need_no_file(tiny: Tiny) -> None:
    recipe = load_recipe(
        None,
        [
            *(f"{key}={value}" for key, value in (("run.device", "cpu"), ("run.threads", 1))),
            f'run.folder="{tiny().run.folder}"',
            "data.source=random",
            "model.vocab_size=300",
            "model.context_length=8",
            "model.d_model=16",
            "model.d_ff=32",
            "model.num_layers=1",
            "model.num_heads=2",
            "train.steps=3",
            "train.batch_size=4",
        ],
    )
    result = train_here(recipe)
    assert (result.status, result.valid_loss) == ("finished", None)
    assert train_here(recipe).status == "nothing to do"


def test_a_time_box_ends_the_run_at_the_end_of_its_schedule(tiny: Tiny) -> None:
    recipe = tiny("train.steps=1000000", "train.max_minutes=0.02", "train.eval_interval=0")
    result = train_here(recipe)
    assert result.status == "finished"
    assert 2 < result.step < 1000000
    rates = [
        record["lr"]
        for record in read_metrics(recipe.run.path / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    assert rates[-1] < 0.05 * max(rates)
    state = newest(recipe).state
    assert state.time_fraction is not None
    assert state.time_fraction >= 1
    assert train_here(recipe).status == "nothing to do"


def test_a_last_evaluation_that_was_cut_short_is_made_up_after_a_time_box_too(tiny: Tiny) -> None:
    recipe = tiny("train.steps=1000000", "train.max_minutes=0.02", "train.eval_interval=0")
    first = train_here(recipe)
    metrics = recipe.run.path / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines(keepends=True) if '"final"' not in line]
    metrics.write_text("".join(kept))
    assert "only the last evaluation is left" in session.plan(recipe).start
    again = train_here(recipe)
    assert (again.status, again.step, again.valid_loss) == ("finished", first.step, first.valid_loss)
    assert train_here(recipe).valid_loss == first.valid_loss


def test_bf16_trains(tiny: Tiny) -> None:
    recipe = tiny('train.precision="bf16"', "train.steps=30", "optimizer.lr=0.01")
    train_here(recipe)
    assert losses(recipe)[-1][1] < losses(recipe)[0][1]
    assert all(tensor.dtype == torch.float32 for tensor in newest(recipe).model_tensors().values())


def test_loading_a_model_and_evaluating_it(tiny: Tiny) -> None:
    recipe = tiny()
    result = train_here(recipe)
    for path in (recipe.run.path, newest(recipe).path):
        checkpoint = newest_checkpoint(path)
        assert checkpoint.state.model.vocab_size == 64
        assert not plain_model(checkpoint, device="cpu").training
        assert run_tokenizer(checkpoint.path) is None
        found = evaluation.evaluate_run(path)
        assert (found.loss, found.tokens) == (result.valid_loss, 700)
        assert found.bits_per_byte == result.bits_per_byte
    (recipe.run.path / "tokenizer.json").write_text("{}")
    assert run_tokenizer(newest(recipe).path) == (recipe.run.path / "tokenizer.json").resolve()
    with pytest.raises(UsageError, match="no such folder"):
        newest_checkpoint(recipe.run.path / "nothing")
    with pytest.raises(UsageError, match="holds no checkpoint"):
        newest_checkpoint(recipe.run.folder)


def test_the_name_of_a_run_where_a_path_is_needed_gives_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts" / "runs" / "mine").mkdir(parents=True)
    hints = {}
    for command in (newest_checkpoint, verify.verify_path):
        for name in ("mine", "yours", "/", "."):
            with pytest.raises(UsageError) as caught:
                command(Path(name))
            hints[command, name] = caught.value.hint
    for command in (newest_checkpoint, verify.verify_path):
        assert hints[command, "mine"] == f"did you mean {Path('artifacts/runs/mine')}?"
        for name in ("yours", "/", "."):
            assert "did you mean" not in hints[command, name]


def test_a_plan_writes_nothing(tiny: Tiny) -> None:
    recipe = tiny()
    plan = session.plan(recipe, nproc=2)
    assert (plan.steps, plan.tokens_per_step, plan.ranks) == (10, 64, 2)
    assert "starting from scratch" in str(plan)
    assert not recipe.run.path.exists()
    with pytest.raises(UsageError, match="not divisible by 3 ranks"):
        session.plan(recipe, nproc=3)
    with pytest.raises(UsageError, match="cannot write there"):
        session.plan(tiny("run.folder=/proc/nowhere"))


def test_a_plan_says_what_the_session_would(tiny: Tiny) -> None:
    train_here(tiny(), stop_at_step=4)
    assert "only" not in session.plan(tiny()).start
    plan = session.plan(tiny("optimizer.lr=0.5"), stop_at_step=8)
    assert plan.start.startswith("resuming from")
    assert any(note.startswith("changed since that checkpoint: optimizer.lr") for note in plan.notes)
    assert str(plan).endswith("on 1 rank, stopping after step 8")
    assert session.plan(tiny(), stop_at_step=4).start == "nothing to do: already at step 4"
    assert session.plan(tiny(), nproc=2).notes[0].startswith("saved by 1 rank, going on with 2")


def test_what_is_lacking_is_named(tiny: Tiny) -> None:
    with pytest.raises(UsageError, match=r"\[train\]"):
        train_here(load_recipe(None, ["model.d_model=16", "model.num_heads=2"]))
    with pytest.raises(UsageError, match=r"^missing\.npy: no such token file .*data\.train"):
        train_here(tiny('data.train="missing.npy"'))
    with pytest.raises(UsageError, match="no such token file") as missing:
        train_here(tiny('data.train="not there.npy"'))
    assert "lmkit data encode TEXT 'not there.npy' --tokenizer" in missing.value.hint
    with pytest.raises(UsageError, match=r"model\.vocab_size: 63"):
        train_here(tiny("model.vocab_size=63"))


def test_fault_32_a_tokenizer_that_did_not_make_the_tokens_is_refused_with_both_hashes(
    tiny: Tiny, tmp_path: Path
) -> None:
    train_here(tiny(), stop_at_step=1)  # on tokens of tokenizer aaa...
    other = Tokenizer(vocab={i: bytes([i]) for i in range(256)}, merges=[], special_tokens=())
    given = tmp_path / "other.json"
    other.save(given)
    attempts = [
        lambda: train_here(tiny("run.name=new", f'tokenizer.path="{given}"')),
        lambda: generate.run(tiny().run.path, tokenizer=given),
    ]
    for attempt in attempts:
        with pytest.raises(UsageError) as caught:
            attempt()
        assert other.sha256 in caught.value.message
        assert "a" * 64 in caught.value.message
    assert not (tiny().run.folder / "new").exists()
    other.save(tiny().run.path / "tokenizer.json")
    for attempt in (lambda: train_here(tiny()), lambda: generate.run(tiny().run.path)):
        with pytest.raises(UsageError, match=other.sha256):
            attempt()


def test_a_model_of_gpu_kernels_runs_on_a_cpu_and_says_so(
    tiny: Tiny, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lmkit"), "propagate", True)  # the command line turns it off
    recipe = tiny()
    train_here(recipe)
    checkpoint = newest(recipe)
    config = checkpoint.state.model.model_copy(update={"attention": "flash_triton"})
    state = checkpoint.state.model_copy(update={"model": config})
    ids = torch.arange(8)[None]
    expected = plain_model(checkpoint, device="cpu")(ids)
    assert torch.equal(plain_model(dataclasses.replace(checkpoint, state=state), device="cpu")(ids), expected)
    assert "flash_triton" in caplog.text
