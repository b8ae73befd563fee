"""A folder is a run because a record of lmkit's says so: no command deletes or replaces files of somebody else."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from lmkit.recipe.run_folder import is_run

MINE = {
    "recipe.toml": "# mine, with comments\n",
    "metrics.jsonl": "mine",
    "stages.json": '{"train": {"cmd": "make train"}, "evaluate": {"cmd": "make test"}}',
}


def content(folder: Path) -> dict[str, bytes]:
    """Of all files but those of a run that was set aside."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    names = {path.relative_to(folder): path for path in paths}
    return {str(name): path.read_bytes() for name, path in names.items() if not str(name).startswith("old-")}


@pytest.mark.parametrize("name", MINE)
def test_a_folder_with_files_of_somebody_else_is_no_run(name, run, terminal):
    """Though it may have a recipe."""
    file, recipe = Path("proj", name), Path("fish.toml")
    file.parent.mkdir()
    file.write_text(MINE[name] + (recipe.read_text() if name == "recipe.toml" else ""))
    before = file.read_bytes()
    place = "--set run.folder=. --set run.name=proj"
    for option in ("--dry-run", ""):
        words = f"train fish.toml {place} --set data.train={run}/tokens/train.npy {option}"
        terminal.refuses(words, code="run.not_a_run_folder", says=[name])
    for option in ("", "--force", "--force --dry-run"):
        words = f"run {file if name == 'recipe.toml' else recipe} {place} {option}"
        terminal.refuses(words, code="run.not_a_run_folder", says=["proj"])
    assert [path.name for path in Path("proj").iterdir()] == [name]
    assert file.read_bytes() == before


def test_runs_are_known_by_their_content(run, terminal, tmp_path):
    record = (run / "stages.json").read_text()
    assert is_run(run)
    (run / "stages.json").write_text("{")  # damaged
    assert is_run(run)
    old = tmp_path / "old"
    old.mkdir()
    (old / "stages.json").write_text(record)
    assert is_run(old)
    (old / "stages.json").unlink()
    assert not is_run(old)
    shutil.copytree(run / "checkpoints", old / "checkpoints")  # as `lmkit import` leaves them
    assert is_run(old)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"train": {"done": true}}', '{"files": {}}', '{"lmkit": "mine"}']
)
def test_other_records_are_no_run(text, tmp_path):
    for name in ("stages.json", "environment.json", "metrics.jsonl"):
        (tmp_path / name).write_text(text)
    assert not is_run(tmp_path)


def of_training(files: dict[str, bytes]) -> dict[str, bytes]:
    """What a run that starts over keeps of the earlier one: data are made again."""
    return {key: data for key, data in files.items() if not key.startswith(("corpus/", "tokens/", "stages"))}


def test_starting_over_keeps_the_training_and_files_of_the_user(run, terminal):
    before = content(run)
    mine = {"notes.md": b"mine", "corpus/book.txt": b"a book", "src/model.py": b"import this"}
    for name, data in mine.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(data)
    terminal("run fish.toml --force")
    assert content(run).items() >= mine.items()
    (aside,) = run.glob("old-*")
    assert of_training(content(aside)) == of_training(before)
    assert not (aside / "tokens").exists()  # which may be large
    done = json.loads(terminal(f"run {aside}/recipe.toml --set train.steps=3 --json"))
    assert (done["folder"], done["steps"]) == (str(aside), 3)


def test_a_run_that_is_killed_leaves_the_earlier_one(run, terminal, lmkit):
    before = of_training(content(run))
    plugin = Path("kill.py")
    plugin.write_text(
        "import os, signal\nimport lmkit.data.corpora as corpora\n"
        "corpora._join = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = lmkit("run", "fish.toml", "--force", "--plugin", plugin)
    assert killed.returncode == -signal.SIGKILL
    (aside,) = run.glob("old-*")
    assert of_training(content(aside)) == before
    terminal("run fish.toml")
    assert of_training(content(aside)) == before  # the next run does not know that it replaced that one
    words = "run fish.toml --force --set model.context_length=100000"
    terminal.refuses(words, code="tokens.too_short")
    later = next(place for place in run.glob("old-*") if place != aside)
    assert str(later) in terminal.err
    later.rename("runs/again")  # the way back
    assert json.loads(terminal("run runs/again/recipe.toml --json"))["steps"] == 2
    weights = "checkpoints/step-00000002/model.safetensors"
    assert Path("runs/again", weights).read_bytes() == before[weights]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("corpus.train", "corpus/train.txt"), ("tokenizer.path", "tokenizer.json")),
        *(("train.init_from", ""), ("checkpoint.resume", "checkpoints/step-00000002")),
        ("data.train", "tokens/valid.npy"),
    ],
)
def test_a_recipe_that_reads_the_run_it_starts_over_is_refused(key, name, run, terminal):
    os.symlink("runs/fish", "link")
    before = content(run)
    for through in ("runs/fish", "link"):
        value = f'["{through}/{name}"]' if key == "corpus.train" else f"{through}/{name}"
        for option in ("--dry-run", "--json"):
            words = ("run", "fish.toml", "--force", option, "--set", f"{key}={value}")
            terminal.refuses(*words, code="run.reads_itself", says=[key])
    assert content(run) == before
    assert not list(run.glob("old-*"))


def test_sources_of_the_user_in_the_run_folder_are_read(run, terminal):
    shutil.copy("corpus.txt", run / "book.txt")
    shutil.copy(run / "tokenizer.json", run / "mine.json")
    shutil.copytree(run / "checkpoints/step-00000002", run / "base")
    sources = {"corpus.train": '["runs/fish/book.txt"]', "tokenizer.path": "runs/fish/mine.json"}
    sources |= {"corpus.valid": '["runs/fish/book.txt"]', "train.init_from": "runs/fish/base"}
    settings = [word for key, value in sources.items() for word in ("--set", f"{key}={value}")]
    terminal("run", "fish.toml", "--force", *settings)
    (aside,) = run.glob("old-*")
    assert json.loads(terminal("run", f"{aside}/recipe.toml", "--dry-run", "--json"))["folder"] == str(aside)
    terminal("run", "runs/fish/recipe.toml", "--force")  # reads them again
    assert (run / "book.txt").read_bytes() == Path("corpus.txt").read_bytes()


def test_a_corpus_is_no_output_of_its_own_run(run, terminal):
    shutil.rmtree(run / "checkpoints")
    record = json.loads((run / "stages.json").read_text())
    del record["train"], record["evaluate"], record["generate"]
    (run / "stages.json").write_text(json.dumps(record))
    text = (run / "corpus/train.txt").read_bytes()
    words = ("run", "fish.toml", "--set", 'corpus.train=["runs/fish/corpus/train.txt"]')
    terminal.refuses(*words, code="run.reads_itself")
    assert (run / "corpus/train.txt").read_bytes() == text
