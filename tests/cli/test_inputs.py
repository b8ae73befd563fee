"""What is read: regular files, texts from pipes, and token files as they were made."""

import os
import shutil
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)  # a command that waits for the writer of a pipe fails its test


def test_texts_come_from_named_pipes(run, terminal):
    os.mkfifo("pipe")
    writer = threading.Thread(target=Path("pipe").write_bytes, args=(b"one fish two fish",))
    writer.start()
    terminal("tokenizer train pipe made.json --vocab-size 260")
    writer.join()
    writer = threading.Thread(target=Path("pipe").write_bytes, args=(b"one fish\n",))
    writer.start()
    assert "one fish" in terminal(f"generate {run} --prompts-file pipe")
    writer.join()


@pytest.mark.parametrize(
    ("begin", "name"),
    [("resumed", "tokens/train.npy"), ("from scratch", "tokens/valid.npy"), ("resumed", "tokens/valid.json")],
)
def test_fault_159_train_refuses_token_files_that_changed(begin, name, run, terminal):
    terminal("run fish.toml")  # notes sizes and times of the files, which were copied here
    if begin == "from scratch":
        shutil.rmtree(run / "checkpoints")
    path, key = run / name, f"data.{Path(name).stem}"
    content = bytearray(path.read_bytes())
    if path.suffix == ".json":
        content = content.replace(b'"num_documents": ', b'"num_documents": 1')
    else:
        content[-2] ^= 1  # another token of the vocabulary, and the same size
    path.write_bytes(content)
    for command in ("train fish.toml --steps 3", "train fish.toml --steps 3 --dry-run"):
        refused = terminal.refuses(command, code="data.changed", says=[str(path), key])
        assert f"lmkit run {run}/recipe.toml" in refused.hint
    path.unlink()
    if name == "tokens/valid.npy":  # not a run without evaluation
        terminal.refuses("train fish.toml --steps 3", code="data.changed", says=[str(path), key])
    terminal(f"run {run}/recipe.toml")
    terminal("train fish.toml --steps 3")


@pytest.mark.parametrize("form", ["", "--by-document"])
def test_evaluate_refuses_a_held_out_file_that_changed(form, run, terminal):
    held_out = run / "tokens/valid.npy"
    content = bytearray(held_out.read_bytes())
    content[-2] ^= 1  # another token of the vocabulary, and the same size
    held_out.write_bytes(content)
    terminal.refuses(f"evaluate {run} {form}", code="data.changed", says=[str(held_out)], hint="--tokens")
    terminal(f"evaluate {run} {form} --tokens {held_out}")  # meant


def test_fault_159_token_files_are_read_only_if_size_or_times_changed(run, terminal, monkeypatch):
    terminal("run fish.toml")
    monkeypatch.setattr("lmkit.storage.atomic.sha256_file", lambda path: pytest.fail(f"{path} was read"))
    terminal("train fish.toml --steps 3 --dry-run")


def test_a_missing_file_of_a_recipe_is_named_with_what_to_do_and_a_pipe_is_no_corpus(run, terminal):
    unmade = "run fish.toml --set run.name=new --set tokenizer.path=runs/quickstart/tokenizer.json"
    terminal.refuses(unmade, code="run.missing_file", says=["tokenizer.path"], hint="lmkit run quickstart")
    os.unlink("corpus.txt")
    refused = terminal.refuses("run fish.toml", code="run.missing_file", says=["corpus.txt"])
    assert "--set 'corpus.train=" in refused.hint
    os.mkfifo("corpus.txt")  # a run reads it again
    terminal.refuses("run fish.toml", code="run.missing_file", says=["corpus.txt", "not a regular file"])


def test_a_tilde_that_the_shell_left_is_the_home_folder(run, terminal, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    terminal("data synth ~/stories.txt --size-mb 0.001")
    terminal("run fish.toml --set run.folder=~/runs")
    terminal("evaluate ~/runs/fish")
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"runs", "stories.txt"}
    assert not Path("~").exists()
