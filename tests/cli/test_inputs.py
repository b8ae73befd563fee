"""What is read: regular files, texts from pipes, and token files as they were made."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkit.recipe.load import shipped_recipes

CHECKPOINT = "checkpoints/step-00000002"


@pytest.fixture(autouse=True)
def waiting_fails() -> Iterator[None]:
    """A command that waits for the writer of a pipe fails its test."""

    def fail(*_: object) -> None:
        pytest.fail("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "command", "code"),
    [
        ("recipe.toml", "run runs/fish/recipe.toml", "recipe.unreadable"),
        ("metrics.jsonl", "train fish.toml --steps 3", "train.io"),
        ("tokenizer.json", "train fish.toml --steps 3", "tokenizer.unreadable"),
        ("tokens/train.npy", "data inspect runs/fish/tokens/train.npy", "file.failed"),
        (f"{CHECKPOINT}/model.safetensors", "export runs/fish exported", "checkpoint.none_good"),
    ],
)
def test_a_pipe_in_a_run_folder_is_named(name, command, code, run, terminal):
    put_pipe(run / name)
    refused = terminal.refuses(
        command, code=code, exit_code=2 if code.endswith("unreadable") and "report." not in code else 1
    )
    assert str(run / name) in refused.error


def test_a_pipe_is_no_corpus_of_a_run_which_reads_it_again(run, terminal):
    put_pipe(Path("corpus.txt"))
    terminal.refuses("run fish.toml", code="run.missing_file", says=["corpus.txt", "not a regular file"])


def handed_over(content: bytes) -> str:
    """Return the name under which a shell would hand over the output of a command: `<(...)`."""
    reading, writing = os.pipe()
    os.write(writing, content)  # less than a pipe holds
    os.close(writing)
    return f"/dev/fd/{reading}"


def test_what_the_shell_hands_over_is_read(terminal):
    recipe = handed_over(shipped_recipes()["quickstart"].read_bytes())
    assert "valid" in terminal(f"recipe validate {recipe}")
    terminal(f"tokenizer train {handed_over(b'one fish two fish')} made.json --vocab-size 260")
    assert "vocabulary 260" in terminal(f"tokenizer inspect {handed_over(Path('made.json').read_bytes())}")


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


@pytest.mark.parametrize("name", ["tokens/train.npy", "tokens/valid.npy", "tokens/valid.json"])
@pytest.mark.parametrize("begin", ["resumed", "from scratch"])
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
    refused = terminal.refuses(f"evaluate {run} {form}", code="data.changed", says=[str(held_out)])
    assert "--tokens" in refused.hint
    terminal(f"evaluate {run} {form} --tokens {held_out}")  # meant


def test_fault_159_token_files_are_read_only_if_size_or_times_changed(run, terminal, monkeypatch):
    terminal("run fish.toml")
    monkeypatch.setattr("lmkit.storage.atomic.sha256_file", lambda path: pytest.fail(f"{path} was read"))
    terminal("train fish.toml --steps 3 --dry-run")


def test_fault_159_touched_and_copied_token_files_are_as_they_were(run, terminal):
    os.utime(run / "tokens/train.npy", (1, 1))
    terminal("train fish.toml --steps 3")
    shutil.move(run, "runs/moved")
    terminal("train runs/moved/recipe.toml --steps 4")


def test_fault_159_other_tokens_can_be_named(run, terminal):
    for suffix in ("npy", "json"):
        shutil.copy(run / f"tokens/train.{suffix}", f"mine.{suffix}")
    content = bytearray(Path("mine.npy").read_bytes())
    content[-2] ^= 1
    Path("mine.npy").write_bytes(content)
    terminal("train fish.toml --steps 3 --set data.train=mine.npy")


@pytest.mark.parametrize("key", ["data.train", "data.valid"])
@pytest.mark.parametrize("value", ['""', '"/"'])
def test_a_folder_without_a_name_is_no_token_file(key, value, run, terminal):
    for command in ("train", "train --dry-run"):
        terminal.refuses(f"{command} fish.toml --set {key}={value}", code="tokens.missing", says=["folder"])


def test_a_folder_without_a_name_is_no_tokenizer(run, terminal):
    for command in ("run", "run --dry-run"):
        line = f"{command} fish.toml --set run.name=new --set tokenizer.path=/"
        terminal.refuses(line, code="run.missing_file", says=["tokenizer.path"])


def test_a_missing_file_of_a_recipe_is_named_with_what_to_do(run, terminal):
    unmade = "run fish.toml --set run.name=new --set tokenizer.path=runs/quickstart/tokenizer.json"
    refused = terminal.refuses(unmade, code="run.missing_file", says=["tokenizer.path"])
    assert "lmkit run quickstart" in refused.hint
    os.unlink("corpus.txt")
    refused = terminal.refuses("run fish.toml", code="run.missing_file", says=["corpus.txt"])
    assert "--set 'corpus.train=" in refused.hint


LOOPS = (
    "data encode loop.txt tokens.npy --tokenizer runs/fish/tokenizer.json",
    "data encode corpus.txt loop.npy --tokenizer runs/fish/tokenizer.json",
    "data encode corpus.txt loop/tokens.npy --tokenizer runs/fish/tokenizer.json",
    "data encode corpus.txt tokens.npy --tokenizer loop.json",
    "data synth loop.txt",
    "data synth loop/stories.txt",
    "data download tinystories --folder loop",
    "tokenizer train loop.txt new.json",
    "tokenizer train corpus.txt loop.json",
    "tokenizer inspect loop.json",
    "tokenizer inspect runs/fish/tokenizer.json --text loop.txt",
    "tokenizer export runs/fish/tokenizer.json loop",
    "recipe copy quickstart loop",
    "run loop",
    "run fish.toml --plugin loop.txt --dry-run",
    "run fish.toml --set run.folder=loop",
    "run fish.toml --set run.folder=. --set run.name=loop",
    "train fish.toml --set run.folder=loop --set data.train=runs/fish/tokens/train.npy",
    "run fish.toml --set run.name=new --set tokenizer.path=loop.json",
    "run fish.toml --set run.name=new --set train.init_from=loop",
    "train fish.toml --set data.train=loop.npy",
    "generate loop",
    "generate checkpoints",
    "generate runs/fish --tokenizer loop.json",
    "evaluate runs/fish --text loop.txt",
    "export runs/fish loop",
    "export loop new",
    "import loop new",
    "verify loop",
    "compare loop runs/fish",
    "report loop --html",
    "report runs/fish --html --beside loop",
    "report runs/fish --html --output loop",
    "rerun runs/fish --output loop",
    "bench all-reduce --output loop",
    "profile kineto fish.toml --output loop",
)


@pytest.mark.parametrize("command", LOOPS)
def test_a_link_to_itself_is_a_wrong_path(command, run, terminal):
    links = [Path(f"{name}") for name in ("loop", "loop.txt", "loop.npy", "loop.json", "checkpoints")]
    for link in links:
        link.symlink_to(link)
    before = {str(path) for path in Path().rglob("*")}
    terminal.refuses(command, code=None)
    assert {str(path) for path in Path().rglob("*")} == before
    assert all(link.is_symlink() for link in links)


def test_a_tilde_that_the_shell_left_is_the_home_folder(run, terminal, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    terminal("data synth ~/stories.txt --size-mb 0.001")
    terminal("run fish.toml --set run.folder=~/runs")
    terminal("evaluate ~/runs/fish")
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"runs", "stories.txt"}
    assert not Path("~").exists()
