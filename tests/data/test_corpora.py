"""A recipe's [corpus] table becomes text to train on and text held out."""

import gzip
import json
import os
import random
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
from raising import raises

from lmkit.data import corpora, json_lines
from lmkit.data.corpora import plain_text_files, prepare_corpus
from lmkit.data.synth import write_stories
from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.tables import CorpusConfig

MARK = "<|endoftext|>"


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture
def split(tmp_path):
    """Prepare a corpus of files without a held-out one; return both parts as bytes."""

    def split(*paths, **table):
        files = prepare_corpus(CorpusConfig(source="files", train=paths, **table), tmp_path / "corpus")
        assert [path.name for path in files.train + files.valid] == ["train.txt", "valid.txt"]
        assert {path.name for path in (tmp_path / "corpus").iterdir()} == {"train.txt", "valid.txt"}
        return files.train[0].read_bytes(), files.valid[0].read_bytes()

    return split


@pytest.mark.parametrize("end", [MARK, MARK + "\n", MARK + "\r\n"])
def test_holds_out_the_last_documents(write, split, end):
    documents = [f"document {number}\nwith two lines{end}".encode() for number in range(20)]
    path = write("text.txt", b"".join(documents))
    for fraction, held_out in ((0.1, 2), (0.12, 2), (0.13, 3), (0.08, 2), (0.0001, 1), (0.999, 19)):
        train, valid = split(path, valid_fraction=fraction)
        assert valid == b"".join(documents[-held_out:])
        assert train + valid == b"".join(documents)


def test_a_book_is_cut_at_a_line(write, split):
    lines = [f"line {number:03}\n".encode() for number in range(100)]  # 9 bytes each
    train, valid = split(write("book.txt", b"".join(lines)), valid_fraction=0.1)
    assert valid == b"".join(lines[90:])
    train, valid = split(write("book.txt", b"".join(lines) + MARK.encode()), valid_fraction=0.1)
    assert train.endswith(b"\n")
    assert valid.endswith(b"line 099\n" + MARK.encode())
    assert 0.1 * 913 - 9 <= len(valid) <= 0.1 * 913 + 9


@pytest.mark.parametrize(
    "text",
    [
        "short" + MARK + "a line\n" * 1000,
        "a line\n" * 1000 + MARK + "short",
        "a line\n" * 500 + MARK + "a line\n" * 500,
        (("a line\r\n" * 9 + MARK + "\r\n") * 100) + "a line\n" * 900,
        "no line " * 1000,
    ],
)
@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.1, 0.5])
def test_about_as_much_is_held_out_as_was_asked_for(write, split, text, fraction):
    train, valid = split(write("text.txt", text), valid_fraction=fraction)
    assert train + valid == text.encode()
    assert fraction / 2 <= len(valid) / len(text) <= max(1.5 * fraction, 0.1)


@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.3, 0.5, 0.61, 0.75, 0.9, 0.99])
@pytest.mark.parametrize("text", ["a😀b😀😀c", "aéé日本é", "ab", "日本語" * 50])
def test_a_line_of_any_characters_is_cut_between_two_of_them(write, split, text, fraction):
    train, valid = split(write("line.txt", text), valid_fraction=fraction)
    assert train.decode() + valid.decode() == text
    # As many bytes as were asked for, and what else belongs to their first character.
    wanted = len(text.encode()) * fraction
    assert wanted <= len(valid) < wanted + 4 or len(train) == 1


def test_several_files_are_several_documents(write, split):
    texts = (
        *(("a.txt", "first"), ("b.txt", f"second{MARK}"), ("empty.txt", ""), ("c.txt", f"third{MARK}")),
        *(("d.jsonl", '{"text": "fourth"}'), ("e.txt", f"fifth{MARK}\r\n"), ("f.txt", f"sixth{MARK}!")),
        ("g.txt", "seventh"),
    )
    train, valid = split(*(write(*text) for text in texts), valid_fraction=0.07)
    joined = f"first{MARK}second{MARK}third{MARK}fourth{MARK}fifth{MARK}\r\nsixth{MARK}!{MARK}"
    assert (train.decode(), valid) == (joined, b"seventh")


