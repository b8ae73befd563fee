"""Checkpoint folders: damage is noticed, an older checkpoint takes over, the right ones are deleted."""

import errno
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from raising import raises
from run_folders import make_state

from lmkit.errors import LmkitError, UsageError
from lmkit.storage.atomic import sha256_file
from lmkit.training import checkpoint, resume

SHARD = "optimizer-00000-of-00001.safetensors"
CPU = torch.device("cpu")


def make_checkpoint(folder: Path, step: int, *, loss: float | None = None, text: str = "x") -> Path:
    """A folder that is a checkpoint as far as files and checksums go."""
    partial = folder / (checkpoint.step_name(step) + ".lmkit-partial")
    partial.mkdir(parents=True)
    content = {checkpoint.MODEL: f"model {text} {step}" * 50, SHARD: f"optimizer {step}" * 50}
    content[checkpoint.STATE] = make_state(step, valid_loss=loss).model_dump_json()
    entries = {name: checkpoint.write_file(partial / name, body.encode()) for name, body in content.items()}
    checkpoint.write_manifest(partial, entries)
    checkpoint.publish(partial, folder / checkpoint.step_name(step))
    return folder / checkpoint.step_name(step)


def rewrite_manifest(folder: Path, **changes: object) -> None:
    """Change keys of a manifest as another version would have written it: with a checksum that fits."""
    content = json.loads((folder / checkpoint.MANIFEST).read_text()) | changes
    content["checksum"] = checkpoint.manifest_checksum(content)
    (folder / checkpoint.MANIFEST).write_text(json.dumps(content))


def steps_in(folder: Path) -> list[int]:
    return [saved.step for saved in checkpoint.saved_steps(folder)]


def prune(folder: Path, *, keep_last: int = 1, keep_best: int = 0) -> list[str]:
    return [path.name for path in resume.prune(folder, {}, keep_last=keep_last, keep_best=keep_best)]


@pytest.mark.parametrize("name", [checkpoint.MODEL, SHARD, checkpoint.STATE, checkpoint.MANIFEST])
@pytest.mark.parametrize("keep", [None, 0.0, 0.5, 0.99], ids=["gone", "empty", "half", "almost whole"])
def test_fault_44_a_cut_file_falls_back_to_the_checkpoint_before(name, keep, tmp_path):
    good, newest = make_checkpoint(tmp_path, 1), make_checkpoint(tmp_path, 2)
    whole = (newest / name).read_bytes()
    if keep is None:
        (newest / name).unlink()
    else:
        (newest / name).write_bytes(whole[: int(len(whole) * keep)])
    choice = checkpoint.newest_valid(tmp_path)
    assert choice.path == good
    assert len(choice.skipped) == 1
    assert name in choice.skipped[0]


def test_fault_45_every_flipped_bit_of_a_checkpoint_is_noticed(tmp_path):
    folder = make_checkpoint(tmp_path, 1)
    generator = random.Random(45)
    for _ in range(200):
        path = folder / generator.choice([checkpoint.MODEL, SHARD, checkpoint.STATE, checkpoint.MANIFEST])
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            harmless = path.name == checkpoint.MANIFEST and json.loads(path.read_bytes()) == json.loads(whole)
        except ValueError:
            harmless = False
        if harmless:
            checkpoint.verify(folder)  # white space between the values
        else:
            with pytest.raises(checkpoint.DamagedCheckpoint):
                checkpoint.verify(folder)
        path.write_bytes(whole)
    checkpoint.verify(folder)


def test_fault_47_a_kill_between_rename_and_prune_leaves_a_folder_that_resumes(tmp_path):
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    # Pruning began with this.
    os.replace(tmp_path / checkpoint.step_name(1), tmp_path / (checkpoint.step_name(1) + ".lmkit-partial"))
    assert checkpoint.newest_valid(tmp_path).path == tmp_path / checkpoint.step_name(3)
    assert [path.name for path in checkpoint.clean_leftovers(tmp_path)] == [
        checkpoint.step_name(1) + ".lmkit-partial"
    ]
    assert steps_in(tmp_path) == [2, 3]


def test_a_step_that_is_saved_again_moves_the_older_checkpoint_aside(tmp_path):
    make_checkpoint(tmp_path, 1, text="old")
    new = make_checkpoint(tmp_path, 1, text="new")
    assert "new" in (new / checkpoint.MODEL).read_text()
    assert "old" in (tmp_path / f"{new.name}.damaged" / checkpoint.MODEL).read_text()


