import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from byte_tokenizers import of_bytes
from raising import raises

from lmkit.data.encoding import encode_corpus
from lmkit.data.shards import open_tokens
from lmkit.errors import LmkitError, UsageError

END = "<|endoftext|>"


@pytest.fixture
def corpus(tmp_path, story):
    path = tmp_path / "corpus.txt"
    path.write_text(story, "utf-8")
    return path


def tokens(path):
    return open_tokens(path).tokens.tolist()


def test_one_path_or_several_and_json_lines_are_taken(tmp_path, corpus, story, tokenizer):
    lines = tmp_path / "corpus.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in story.split(END)[:-1]))
    for number, sources in enumerate((corpus, str(corpus), [corpus], lines)):
        encode_corpus(sources, tmp_path / f"{number}.npy", tokenizer)
        assert tokens(tmp_path / f"{number}.npy") == tokenizer.encode(story)
    assert (
        len(list(tmp_path.iterdir())) == 2 + 4 * 4
    )  # nothing but corpora, token files and what describes them


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("ends", [True, False])
def test_fault_103_prefix_and_suffix_stand_around_every_document(
    corpus, story, tmp_path, small_chunks, workers, ends
):
    """As `encode` puts them around a text."""
    framed = of_bytes("<s>", "</s>", *([END] if ends else []), prefix=(256, 256), suffix=(257,))
    (tmp_path / "two.txt").write_text(f"{END}one{END}{END}two", "utf-8")
    encode_corpus([corpus, tmp_path / "two.txt"], tmp_path / "t.npy", framed, workers=workers)
    if ends:
        documents = story.split(END)[:-1]
        expected = [token for text in documents for token in (*framed.encode(text), 258)]
        expected += [token for text in ("", "one", "", "two") for token in (*framed.encode(text), 258)]
    else:
        expected = framed.encode(story) + framed.encode(f"{END}one{END}{END}two")
    assert tokens(tmp_path / "t.npy") == expected


def test_tokens_and_description(corpus, tokenizer, tmp_path, story):
    seen = []
    meta = encode_corpus([corpus], tmp_path / "t.npy", tokenizer, progress=lambda *told: seen.append(told))
    assert open_tokens(tmp_path / "t.npy", tokenizer_sha256=tokenizer.sha256).meta == meta
    assert meta.num_documents == story.count(END)
    assert meta.num_bytes == len(story.replace(END, "").replace("saw two", "").encode())
    assert meta.source_sha256 == hashlib.sha256(story.encode()).hexdigest()
    assert seen[-1] == ("encode", len(story.encode()), len(story.encode()))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_fault_25_exact_at_chunk_borders_for_any_number_of_workers(
    corpus, tokenizer, tmp_path, story, workers
):
    (tmp_path / "more.txt").write_text(story + "\n", "utf-8")
    meta = encode_corpus([corpus, tmp_path / "more.txt"], tmp_path / "t.npy", tokenizer, workers=workers)
    file = open_tokens(tmp_path / "t.npy")
    assert file.tokens.tolist() == tokenizer.encode(story) * 2
    texts = story.split(END)[:-1] * 2
    sizes = [len(tokenizer.encode(text + END)) for text in texts]
    assert file.documents.tolist() == [sum(sizes[:i]) for i in range(len(sizes))]
    assert meta.num_bytes == sum(len(text.replace("saw two", "").encode()) for text in texts)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.usefixtures("small_chunks")
