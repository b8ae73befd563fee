from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from test_checkpoint_writer import make_state

from lmkit.errors import LmkitError
from lmkit.training import checkpoint as checkpoint_folder
from lmkit.training.checkpoint import (
    MANIFEST,
    MODEL,
    STATE,
    DamagedCheckpoint,
    NewerFormat,
    Retention,
    clean_leftovers,
    newest_valid,
    open_checkpoint,
    publish,
    read_manifest,
    saved_steps,
    step_name,
    verify,
    write_manifest,
)
from lmkit.training.tensor_files import read_verified, write_text

SHARD = "optimizer-00000-of-00001.safetensors"


def make_checkpoint(folder: Path, step: int, *, loss: float | None = None, text: str = "x") -> Path:
    """A folder that is a checkpoint as far as files and sums go."""
    partial = folder / (step_name(step) + ".partial")
    partial.mkdir(parents=True)
    content = {MODEL: f"model {text} {step}" * 50, SHARD: f"optimizer {step}" * 50}
    content[STATE] = make_state(step, valid_loss=loss).model_dump_json()
    write_manifest(partial, {name: write_text(partial / name, body) for name, body in content.items()})
    publish(partial, folder / step_name(step))
    return folder / step_name(step)


def rewrite(folder: Path, name: str, body: str) -> None:
    """Change a file of a checkpoint as another version would have written it: with a manifest that fits."""
    entries = read_manifest(folder)
    write_manifest(folder, {**entries, name: write_text(folder / name, body)})


def steps_in(folder: Path) -> list[int]:
    return [saved.step for saved in saved_steps(folder)]


@pytest.mark.parametrize("name", [MODEL, SHARD, STATE, MANIFEST])
@pytest.mark.parametrize(
    "keep", [None, 0, 1, 0.5, -1], ids=["gone", "empty", "one byte", "half", "all but one byte"]
)
def test_fault_44_a_cut_file_falls_back_to_the_checkpoint_before(
    name: str, keep: float | None, tmp_path: Path
) -> None:
    good, newest = make_checkpoint(tmp_path, 1), make_checkpoint(tmp_path, 2)
    whole = (newest / name).read_bytes()
    if keep is None:
        (newest / name).unlink()
    else:
        (newest / name).write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    choice = newest_valid(tmp_path)
    assert choice.path == good
    assert len(choice.skipped) == 1
    assert name in choice.skipped[0]


def test_what_the_operating_system_says_is_said_in_one_way(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 1)
    entry = read_manifest(folder)[MODEL]
    (folder / MODEL).unlink()
    for look in (lambda: verify(folder), lambda: read_verified(folder / MODEL, entry)):
        with pytest.raises(LmkitError, match=f"/{MODEL}: no such file or directory$"):
            look()
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    with pytest.raises(DamagedCheckpoint, match=f"/{MANIFEST}: is a directory$"):
        read_manifest(folder)


def test_fault_45_every_flipped_bit_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 1)
    generator = random.Random(45)
    for _ in range(200):
        path = folder / generator.choice([MODEL, SHARD, STATE, MANIFEST])
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        if path.name == MANIFEST and _same_json(damaged, whole):
            verify(folder)  # white space between the values
        else:
            with pytest.raises(DamagedCheckpoint):
                verify(folder)
        path.write_bytes(whole)
    verify(folder)


def _same_json(left: bytes | bytearray, right: bytes) -> bool:
    try:
        return bool(json.loads(left) == json.loads(right))
    except ValueError:
        return False


def test_fault_47_a_kill_between_rename_and_prune_leaves_a_folder_that_resumes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step)
    os.replace(tmp_path / step_name(1), tmp_path / (step_name(1) + ".partial"))  # pruning began with this
    assert newest_valid(tmp_path).path == tmp_path / step_name(3)
    assert [path.name for path in clean_leftovers(tmp_path)] == [step_name(1) + ".partial"]
    assert steps_in(tmp_path) == [2, 3]


def test_fault_47_a_kill_while_one_step_is_replaced_loses_neither(tmp_path: Path) -> None:
    old = make_checkpoint(tmp_path, 1, text="old")
    os.replace(old, tmp_path / (step_name(1) + ".replaced"))  # killed before the second rename
    assert clean_leftovers(tmp_path) == []
    verify(old)
    make_checkpoint(tmp_path, 1, text="new")  # the same step again
    assert "new" in (old / MODEL).read_text()
    assert [path.name for path in tmp_path.iterdir()] == [step_name(1)]
    shutil.copytree(old, tmp_path / (step_name(1) + ".replaced"))  # killed after the second rename
    assert [path.name for path in clean_leftovers(tmp_path)] == [step_name(1) + ".replaced"]
    assert [path.name for path in tmp_path.iterdir()] == [step_name(1)]
    verify(old)


