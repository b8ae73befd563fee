"""Commands, code and links of the documents work."""

import re
import shlex
from pathlib import Path

import pytest

from lmkit.cli.app import run_command_line
from lmkit.recipe.load import shipped_recipes

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = sorted({text for text in re.findall(r"`([^`\n]+)`", README) if re.match(r"lmkit [a-z]", text)})
NAMES_A_RECIPE = re.compile(r"(?:run|train|bench [\w-]+|profile \w+|recipe (?:show|copy)) (\w+)(?: |$)")
DOCUMENTS = [*ROOT.glob("*.md"), ROOT / "tests/README.md", *ROOT.glob("lmkit/*.md")]
DOCUMENTS += (ROOT / "artifacts").rglob("*.md")


def links_of(document: Path) -> list[Path]:
    """Return the files that a document links to or shows."""
    text = re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [
        (document.parent / target.partition("#")[0]).resolve()
        for target in targets
        if not target.startswith(("http://", "https://", "#"))
    ]


@pytest.mark.parametrize("code", PYTHON)
def test_its_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("stories.txt").write_text("Once upon a time there was a fox.\n<|endoftext|>\n" * 100)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_and_their_options_exist(command, capsys):
    words = shlex.split(command)[1:]
    if "--" in words:  # the words after it belong to another program
        words = words[: words.index("--")]
    assert run_command_line([*words, "--help"]) == 0, capsys.readouterr().err
    named = NAMES_A_RECIPE.match(" ".join(words))
    assert named is None or named[1] in shipped_recipes()


def test_ci_runs_the_test_command_of_the_readme():
    (command,) = re.findall(r"<!-- test command -->\n```sh\n(.+)\n```", README)
    assert command in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document):
    for target in links_of(document):
        assert target.exists(), target


def test_every_document_and_picture_of_the_results_is_reached_from_their_readme():
    results = ROOT / "artifacts"
    reached: set[Path] = set()
    following = [results / "README.md"]
    while following:
        path = following.pop()
        if path not in reached:
            reached.add(path)
            following += links_of(path) if path.suffix == ".md" else []
    machines = [
        path for path in results.iterdir() if path.name not in ("runs", "benches", "profiles", "data")
    ]
    shown = {path for machine in machines for kind in ("*.md", "*.png") for path in machine.rglob(kind)}
    assert len(shown) > 50
    assert sorted(shown - reached) == []


def test_the_architecture_names_files_and_functions_that_exist():
    text = (ROOT / "lmkit/README.md").read_text("utf-8")
    for file in re.findall(r"`([\w/]+\.(?:py|md))`", text):
        assert (ROOT / "lmkit" / file).exists(), file
    named = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", text)  # such as: `training/step.py` `Step`
    assert len(named) > 15
    for file, names in named:
        source = (ROOT / "lmkit" / file).read_text("utf-8")
        for name in names.split("."):
            assert re.search(rf"\b(?:def|class) {name}\b", source), (file, name)
