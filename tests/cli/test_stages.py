"""The stages of a run depend on the content of files, and no run deletes the checkpoints of another training."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from lmkit.cli import stages

RUN = Path("runs/fish")
CHECKPOINT = "step-00000002/model.safetensors"


def content(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def states(terminal, command: str) -> dict[str, str]:
    return json.loads(terminal(f"{command} --json"))["stages"]


def append_a_line() -> None:
    with open("corpus.txt", "a") as file:
        file.write("new fish<|endoftext|>\n")


def test_fault_95_a_touched_or_copied_corpus_redoes_nothing(run: Path, made: Path, terminal) -> None:
    """The copy that the fixture makes has other times and another place."""
    before = content(run / "checkpoints")
    assert set(states(terminal, "run fish.toml --dry-run").values()) == {"up to date"}
    assert set(states(terminal, "run fish.toml").values()) == {"up to date"}
    os.utime("corpus.txt", (0, 0))
    assert set(states(terminal, "run fish.toml").values()) == {"up to date"}
    assert content(run / "checkpoints") == before


def test_fault_95_a_copy_does_not_look_at_the_original(run: Path, terminal, tmp_path: Path) -> None:
    shutil.rmtree(run / "tokens")  # of the copy: the original's are of no use to it
    remade = states(terminal, "run fish.toml")
    assert {stage for stage, state in remade.items() if state != "up to date"} == {"encode"}
    os.rename("runs", "elsewhere")
    moved = states(terminal, "run fish.toml --set run.folder=elsewhere")
    assert set(moved.values()) == {"up to date"}


@pytest.mark.parametrize("interrupted", [False, True])
def test_fault_95_a_training_on_other_content_is_refused_and_stays(
    interrupted: bool, run: Path, terminal
) -> None:
    if interrupted:
        record = json.loads((run / "stages.json").read_text())
        record["train"]["done"] = False
        (run / "stages.json").write_text(json.dumps(record))
    append_a_line()
    before = content(run)
    for command in ("run fish.toml --dry-run", "run fish.toml"):
        refused = terminal.refuses(command, code="run.other_data", says=["corpus.txt", "corpus.train"])
        assert "--set run.name=" in refused.hint
        assert "checkpoints.old-" in refused.hint
    assert content(run) == before
    assert set(states(terminal, "run fish.toml --set run.name=new").values()) & {"up to date"} == set()


def test_a_run_without_a_training_takes_the_new_content(run: Path, terminal) -> None:
    shutil.rmtree(run / "checkpoints")
    record = json.loads((run / "stages.json").read_text())
    for stage in ("train", "evaluate", "generate"):
        del record[stage]
    (run / "stages.json").write_text(json.dumps(record))
    append_a_line()
    assert "up to date" not in states(terminal, "run fish.toml").values()


@pytest.mark.parametrize("option", ["--force", "--from train", "--from corpus"])
def test_fault_95_starting_over_sets_the_checkpoints_aside(option: str, run: Path, terminal) -> None:
    before = content(run / "checkpoints")
    if option == "--force":
        append_a_line()
    planned = json.loads(terminal(f"run fish.toml {option} --dry-run --json"))
    assert planned["set_aside"] == str(run / "checkpoints")
    assert "checkpoints.old-" in terminal(f"run fish.toml {option} --dry-run")
    assert content(run / "checkpoints") == before
    assert states(terminal, f"run fish.toml {option}")["train"] != "up to date"
    assert "checkpoints.old-" in terminal.err
    (aside,) = run.glob("checkpoints.old-*")
    assert content(aside).items() >= before.items()
    assert (run / "checkpoints" / CHECKPOINT).is_file()
    assert terminal(f"generate {aside}")  # with the tokenizer that lies beside them

    terminal(f"run fish.toml {option}")
    assert len(list(run.glob("checkpoints.old-*"))) == 2


def test_a_training_that_was_not_begun_leaves_nothing_to_set_aside(run: Path, terminal) -> None:
    shutil.rmtree(run / "checkpoints")
    assert json.loads(terminal("run fish.toml --force --dry-run --json"))["set_aside"] is None
    terminal("run fish.toml --force")
    assert list(run.glob("checkpoints.old-*")) == []


def test_a_change_that_keeps_size_and_time_is_seen(run: Path, terminal) -> None:
    terminal("run fish.toml")  # notes the hash of the corpus in this place
    times = os.stat("corpus.txt")
    Path("corpus.txt").write_text(Path("corpus.txt").read_text().replace("two", "six"))
    os.utime("corpus.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    terminal.refuses("run fish.toml", code="run.other_data")


def test_content_is_read_once_while_its_file_stays_as_it_is(
    run: Path, terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal("run fish.toml")
    monkeypatch.setattr(stages, "sha256_file", lambda path: pytest.fail(f"{path} was read again"))
    terminal("run fish.toml")


def test_the_record_of_an_older_version_costs_no_checkpoint(run: Path, terminal) -> None:
    """Its keys are of size and time, and its paths are relative to the current folder."""
    keys = dict.fromkeys(json.loads((run / "stages.json").read_text()), "older")
    outputs = {"train": [str(run / "tokens/train.npy")]}
    record = {
        stage: {"before": "x", "key": key, "done": True, "outputs": outputs} for stage, key in keys.items()
    }
    (run / "stages.json").write_text(json.dumps(record))
    before = content(run / "checkpoints")
    terminal("run fish.toml")
    assert content(run / "checkpoints") == before


def test_fault_107_a_pipe_is_read_once_into_the_corpus_of_the_run(made: Path, terminal) -> None:
    text = "one fish two fish red fish blue fish<|endoftext|>\n" * 50
    os.mkfifo("pipe")
    Path("fish.toml").write_text((made / "fish.toml").read_text().replace("corpus.txt", "pipe"))
    states(terminal, "run fish.toml --dry-run")  # does not wait for a writer
    writer = threading.Thread(target=Path("pipe").write_text, args=(text,), daemon=True)
    writer.start()
    assert "up to date" not in states(terminal, "run fish.toml").values()
    made = [(RUN / "corpus" / f"{part}.txt").read_text() for part in ("train", "valid")]
    assert "".join(made) == text
    assert set(states(terminal, "run fish.toml").values()) == {"up to date"}
    assert "not read again" in terminal.err
    os.unlink("pipe")  # as a process substitution goes away
    assert set(states(terminal, f"run {RUN}/recipe.toml").values()) == {"up to date"}


def test_fault_107_a_directory_as_corpus_is_named(made: Path, terminal) -> None:
    Path("fish.toml").write_text((made / "fish.toml").read_text().replace("corpus.txt", "texts"))
    Path("texts").mkdir()
    terminal.refuses(
        "run fish.toml", code="corpus.directory", says=["texts", "is a directory", "corpus.train"]
    )