def test_fault_111_damaged_checkpoints_stay_while_they_are_newer_than_one_to_keep(tmp_path):
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    (tmp_path / checkpoint.step_name(2) / checkpoint.MODEL).write_text("damaged")
    assert prune(tmp_path) == []
    make_checkpoint(tmp_path, 3)
    assert prune(tmp_path, keep_last=2) == []
    assert prune(tmp_path) == [checkpoint.step_name(1), checkpoint.step_name(2)]


@pytest.mark.parametrize("first", [1, 2], ids=["a checkpoint", "a folder of somebody else"])
def test_a_folder_with_other_files_is_not_pruned(first, tmp_path):
    for step in range(first, 4):
        make_checkpoint(tmp_path, step)
    own = tmp_path / checkpoint.step_name(1) / "notes.txt"
    own.parent.mkdir(exist_ok=True)
    own.write_text("mine")
    assert prune(tmp_path) == [checkpoint.step_name(2)]
    assert own.read_text() == "mine"


def test_a_renamed_checkpoint_is_not_the_newest(tmp_path):
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    os.rename(tmp_path / checkpoint.step_name(1), tmp_path / checkpoint.step_name(9))
    with pytest.raises(checkpoint.DamagedCheckpoint, match="step 1"):
        checkpoint.verify(tmp_path / checkpoint.step_name(9))
    assert checkpoint.newest_valid(tmp_path).path.name == checkpoint.step_name(2)


def test_the_best_are_kept_besides_the_last(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 4.0)):
        make_checkpoint(tmp_path, step, loss=loss)
    assert prune(tmp_path, keep_best=2) == [checkpoint.step_name(1), checkpoint.step_name(4)]
    assert steps_in(tmp_path) == [2, 3, 5]


@pytest.mark.parametrize("newer", [checkpoint.MANIFEST, checkpoint.STATE])
def test_fault_58_a_newer_format_asks_for_an_upgrade_and_is_never_deleted(newer, tmp_path):
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    folder = tmp_path / checkpoint.step_name(2)
    if newer == checkpoint.MANIFEST:
        rewrite_manifest(folder, format=checkpoint.FORMAT + 1)
    else:
        content = json.loads((folder / checkpoint.STATE).read_text()) | {"format": 2, "unheard_of": True}
        entry = checkpoint.write_file(folder / checkpoint.STATE, json.dumps(content).encode())
        checkpoint.write_manifest(folder, {**checkpoint.read_manifest(folder), checkpoint.STATE: entry})
    with raises(LmkitError, "checkpoint.newer_format", folder / newer, hint="upgrade"):
        checkpoint.open_checkpoint(folder)
    if newer == checkpoint.MANIFEST:
        with raises(LmkitError, "checkpoint.newer_format"):  # falling back would lose the steps since
            checkpoint.newest_valid(tmp_path)
    make_checkpoint(tmp_path, 3)
    prune(tmp_path)
    assert steps_in(tmp_path) == [2, 3]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_fault_176_a_checkpoint_that_cannot_be_read_now_is_not_called_damaged(number, tmp_path, monkeypatch):
    """Falling back would lose the steps since, and a damaged one is deleted when its time comes."""
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)

    def read(path):
        if path.parent.name == checkpoint.step_name(2):
            raise OSError(number, os.strerror(number))
        return sha256_file(path)

    monkeypatch.setattr(checkpoint, "sha256_file", read)
    assert prune(tmp_path) == [checkpoint.step_name(1)]
    assert steps_in(tmp_path) == [2, 3]
    shutil.rmtree(tmp_path / checkpoint.step_name(3))
    with raises(LmkitError, "checkpoint.unreadable", tmp_path / checkpoint.step_name(2)):
        checkpoint.newest_valid(tmp_path)