def test_a_mark_that_ends_in_a_new_line_is_not_doubled(write):
    texts = {"a.jsonl": '{"text": "one"}', "b.txt": "two\n--\n ", "c.jsonl": '{"text": "c"}'}
    paths = [write(name, text) for name, text in texts.items()]
    with plain_text_files(paths, mark="\n--\n") as texts:
        assert [text.read_text() for text in texts] == ["one\n--\n", "two\n--\n ", "c\n--\n"]
    table = CorpusConfig(source="files", train=tuple(paths), valid_fraction=0.1)
    files = prepare_corpus(table, paths[0].parent, mark="\n--\n")
    assert files.train[0].read_text() + files.valid[0].read_text() == "one\n--\ntwo\n--\n c\n--\n"


def test_named_text_files_are_used_where_they_lie(write, tmp_path):
    train, valid = write("a.txt", "train"), write("b.txt", "valid")
    table = CorpusConfig(source="files", train=(train,), valid=(valid,))
    files = prepare_corpus(table, tmp_path / "corpus")
    assert (files.train, files.valid) == ((train,), (valid,))
    assert not (tmp_path / "corpus").exists()


def test_documents_of_weight_0_are_left_out(write, split):
    lines = [{"text": "a", "weight": 1.0}, {"text": "b", "weight": 0}, {"text": "c", "train": False}]
    lines += [{"text": "d", "train": True, "weight": None, "tools": [1]}]
    train, valid = split(write("x.jsonl", "\n".join(map(json.dumps, lines))), valid_fraction=0.5)
    assert train + valid == f"a{MARK}d{MARK}".encode()
    odd = write("y.jsonl", '{"text": 1, "train": "a"}\n' * 2)
    train, valid = split(odd, field="train", valid_fraction=0.5)
    assert train == valid == f"a{MARK}".encode()


def test_conversations_are_told_apart_from_documents(write, split):
    with raises(UsageError, "corpus.no_field", "x.jsonl, line 1", hint='corpus.source = "chat"'):
        split(write("x.jsonl", '{"messages": []}'))


@pytest.mark.parametrize(
    ("lines", "options", "documents"),
    [
        (
            '{"story": "a\\nb é", "other": 1}\n{"story": "c"}\n\n'.encode(),
            {"field": "story"},
            ("a\nb é", "c"),
        ),
        (
            b'{"text": "a--b--"}\n{"text": "c--"}',
            {"separator": "--"},
            ("a--b", "c"),
        ),  # a separator at the end
        (  # characters that are not text
            b'{"text": "a\xffb\\ud83d\\ude00"}\n{"text": "c\\ud800d"}\n{"text": "e"}\n',
            {"errors": "replace"},
            ("a\ufffdb\U0001f600", "c\ufffdd", "e"),
        ),
    ],
)
def test_texts_of_json_lines(write, split, lines, options, documents):
    train, valid = split(write("x.jsonl", lines), valid_fraction=0.3, **options)
    assert (train + valid).decode() == "".join(text + MARK for text in documents)
    assert valid.decode() == documents[-1] + MARK


@pytest.mark.parametrize(
    ("content", "code", "where"),
    [
        ('{"text": "a"}\n{"text": \n', "corpus.not_json", "x.jsonl, line 2"),
        ('{"text": "a"}\n' + "[" * 100_000 + "\n", "corpus.not_json", "x.jsonl, line 2"),
        ('{"text": "a"}\n{"body": "b"}\n', "corpus.no_field", 'x.jsonl, line 2: no text under "text"'),
        ('{"text": 5}\n', "corpus.no_field", 'line 1: no text under "text" (it is 5)'),
        ('{"text": ' + "1" * 5000 + "}\n", "corpus.not_json", "x.jsonl, line 1"),
        ('{"text": "a", "train": "no"}', "corpus.unsupported_key", "line 1: train"),
        ('{"text": "a", "weight": 0}', "corpus.empty", "x.jsonl"),
        ("\n \n", "corpus.empty", "x.jsonl"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "text.not_utf8", "byte 24"),
        ('{"text": "a"}\n{"text": "b\\ud83d"}\n', "text.not_utf8", "x.jsonl, line 2: \\ud83d"),
    ],
)
def test_bad_json_lines_name_the_line(write, split, tmp_path, content, code, where):
    with raises(LmkitError, code, where) as caught:
        split(write("x.jsonl", content))
    assert caught.value.exit_code == (2 if isinstance(caught.value, UsageError) else 1)
    assert list((tmp_path / "corpus").iterdir()) == []


