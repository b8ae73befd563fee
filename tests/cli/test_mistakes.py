"""Mistakes with recipes, paths and options: one line, one hint, and no file of the user's is lost."""

import shutil
from pathlib import Path

import pytest

from lmkit.cli.app import run_command_line
from lmkit.errors import limit_reached


def test_mistakes_in_a_recipe_reach_the_terminal_as_one_line(terminal, tmp_path):
    mistakes = {b"[train\n": "recipe.syntax", b"\xff": "recipe.unreadable"}
    mistakes[b"[model]\nx = 1\n"] = "recipe.unknown_key"
    for content, code in mistakes.items():
        Path("wrong.toml").write_bytes(content)
        for command in ("train", "run", "verify --resume", "bench ddp", "profile kineto"):
            terminal.refuses(f"{command} wrong.toml", code=code, says=["wrong.toml"])
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.toml"]


def test_a_forgotten_output_does_not_replace_the_corpus(terminal):
    Path("text.txt").write_text("one fish two fish")
    terminal.refuses("tokenizer train text.txt text.txt --force", code="tokenizer.output_name")
    assert Path("text.txt").read_text() == "one fish two fish"


@pytest.mark.parametrize("command", ["bench attention bench_attention_cpu", "profile kineto quickstart"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_made(command, terminal):
    Path("file").touch()
    Path("artifacts").touch()  # in the way of the default folder
    for output, obstacle in ((" --output file", "file"), (" --output file/below", "file"), ("", "artifacts")):
        terminal.refuses(command + output, code="output.unwritable", says=[obstacle], hint="--output")
    assert {path.name for path in Path().iterdir()} == {"file", "artifacts"}


@pytest.mark.parametrize(
    "name",
    [
        *("profile_report.md", "profile.nsys-rep", "profile.sqlite", "kineto_trace.json.gz"),
        "memory_peaks.csv",
    ],
)
def test_a_profile_replaces_no_results_by_accident(name, terminal):
    Path(name).touch()
    terminal.refuses("profile nsys --output . -- sh -c true", code="output.exists", says=[name])
    Path("environment.json").write_text('{"lmkit": "0.2.0", "packages": {}}')  # as profiles write it
    for engine in ("nsys", "kineto", "memory"):
        terminal.refuses(f"profile {engine} no-such-recipe --output .", code="output.exists", hint="--force")
        terminal.refuses(f"profile {engine} no-such-recipe --output . --force", code="recipe.not_found")


@pytest.fixture(scope="module")
def zoo(run_in, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds of paths that a user may name instead of a file of lmkit's."""
    folder = tmp_path_factory.mktemp("zoo")
    (folder / "text.txt").write_text("one fish two fish red fish blue fish\n" * 50)
    commands = (
        "tokenizer train text.txt good.json --vocab-size 260",
        "data encode text.txt good.npy --tokenizer good.json",  # its description would replace the tokenizer
        "data encode text.txt whole.npy --tokenizer good.json",
    )
    assert run_in(folder, *commands) == [0, 2, 0]
    for suffix in ("", ".npy", ".json", ".toml", ".jsonl"):
        (folder / f"empty{suffix}").touch()
        (folder / f"folder{suffix}").mkdir()
        (folder / f"noise{suffix}").write_bytes(bytes(range(256)) * 9)
        (folder / f"dangling{suffix}").symlink_to("nothing")
        (folder / f"circular{suffix}").symlink_to(f"circular{suffix}")
    (folder / "lines.jsonl").write_bytes(b"[1]\n")
    descriptions = {"list": "[1]", "deep": "[" * 50_000, "strange": '{"a": 1}', "words": '"x"'}
    for name in ("alone", *descriptions):
        shutil.copy(folder / "whole.npy", folder / f"{name}.npy")
        if name in descriptions:
            (folder / f"{name}.json").write_text(descriptions[name])
    return folder


# Python's words, which are not for users.
FOREIGN = ("Traceback", "codec", "__init__", "Errno", "NoneType", "argument after", "unexpected keyword")


@pytest.mark.parametrize(
    "words",
    [
        *("data inspect PATH", "tokenizer inspect PATH", "tokenizer export PATH gpt2", "compare PATH PATH"),
        *("verify PATH", "generate PATH", "evaluate PATH", "train PATH", "recipe validate PATH"),
        "tokenizer train PATH out.json --vocab-size 260",
        "data encode text.txt out.npy --tokenizer PATH",
        "data encode PATH out.npy --tokenizer good.json",
    ],
)
def test_every_wrong_kind_of_path_is_one_error_and_one_hint(words, zoo, monkeypatch, capsys):
    monkeypatch.chdir(zoo)
    command = words.split()
    names = [path.name for path in zoo.iterdir()]
    before = sorted(zoo.iterdir())
    seen = set()
    for name in [*names, "missing", "missing.npy", "missing.json", "", ".", "/dev/null"]:
        code = run_command_line([name if part == "PATH" else part for part in command])
        out, err = capsys.readouterr()
        for wording in FOREIGN:
            assert wording not in out + err, (name, out + err)
        seen.add(code)
        if code == 0:
            for made in ("gpt2", "out.npy", "out.json", "out.documents", "out.overlap"):
                path = zoo / made
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            continue
        if command[0] in ("verify", "compare") and code == 1 and out:  # a verdict
            assert err == ""
            continue
        *warnings, error, hint = err.splitlines()
        assert error.startswith("error"), (name, err)
        assert hint.startswith("hint: "), (name, err)
        assert all(line.startswith("warning: ") for line in warnings), (name, err)
        assert code in (1, 2)
        assert out == "", name
        assert sorted(zoo.iterdir()) == before, name
    assert {1, 2} & seen


@pytest.mark.parametrize(
    ("raised", "size"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity", "20.00 GiB"),
        ("can't start new thread", ""),
        ("the sky falls", None),
    ],
)
def test_out_of_memory_says_how_much_was_asked_for(raised, size):
    error = limit_reached(RuntimeError(raised))
    assert (error is None) == (size is None)
    assert error is None or (error.code == "memory.exhausted" and size in error.message)
