"""What `lmkit profile nsys` takes its words for: a recipe, a recording, or behind `--` a command."""

from pathlib import Path

import pytest

from lmkit.cli.app import run_command_line


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What would have been profiled."""
    calls: list[tuple[str, object]] = []
    monkeypatch.chdir(tmp_path)
    for kind in ("command", "steps", "recording"):
        monkeypatch.setattr(
            f"lmkit.profile.run.run_{kind}", lambda what, *_, kind=kind, **__: calls.append((kind, what))
        )
    return calls


@pytest.mark.parametrize(
    "command", [["false"], ["./job.sh"], ["quickstart"], ["old.sqlite"], ["sh", "-c", "true", "--", "--json"]]
)
def test_words_behind_two_dashes_are_a_command(command, profiled, tmp_path):
    (tmp_path / "job.sh").touch()
    assert run_command_line(["profile", "nsys", "--force", "--", *command]) == 0
    assert profiled == [("command", command)]


@pytest.mark.parametrize(("target", "kind"), [("quickstart", "steps"), ("old.sqlite", "recording")])
def test_a_word_before_them_is_none(target, kind, profiled):
    assert run_command_line(["profile", "nsys", target]) == 0
    assert [call[0] for call in profiled] == [kind]


@pytest.mark.parametrize("words", ["quickstart 5", "quickstart -- true", "sh job.sh"])
def test_more_than_one_word_before_them_is_refused(words, profiled, terminal):
    refusal = terminal.refuses(f"profile nsys {words}", code="profile.too_many_targets")
    assert "lmkit profile nsys -- COMMAND" in refusal.hint
    assert profiled == []
