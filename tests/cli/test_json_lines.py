"""`.jsonl` means the same to every command that reads text as it does to a recipe: a document a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmkit.cli.app import run_command_line
from lmkit.data.corpora import prepare_corpus
from lmkit.recipe.tables import CorpusConfig

DOCUMENTS = ["one fish two fish\nred fish", "blue fish é", "old fish\n"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": 7, "text": document}) for document in DOCUMENTS]
    (tmp_path / "j.jsonl").write_text("\n".join(lines))
    (tmp_path / "more.txt").write_text("new fish<|endoftext|>\n")
    sources = (Path("j.jsonl"), Path("more.txt"))
    table = CorpusConfig(source="files", train=sources, valid=(Path("more.txt"),))
    (text,) = prepare_corpus(table, tmp_path / "corpus").train
    text.rename(tmp_path / "as_recipe.txt")
    (tmp_path / "corpus").rmdir()
    return tmp_path


def lmkit(command: str) -> int:
    return run_command_line(command.split())


def test_commands_take_the_documents_that_a_recipe_takes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sources in (("a", "j.jsonl more.txt"), ("b", "as_recipe.txt")):
        assert lmkit(f"tokenizer train {sources} out/{name}.json --vocab-size 265") == 0
        assert lmkit(f"data encode {sources} out/{name}_tokens.npy --tokenizer out/a.json") == 0
    assert (folder / "out/a.json").read_bytes() == (folder / "out/b.json").read_bytes()
    tokens = [(folder / f"out/{name}_tokens.npy").read_bytes() for name in "ab"]
    assert tokens[0] == tokens[1]
    assert len(list((folder / "out").iterdir())) == 6  # what was made on the way is gone

    (folder / "only.txt").write_text("<|endoftext|>\n".join([*DOCUMENTS, ""]))
    capsys.readouterr()
    for text in ("j.jsonl", "only.txt"):
        assert lmkit(f"tokenizer inspect out/a.json --text {text}") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[: len(said) // 2] == said[len(said) // 2 :]


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        (b'{"body": "a"}', 2, "line 1"),
        (b'{"text": "\xff"}', 1, "byte 10"),
        (b"one fish", 1, "line 1"),
        (b"\n", 2, "j.jsonl"),
        (None, 2, "j.jsonl"),
    ],
)
def test_what_holds_no_documents_is_refused(
    content: bytes | None,
    code: int,
    named: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lmkit("tokenizer train more.txt t.json --vocab-size 260") == 0
    (folder / "j.jsonl").unlink()
    if content is not None:
        (folder / "j.jsonl").write_bytes(content)
    before = sorted(folder.iterdir())
    for command in ("tokenizer train j.jsonl out.json", "data encode j.jsonl out.npy --tokenizer t.json"):
        capsys.readouterr()
        assert lmkit(command) == code
        error, hint = capsys.readouterr().err.splitlines()
        assert "j.jsonl" in error
        assert named in error
        assert hint.startswith("hint: ")
    assert sorted(folder.iterdir()) == before


def test_an_output_is_refused_before_the_lines_are_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lmkit("tokenizer train more.txt t.json --vocab-size 260") == 0
    (folder / "j.jsonl").write_text("not JSON")
    for output in ("more.txt", "there.npy"):
        (folder / output).touch()
        assert lmkit(f"data encode j.jsonl {output} --tokenizer t.json") == 2
        assert f"]: {output}: " in capsys.readouterr().err
