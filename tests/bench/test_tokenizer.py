from __future__ import annotations

from pathlib import Path

import pytest

from lmkit.bench import tokenizer as bench
from lmkit.bench.tokenizer import Case, bench_tokenizer, measure
from lmkit.errors import LmkitError, UsageError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Some words, and more words.<|endoftext|>\n" * 300, "utf-8")
    return path


def test_rows_of_training_and_encoding(text: Path) -> None:
    cases = [
        Case("train", text, "words", 1, 300, ("lmkit",)),
        Case("encode", text, "words", 2, 300, ("lmkit", "tokenizers", "tiktoken")),
    ]
    result = bench_tokenizer(cases, rounds=1)
    rows = {(row["task"], row["contender"]): row for row in result.rows}
    assert set(rows) >= {("train", "lmkit"), ("encode", "lmkit")}
    for row in result.rows:
        assert row["median_s"] > 0
        assert row["speedup"] > 0
    assert rows["encode", "lmkit"]["peak_pss_mb"] > 0  # of so short a job a look or two, perhaps early ones
    assert rows["encode a prompt", "lmkit"]["microseconds"] < 1e5
    assert set(result.files) == {"results.jsonl", "results.csv", "report.md"}
    table = result.table()
    assert max(map(len, table.splitlines())) <= 100
    assert "…" not in table
    assert "A prompt of 202 characters, warm, lmkit: " in table


def test_encoders_that_disagree_are_not_timed(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_run_watched", lambda job: ({"ids": job.contender}, 0))
    case = Case("encode", text, "words", 1, 300, ("lmkit", "tokenizers"))
    with pytest.raises(LmkitError, match="disagree"):
        measure([case], rounds=1)


def test_a_contender_that_fails_is_named(text: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff<|endoftext|>\n")
    with pytest.raises(LmkitError, match=r"lmkit failed to train: .*invalid UTF-8"):
        measure([Case("train", bad, "bad", 1, 300, ("lmkit",))], rounds=1)
    with pytest.raises(UsageError, match=r"none\.txt"):
        measure([Case("train", tmp_path / "none.txt", "none", 1, 300, ("lmkit",))], rounds=1)