def test_fault_20_invalid_utf8(tokenizer, tmp_path, workers):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"fine " * 1000 + b"\xe6\x97 cut" + b" fine" * 1000)
    output = tmp_path / "tokens.npy"
    with raises(LmkitError, "text.not_utf8", "bad.txt", "byte 5000"):
        encode_corpus([path], output, tokenizer, workers=workers)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.txt"]
    encode_corpus([path], output, tokenizer, workers=workers, errors="replace")
    expected = path.read_bytes().decode("utf-8", "replace") + END
    assert tokens(output) == tokenizer.encode(expected)


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from lmkit.data.encoding import encode_corpus
    from lmkit.tokenizer import Tokenizer

    sent = []  # once: workers report on until the signal is dealt with, and a second one ends the cleaning up

    def die(stage, done, total):
        if done > total // 2 and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.{signal})

    options = {{"format": sys.argv[4], "shard_tokens": 10_000}}
    text, output, tokenizer = map(Path, sys.argv[1:4])
    encode_corpus([text], output, Tokenizer.load(tokenizer), workers=2, progress=die, **options)
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_fault_39_killed_while_encoding(tokenizer, tmp_path, story, name):
    corpus, output = tmp_path / "corpus.txt", tmp_path / "tokens.npy"
    corpus.write_text(story * (3_000_000 // len(story)), "utf-8")
    tokenizer.save(tmp_path / "tokenizer.json")
    script = textwrap.dedent(KILLED).format(signal=name)
    command = [
        sys.executable,
        "-c",
        script,
        str(corpus),
        str(output),
        str(tmp_path / "tokenizer.json"),
        "npy",
    ]
    killed = subprocess.run(command, capture_output=True, timeout=120)
    assert killed.returncode == -getattr(signal, name), killed.stderr
    left = {path.name for path in tmp_path.iterdir()} - {"corpus.txt", "tokenizer.json"}
    half_written = {"tokens.npy.lmkit-partial", "tokens.documents.lmkit-partial"}
    assert left == (set() if name == "SIGINT" else half_written)
    encode_corpus([corpus], output, tokenizer, workers=1)
    encode_corpus([corpus], tmp_path / "again.npy", tokenizer, workers=2)
    assert (tmp_path / "again.npy").read_bytes() == output.read_bytes()
    assert not list(tmp_path.glob("*.lmkit-partial"))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_fault_39_killed_while_encoding_shards(tokenizer, tmp_path, story, name):
    corpus, output = tmp_path / "corpus.txt", tmp_path / "tokens"
    corpus.write_text(story * (3_000_000 // len(story)), "utf-8")
    tokenizer.save(tmp_path / "tokenizer.json")
    script = textwrap.dedent(KILLED).format(signal=name)
    command = [
        sys.executable,
        "-c",
        script,
        str(corpus),
        str(output),
        str(tmp_path / "tokenizer.json"),
        "bin",
    ]
    killed = subprocess.run(command, capture_output=True, timeout=120)
    assert killed.returncode == -getattr(signal, name), killed.stderr
    assert not list(tmp_path.glob("*.bin"))
    left = len(list(tmp_path.glob("tokens_*.bin.lmkit-partial")))
    assert left == 0 if name == "SIGINT" else left > 10
    encode_corpus([corpus], output, tokenizer, workers=1, format="bin")
    assert [path.name for path in tmp_path.glob("tokens*")] == ["tokens_000000.bin"]


def test_fault_40_output_exists(corpus, tokenizer, tmp_path):
    output = tmp_path / "tokens.npy"
    output.write_bytes(b"precious")
    with raises(UsageError, "output.exists", "tokens.npy", hint="--force"):
        encode_corpus([corpus], output, tokenizer)
    assert output.read_bytes() == b"precious"
    encode_corpus([corpus], output, tokenizer, force=True)
    assert open_tokens(output).meta.num_tokens > 0


def test_no_source_is_replaced(corpus, tokenizer, tmp_path):
    for name in ("text.json", "text.npy"):
        source = tmp_path / name
        source.write_bytes(corpus.read_bytes())
        (tmp_path / "text.npy").touch()
        with raises(UsageError, "output.replaces_source", name):
            encode_corpus([corpus, source], tmp_path / "text.npy", tokenizer, force=True)
        assert source.read_bytes() == corpus.read_bytes()


@pytest.mark.parametrize("suffix", [".documents", ".overlap"])
def test_a_file_of_somebody_else_is_not_replaced(corpus, tokenizer, tmp_path, suffix):
    output, mine = tmp_path / "text.npy", tmp_path / f"text{suffix}"
    mine.write_bytes(b"precious")
    with raises(UsageError, "output.exists", mine):
        encode_corpus([corpus], output, tokenizer)
    assert mine.read_bytes() == b"precious"
    assert not output.exists()


@pytest.mark.parametrize("change", ["grow", "rewrite", "shrink", "grow before its turn"])
def test_fault_43_corpus_changes_while_encoding(corpus, tokenizer, tmp_path, small_chunks, change):
    first = tmp_path / "first.txt"
    first.write_bytes(corpus.read_bytes() if "before" in change else b"x")

    def alter(stage, done, total):
        if total // 2 - 300 < done < total // 2 + 300:
            os.truncate(corpus, corpus.stat().st_size + {"rewrite": 0, "shrink": -1}.get(change, 1))
            os.utime(corpus, ns=(1, 1))

    with raises(LmkitError, "corpus.changed", "corpus.txt"):
        encode_corpus([first, corpus], tmp_path / "tokens.npy", tokenizer, workers=1, progress=alter)
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.txt", "first.txt"}


@pytest.fixture(autouse=True)
def _no_threads_left():
    before = threading.active_count()
    yield
    assert threading.active_count() <= before  # threads of earlier tests may end meanwhile
