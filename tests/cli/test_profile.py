"""What `lmkit profile nsys` takes its words for: a recipe, a recording, or behind `--` a command."""

from pathlib import Path

import pytest


@pytest.fixture
def profiled(terminal, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What would have been profiled."""
    calls: list[tuple[str, object]] = []
    for kind in ("command", "steps", "recording"):
        monkeypatch.setattr(
            f"lmkit.profile.run.run_{kind}", lambda what, *_, kind=kind, **__: calls.append((kind, what))
        )
    return calls


@pytest.mark.parametrize(
    "command", [["false"], ["./job.sh"], ["quickstart"], ["old.sqlite"], ["sh", "-c", "true", "--", "--json"]]
)
def test_words_behind_two_dashes_are_a_command(command, profiled, terminal):
    Path("job.sh").touch()
    terminal("profile", "nsys", "--force", "--", *command)
    assert profiled == [("command", command)]


@pytest.mark.parametrize(("target", "kind"), [("quickstart", "steps"), ("old.sqlite", "recording")])
def test_a_word_before_them_is_none(target, kind, profiled, terminal):
    terminal("profile", "nsys", target)
    assert [call[0] for call in profiled] == [kind]


@pytest.mark.parametrize("words", ["quickstart 5", "quickstart -- true", "sh job.sh"])
def test_more_than_one_word_before_them_is_refused(words, profiled, terminal):
    refusal = terminal.refuses(f"profile nsys {words}", code="profile.too_many_targets")
    assert "lmkit profile nsys -- COMMAND" in refusal.hint
    assert profiled == []
