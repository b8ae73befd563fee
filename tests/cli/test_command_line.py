"""The command line as a user meets it: help, exit codes, streams, signals."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmkit.cli.app import root_command, run_command_line
from lmkit.tokenizer import Tokenizer

HEAVY = ("torch", "numpy", "triton", "matplotlib", "wandb", "pydantic", "rich.console")


def every_command() -> list[tuple[str, ...]]:
    def walk(command: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        children = {name: command.get_command(None, name) for name in getattr(command, "commands", ())}
        return [path, *(found for name, child in children.items() for found in walk(child, (*path, name)))]

    return walk(root_command(), ())


def test_help_imports_nothing_heavy():
    commands = every_command()
    code = (
        "import sys\nfrom lmkit.cli.app import run_command_line\n"
        f"codes = [run_command_line([*command, '--help']) for command in {commands!r}]\n"
        f"print(set(codes), [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == "{0} []\n"


def test_unknown_command_with_suggestion(terminal):
    assert "train" in terminal.refuses("trian", code="command.wrong_arguments").error


@pytest.mark.parametrize("command", ["run --help", "--version"])
def test_stdout_closed_early(command, tmp_path):
    # The reader is gone before the first byte: every write fails.
    reader, writer = os.pipe()
    os.close(reader)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-m", "lmkit", *command.split()]
    options = {"stdout": writer, "stderr": subprocess.PIPE, "cwd": tmp_path, "env": environment}
    process = subprocess.run(words, **options, check=False)
    os.close(writer)
    assert (process.stderr, process.returncode) == (b"", 1)


def test_json_is_one_object_and_warnings_go_to_stderr(terminal, tmp_path):
    assert json.loads(terminal("recipe validate quickstart --json"))["tables"]
    assert json.loads(terminal("env --json"))["versions"]["lmkit"]
    (tmp_path / "text.txt").write_text("no document ends here " * 50)
    command = "tokenizer train text.txt t.json --vocab-size 260 --json"
    assert json.loads(terminal(command))["vocab_size"] == 260
    assert "warning: " in terminal.err


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "")]
)
def test_faults_16_129_a_stopped_command_leaves_nothing(number, code, said, tmp_path):
    command = [sys.executable, "-m", "lmkit", "data", "synth", "big.txt", "--size-mb", "5000"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while not any(path.stat().st_size for path in tmp_path.glob("*.lmkit-partial")):  # the work has begun
            assert process.poll() is None
        process.send_signal(number)
        _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (code, said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "then"),
    [
        ("typer", "raise"),
        ("torch", "print('went on without what it wanted')"),
        ("pydantic", "exec('raise')"),  # as inside the exec() that makes a dataclass
    ],
)
def test_fault_16_ctrl_c_during_an_import_is_130_too(module, then, lmkit, tmp_path):
    interrupt = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()\n"
    # `-m` puts the current folder first.
    (tmp_path / f"{module}.py").write_text(f"{interrupt}except KeyboardInterrupt:\n    {then}\n")
    result = lmkit("env")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_a_character_that_the_encoding_lacks_is_escaped(lmkit, tmp_path):
    locale = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    (tmp_path / "r.toml").write_text('[generate]\nprompts = ["né"]\n', encoding="utf-8")
    result = lmkit("recipe", "show", "r.toml", **locale)
    assert (result.returncode, result.stderr) == (0, "")
    assert r'prompts = ["n\xe9"]' in result.stdout
    assert r"n\xe9.toml" in lmkit("recipe", "show", "né.toml", **locale).stderr


def test_debug_shows_the_traceback(lmkit):
    assert "Traceback" in lmkit("train", "nowhere", "--debug").stderr


def test_running_the_package_as_a_folder_shadows_nothing(tmp_path):
    """`python path/to/lmkit` is what the literal `torchrun lmkit` runs."""
    import lmkit

    words = [sys.executable, str(Path(lmkit.__file__).parent), "--version"]
    assert subprocess.run(words, capture_output=True, cwd=tmp_path, check=True).stdout.startswith(b"lmkit ")


@pytest.mark.parametrize(
    ("on_terminal", "printed"),
    [(True, "a\tb\ufffd[2J\ufffd\ufffd\n".encode()), (False, b"a\tb\x1b[2J\xc2\x9b\xff")],
)
def test_decoded_text_drives_no_terminal_and_ends_its_line_there(on_terminal, printed, tmp_path, monkeypatch):
    path = tmp_path / "bytes.json"
    Tokenizer(vocab={i: bytes([i]) for i in range(256)}, merges=[]).save(path)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: on_terminal)
    monkeypatch.setattr("sys.stdout", stream)
    ids = map(str, b"a\tb\x1b[2J\xc2\x9b\xff")
    assert run_command_line(["tokenizer", "decode", str(path), *ids]) == 0
    assert raw.getvalue() == printed