def test_what_lies_under_a_passing_name_is_in_nobodys_way(tmp_path: Path) -> None:
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
        for suffix in (".partial", ".replaced"):
            shutil.copytree(tmp_path / step_name(step), tmp_path / (step_name(step) + suffix))
    Retention(tmp_path, keep_last=1, keep_best=0).prune()
    assert not (tmp_path / (step_name(1) + ".partial")).exists()
    shutil.rmtree(tmp_path / (step_name(2) + ".partial"))
    make_checkpoint(tmp_path, 2, text="new")
    assert "new" in (tmp_path / step_name(2) / MODEL).read_text()
    clean_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [step_name(1), step_name(2)]
    verify(tmp_path / step_name(1))


def test_fault_51_all_corrupt_lists_each(tmp_path: Path) -> None:
    for step in (1, 2):
        (make_checkpoint(tmp_path, step) / MODEL).write_text("something else")
    with pytest.raises(LmkitError) as caught:
        newest_valid(tmp_path)
    assert step_name(1) in caught.value.message
    assert step_name(2) in caught.value.message
    assert "\n" not in caught.value.message


def test_fault_52_incomplete_checkpoints_do_not_count_towards_those_to_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        make_checkpoint(tmp_path, step)
    (tmp_path / step_name(3) / MANIFEST).unlink()
    (tmp_path / step_name(2) / MODEL).write_text("damaged")
    Retention(tmp_path, keep_last=2, keep_best=0).prune()
    assert steps_in(tmp_path) == [1, 4]


def test_damaged_ones_go_only_when_a_newer_good_one_exists(tmp_path: Path) -> None:
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    (tmp_path / step_name(2) / MODEL).write_text("damaged")
    Retention(tmp_path, keep_last=1, keep_best=0).prune()
    assert steps_in(tmp_path) == [1, 2]
    make_checkpoint(tmp_path, 3)
    Retention(tmp_path, keep_last=1, keep_best=0).prune()
    assert steps_in(tmp_path) == [3]


def test_the_best_stay_beside_the_last(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 4.0)):
        make_checkpoint(tmp_path, step, loss=loss)
    retention = Retention(tmp_path, keep_last=1, keep_best=2)
    assert [path.name for path in retention.prune()] == [step_name(1), step_name(4)]
    assert steps_in(tmp_path) == [2, 3, 5]


def test_fault_58_a_newer_format_asks_for_an_upgrade_and_is_never_deleted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    newest = make_checkpoint(tmp_path, 2)
    content = json.loads((newest / MANIFEST).read_text())
    content["format"] += 1
    content["checksum"] = checkpoint_folder._checksum(content)
    (newest / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(NewerFormat) as caught:
        newest_valid(tmp_path)
    assert "upgrade" in caught.value.hint
    make_checkpoint(tmp_path, 3)
    Retention(tmp_path, keep_last=1, keep_best=0).prune()
    assert steps_in(tmp_path) == [2, 3]


def test_fault_58_a_newer_state_asks_for_an_upgrade_and_is_never_deleted(tmp_path: Path) -> None:
    for step in (1, 3):
        make_checkpoint(tmp_path, step)
    newer = make_checkpoint(tmp_path, 2)
    content = json.loads((newer / STATE).read_text())
    content |= {"format": 2, "unheard_of": True}
    rewrite(newer, STATE, json.dumps(content))
    with pytest.raises(
        NewerFormat, match=rf"^{newer / STATE}: state format 2, this lmkit knows 1$"
    ) as caught:
        open_checkpoint(newer)
    assert "upgrade" in caught.value.hint
    Retention(tmp_path, keep_last=1, keep_best=0).prune()
    assert steps_in(tmp_path) == [2, 3]


def test_fault_63_the_latest_is_the_one_with_the_highest_step_whatever_the_clock_said(tmp_path: Path) -> None:
    for step in (9, 100_000_001, 10):
        make_checkpoint(tmp_path, step)
        os.utime(tmp_path / step_name(step), (1e9 - step, 1e9 - step))
    assert newest_valid(tmp_path).path == tmp_path / "step-100000001"


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/b", "", ".hidden"])
def test_a_manifest_names_only_files_beside_it(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 1)
    content = json.loads((folder / MANIFEST).read_text())
    content["files"][name] = {"sha256": "0" * 64, "bytes": 0}
    content["checksum"] = checkpoint_folder._checksum(content)
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpoint, match=re.escape(repr(name))):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "[" * 100_000, '{"format": 1}', "\x00"])
def test_a_manifest_of_another_shape_is_damage(text: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 1)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(DamagedCheckpoint):
        read_manifest(folder)


def test_a_manifest_larger_than_any_is_not_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, 1)
    with open(folder / MANIFEST, "r+b") as file:
        file.truncate(1 << 40)  # a hole: reading it would take all memory there is
    with pytest.raises(DamagedCheckpoint, match="larger than any manifest"):
        read_manifest(folder)


def test_no_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "nothing").path is None
