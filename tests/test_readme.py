"""What the README tells people to write has to work, and what it shows has to be what was measured."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from lmkit.bench.attention_targets import rate_table
from lmkit.cli.app import run_command_line
from lmkit.recipe.load import shipped_recipes

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = sorted({text for text in re.findall(r"`([^`\n]+)`", README) if re.match(r"lmkit [a-z]", text)})
NAMES_A_RECIPE = re.compile(
    r"(?:run|train|bench [\w-]+|profile \w+|recipe (?:show|copy)|verify resume) (\w+)(?: |$)"
)


def test_there_is_something_to_test() -> None:
    assert len(PYTHON) >= 2
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize("code", PYTHON)
def test_its_python_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stories.txt").write_text("Once upon a time there was a fox.\n<|endoftext|>\n" * 100)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_and_their_options_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[1:]
    if "--" in words:  # what comes after it belongs to another program
        words = words[: words.index("--")]
    assert run_command_line([*words, "--help"]) == 0, capsys.readouterr().err
    named = NAMES_A_RECIPE.match(" ".join(words))
    assert named is None or named[1] in shipped_recipes()


def test_its_lines_fit_a_window() -> None:
    assert [line for line in README.splitlines() if len(line) > 120] == []


def test_the_attention_tables_show_the_committed_rows() -> None:
    lines = (ROOT / "artifacts/h200/attention/acceptance.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for direction in ("forward", "backward"):
        measured = {
            tuple(cell.strip() for cell in line.strip("|").split("|")[1:])
            for line in rate_table(rows, direction).splitlines()
        }
        header = f"| {direction} | 1k | 2k | 4k | 8k | 16k |"
        shown = README[README.index(header) :].partition("\n\n")[0].splitlines()[2:]
        assert len(shown) in (4, 8)
        for line in shown:
            assert tuple(cell.strip() for cell in line.strip("|").split("|")[1:]) in measured, line


def _documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "tests/README.md", *sorted((ROOT / "artifacts").glob("*/**/*.md"))]


@pytest.mark.parametrize("document", _documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (document.parent / target.partition("#")[0]).exists(), target
