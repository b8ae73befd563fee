"""The command line as a user meets it: real subprocesses, exit codes, one line of error and one of hint."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmkit.cli.app import run_command_line
from lmkit.tokenizer import Tokenizer

Lmkit = Callable[..., "subprocess.CompletedProcess[str]"]

HEAVY = ("torch", "numpy", "triton", "matplotlib", "wandb", "pydantic", "rich")

COMMANDS = (
    (),
    ("run",),
    ("train",),
    ("evaluate",),
    ("generate",),
    ("env",),
    ("compare",),
    ("report",),
    ("verify",),
    ("bench",),
    ("bench", "attention"),
    ("bench", "model"),
    ("bench", "ddp"),
    ("bench", "lm-matrix"),
    ("bench", "tokenizer"),
    ("bench", "all-reduce"),
    ("bench", "optimizer"),
    ("profile",),
    ("profile", "nsys"),
    ("profile", "kineto"),
    ("profile", "memory"),
    ("data",),
    ("data", "synth"),
    ("data", "download"),
    ("data", "encode"),
    ("data", "inspect"),
    ("tokenizer",),
    ("tokenizer", "train"),
    ("tokenizer", "encode"),
    ("tokenizer", "decode"),
    ("tokenizer", "inspect"),
    ("tokenizer", "import"),
    ("tokenizer", "export"),
    ("recipe",),
    ("recipe", "list"),
    ("recipe", "show"),
    ("recipe", "validate"),
    ("recipe", "copy"),
)


def is_one_error(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, one line of error that holds the words, one line of hint, nothing on stdout."""
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 2, result.stderr
    assert lines[0].startswith("error")
    assert lines[1].startswith("hint: ")
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom lmkit.cli.app import run_command_line\n"
        f"code = run_command_line([*{command!r}, '--help'])\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(heavy, file=sys.stderr)\nsys.exit(code)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert result.stderr == "[]\n"
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "lmkit" in result.stdout.splitlines()[-1] or "lmkit" in result.stdout.splitlines()[-2]


