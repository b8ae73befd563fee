"""Checkpoints written in the background: the right moment, in the right order, or an error that loses nothing."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import file_size_limit
from raising import raises
from run_folders import make_state

from lmkit.errors import LmkitError
from lmkit.parallel.ranks import RankLost, Ranks
from lmkit.recipe.tables import CheckpointConfig
from lmkit.training import checkpoint as ckpt
from lmkit.training import resume
from lmkit.training.resume import CheckpointWriter

Save = Callable[..., None]


def make_writer(folder: Path, keep_last: int = 2, ranks: Ranks | None = None) -> CheckpointWriter:
    return CheckpointWriter(folder, ranks or Ranks(), CheckpointConfig(keep_last=keep_last))


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(100, 100)}


@pytest.fixture
def save(model: dict[str, torch.Tensor]) -> Save:
    """`save(writer, step)` begins to save `model` and an optimizer state."""
    optimizer = {"w.exp_avg": torch.randn(100, 100), "w.step": torch.tensor(3.0)}

    def begin(writer: CheckpointWriter, step: int, **fields: object) -> None:
        ranks = writer._ranks
        files = {ckpt.shard_name(ranks.rank, ranks.world_size): optimizer} | (
            {ckpt.MODEL: model} if ranks.is_first else {}
        )
        writer.save(make_state(step, **fields), files)

    return begin


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (torch.tensor(1), torch.tensor(0.5)),
        (torch.tensor([1.0, 2.0]), torch.tensor([7.0])),
        (torch.tensor([1.0]), torch.tensor([1.0, 2.0])),
        (torch.full((3,), 1 / 3, dtype=torch.bfloat16), torch.full((3,), 1 / 3)),
    ],
)
def test_a_state_may_change_its_shape_and_dtype_between_saves(first, then, tmp_path):
    writer = make_writer(tmp_path)
    for step, value in enumerate((first, then), 1):
        writer.save(
            make_state(step), {ckpt.MODEL: {"w": torch.ones(2)}, ckpt.shard_name(0, 1): {"w.state": value}}
        )
        writer.wait()
        saved = ckpt.open_checkpoint(tmp_path / ckpt.step_name(step)).optimizer_tensors()["w.state"]
        assert saved.dtype == value.dtype
        assert torch.equal(saved, value)


def test_saves_the_moment_of_the_call_not_what_training_made_of_it(tmp_path, model, save):
    writer = make_writer(tmp_path)
    at_the_call = {}
    for step in (1, 2, 3):
        at_the_call[step] = model["w"].clone()
        save(writer, step)
        writer.release_weights()
        model["w"] += 1  # the next update, perhaps before anything is on the disk
    writer.wait()
    assert [saved.step for saved in ckpt.saved_steps(tmp_path)] == [2, 3]
    for step in (2, 3):
        checkpoint = ckpt.open_checkpoint(tmp_path / ckpt.step_name(step))
        assert torch.equal(ckpt.TensorFile(checkpoint.path / ckpt.MODEL).read("w"), at_the_call[step])
        assert set(checkpoint.optimizer_tensors()) == {"w.exp_avg", "w.step"}
        assert checkpoint.state == make_state(step)
    assert not list(tmp_path.glob("*.lmkit-partial"))


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path, save, synced_and_named):
    writer = make_writer(tmp_path)
    save(writer, 1)
    writer.wait()
    final = tmp_path / ckpt.step_name(1)
    *synced, manifest, entries, named, name = synced_and_named
    others = {path.stat().st_ino for path in final.iterdir() if path.name != ckpt.MANIFEST}
    assert set(synced) == {("synced", file) for file in others}
    assert len(others) == 3
    assert manifest == ("synced", (final / ckpt.MANIFEST).stat().st_ino)
    assert (entries, named) == (("synced", final.stat().st_ino), ("named", final.stat().st_ino))
    assert name == ("synced", tmp_path.stat().st_ino)


def test_fault_49_a_file_size_limit_is_an_error_that_leaves_the_older_one_intact(tmp_path, save):
    writer = make_writer(tmp_path)
    save(writer, 1)
    writer.wait()
    with file_size_limit(10_000):
        save(writer, 2)
        with raises(LmkitError, "checkpoint.write_failed", ckpt.step_name(2), "file too large"):
            writer.wait()
    assert ckpt.newest_valid(tmp_path).path == tmp_path / ckpt.step_name(1)
    assert [path.name for path in tmp_path.iterdir()] == [ckpt.step_name(1)]
    save(writer, 3)  # now there is room again
    writer.wait()
    assert ckpt.newest_valid(tmp_path).path == tmp_path / ckpt.step_name(3)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_fault_68_weights_that_are_not_finite_never_replace_a_good_checkpoint(value, tmp_path, model, save):
    writer = make_writer(tmp_path, keep_last=1)
    save(writer, 1)
    writer.wait()
    model["w"][99, 99] = value
    save(writer, 2)
    with raises(LmkitError, "checkpoint.nonfinite", "step 2", "model.safetensors: w"):
        writer.wait()
    assert [saved.step for saved in ckpt.saved_steps(tmp_path)] == [1]


def test_an_error_in_the_background_is_raised_before_the_next_update(tmp_path, save, monkeypatch):
    def broken(*_: object, **__: object) -> list[Path]:
        raise ZeroDivisionError

    writer = make_writer(tmp_path)
    monkeypatch.setattr(resume, "prune", broken)
    save(writer, 1)
    assert isinstance(writer.writing.exception(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):  # a defect keeps its traceback
        writer.release_weights()
    save(writer, 2)
    with pytest.raises(ZeroDivisionError):
        writer.wait()


@pytest.fixture
def two_writers(tmp_path: Path) -> list[CheckpointWriter]:
    """The writers of two ranks, in one process."""
    store = torch.distributed.HashStore()
    ranks = [Ranks(rank=rank, world_size=2, store=store, timeout_s=60) for rank in (0, 1)]
    return [make_writer(tmp_path, 9, each) for each in ranks]


def test_messages_of_ranks_do_not_add_up_in_their_store(tmp_path, save, two_writers):
    for step in (1, 2, 3):
        for writer in two_writers:
            save(writer, step, world_size=2, optimizer_shards=2)
        for writer in two_writers:
            writer.wait()
        assert len(ckpt.open_checkpoint(tmp_path / ckpt.step_name(step)).state.rng) == 2
        assert two_writers[0]._ranks.store.num_keys() == 2  # type: ignore[union-attr]


def test_fault_48_a_rank_whose_disk_is_full_is_named_by_the_first(tmp_path, save, two_writers, monkeypatch):
    original, full = resume.write_tensors, ckpt.step_name(2) + ".lmkit-partial"

    def write_tensors(path: Path, part: dict[str, torch.Tensor]) -> object:
        if path.parent.name == full and "00001-of" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, part)

    monkeypatch.setattr(resume, "write_tensors", write_tensors)
    for step in (1, 2):
        for writer in two_writers:
            save(writer, step, world_size=2, optimizer_shards=2)
    with raises(LmkitError, "checkpoint.write_failed", "rank 1", "no space left on device"):
        two_writers[0].wait()
    with raises(LmkitError, "checkpoint.write_failed", ckpt.step_name(2), "no space left on device"):
        two_writers[1].wait()
    assert [path.name for path in tmp_path.iterdir()] == [ckpt.step_name(1)]
    assert ckpt.newest_valid(tmp_path).path == tmp_path / ckpt.step_name(1)


def test_a_rank_does_not_wait_for_its_own_part_once_another_cannot_save(tmp_path, save, monkeypatch):
    writer, may_write, original = make_writer(tmp_path), threading.Event(), resume.write_tensors

    def write_tensors(path: Path, part: dict[str, torch.Tensor]) -> object:
        assert may_write.wait(60)
        return original(path, part)

    told: list[tuple[bool, ...]] = []

    def on_any_rank(ranks: Ranks, *facts: bool) -> tuple[bool, ...]:
        told.append(facts)
        return (True, len(told) == 2)  # another rank writes at the first look, and has failed at the second

    monkeypatch.setattr(resume, "write_tensors", write_tensors)
    monkeypatch.setattr(resume, "on_any_rank", on_any_rank)
    save(writer, 7)
    with raises(RankLost, "ranks.lost", "rank 0", "step 7"):
        writer.wait_for_all()
    assert told == [(True, False)] * 2
    may_write.set()
    writer.wait()


def test_a_rank_that_cannot_save_tells_the_others(tmp_path, model, save, monkeypatch):
    writer, told = make_writer(tmp_path), []
    monkeypatch.setattr(resume, "on_any_rank", lambda ranks, *facts: told.append(facts) or facts)
    model["w"][0, 0] = float("nan")
    save(writer, 1)
    with raises(LmkitError, "checkpoint.nonfinite"):
        writer.wait_for_all()
    assert told[-1] == (False, True)