def test_a_source_without_text_among_others_is_left_out(write):
    empty, text = write("w.jsonl", '{"text": "a", "weight": 0}'), write("b.txt", "b")
    with plain_text_files([empty, text]) as texts:
        assert [path.read_text() for path in texts] == ["", "b"]
    with raises(UsageError, "corpus.empty", "w.jsonl"), plain_text_files([empty, empty]):
        pass


@pytest.mark.parametrize(
    ("content", "offset", "replaced"),
    [
        (b"abc\xffdef\nghi\n", 3, "abc\ufffddef\nghi\n"),
        (b"abcdef" * 3 + b"\xc3(\n.", 18, "abcdef" * 3 + "\ufffd(\n."),
        (b"abcde\xe2\x82", 5, "abcde\ufffd"),  # cut in a character, over the border of a block
    ],
)
def test_invalid_utf8_names_the_byte_or_is_replaced(write, split, tmp_path, content, offset, replaced):
    path = write("bad.txt", content)
    with raises(LmkitError, "text.not_utf8", "bad.txt", f"byte {offset}"):
        split(path)
    assert list((tmp_path / "corpus").iterdir()) == []
    train, valid = split(path, errors="replace")
    assert (train + valid).decode() == replaced


def test_folders_and_missing_empty_and_short_files_are_wrong_use(write, split, tmp_path):
    with raises(UsageError, "corpus.missing_file", "corpus.train", "nowhere.txt"):
        split(tmp_path / "nowhere.txt")
    (tmp_path / "texts").mkdir()
    with raises(UsageError, "corpus.directory", "corpus.train", "texts", "is a directory"):
        split(tmp_path / "texts")
    with raises(UsageError, "corpus.empty", "corpus.train", "empty.txt"):
        split(write("empty.txt", ""))
    for name, content in (("empty.txt", ""), ("blank.jsonl", "\n \n")):
        with raises(UsageError, "corpus.empty", "corpus.valid", name):
            split(write("t.jsonl", '{"text": "a"}\n'), valid=(write(name, content),))
    for text in ("x", "😀"):
        with raises(UsageError, "corpus.too_short", "a.txt"):
            split(write("a.txt", text))


def test_stories_are_made_with_others_held_out(tmp_path):
    table = CorpusConfig(source="synth", size_mb=0.1, seed=3, valid_fraction=0.2)
    files = prepare_corpus(table, tmp_path)
    train, valid = files.train[0].read_text("ascii"), files.valid[0].read_text()
    assert 100_000 <= len(train) < 105_000
    assert train.endswith(MARK)
    assert 20_000 <= len(valid) < 25_000
    assert not set(train.split(MARK)[:-1]) & set(valid.split(MARK)[:-1])
    write_stories(tmp_path / "same.txt", size_mb=0.1, seed=3)
    assert (tmp_path / "same.txt").read_text() == train
    other = prepare_corpus(table.model_copy(update={"seed": 4}), tmp_path / "other")
    assert other.train[0].read_text() != train
    assert other.valid[0].read_text() != valid


# ---- compressed files, pipes, directories


@pytest.fixture
def pipe(tmp_path):
    """Make a named pipe; a thread writes the content into it once, as a process substitution does."""
    writers = []

    def pipe(name: str, content: bytes) -> Path:
        path = tmp_path / name
        os.mkfifo(path)
        writers.append(threading.Thread(target=path.write_bytes, args=(content,), daemon=True))
        writers[-1].start()
        return path

    yield pipe
    for writer in writers:
        writer.join(timeout=10)
        assert not writer.is_alive(), "nobody read the pipe"


