"""Whole runs through `lmkit.commands.train`, in this process."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.commands import evaluate, train
from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.load import load_recipe
from lmkit.recipe.schema import Recipe
from lmkit.storage import FolderLock
from lmkit.training import loop as loop_module
from lmkit.training.checkpoint_folder import MODEL, saved_steps, step_name, verify
from lmkit.training.checkpoints import Checkpoint, load_model, open_checkpoint
from lmkit.training.metrics import read_metrics
from lmkit.training.step import Step

Tiny = Callable[..., Recipe]
draw_losses = train.draw_losses


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib takes longer than these runs; one test puts it back."""
    monkeypatch.setattr(train, "draw_losses", lambda *arguments, **options: None)


def train_here(recipe: Recipe, *, stop_at_step: int | None = None) -> train.TrainResult:
    result = train.run(recipe, stop_at_step=stop_at_step)
    assert result is not None
    return result


def losses(recipe: Recipe, kind: str = "train") -> list[tuple[int, float]]:
    records = read_metrics(recipe.run.path / "metrics.jsonl")
    return [(record["step"], record["loss"]) for record in records if record["kind"] == kind]


def newest(recipe: Recipe) -> Checkpoint:
    return open_checkpoint(saved_steps(recipe.run.path / "checkpoints")[-1].path)


def saved(recipe: Recipe) -> list[int]:
    return [item.step for item in saved_steps(recipe.run.path / "checkpoints")]


def assert_same_state(left: Checkpoint, right: Checkpoint) -> None:
    """Bit for bit: weights, optimizer state, generators."""
    for mine, yours in (
        (left.model_tensors(), right.model_tensors()),
        (left.optimizer_tensors(), right.optimizer_tensors()),
    ):
        assert mine.keys() == yours.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor, yours[name]), name
    assert left.state.rng == right.state.rng
    assert (left.state.step, left.state.tokens) == (right.state.step, right.state.tokens)


def test_two_fresh_runs_of_20_steps_have_identical_losses(tiny: Tiny) -> None:
    one, two = (tiny("train.steps=20", f"run.name={name}") for name in ("one", "two"))
    train_here(one)
    train_here(two)
    assert len(losses(one)) == 20
    assert losses(one) == losses(two)
    assert losses(one, "valid") == losses(two, "valid")
    assert_same_state(newest(one), newest(two))


def test_another_seed_is_another_run(tiny: Tiny) -> None:
    one, two = tiny("run.name=one"), tiny("run.name=two", "run.seed=1")
    train_here(one, stop_at_step=2)
    train_here(two, stop_at_step=2)
    assert losses(one)[0] != losses(two)[0]


def test_it_learns_and_leaves_a_whole_run_folder(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "draw_losses", draw_losses)
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


@pytest.mark.parametrize("stop", [1, 5, 9])
def test_fault_54_10_steps_are_5_and_5_bit_for_bit(stop: int, tiny: Tiny) -> None:
    whole, parts = tiny("run.name=whole"), tiny("run.name=parts")
    train_here(whole)
    first = train_here(parts, stop_at_step=stop)
    assert (first.status, first.step) == ("stopped early", stop)
    second = train_here(parts)
    assert (second.status, second.resumed_from) == ("finished", stop)
    assert_same_state(newest(whole), newest(parts))
    assert losses(whole) == losses(parts)
    assert losses(whole, "valid") == losses(parts, "valid")
    assert losses(whole, "final") == losses(parts, "final")


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


