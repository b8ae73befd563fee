"""Results on stdout."""

from __future__ import annotations

import io

import pytest

from lmkit.cli.recipe import RecipeIsValid
from lmkit.cli.render import show, write


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [
        ({}, True),
        ({"RANK": "1"}, True),  # somebody's leftover, not torchrun
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, True),
        ({"RANK": "1", "TORCHELASTIC_RUN_ID": "none"}, False),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_of_torchrun_s_processes_one_speaks(
    environment: dict[str, str],
    speaks: bool,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    show(RecipeIsValid("mine.toml", ("run",)), as_json=as_json)
    assert ("mine.toml" in capsys.readouterr().out) == speaks


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdout", "shown"),
    [
        (Terminal(), "a\tb\r\nc\ufffd[2J\ufffd]0;title\ufffd\ufffd d\u3000é\U0001f98a\n"),
        (io.StringIO(), "a\tb\r\nc\x1b[2J\x1b]0;title\x07\x9b d\u3000é\U0001f98a\n"),
    ],
    ids=["terminal", "file"],
)
def test_text_that_a_model_wrote_cannot_drive_a_terminal(
    stdout: io.StringIO, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", stdout)
    write("a\tb\r\nc\x1b[2J\x1b]0;title\x07\x9b d\u3000é\U0001f98a\n")
    assert stdout.getvalue() == shown
