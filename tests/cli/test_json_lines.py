"""`.jsonl` means the same to every command that reads text as it does to a recipe: a document a line."""

import json
from pathlib import Path

import pytest

from lmkit.data.corpora import prepare_corpus
from lmkit.recipe.tables import CorpusConfig

DOCUMENTS = ["one fish two fish\nred fish", "blue fish é", "old fish\n"]


@pytest.fixture(autouse=True)
def files(terminal, tmp_path: Path) -> None:
    """Sources, and as_recipe.txt, what a recipe makes of them."""
    lines = [json.dumps({"id": 7, "text": document}) for document in DOCUMENTS]
    Path("j.jsonl").write_text("\n".join(lines))
    Path("more.txt").write_text("new fish<|endoftext|>\n")
    sources = (Path("j.jsonl"), Path("more.txt"))
    table = CorpusConfig(source="files", train=sources, valid=(Path("more.txt"),))
    (text,) = prepare_corpus(table, tmp_path / "corpus").train
    text.rename("as_recipe.txt")
    Path("corpus").rmdir()


def test_commands_take_the_documents_that_a_recipe_takes(terminal):
    for name, sources in (("a", "j.jsonl more.txt"), ("b", "as_recipe.txt")):
        terminal(f"tokenizer train {sources} out/{name}.json --vocab-size 265")
        terminal(f"data encode {sources} out/{name}_tokens.npy --tokenizer out/a.json")
    for one, other in (("a.json", "b.json"), ("a_tokens.npy", "b_tokens.npy")):
        assert Path("out", one).read_bytes() == Path("out", other).read_bytes()
    assert len(list(Path("out").iterdir())) == 10  # what was made on the way is gone

    Path("only.txt").write_text("<|endoftext|>".join([*DOCUMENTS, ""]))
    facts = {terminal(f"tokenizer inspect out/a.json --text {text}") for text in ("j.jsonl", "only.txt")}
    assert len(facts) == 1