def zstd(*parts: bytes) -> bytes:
    """Compress every part as a frame of its own, as pzstd does, with a frame to skip before it."""
    zstandard = pytest.importorskip("zstandard", reason="the extra `text` is not installed")
    skipped = (0x184D2A50).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"skip"
    return b"".join(skipped + zstandard.compress(part) for part in parts)


COMPRESS = {".gz": lambda *parts: b"".join(map(gzip.compress, parts)), ".zst": zstd}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_and_pipes_become_text(write, pipe, tmp_path, suffix):
    compress, story = COMPRESS[suffix], json.dumps({"text": "three"}).encode()
    train = (
        write(f"a.txt{suffix}", compress(b"one ", "\u00e9".encode())),
        pipe("b", b"two"),
        pipe(f"b.txt{suffix}", compress(b"and a half")),
        write(f"c.jsonl{suffix}", compress(story[:9], story[9:])),
        write(f"c.json{suffix.upper()}", compress(b'[{"text": "3a"}, {"text": "3b"}]')),
        write("d.txt", "four"),
    )
    table = CorpusConfig(source="files", train=train, valid=(pipe("v", b"five"),))
    files = prepare_corpus(table, tmp_path / "corpus", progress=lambda *report: None)
    text = MARK.join(("one \u00e9", "two", "and a half", "three", "3a", "3b", "four"))
    assert files.train[0].read_text() == text
    assert files.valid == (tmp_path / "corpus" / "valid.txt",)  # not the pipe
    assert files.valid[0].read_text() == "five"


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_is_read_in_bounded_memory(write, tmp_path, monkeypatch, suffix):
    size = 48 << 20
    monkeypatch.setattr(json_lines, "_LONGEST_LINE", 1 << 20)
    word = write(f"bomb.txt{suffix}", COMPRESS[suffix](b"a" * size))
    line = write(f"bomb.jsonl{suffix}", COMPRESS[suffix](b"[" * size))
    tracemalloc.start()
    try:
        with plain_text_files(word, tmp_path / "made") as (text,):
            assert text.stat().st_size == size
        with (
            raises(LmkitError, "corpus.long_line", f"bomb.jsonl{suffix}, line 1"),
            plain_text_files(line, tmp_path / "made"),
        ):
            pass
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("suffix", "code"), [(".gz", "corpus.damaged_gzip"), (".zst", "corpus.damaged_zstd")]
)
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],
        lambda data: b"text" + data,
        lambda data: data[:40] + bytes([data[40] ^ 0xFF]) + data[41:],
        lambda data: data + data[:30],
        lambda data: data + b"text",
    ],
)
def test_a_damaged_compressed_file_is_an_error(write, split, tmp_path, suffix, code, damage):
    data = COMPRESS[suffix](random.Random(1).randbytes(500).hex().encode())
    with raises(LmkitError, code, f"text.txt{suffix}"):
        split(write(f"text.txt{suffix}", damage(data)))
    assert list((tmp_path / "corpus").iterdir()) == []


def test_a_package_that_is_not_installed_is_named(write, split, monkeypatch):
    path = write("text.txt.zst", zstd(b"some text"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with raises(
        UsageError, "corpus.not_installed", "text.txt.zst", "zstandard", hint="pip install -e '.[text]'"
    ):
        split(path)


@pytest.mark.parametrize("border", range(60))
def test_text_is_the_same_wherever_a_block_ends(write, split, monkeypatch, border):
    monkeypatch.setattr(corpora, "CHUNK_BYTES", 7 + border)
    content = (
        bytes([*range(0x70, 0x100)]) + "a\u00e9\u65e5\U0001f600".encode() * 5 + b"\x80" * 9 + b"\xf0\x9f"
    )
    train, valid = split(write("odd.txt", content), errors="replace")
    assert (train + valid).decode() == content.decode("utf-8", "replace")


def test_a_field_of_files_that_are_read_as_text_is_refused(write, split):
    lines = write("lines.txt", '{"body": "a b"}\n' * 9)
    with raises(UsageError, "corpus.unused_field", "corpus.field", lines):
        split(lines, field="body")
