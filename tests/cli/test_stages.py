"""The stages of a run depend on the content of files, and no run deletes the checkpoints of another training."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from raising import raises

from lmkit.cli import pipeline
from lmkit.errors import LmkitError
from lmkit.storage.atomic import FolderLock

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


def test_fault_95_a_touched_or_copied_corpus_redoes_nothing(run, made, terminal):
    """The copy that the fixture makes has other times and another place."""
    before = content(run / "checkpoints")
    assert set(states(terminal, "run fish.toml --dry-run").values()) == {"up to date"}
    assert set(states(terminal, "run fish.toml").values()) == {"up to date"}
    os.utime("corpus.txt", (0, 0))
    assert set(states(terminal, "run fish.toml").values()) == {"up to date"}
    assert content(run / "checkpoints") == before


def test_fault_95_a_copy_does_not_look_at_the_original(run, terminal, tmp_path):
    shutil.rmtree(run / "tokens")  # of the copy: the original's are of no use to it
    remade = states(terminal, "run fish.toml")
    assert {stage for stage, state in remade.items() if state != "up to date"} == {"encode"}
    os.rename("runs", "elsewhere")
    moved = states(terminal, "run fish.toml --set run.folder=elsewhere")
    assert set(moved.values()) == {"up to date"}


def test_fault_95_a_training_on_other_content_is_refused_and_stays(run, terminal):
    """Also one that was interrupted."""
    record = json.loads((run / "stages.json").read_text())
    record["train"]["done"] = False
    (run / "stages.json").write_text(json.dumps(record))
    append_a_line()
    before = content(run)
    for command in ("run fish.toml --dry-run", "run fish.toml"):
        refused = terminal.refuses(command, code="run.other_data", says=["corpus.txt", "corpus.train"])
        assert "--set run.name=" in refused.hint
        assert "--force" in refused.hint
    assert content(run) == before
    assert set(states(terminal, "run fish.toml --set run.name=new").values()) & {"up to date"} == set()


def test_a_run_without_a_training_takes_the_new_content(run, terminal):
    shutil.rmtree(run / "checkpoints")
    record = json.loads((run / "stages.json").read_text())
    del record["train"], record["evaluate"], record["generate"]
    (run / "stages.json").write_text(json.dumps(record))
    append_a_line()
    assert "up to date" not in states(terminal, "run fish.toml").values()


@pytest.mark.parametrize("option", ["--force", "--from corpus"])
def test_fault_95_starting_over_sets_the_checkpoints_aside(option, run, terminal):
    before = content(run / "checkpoints")
    if option == "--force":
        append_a_line()
    planned = json.loads(terminal(f"run fish.toml {option} --dry-run --json"))
    assert planned["set_aside"] == str(run / "checkpoints")
    assert str(run / "old-") in terminal(f"run fish.toml {option} --dry-run")
    assert content(run / "checkpoints") == before
    assert states(terminal, f"run fish.toml {option}")["train"] != "up to date"
    (aside,) = run.glob("old-*")
    assert str(aside) in terminal.err
    assert content(aside / "checkpoints") == before
    assert (run / "checkpoints" / CHECKPOINT).is_file()
    assert terminal(f"generate {aside}")  # with the tokenizer that lies beside them

    terminal(f"run fish.toml {option}")
    assert len(list(run.glob("old-*"))) == 2


def test_fault_117_other_text_does_not_replace_the_tokenizer_of_a_kept_training(run, terminal):
    before = (run / "tokenizer.json").read_bytes()
    Path("corpus.txt").write_text("".join(f"quite other words, {i}<|endoftext|>\n" for i in range(400)))
    terminal("run fish.toml --from corpus")
    (aside,) = run.glob("old-*")
    assert (aside / "tokenizer.json").read_bytes() == before != (run / "tokenizer.json").read_bytes()
    assert terminal(f"generate {aside}")


@pytest.mark.parametrize(
    ("option", "function", "name"),
    [("--from corpus", "write_atomic", "tokenizer.json"), ("--force", "_move", "evaluation.json")],
)
def test_fault_118_force_on_a_full_disk_changes_nothing(option, function, name, run, terminal, monkeypatch):
    original = getattr(pipeline, function)

    def full(path: Path, to: object) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, "no space left", str(path))
        original(path, to)

    monkeypatch.setattr(pipeline, function, full)
    before = content(run)
    terminal.refuses(f"run fish.toml {option}", code="file.failed", says=[name], exit_code=1)
    assert content(run) == before


def test_content_is_read_once_while_its_file_stays_as_it_is(run, terminal, monkeypatch):
    terminal("run fish.toml")  # notes the hash of the corpus in this place
    with monkeypatch.context() as patch:
        patch.setattr("lmkit.storage.atomic.sha256_file", lambda path: pytest.fail(f"{path} was read again"))
        terminal("run fish.toml")
    times = os.stat("corpus.txt")
    Path("corpus.txt").write_text(Path("corpus.txt").read_text().replace("two", "six"))
    os.utime("corpus.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    terminal.refuses("run fish.toml", code="run.other_data")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("output", "redone"),
    [
        *(("corpus/train.txt", "corpus"), ("tokenizer.json", "tokenizer"), ("tokens/valid.json", "encode")),
        *(("training.json", "train evaluate generate"), ("stories.txt", "generate")),
    ],
)
def test_fault_109_a_damaged_output_is_made_again(output, redone, run, terminal):
    before = content(run)
    cut(run / output)
    if output.endswith("valid.json"):
        (run / output).write_text("{}")  # a JSON file of somebody else, as far as one can tell
    damaged = (run / output).read_bytes()
    planned = terminal("run fish.toml --dry-run")
    assert f"{run / output} " in planned
    made = states(terminal, "run fish.toml")
    assert [stage for stage, state in made.items() if state != "up to date"] == redone.split()
    assert f"{redone.split()[0]}: {run / output} " in terminal.err
    after = content(run)
    assert after[f"{output}.damaged"] == damaged  # perhaps somebody has edited it
    assert str(run / f"{output}.damaged") in terminal.err
    ours = [name for name in before if name.startswith(("corpus/", "tok", "checkpoints/", "stories"))]
    assert {name: after[name] for name in ours} == {name: before[name] for name in ours}
    assert set(states(terminal, "run fish.toml").values()) == {"up to date"}


def test_fault_109_a_damaged_newest_checkpoint_is_trained_again_and_kept(made, terminal):
    shutil.copy(made / "corpus.txt", ".")
    Path("fish.toml").write_text((made / "fish.toml").read_text() + "[checkpoint]\ninterval = 1\n")
    terminal("run fish.toml")
    newest = RUN / "checkpoints" / "step-00000002"
    whole = content(newest)
    cut(newest / "model.safetensors")
    damaged = content(newest)
    assert str(newest / "model.safetensors") in terminal("run fish.toml --dry-run")
    made_again = states(terminal, "run fish.toml --set checkpoint.keep_last=1")
    redone = [stage for stage, state in made_again.items() if state != "up to date"]
    assert redone == ["train", "evaluate", "generate"]
    aside = newest.with_name("step-00000002.damaged")
    assert str(aside) in terminal.err
    assert content(aside) == damaged
    assert content(newest)["model.safetensors"] == whole["model.safetensors"]
    assert set(states(terminal, "run fish.toml").values()) == {"up to date"}


def test_fault_109_the_only_checkpoint_damaged_is_named_and_stays(run, terminal):
    cut(run / "checkpoints" / CHECKPOINT)
    before = content(run / "checkpoints")
    terminal.refuses("run fish.toml", code="checkpoint.none_good", exit_code=1, says=[CHECKPOINT])
    assert content(run / "checkpoints") == before


def test_fault_120_a_run_holds_its_folder_from_the_first_stage_to_the_last(run, terminal, monkeypatch):
    looked = []

    def look(self, stage: str, original=pipeline.Pipeline.bring_up_to_date) -> str:
        looked.append(stage)
        # Another process has a file description of its own, as this lock has.
        with raises(LmkitError, "storage.folder_busy"), FolderLock(run):
            pass
        return original(self, stage)

    monkeypatch.setattr(pipeline.Pipeline, "bring_up_to_date", look)
    for options in ("", "--from train", "--force"):
        looked.clear()
        terminal(f"run fish.toml {options}")
        assert looked == list(pipeline.STAGES)
    with FolderLock(run):
        before = content(run)
        for command in ("run fish.toml", "run fish.toml --force", "train fish.toml --steps 9"):
            terminal.refuses(command, code="storage.folder_busy", exit_code=1, says=[str(run)])
        assert content(run) == before


def test_fault_132_a_damaged_record_is_said_and_costs_no_model(run, terminal):
    record, before = run / "stages.json", content(run / "checkpoints")
    whole = json.loads(record.read_text())
    record.write_text(json.dumps(whole | {"encode": "?"}))
    terminal("run fish.toml --dry-run")
    assert "stages.json: damaged, so that encode may" in terminal.err
    record.write_text("{")
    old = Path("corpus.txt").read_bytes()
    Path("corpus.txt").write_text("zebras zoom<|endoftext|>\n" * 50)
    tokenizer = (run / "tokenizer.json").read_bytes()
    terminal.refuses("run fish.toml", code="run.other_data", says=["tokenizer.json"])
    assert (run / "tokenizer.json").read_bytes() == tokenizer
    record.write_text("{")
    (run / "tokenizer.json").unlink()  # the checkpoints still say which one it was
    tokens = (run / "tokens/train.npy").read_bytes()
    terminal.refuses("run fish.toml", code="run.other_data", says=["tokenizer.json"])
    assert (run / "tokens/train.npy").read_bytes() == tokens
    (run / "tokenizer.json").write_bytes(tokenizer)
    Path("corpus.txt").write_bytes(old)
    record.write_text("{")
    assert states(terminal, "run fish.toml")["encode"] != "up to date"
    assert "stages.json: damaged" in terminal.err
    assert content(run / "checkpoints") == before


def test_skip_data_needs_no_corpus(run, terminal):
    os.unlink("corpus.txt")
    terminal.refuses("run fish.toml", code="run.missing_file", says=["corpus.txt"])
    for options in ("--skip-data --dry-run", "--skip-data"):
        assert set(states(terminal, f"run fish.toml {options}").values()) == {"up to date"}
    shutil.rmtree(run / "corpus")
    assert set(states(terminal, "run fish.toml --skip-data").values()) == {"up to date"}
    assert states(terminal, "run fish.toml --skip-data --from train")["train"] != "up to date"
    shutil.copy(run / "stories.txt", "corpus.txt")  # other content: what was trained on is still known
    terminal.refuses("run fish.toml", code="run.other_data", says=["corpus.txt"])


def test_fault_145_the_tokenizer_of_another_model_is_refused(run, terminal):
    Path("other.txt").write_text("quite other words\n" * 50)
    terminal(f"tokenizer train other.txt {run}/tokenizer.json --vocab-size 262 --force")
    Path("questions.jsonl").write_text('{"question": "a", "choices": ["b", "c"], "answer": 0}\n')
    for command in (
        *(f"generate {run}", f"export {run} exported", f"evaluate {run} --text corpus.txt"),
        f"evaluate {run} --choices questions.jsonl",
    ):
        terminal.refuses(command, code="checkpoint.wrong_tokenizer", says=[str(run / "tokenizer.json")])
    assert not Path("exported").exists()


@pytest.mark.parametrize("damaged", ["tokens/train.npy", "corpus/valid.txt"])
def test_fault_146_verify_notices_other_content(damaged, run, terminal):
    assert "all is well" in terminal(f"verify {run}")
    content = (run / damaged).read_bytes()
    (run / damaged).write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    said = terminal(f"verify {run}", exit_code=1).splitlines()
    (wrong,) = [line for line in said if line.startswith("WRONG")]
    assert str(run / damaged) in wrong


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("run.device=cuda", "parallel.no_gpu"),
        ("train.precision=fp16 --set run.device=auto", "train.wrong_device"),
        ("train.init_from=nowhere", "checkpoint.not_found"),
        ("checkpoint.resume=nowhere", "checkpoint.not_found"),
        ("optimizer.name=sgd --set optimizer.options.momentum=1.0", "optimizer.momentum"),
        ("tokenizer.path=corpus.txt", "tokenizer.damaged_file"),
        ("tokenizer.path=nowhere.json", "run.missing_file"),
        ("data.train=nowhere.npy", "data.no_tokens"),
    ],
)
def test_fault_148_what_cannot_train_is_refused_before_the_data(setting, code, run, terminal, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    before, code_of = content(run), {"tokenizer.damaged_file": 1}
    for options in ("--set run.name=new --dry-run", "--set run.name=new", "--force --dry-run", "--force"):
        words = f"run fish.toml {options} --set {setting}"
        terminal.refuses(words, code=code, exit_code=code_of.get(code, 2))
    assert not run.with_name("new").exists()
    assert content(run) == before


def test_fault_149_a_first_run_replaces_no_files_of_the_users(run, terminal):
    mine = "corpus/train.txt"
    path = run.with_name("new") / mine
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    for command in ("run fish.toml --dry-run", "run fish.toml"):
        terminal.refuses(f"{command} --set run.name=new", code="run.not_a_run_folder", says=[mine])
    assert content(run.with_name("new")) == {mine: b"mine"}
    path.rename(path.with_name("notes"))
    terminal("run fish.toml --set run.name=new")
