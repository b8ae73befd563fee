"""`lmkit report RUN --html`: one page that loads nothing."""

import base64
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.training.results import write_page

RECIPE = '[run]\nname = "{name}"\n[train]\nsteps = {steps}\n'
PNG = b"\x89PNG\r\n\x1a\n"
MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(
        place: str, *, steps: int = 20, text: str = "", records: list[dict[str, Any]] | None = None
    ) -> Path:
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text(RECIPE.format(name=folder.name, steps=steps))
        (folder / "environment.json").write_text(json.dumps({"lmkit": "9.9"}))
        if records is None:
            records = [{"kind": "valid", "step": 0, "loss": 5.0, "perplexity": 148.4, "bits_per_byte": None}]
            for step in range(10, steps + 1, 10):
                shared = {"step": step, "loss": 1 + 10 / step}
                records.append(
                    {
                        "kind": "train",
                        **shared,
                        "tokens": 64 * step,
                        "seconds": 6.0 * step,
                        "tokens_per_second": 99.4,
                    }
                )
            records.append(
                {
                    "kind": "final",
                    **shared,
                    "perplexity": 4.48,
                    "bits_per_byte": 0.8123,
                    "bytes_per_token": 2.7,
                }
            )
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if text:
            (folder / "stories.txt").write_text(text)
        return folder

    return make


class Parts(HTMLParser):
    """The parts of a page: attributes by tag, and the text of cells and of `pre`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.inside = ""
        self.texts: dict[str, list[str]] = {"td": [], "th": [], "pre": [], "h2": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.inside = tag
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.inside in self.texts:
            self.texts[self.inside][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


def test_a_page_holds_figures_curves_texts_recipe_and_environment(make_run):
    folder = make_run("one", text="A <b>bold</b> story & more")
    page = write_page(folder)
    assert (page.path, page.runs) == (str(folder / "report.html"), ("one",))
    parts = Parts(Path(page.path).read_text())
    assert dict(zip(parts.texts["th"], parts.texts["td"], strict=True)) == {
        "run": "one",
        "steps": "20",
        "tokens": "1,280",
        "minutes": "2.0",
        "tokens/s": "99",
        "held-out loss": "1.5000",
        "perplexity": "4.48",
        "bits per byte": "0.8123",
    }
    story, recipe, environment = parts.texts["pre"]
    assert story == "A <b>bold</b> story & more"
    assert recipe == (folder / "recipe.toml").read_text()
    assert json.loads(environment) == {"lmkit": "9.9"}
    pictures = [value for tag, name, value in parts.attributes if (tag, name) == ("img", "src")]
    narrow = [value for tag, name, value in parts.attributes if (tag, name) == ("source", "srcset")]
    assert len(pictures) == len(narrow) == len({*pictures, *narrow}) / 2 == 3
    assert [value for _, name, value in parts.attributes if name == "data-name"] == parts.texts["th"]
    for picture in (*pictures, *narrow):
        assert base64.b64decode(picture.removeprefix("data:image/png;base64,")).startswith(PNG)


def test_it_loads_nothing_and_runs_nothing(make_run):
    folder = make_run("<img src=x onerror=alert(1)>", text="<script>alert(1)</script>")
    text = Path(write_page(folder).path).read_text()
    parts = Parts(text)
    assert "script" not in parts.tags
    assert not [name for _, name, _ in parts.attributes if name.startswith("on")]
    for tag, name, value in parts.attributes:
        if name in ("src", "srcset", "href"):
            assert value.startswith("data:"), (tag, name)
    assert not re.search(r"url\(|@import", text)
    policy = [value for _, name, value in parts.attributes if name == "content" and "default-src" in value]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_runs_beside_one_another(make_run, tmp_path):
    """Folders of one name are told apart; what differs between the recipes is named."""
    first, second = make_run("a/run"), make_run("b/run", steps=40)
    page = write_page(first, [second], output=tmp_path / "both.html")
    assert (page.path, page.runs) == (str(tmp_path / "both.html"), ("a/run", "b/run"))
    parts = Parts((tmp_path / "both.html").read_text())
    assert parts.texts["td"][1::8] == ["20", "40"]
    assert "train.steps: 20 -> 40" in parts.texts["pre"]
    assert not (first / "report.html").exists()


def test_what_is_no_run_is_refused(make_run, tmp_path):
    (tmp_path / "empty").mkdir()
    with raises(UsageError, "report.no_run", "empty"):
        write_page(tmp_path / "empty")
    damaged = make_run("damaged")
    for content in ("{", "[1]"):
        (damaged / "environment.json").write_text(content)
        with raises(LmkitError, "report.damaged", "environment.json"):
            write_page(damaged)
    assert not (damaged / "report.html").exists()


def test_fault_138_a_page_replaces_a_named_file_only_by_force(make_run, tmp_path, terminal):
    run, notes = make_run("run"), tmp_path / "notes.html"
    terminal("report", run, "--html")
    terminal("report", run, "--html")  # the run's own page is made anew
    notes.write_text("mine")
    refused = terminal.refuses("report", run, "--html", "--output", run, code="output.not_a_file")
    assert str(run / "report.html") in refused.hint
    terminal.refuses("report", run, "--html", "--output", notes, code="output.exists", says=["notes.html"])
    assert notes.read_text() == "mine"
    terminal("report", run, "--html", "--output", notes, "--force")
    assert "</html>" in notes.read_text()


def test_a_last_line_that_a_kill_cut_is_left_out_and_told(make_run, caplog):
    whole, cut = make_run("whole"), make_run("cut")
    with open(cut / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert Parts(Path(write_page(cut).path).read_text()).texts["td"][1] == "20"
    assert f"{cut / 'metrics.jsonl'}: " in caplog.text
    assert "line 5 " in caplog.text
    caplog.clear()
    write_page(whole)
    assert caplog.text == ""


@pytest.mark.parametrize("line", ['{"kind": "tra', "[]", '{"kind": "train", "step": 1}'])
def test_damage_inside_the_metrics_is_refused(line, make_run):
    folder = make_run("one")
    path = folder / "metrics.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *others]) + "\n")
    with raises(LmkitError, "rows.damaged", path, "line 2"):
        write_page(folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("name", ["recipe.toml", "metrics.jsonl"])
def test_a_page_replaces_no_file_of_its_runs(name, make_run, terminal):
    run, other = make_run("run"), make_run("other")
    for source in (run / name, other / name):
        before = source.read_bytes()
        terminal.refuses(
            *("report", run, "--html", "--beside", other, "--output", source, "--force"),
            code="output.replaces_source",
            says=[str(source)],
        )
        assert source.read_bytes() == before