def test_fault_63_the_latest_is_the_one_with_the_highest_step_whatever_the_clock_said(tmp_path):
    for step in (9, 100_000_001, 10):
        make_checkpoint(tmp_path, step)
        os.utime(tmp_path / checkpoint.step_name(step), (1e9 - step, 1e9 - step))
    assert checkpoint.newest_valid(tmp_path).path == tmp_path / "step-100000001"
    assert checkpoint.newest_valid(tmp_path / "nothing").path is None


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/b", "", ".hidden"])
def test_a_manifest_names_only_files_in_its_folder(name, tmp_path):
    folder = make_checkpoint(tmp_path, 1)
    files = json.loads((folder / checkpoint.MANIFEST).read_text())["files"]
    rewrite_manifest(folder, files={**files, name: {"sha256": "0" * 64, "bytes": 0}})
    with raises(LmkitError, "checkpoint.damaged", repr(name)):
        checkpoint.read_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"format": 1}', None])
def test_a_manifest_of_another_shape_is_damage(text, tmp_path):
    folder = make_checkpoint(tmp_path, 1)
    if text is None:
        with open(folder / checkpoint.MANIFEST, "r+b") as file:
            file.truncate(1 << 40)  # a hole: reading it would take all memory there is
    else:
        (folder / checkpoint.MANIFEST).write_text(text)
    with raises(checkpoint.DamagedCheckpoint, "checkpoint.damaged", folder / checkpoint.MANIFEST):
        checkpoint.read_manifest(folder)


def test_weights_in_several_files_are_one_model(tmp_path):
    parts = [{"a": torch.ones(2), "c": torch.zeros(1)}, {"b": torch.ones(3)}, {}]
    names = [checkpoint.model_name(rank, 3) for rank in range(3)]
    entries = {
        name: checkpoint.write_tensors(tmp_path / name, part) for name, part in zip(names, parts, strict=True)
    }
    entries |= {SHARD: checkpoint.write_tensors(tmp_path / SHARD, {})}
    state = make_state(1).model_dump_json().encode()
    entries |= {checkpoint.STATE: checkpoint.write_file(tmp_path / checkpoint.STATE, state)}
    checkpoint.write_manifest(tmp_path, entries)
    opened = checkpoint.open_checkpoint(tmp_path)
    files = [checkpoint.TensorFile(tmp_path / name) for name in checkpoint.model_files(opened.entries)]
    sizes = [{name: len(x) for name, x in file.tensors.items()} for file in files]
    assert sizes == [{"a": 2, "c": 1}, {"b": 3}, {}]
    for missing in names:
        checkpoint.write_manifest(tmp_path, {n: entry for n, entry in entries.items() if n != missing})
        with raises(checkpoint.DamagedCheckpoint, "checkpoint.damaged", tmp_path / checkpoint.MANIFEST):
            checkpoint.open_checkpoint(tmp_path)


# Tensor files


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "layers.0.weight": torch.randn(5, 7, generator=generator),
        "odd": torch.randn(3, generator=generator).to(torch.bfloat16),
        "half": torch.randn(2, 2, generator=generator).half(),
        "double": torch.randn(3, generator=generator, dtype=torch.float64),
        "step": torch.tensor(12, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }


def read(path: Path) -> dict[str, torch.Tensor]:
    file = checkpoint.TensorFile(path)
    return {name: file.read(name) for name in file.tensors}


def test_tensors_are_read_back_as_they_were_written_also_by_the_library(tmp_path):
    tensors, path = some_tensors(), tmp_path / "t.safetensors"
    entry = checkpoint.write_tensors(path, tensors)
    assert (entry["sha256"], entry["bytes"]) == (sha256_file(path), path.stat().st_size)
    for loaded in (read(path), safetensors.torch.load_file(path)):
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(loaded[name], tensor)


def test_fault_64_loaded_tensors_survive_the_file_being_overwritten(tmp_path):
    tensors, path = some_tensors(), tmp_path / "t.safetensors"
    checkpoint.write_tensors(path, tensors)
    loaded = read(path)
    path.write_bytes(b"")  # a tensor in a memory map would now end the process with SIGBUS
    assert torch.equal(loaded["layers.0.weight"], tensors["layers.0.weight"])
    loaded["layers.0.weight"] += 1  # and it is writable memory of its own


# state.json


def test_a_checkpoint_of_a_missing_plugin_is_whole():
    content = make_state(7).model_dump(mode="json")
    content["model"]["attention"] = "from_a_plugin"
    with raises(UsageError, "checkpoint.unregistered", "state.json: model.attention", hint="plugin"):
        checkpoint.parse_state(json.dumps(content).encode(), path="state.json")
