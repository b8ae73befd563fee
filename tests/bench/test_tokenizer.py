"""The tokenizer bench: its rows, what it refuses, and that all encoders are given the same work."""

from pathlib import Path

import pytest
from marking import full_except
from raising import raises

from lmkit.bench import tokenizer as bench
from lmkit.bench.context import Context, Journal
from lmkit.bench.harness import result_files
from lmkit.bench.tokenizer import Job, measure
from lmkit.errors import UsageError
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import load_recipe


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Some words, and more words.<|endoftext|>\n" * 300, "utf-8")
    return path


@pytest.fixture
def context(tmp_path: Path) -> Context:
    recipe = load_recipe(None, flags={"bench.tokenizer.rounds": 1}, benches=True)
    journal = Journal(tmp_path / "rows")
    return Context(recipe, recipe.bench_table("tokenizer"), Ranks(), lambda *_: None, journal)


@pytest.mark.full
def test_rows_of_training_and_encoding(run_bench, text):
    result = run_bench("tokenizer", texts=[text], vocab_sizes=[300], workers=[2], rounds=1)
    rows = {(row["task"], row["variant"]): row for row in result.rows}
    assert set(rows) >= {("train", "lmkit"), ("encode", "lmkit"), ("encode", "tiktoken")}
    for row in result.rows:
        assert row["median_s"] > 0
        assert row["speedup"] > 0
    assert set(result.files) == {"results.jsonl", "results.csv", "report.md", "mb_per_s.png"}


@pytest.mark.parametrize(("end", "workers"), full_except(("<|endoftext|>\n\n", 1), ("\n", 2), ("", 1)))
def test_encoders_agree_on_texts_with_and_without_an_end_of_text(context, tmp_path, end, workers):
    """`lmkit data encode` closes the last document; so do the rivals."""
    path = tmp_path / "text.txt"
    path.write_text("Some words.\n<|endoftext|>\nAnd more\nwords" + end, "utf-8")
    rows = measure(Job("encode", "", str(path), workers, 300), context, tmp_path)
    statuses = {row["variant"]: row["status"] for row in rows}
    assert statuses["lmkit"] == statuses["tiktoken"] == "ok"


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ({"lmkit": "a", "tokenizers": "b", "tiktoken": "c"}, {"lmkit", "tokenizers", "tiktoken"}),
        ({"lmkit": "a", "tokenizers": "b", "tiktoken": "b"}, {"lmkit"}),
        ({"lmkit": "b", "tokenizers": "b", "tiktoken": "a"}, {"tiktoken"}),
    ],
)
def test_encoders_that_disagree_are_wrong_and_not_timed(context, text, tmp_path, monkeypatch, ids, wrong):
    """The ids of most are right; where all differ, none is known to be."""
    monkeypatch.setattr(bench, "_run", lambda job: {"ids": ids[job.variant], "seconds": 0.1})
    rows = measure(Job("encode", "", str(text), 1, 300), context, tmp_path)
    assert {row["variant"] for row in rows if row["status"] == "wrong result"} == wrong
    assert {row["variant"] for row in rows if "median_s" in row} == ids.keys() - wrong
    summary, _ = result_files("tokenizer", [{"task": "encode", "text": "t", **row} for row in rows], {})
    assert len(summary.wrong) == len(wrong)


def test_a_variant_that_fails_is_a_row(context, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff<|endoftext|>\n")
    row = measure(Job("train", "", str(bad), 1, 300), context, tmp_path)[0]
    assert (row["variant"], row["status"]) == ("lmkit", "failed")
    assert "lmkit failed to train" in row["detail"]


def test_texts_are_there_and_have_names_of_their_own(run_bench, tmp_path):
    texts = [tmp_path / folder / "x.txt" for folder in ("a", "b")]
    for chosen, code in ((texts, "bench.same_names"), (texts[:1], "bench.missing_text")):
        with raises(UsageError, code, "bench.tokenizer.texts"):
            run_bench("tokenizer", texts=chosen)
