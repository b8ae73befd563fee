"""Parquet files become text: a row is a document."""

import json
import logging
import os
import sys
import tracemalloc

import pytest
from raising import raises

from lmkit.cli.app import run_command_line
from lmkit.data import formats
from lmkit.data.corpora import plain_text_files, prepare_corpus
from lmkit.data.encoding import encode_corpus
from lmkit.data.parquet import parquet_texts
from lmkit.data.shards import open_tokens
from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.tables import CorpusConfig

pa = pytest.importorskip("pyarrow", reason="the extra `text` is not installed")
parquet = pytest.importorskip("pyarrow.parquet")
MARK = "<|endoftext|>"


@pytest.fixture
def write(tmp_path):
    def write(name, columns, **options):
        path = tmp_path / name
        parquet.write_table(pa.table(columns), path, **options)
        return path

    return write


def text_of(*paths, **options):
    with plain_text_files(paths, **options) as texts:
        return "".join(text.read_text("utf-8") for text in texts)


TEXTS = ["one é", "two\nlines", "", None, "日本", "two\nlines"]
KINDS = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
def test_rows_become_documents(write, caplog, kind, compression):
    column = pa.array(TEXTS, pa.string()).cast(KINDS[kind])
    path = write("x.Parquet", {"id": range(6), "text": column}, row_group_size=4, compression=compression)
    with caplog.at_level(logging.WARNING, "lmkit"):
        assert text_of(path) == "".join(text + MARK for text in TEXTS if text)
    assert [record.args[1:3] for record in caplog.records if "rows" in record.msg] == [(1, 6)]


def test_text_is_the_same_as_of_json_lines(write, tmp_path):
    rows = [{"body": f"text {number}--", "weight": number % 3, "n": {"a": 1}} for number in range(3000)]
    for row in rows:
        row["weight"] = min(row["weight"], 1)
    lines = tmp_path / "x.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    path = write("x.parquet", {key: [row[key] for row in rows] for key in rows[0]}, row_group_size=700)
    options = {"field": "body", "separator": "--"}
    assert text_of(path, **options) == text_of(lines, **options)


def test_parquet_is_a_corpus_and_a_source_of_tokens_and_tokenizers(write, tmp_path, tokenizer):
    texts = [f"document {number}" for number in range(20)]
    path = write("x.parquet", {"story": texts})
    table = CorpusConfig(source="files", train=(path,), valid=(path,), field="story")
    files = prepare_corpus(table, tmp_path / "corpus")
    assert files.train[0].read_text() == files.valid[0].read_text() == "".join(t + MARK for t in texts)
    made, saved = tmp_path / "x.npy", tmp_path / "tokenizer.json"
    tokenizer.save(saved)
    arguments = ["data", "encode", str(path), str(made), "--tokenizer", str(saved), "--field", "story"]
    assert run_command_line(arguments) == 0
    file = open_tokens(made)
    assert file.meta.num_documents == 20
    assert tokenizer.decode(file.tokens.tolist()) == files.train[0].read_text()
    arguments = ["tokenizer", "train", str(path), str(tmp_path / "t.json"), "--field", "story"]
    assert run_command_line([*arguments, "--vocab-size", "262"]) == 0


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"body": ["a"], "url": ["b"]}, ('no column "text"', "body, url")),
        ({"text": [1]}, ('column "text"', "int64")),
        ({"text": [["a"]]}, ('column "text"', "list")),
        ({"text": pa.array(["a"]).cast(pa.binary())}, ('column "text"', "binary")),
        ({"text": pa.array([5]).dictionary_encode()}, ('column "text"', "int64")),
    ],
)
def test_a_column_without_text_is_refused_by_name(write, columns, words):
    path = write("x.parquet", columns)
    with raises(UsageError, "corpus.no_field", path, *words, hint="corpus.field"):
        text_of(path)


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    with raises(UsageError, "corpus.no_field", path, "text"):
        text_of(path)


def test_bytes_that_are_not_utf8_name_the_row_or_are_replaced(write):
    texts = pa.array([b"a", b"b\xff"]).cast(pa.binary()).view(pa.string())
    path = write("x.parquet", {"text": texts})
    with raises(LmkitError, "text.not_utf8", "x.parquet, row 2", "byte 1"):
        text_of(path)
    assert text_of(path, errors="replace") == f"a{MARK}b\ufffd{MARK}"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"not parquet",
        lambda data: data[:-20],
        lambda data: data[:1000],
        lambda data: data[:300] + bytes(200) + data[500:],
        lambda data: data[:-8] + b"\xff" * 4 + data[-4:],
        lambda data: data.replace(b"text", b"\xff" * 4),
    ],
)
def test_a_damaged_file_is_refused_by_name(write, tmp_path, tokenizer, damage):
    texts = [f"{number} {number**5:x}" for number in range(2000)]
    path = write("x.parquet", {"text": texts}, write_page_checksum=True)
    path.write_bytes(damage(path.read_bytes()))
    with raises(LmkitError, "corpus.damaged_parquet", path):
        encode_corpus(path, tmp_path / "x.npy", tokenizer)
    assert not (tmp_path / "x.npy").exists()


def test_a_column_is_read_in_parts(write):
    texts = [f"{number:x}" * 500 for number in range(24_000)]
    size = sum(map(len, texts))
    columns = {"text": texts, "other": texts}
    path = write("x.parquet", columns, compression="none", use_dictionary=False, row_group_size=1000)
    before, most, rows = pa.total_allocated_bytes(), 0, 0
    with formats.opened(path) as (_, stream):
        tracemalloc.start()  # Python's memory, with what is read; pyarrow counts its own
        for _ in parquet_texts(stream, path, CorpusConfig()):
            rows += 1
            most = max(most, pa.total_allocated_bytes() - before)
        python = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert rows == len(texts)
    assert 0 < most < size / 2
    assert 0 < python < size / 2


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "x.parquet")
    with raises(UsageError, "text.unreadable", tmp_path / "x.parquet"):
        text_of(tmp_path / "x.parquet")


def test_conversations_are_refused(write, tmp_path):
    path = write("x.parquet", {"messages": ["a"]})
    table = CorpusConfig(source="chat", train=(path,))
    with raises(UsageError, "corpus.parquet_chat", path):
        prepare_corpus(table, tmp_path / "corpus")


def test_without_pyarrow_its_extra_is_named(write, monkeypatch):
    path = write("x.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises(UsageError, "corpus.not_installed", path, "pyarrow", hint="pip install -e '.[text]'"):
        text_of(path)


# ---- globs


def test_a_glob_names_its_files_sorted(write, tmp_path):
    for number in (10, 2, 1):
        write(f"s_{number:03}.parquet", {"text": [f"t{number}"]})
    (tmp_path / "s_000.txt").write_text("no")
    (tmp_path / "s_0.parquet").mkdir()
    (tmp_path / "[s].txt").write_text("a file with such a name")
    table = CorpusConfig(source="files", train=(tmp_path / "s_*.parquet",), valid=(tmp_path / "[s].txt",))
    files = prepare_corpus(table, tmp_path / "corpus")
    assert files.train[0].read_text() == f"t1{MARK}t2{MARK}t10{MARK}"
    assert files.valid[0].read_text() == "a file with such a name"
    nothing = tmp_path / "n*.parquet"
    with raises(UsageError, "corpus.empty_glob", "corpus.valid", nothing):
        prepare_corpus(CorpusConfig(source="files", train=table.train, valid=(nothing,)), tmp_path / "c")