@pytest.mark.parametrize("group", [(), ("data",), ("tokenizer",), ("bench",), ("profile",), ("recipe",)])
def test_what_a_command_does_is_said_in_full_on_80_columns(
    group: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command_line([*group, "--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:\n")[2]
    assert commands
    assert "..." not in commands


def test_every_command_is_in_the_list_above() -> None:
    import typer

    from lmkit.cli.app import app

    def walk(command: object, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        children = getattr(command, "commands", {})
        return [path, *(found for name, child in children.items() for found in walk(child, (*path, name)))]

    assert set(walk(typer.main.get_command(app), ())) == set(COMMANDS)


def test_fault_01_to_06_reach_the_terminal_as_one_line(lmkit: Lmkit, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text('[model]\ncontxt_length = 128\n[train]\nsteps = true\nbatch_size = "8"\n')
    is_one_error(
        lmkit("run", bad), str(bad), "did you mean context_length?", "train.steps", "train.batch_size"
    )


def test_fault_08_missing_table(lmkit: Lmkit, tmp_path: Path) -> None:
    recipe = tmp_path / "empty.toml"
    recipe.write_text('[run]\nname = "empty"\n')
    is_one_error(lmkit("train", recipe), "[model]")
    is_one_error(lmkit("run", recipe), "[corpus]")
    assert list(tmp_path.iterdir()) == [recipe]


def test_fault_09_missing_recipe_or_a_folder(lmkit: Lmkit, tmp_path: Path) -> None:
    is_one_error(lmkit("train", "nowhere.toml"), "nowhere.toml")
    is_one_error(lmkit("train", tmp_path), "is a folder")


def test_fault_10_wrong_override(lmkit: Lmkit) -> None:
    is_one_error(lmkit("train", "quickstart", "--set", "train.steps"), "table.key=value")
    is_one_error(lmkit("train", "quickstart", "--set", "train.stepz=1"), "did you mean steps?")


def test_fault_11_shape_is_refused_before_torch_loads(lmkit: Lmkit, tmp_path: Path) -> None:
    recipe = tmp_path / "heads.toml"
    recipe.write_text("[model]\nd_model = 100\nnum_heads = 3\n[train]\nsteps = 1\n")
    # A torch that cannot be imported stands in for "before torch is imported"; `-m` puts the current folder first.
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    is_one_error(lmkit("train", recipe), "d_model 100", "num_heads 3")
    assert "torch was imported" in lmkit("env").stderr  # it would have been noticed


def test_fault_12_unknown_command_with_suggestion(lmkit: Lmkit) -> None:
    result = lmkit("trian")
    assert result.returncode == 2
    assert "Did you mean 'train'?" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "lmkit recipe show quickstart",
        "lmkit run --help",
        "lmkit recipe list",
        "lmkit env --json",
        "lmkit --version",
    ],
)
def test_fault_13_stdout_closed_early(command: str, tmp_path: Path) -> None:
    # The reader is gone before the first byte: every write fails.
    arguments = [sys.executable, "-m", *command.split()]
    reader, writer = os.pipe()
    os.close(reader)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    process = subprocess.run(
        arguments,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    os.close(writer)
    assert process.stderr == ""
    assert process.returncode == 1


def test_fault_14_no_escape_codes_without_a_terminal(lmkit: Lmkit) -> None:
    for arguments in (("--help",), ("recipe", "show", "quickstart"), ("trian",), ("train", "nowhere")):
        result = lmkit(*arguments)
        assert "\x1b" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("setting", "colourful"), [({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({}, True)]
)
def test_fault_14_a_terminal_shows_no_escape_codes_where_they_are_not_wanted(
    setting: dict[str, str], colourful: bool, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    command = [sys.executable, "-m", "lmkit", "data", "synth", "stories.txt", "--size-mb", "3"]
    environment |= {"TERM": "xterm", **setting}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b"".join(iter(lambda: _read(ours), b""))
    os.close(ours)
    assert process.returncode == 0
    assert b"wrote stories.txt" in shown
    assert (b"\x1b" in shown) == colourful


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux's way to say that nobody writes any more
        return b""


def test_fault_15_json_is_one_object(lmkit: Lmkit, tmp_path: Path) -> None:
    result = lmkit("recipe", "validate", "quickstart", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["tables"]
    assert json.loads(lmkit("env", "--json").stdout)["versions"]["lmkit"]
    (tmp_path / "text.txt").write_text("no document ends here " * 50)
    warned = lmkit("tokenizer", "train", "text.txt", "t.json", "--vocab-size", "260", "--json")
    assert json.loads(warned.stdout)["vocab_size"] == 260
    assert "warning: no special token" in warned.stderr


def test_fault_16_ctrl_c_is_130(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmkit", "data", "synth", "big.txt", "--size-mb", "5000"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while not any(path.stat().st_size for path in tmp_path.glob("*.partial")):  # the work has begun
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("train quickstart --set", "lmkit train"),
        ("--debug data synth train --seed", "lmkit data synth"),
        ("bench model x --lengths", "lmkit bench model"),
    ],
)
def test_an_option_without_its_value_names_the_command(
    arguments: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(arguments.split()) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error[command.wrong_arguments]: {command}: ")
    assert arguments.split()[-1] in error
    assert hint == f"hint: more with {command} --help"


@pytest.mark.parametrize(
    ("module", "then"), [("typer", "raise"), ("torch", "print('went on without what it wanted')")]
)
def test_fault_16_ctrl_c_during_an_import_is_130_too(
    module: str, then: str, lmkit: Lmkit, tmp_path: Path
) -> None:
    interrupt = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()\n"
    # `-m` puts the current folder first.
    (tmp_path / f"{module}.py").write_text(f"{interrupt}except KeyboardInterrupt:\n    {then}\n")
    result = lmkit("env")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "locale", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}]
)
def test_what_a_terminal_s_encoding_lacks_is_escaped(
    locale: dict[str, str], lmkit: Lmkit, tmp_path: Path
) -> None:
    (tmp_path / "r.toml").write_text('[corpus]\nfield = "né"\n', encoding="utf-8")
    result = lmkit("recipe", "show", "r.toml", **locale)
    assert (result.returncode, result.stderr) == (0, "")
    assert r'field = "n\xe9"' in result.stdout
    refused = lmkit("recipe", "show", "né.toml", **locale)
    assert refused.returncode == 2
    assert "no such recipe" in refused.stderr


def test_debug_shows_the_traceback_wherever_it_stands(lmkit: Lmkit) -> None:
    for arguments in (("--debug", "train", "nowhere"), ("train", "nowhere", "--debug")):
        assert "Traceback" in lmkit(*arguments).stderr


def test_print_recipe_is_a_recipe(lmkit: Lmkit, tmp_path: Path) -> None:
    result = lmkit("run", "quickstart", "--set", "train.steps=7", "--print-recipe")
    assert result.returncode == 0
    (tmp_path / "printed.toml").write_text(result.stdout)
    assert "steps = 7" in lmkit("recipe", "show", "printed.toml").stdout


def test_copy_refuses_to_overwrite(lmkit: Lmkit, tmp_path: Path) -> None:
    assert lmkit("recipe", "copy", "quickstart", "mine.toml").returncode == 0
    before = (tmp_path / "mine.toml").read_bytes()
    is_one_error(lmkit("recipe", "copy", "quickstart", "mine.toml"), "exists already")
    assert (tmp_path / "mine.toml").read_bytes() == before
    assert lmkit("recipe", "copy", "quickstart", "mine.toml", "--force").returncode == 0


def test_running_the_package_as_a_folder_shadows_nothing(tmp_path: Path) -> None:
    """`python path/to/lmkit` is what the literal `torchrun lmkit` runs."""
    import lmkit

    folder = Path(lmkit.__file__).parent
    result = subprocess.run(
        [sys.executable, str(folder), "--version"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert result.stdout.startswith("lmkit ")


@pytest.mark.parametrize(("on_terminal", "printed"), [(True, b"ab\n"), (False, b"ab")])
def test_decoded_text_ends_its_line_on_a_terminal_alone(
    on_terminal: bool, printed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("ab ab ab")
    tokenizer = str(tmp_path / "tokenizer.json")
    training = ["tokenizer", "train", str(tmp_path / "text.txt"), tokenizer, "--vocab-size", "257"]
    assert run_command_line(training) == 0
    raw = io.BytesIO()  # without merges, ids are bytes
    stream = io.TextIOWrapper(raw)
    monkeypatch.setattr(stream, "isatty", lambda: on_terminal)
    monkeypatch.setattr("sys.stdout", stream)
    assert run_command_line(["tokenizer", "decode", tokenizer, "97", "98"]) == 0
    assert raw.getvalue() == printed


def test_ids_and_text_go_out_as_json_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "bytes.json")
    Tokenizer(vocab={i: bytes([i]) for i in range(256)}, merges=[]).save(path)
    text = "a\u00e9\n" * 1000  # more ids than a line has where they are printed
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert run_command_line(["tokenizer", "encode", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ids": list(text.encode())}
    assert run_command_line(["tokenizer", "encode", path, "ab", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ids": [97, 98]}
    assert run_command_line(["tokenizer", "decode", path, "97", "255", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"text": "a\ufffd\n"}


def test_ids_that_are_no_tokens_are_not_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gaps = Tokenizer(vocab={i: bytes([i]) for i in range(256)} | {900: b"the end"}, merges=[])
    gaps.save(tmp_path / "gaps.json")
    for number in ("256", "899", "901"):
        assert run_command_line(["tokenizer", "decode", str(tmp_path / "gaps.json"), number]) == 2
        assert f"'{number}' is not a token id of" in capsys.readouterr().err
