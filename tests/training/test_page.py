"""`lmkit report RUN --html`: one page that loads nothing."""

import base64
import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from raising import raises

from lmkit.errors import UsageError
from lmkit.training.results import write_page

RECIPE = '[run]\nname = "{name}"\n[train]\nsteps = {steps}\n'
PNG = b"\x89PNG\r\n\x1a\n"
MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(place: str, *, steps: int = 20, text: str = "") -> Path:
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text(RECIPE.format(name=folder.name, steps=steps))
        (folder / "environment.json").write_text(json.dumps({"lmkit": "9.9"}))
        judged = {"loss": 1.5, "perplexity": 4.48, "bits_per_byte": 0.8123, "bytes_per_token": 2.7}
        records = [{"kind": "valid", "step": 0, "loss": 5.0, "perplexity": 148.4, "bits_per_byte": None}]
        for step in range(10, steps + 1, 10):
            speed = {"tokens": 64 * step, "seconds": 6.0 * step, "tokens_per_second": 99.4}
            records.append({"kind": "train", "step": step, "loss": 1 + 10 / step, **speed})
        records.append({"kind": "final", "step": steps, **judged})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if text:
            (folder / "stories.txt").write_text(text)
        return folder

    return make


def parts(text: str, tag: str) -> list[str]:
    """The text inside of each such tag."""
    return [unescape(found) for found in re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", text, re.DOTALL)]


def test_a_page_holds_figures_curves_texts_recipe_and_environment(make_run):
    folder = make_run("one", text="A <b>bold</b> story & more")
    page = write_page(folder)
    assert (page.path, page.runs) == (str(folder / "report.html"), ("one",))
    text = Path(page.path).read_text()
    facts = {"run": "one", "steps": "20", "tokens": "1,280", "minutes": "2.0", "tokens/s": "99"}
    facts |= {"held-out loss": "1.5000", "perplexity": "4.48", "bits per byte": "0.8123"}
    assert dict(zip(parts(text, "th"), parts(text, "td"), strict=True)) == facts
    story, recipe, environment = parts(text, "pre")
    assert story == "A <b>bold</b> story & more"
    assert recipe == (folder / "recipe.toml").read_text()
    assert json.loads(environment) == {"lmkit": "9.9"}
    pictures = re.findall('src="data:image/png;base64,([^"]*)"', text)
    assert len({*pictures}) == 3
    assert all(base64.b64decode(picture).startswith(PNG) for picture in pictures)


def test_it_loads_nothing_and_runs_nothing(make_run):
    folder = make_run("<img src=x onerror=alert(1)>", text="<script>alert(1)</script>")
    text = Path(write_page(folder).path).read_text()
    tags = re.findall(r"<[^>]*>", text)
    assert not [tag for tag in tags if re.match(r"<script|.*\son\w+=", tag)]
    sources = [source for tag in tags for source in re.findall(r'\s(?:src|srcset|href)="([^"]*)"', tag)]
    assert sources
    assert all(source.startswith("data:") for source in sources)
    assert not re.search(r"url\(|@import", text)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert f'http-equiv="Content-Security-Policy" content="{policy}"' in text


def test_runs_beside_one_another(make_run, tmp_path):
    """Folders of one name are told apart; what differs between the recipes is named."""
    first, second = make_run("a/run"), make_run("b/run", steps=40)
    page = write_page(first, [second], output=tmp_path / "both.html")
    assert (page.path, page.runs) == (str(tmp_path / "both.html"), (str(first), str(second)))
    text = (tmp_path / "both.html").read_text()
    assert parts(text, "td")[1::8] == ["20", "40"]
    assert "train.steps: 20 -> 40" in parts(text, "pre")
    assert not (first / "report.html").exists()


def test_what_is_no_run_is_refused(make_run, tmp_path):
    (tmp_path / "empty").mkdir()
    with raises(UsageError, "report.no_run", "empty"):
        write_page(tmp_path / "empty")


def test_fault_138_a_page_replaces_a_named_file_only_by_force(make_run, tmp_path, terminal):
    run, notes = make_run("run"), tmp_path / "notes.html"
    terminal("report", run, "--html")
    terminal("report", run, "--html")  # the run's own page is made anew
    notes.write_text("mine")
    terminal.refuses(
        "report", run, "--html", "--output", run, code="output.not_a_file", hint=str(run / "report.html")
    )
    terminal.refuses("report", run, "--html", "--output", notes, code="output.exists", says=["notes.html"])
    assert notes.read_text() == "mine"
    terminal("report", run, "--html", "--output", notes, "--force")
    assert "</html>" in notes.read_text()


@pytest.mark.parametrize("name", ["recipe.toml", "metrics.jsonl"])
def test_a_page_replaces_no_file_of_its_runs(name, make_run, terminal):
    run, other = make_run("run"), make_run("other")
    for source in (run / name, other / name):
        before = source.read_bytes()
        words = ("report", run, "--html", "--beside", other, "--output", source, "--force")
        terminal.refuses(*words, code="output.replaces_source", says=[str(source)])
        assert source.read_bytes() == before