def test_fault_44_and_45_a_damaged_newest_checkpoint_is_passed_over_and_named(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, recipe = tiny("run.name=whole"), tiny("checkpoint.interval=3", "run.name=damaged")
    train_here(whole)
    train_here(recipe, stop_at_step=6)
    path = recipe.run.path / "checkpoints" / step_name(6) / MODEL
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    capsys.readouterr()
    assert train_here(recipe).resumed_from == 3
    said = capsys.readouterr().err
    assert f"skipped {path}: checksum error" in said
    assert f"resuming from {path.parent.parent / step_name(3)}" in said
    assert_same_state(newest(whole), newest(recipe))
    verify(newest(recipe).path)


def test_fault_46_leftovers_of_a_killed_session_are_removed(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny()
    train_here(recipe, stop_at_step=2)
    half = recipe.run.path / "checkpoints" / (step_name(3) + ".partial")
    half.mkdir()
    (half / MODEL).write_text("half")
    (recipe.run.path / "recipe.toml.partial").write_text("half")
    train_here(recipe)
    assert "removed" in capsys.readouterr().err
    assert not list(recipe.run.path.rglob("*.partial"))


def test_fault_50_an_output_that_cannot_be_written_is_refused_before_training(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("a model was trained")

    monkeypatch.setattr(Step, "accumulate", never)
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file" / "runs", Path("/proc/nothing/here")):
        with pytest.raises(UsageError, match="cannot write there"):
            train_here(tiny(f'run.folder="{folder}"'))


@pytest.mark.parametrize("limit", [100, 2000])
def test_fault_49_a_limit_on_file_sizes_is_one_error_whichever_file_meets_it(limit: int, tiny: Tiny) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(LmkitError, match=r"file too large$"):
            train_here(tiny())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert saved(tiny()) == []
    assert not list(tiny().run.path.rglob("*.partial"))
    assert train_here(tiny()).status == "finished"


def test_fault_55_a_changed_learning_rate_goes_on_and_says_so(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(tiny(), stop_at_step=5)
    capsys.readouterr()
    result = train_here(tiny("optimizer.lr=0.0005", "train.accumulation=1"))
    assert result.resumed_from == 5
    said = capsys.readouterr().err
    assert "optimizer.lr: 0.001 -> 0.0005" in said
    assert "train.accumulation: 2 -> 1" in said


@pytest.mark.parametrize(
    "change",
    [
        "model.d_model=32",
        "model.num_layers=2",
        "model.vocab_size=80",
        "run.seed=3",
        "train.batch_size=16",
        'train.precision="bf16"',
        "model.rope_theta=500.0",
    ],
)
def test_fault_55_a_change_that_would_not_continue_the_run_is_refused_with_the_difference(
    change: str, tiny: Tiny
) -> None:
    train_here(tiny(), stop_at_step=1)
    before = newest(tiny()).path.stat().st_mtime_ns
    with pytest.raises(UsageError) as caught:
        train_here(tiny(change))
    key, _, value = change.partition("=")
    assert key in caught.value.message
    assert f"-> {value.strip(chr(34))}" in caught.value.message
    assert newest(tiny()).path.stat().st_mtime_ns == before


def test_another_token_file_is_refused(tiny: Tiny, token_files: tuple[Path, Path], tmp_path: Path) -> None:
    train_here(tiny(), stop_at_step=1)
    for suffix in (".npy", ".json"):
        shutil.copy(token_files[0].with_suffix(suffix), tmp_path / f"other{suffix}")
    same = tiny(f'data.train="{tmp_path / "other.npy"}"')
    train_here(same, stop_at_step=2)  # the same content elsewhere is the same data
    sidecar = tmp_path / "other.json"
    sidecar.write_text(sidecar.read_text().replace("b" * 64, "c" * 64))
    with pytest.raises(UsageError, match=r"data\.train: another token file"):
        train_here(same)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_fault_57_a_malicious_pickle_is_never_executed(protocol: int, tiny: Tiny, tmp_path: Path) -> None:
    import pickle

    sentinel = tmp_path / "executed"
    payload = pickle.dumps(_Touch(sentinel), protocol=protocol)
    recipe = tiny()
    train_here(recipe, stop_at_step=1)
    checkpoint = newest(recipe).path
    for name in [path.name for path in checkpoint.iterdir()]:
        evil = tmp_path / f"evil-{name}"
        shutil.copytree(checkpoint, evil)
        (evil / name).write_bytes(payload)
        for attempt in (
            lambda path=evil: load_model(path),
            lambda path=evil: train_here(tiny("run.name=other", f'checkpoint.resume="{path}"')),
        ):
            try:
                attempt()
            except LmkitError:
                continue
            # Generating needs no optimizer state, so its file is not even opened.
            assert name.startswith("optimizer")
    assert not sentinel.exists()


class _Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_fault_60_a_missing_optimizer_shard_is_an_error_when_asked_for_by_name(tiny: Tiny) -> None:
    recipe = tiny()
    train_here(recipe, stop_at_step=1)
    checkpoint = newest(recipe).path
    (shard,) = checkpoint.glob("optimizer-*")
    shard.unlink()
    with pytest.raises(LmkitError, match=f"{shard.name}.*missing"):
        train_here(tiny("run.name=other", f'checkpoint.resume="{checkpoint}"'))
    with pytest.raises(LmkitError, match="no good checkpoint"):
        train_here(recipe)


def test_fault_61_two_runs_in_one_folder(tiny: Tiny) -> None:
    recipe = tiny()
    with FolderLock(recipe.run.path), pytest.raises(LmkitError, match="another process"):
        train_here(recipe)
    train_here(recipe, stop_at_step=1)


def test_fault_65_resuming_a_finished_run_does_nothing(tiny: Tiny) -> None:
    recipe = tiny()
    first = train_here(recipe)
    metrics = (recipe.run.path / "metrics.jsonl").read_bytes()
    again = train_here(recipe)
    assert again.status == "nothing to do"
    assert str(again).startswith("nothing to do")
    assert (again.valid_loss, again.loss, again.step) == (first.valid_loss, first.loss, 10)
    assert (recipe.run.path / "metrics.jsonl").read_bytes() == metrics
    assert train_here(recipe, stop_at_step=5).status == "nothing to do"


def test_an_evaluation_that_was_cut_short_is_made_up_for(tiny: Tiny) -> None:
    recipe = tiny()
    first = train_here(recipe)
    path = recipe.run.path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert '"final"' in lines[-1]
    path.write_text("".join(lines[:-1]))
    again = train_here(recipe)
    assert again.valid_loss == first.valid_loss
    assert len(losses(recipe, "final")) == 1


def test_more_steps_go_on_from_a_finished_run(tiny: Tiny) -> None:
    train_here(tiny())
    result = train_here(tiny("train.steps=12"))
    assert (result.status, result.resumed_from, result.step) == ("finished", 10, 12)


def test_resume_auto_with_nothing_there_starts_fresh_and_says_so(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(tiny(), stop_at_step=1)
    assert "no checkpoint yet: starting from scratch" in capsys.readouterr().err


def test_resume_never_refuses_a_folder_with_checkpoints(tiny: Tiny) -> None:
    never = tiny("checkpoint.resume=never")
    train_here(never, stop_at_step=1)
    with pytest.raises(UsageError, match="never"):
        train_here(never)


def test_resume_from_a_named_checkpoint(tiny: Tiny) -> None:
    recipe = tiny("checkpoint.interval=5", "checkpoint.keep_last=9")
    train_here(recipe)
    older = recipe.run.path / "checkpoints" / step_name(5)
    with pytest.raises(UsageError, match="older than"):
        train_here(tiny(f'checkpoint.resume="{older}"'))
    branch = tiny("run.name=branch", f'checkpoint.resume="{older}"')
    assert train_here(branch).resumed_from == 5
    assert_same_state(newest(recipe), newest(branch))
    with pytest.raises(UsageError, match="not a checkpoint folder"):
        train_here(tiny("run.name=x", 'checkpoint.resume="nowhere"'))


def spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Make the loss of some steps (counted from 1) NaN."""
    original, calls = Step.accumulate, iter(range(1, 1000))

    def accumulate(self: Step, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = original(self, inputs, targets)
        return loss * math.nan if next(calls) in steps else loss

    monkeypatch.setattr(Step, "accumulate", accumulate)


def test_fault_66_and_68_nan_stops_the_run_and_the_good_checkpoint_stays(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny("checkpoint.interval=3", "checkpoint.keep_last=1")
    spoil(monkeypatch, {10})
    with pytest.raises(LmkitError, match=r"step 10: loss nan.* not finite"):
        train_here(recipe)
    assert saved(recipe) == [9]
    tensors = newest(recipe).model_tensors()
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


def test_nan_steps_can_be_skipped_up_to_a_limit(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny('train.nonfinite="skip"', "train.max_skips=2")
    spoil(monkeypatch, {3, 4, 8})
    assert train_here(recipe).status == "finished"
    assert [step for step, _ in losses(recipe, "skip")] == [3, 4, 8]
    assert [step for step, _ in losses(recipe)] == [1, 2, 5, 6, 7, 9, 10]
    spoil(monkeypatch, {3, 4, 5})
    with pytest.raises(LmkitError, match=r"3 times in a row, train\.max_skips is 2"):
        train_here(tiny('train.nonfinite="skip"', "train.max_skips=2", "run.name=worse"))


def stop_by_signal(monkeypatch: pytest.MonkeyPatch, number: int, where: str) -> None:
    """Send this process a signal in the middle of step 3, of an evaluation, or of a save."""
    if where == "step":
        original, calls = Step.accumulate, iter(range(1, 1000))

        def accumulate(self: Step, *batch: torch.Tensor) -> torch.Tensor:
            if next(calls) == 3:
                os.kill(os.getpid(), number)
            return original(self, *batch)

        monkeypatch.setattr(Step, "accumulate", accumulate)
    elif where == "evaluation":
        evaluate_ = loop_module.evaluate

        def evaluating(*arguments: Any, **options: Any):
            os.kill(os.getpid(), number)
            return evaluate_(*arguments, **options)

        monkeypatch.setattr(loop_module, "evaluate", evaluating)
    else:
        save, saves = loop_module.CheckpointWriter.save, iter(range(1, 1000))

        def saving(self: Any, *arguments: Any, **options: Any) -> None:
            save(self, *arguments, **options)
            if next(saves) == 1:
                os.kill(os.getpid(), number)

        monkeypatch.setattr(loop_module.CheckpointWriter, "save", saving)


@pytest.mark.parametrize(("where", "step"), [("step", 3), ("evaluation", 4), ("save", 6)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_fault_69_a_signal_finishes_the_step_and_saves_once(
    where: str, step: int, number: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, recipe = tiny("run.name=whole"), tiny("run.name=stopped", "checkpoint.interval=5")
    train_here(whole)
    with monkeypatch.context() as patch:
        stop_by_signal(patch, number, where)
        with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt) as caught:
            train_here(recipe)
    if number == signal.SIGTERM:
        assert caught.value.code == 143  # type: ignore[union-attr]
    # In a save (of step 5) the signal is seen during the step after it.
    assert saved(recipe) == ([5, 6] if where == "save" else [step])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert train_here(recipe).resumed_from == step
    assert_same_state(newest(whole), newest(recipe))
    assert losses(whole) == losses(recipe)


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


def test_bf16_trains(tiny: Tiny) -> None:
    recipe = tiny('train.precision="bf16"', "train.steps=30", "optimizer.lr=0.01")
    train_here(recipe)
    assert losses(recipe)[-1][1] < losses(recipe)[0][1]
    assert all(tensor.dtype == torch.float32 for tensor in newest(recipe).model_tensors().values())


def test_loading_a_model_and_evaluating_it(tiny: Tiny) -> None:
    recipe = tiny()
    result = train_here(recipe)
    for path in (recipe.run.path, newest(recipe).path):
        model, config, tokenizer = load_model(path)
        assert not model.training
        assert config.vocab_size == 64
        assert tokenizer is None
        found = evaluate.run(path)
        assert (found.loss, found.tokens) == (result.valid_loss, 700)
        assert found.bits_per_byte == result.bits_per_byte
    (recipe.run.path / "tokenizer.json").write_text("{}")
    assert load_model(newest(recipe).path)[2] is not None
    with pytest.raises(UsageError, match="no such folder"):
        load_model(recipe.run.path / "nothing")
    with pytest.raises(UsageError, match="holds no checkpoint"):
        load_model(recipe.run.folder)


def test_a_plan_writes_nothing(tiny: Tiny) -> None:
    recipe = tiny()
    plan = train.plan(recipe, nproc=2)
    assert (plan.steps, plan.tokens_per_step, plan.ranks) == (10, 64, 2)
    assert "starting from scratch" in str(plan)
    assert not recipe.run.path.exists()
    with pytest.raises(UsageError, match="not divisible by 3 ranks"):
        train.plan(recipe, nproc=3)


def test_what_is_lacking_is_named(tiny: Tiny) -> None:
    with pytest.raises(UsageError, match=r"\[train\]"):
        train_here(load_recipe(None, ["model.d_model=16", "model.num_heads=2"]))
    with pytest.raises(UsageError, match="no token file"):
        train_here(tiny('data.train="missing.npy"'))
    with pytest.raises(UsageError, match=r"model\.vocab_size: 63"):
        train_here(tiny("model.vocab_size=63"))
