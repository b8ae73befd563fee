"""Results on stdout."""

from __future__ import annotations

import io

import pytest

from lmkit.cli.render import write


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
