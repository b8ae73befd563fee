"""What fuzzing found, one by one: files that once ended in a traceback or were read wrongly."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmkit.bench.compare import compare_files
from lmkit.cli.pipeline import STAGES, Pipeline
from lmkit.data.corpora import prepare_corpus
from lmkit.data.download import Dataset, RemoteFile, download_dataset
from lmkit.data.token_files import TokenFileWriter, open_tokens
from lmkit.errors import LONGEST, LmkitError, UsageError
from lmkit.profile.run import summarize_file
from lmkit.recipe.load import load_recipe
from lmkit.recipe.tables import CorpusConfig
from lmkit.tokenizer import Tokenizer
from lmkit.training.metrics import read_metrics
from lmkit.training.state import RngState, restore_rng


def _trace(**changes: Any) -> str:
    """One event of torch.profiler with a mistake in it."""
    event = {"ph": "X", "cat": "user_annotation", "name": "step", "ts": 0, "dur": 1, "pid": 1, "tid": 1}
    return json.dumps({"traceEvents": [event | changes]})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model = " + "{a = " * 400 + "1" + "}" * 400, "nested too deeply"),
        (".".join(["a"] * 100_000) + " = 1", "a key of more than 50 parts (at line 1)"),
        ("x = {" + ".".join(['"a b"'] * 100_000) + " = 1}", "a key of more than 50 parts (at line 1)"),
        ("# " + "A" * 2_000_000, "1 MiB"),
        ("x = " + "[" * 100_000, "nested too deeply"),
        ("[train]\nsteps = " + "9" * 5000, "a number is too long"),
        ("[train]\nsteps = 9223372036854775808", "train.steps: must be less than or equal"),
        ("[train]\n" + "s" * 100_000 + " = 1", "unknown key train.sss"),
    ],
)
def test_recipes(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"recipe\.toml: ") as caught:
        load_recipe(path)
    assert says in caught.value.message
    assert len(caught.value.message) <= 2 * LONGEST


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    vocab = {i: bytes([i]) for i in range(256)} | {256: b"he"}
    Tokenizer(vocab=vocab, merges=[(b"h", b"e")], special_tokens=("<|endoftext|>",)).save(path)
    return path


@pytest.mark.parametrize("wrong", [-1, 1 << 24, 1 << 31, 10**30, True, 1.0, "1", None, 256])
@pytest.mark.parametrize("kind", ["token", "special"])
def test_token_ids_that_are_none_or_there_twice(wrong: Any, kind: str, tokenizer: Path) -> None:
    content = json.loads(tokenizer.read_text())
    if kind == "token":
        content["model"]["vocab"]["a"] = wrong
    else:
        content["added_tokens"][0]["id"] = wrong
    tokenizer.write_text(json.dumps(content))
    with pytest.raises(LmkitError, match=r"tokenizer\.json: b'"):
        Tokenizer.load(tokenizer)
    vocab = tokenizer.with_name("vocab.json")
    vocab.write_text(json.dumps(content["model"]["vocab"] | ({"a": wrong} if kind == "special" else {})))
    vocab.with_name("merges.txt").write_text("h e\n")
    with pytest.raises(LmkitError, match=r"vocab\.json: b'.*(instead of an id|have the same id)"):
        Tokenizer.load_gpt2(vocab, vocab.with_name("merges.txt"))


def test_a_tokenizer_with_a_number_of_thousands_of_digits(tokenizer: Path) -> None:
    tokenizer.write_text(tokenizer.read_text().replace(": 256", ": " + "9" * 5000))
    with pytest.raises(LmkitError, match="a number is too long"):
        Tokenizer.load(tokenizer)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<u2', 'fortran_order': False, 'shape': (((((",
        "{1e400: 1, 'a': 2}",
        "{'descr': (), 'shape': (3,)}",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (__import__('os'),), }",
        "'" + "a" * 9000,
    ],
)
def test_headers_of_token_files_are_matched_not_evaluated(header: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    with TokenFileWriter(path, vocab_size=100, tokenizer_sha256="a") as writer:
        writer.append(np.array([1, 2, 3]))
        writer.finish(num_documents=1, num_bytes=3, source_sha256="b")
    text = header.encode() + b"\n"
    tokens = path.read_bytes()[128:]
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + tokens)
    with pytest.raises(LmkitError, match=r"tokens\.npy: not a \.npy file with one row of whole numbers"):
        open_tokens(path)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "1",
        '{"corpus": 1}',
        '{"corpus": {"key": "k", "done": true, "outputs": {"train": [1]}}}',
        "[" * 100_000,
    ],
)
def test_a_broken_record_of_stages_means_that_nothing_is_done(content: str, tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text(content)
    assert not any(pipeline(tmp_path).was_made(stage) for stage in STAGES)


def test_a_stage_whose_output_has_an_impossible_name_is_not_finished(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    entry = {"key": run.keys["corpus"], "done": True, "outputs": {"train": ["A" * 100_000]}}
    (tmp_path / "stages.json").write_text(json.dumps({"corpus": entry}))
    assert pipeline(tmp_path).was_made("corpus")
    assert not pipeline(tmp_path).is_finished("corpus")


def pipeline(folder: Path) -> Pipeline:
    recipe = load_recipe("quickstart", flags={"run.folder": str(folder.parent), "run.name": folder.name})
    return Pipeline(recipe, progress=lambda *_: None)


def test_metrics_that_could_not_be_written_or_drawn_again_are_passed_over(tmp_path: Path) -> None:
    good = {"kind": "train", "step": 1, "loss": 2.0}
    bad = [
        {"kind": "train", "step": 2}, {"kind": "valid", "step": 2, "loss": "low"}, {**good, "lr": [float("nan")]},
        {**good, "step": -1}, {**good, "step": 1 << 64}, {**good, "loss": True}, {**good, "x": {"a": 1}},
    ]  # fmt: skip
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*bad, good]))
    assert read_metrics(path) == [good]
    path.write_bytes(bytes(5_000_000) + b"\n" + json.dumps(good).encode())  # no line is read in one piece
    assert read_metrics(path) == [good]


@pytest.mark.parametrize("saved", ["", "AAAA", "no base64: \x00", "é"])
def test_generator_states_that_are_none(saved: str) -> None:
    with pytest.raises(LmkitError, match="random generators"):
        restore_rng(RngState(cpu=saved), torch.device("cpu"))
    restore_rng(
        RngState(cpu=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()), torch.device("cpu")
    )


@pytest.mark.parametrize(
    "samples", [["a"], [1.0, None], [0.0], [-1.0], "abc", [float("inf")], [[1.0]], {"a": 1}, [10**400]]
)
def test_samples_that_are_no_times(samples: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for key in ("samples_ms", "samples_s"):
        path.write_text(json.dumps({"kernel": "a", key: samples}) + "\n")
        with pytest.raises(LmkitError) as damaged:
            compare_files(path, path, threshold=0.05)
        assert damaged.value.code == "rows.damaged"
        assert "rows.jsonl" in damaged.value.message


def test_a_document_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("[" * 100_000 + "\n")
    table = CorpusConfig(source="files", train=(tmp_path / "corpus.jsonl",))
    with pytest.raises(LmkitError, match="line 1: not JSON"):
        prepare_corpus(table, tmp_path / "out")


ZIPPED = Dataset(
    "http://127.0.0.1:9", RemoteFile("a.txt", "a.gz", 100_000), RemoteFile("a.txt", "a.gz", 100_000)
)


@pytest.mark.parametrize("recorded", ["", " ", "\n", "\udcff", "0" * 64])
def test_a_recorded_digest_that_is_none(recorded: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.txt.sha256").write_bytes(recorded.encode("utf-8", "surrogateescape"))
    with pytest.raises(LmkitError, match="does not have the digest"):
        download_dataset(ZIPPED, tmp_path, retry_wait_s=0)


def test_an_archive_writes_to_its_own_name_whatever_name_it_holds(tmp_path: Path) -> None:
    packed = gzip.compress(b"text", mtime=0)
    named = packed[:3] + b"\x08" + packed[4:10] + b"../outside.txt\0" + packed[10:]  # RFC 1952: FNAME
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.gz").write_bytes(named)
    (folder / "a.gz.sha256").write_text(f"{hashlib.sha256(named).hexdigest()}  a.gz\n")
    assert download_dataset(ZIPPED, folder, retry_wait_s=0)[0].read_bytes() == b"text"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_description_of_tokens_must_name_its_format(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    with TokenFileWriter(path, vocab_size=100, tokenizer_sha256="a") as writer:
        writer.append(np.array([1, 2, 3]))
        writer.finish(num_documents=1, num_bytes=3, source_sha256="b")
    sidecar = path.with_suffix(".json")
    content = json.loads(sidecar.read_text())
    for key in content:
        sidecar.write_text(json.dumps({other: value for other, value in content.items() if other != key}))
        with pytest.raises(LmkitError, match=f"{key} is missing"):
            open_tokens(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"traceEvents": ' + "[" * 100_000, "recursion"),
        (_trace(ts=1e400), "infinity"),
        (_trace(ts=1e300), "is no time"),
        (_trace(dur=-1), "lasts -1 us"),
        (_trace(name=7), "7 is no name"),
        (_trace(name="\ud800"), "surrogates"),
        (_trace(tid=[1]), "[1] is no number"),
    ],
)
def test_traces_of_torch_profiler(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"trace\.json: not a trace of torch.profiler \(") as caught:
        summarize_file(path)
    assert says in caught.value.message


@pytest.mark.parametrize("row", [("zero", 9, 77 << 24), (0, 9, None), (9, 0, 77 << 24), (0, 9, b"\xff")])
def test_databases_of_nsys_with_other_types_in_their_columns(row: tuple[Any, ...], tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        database.execute(
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, globalTid INTEGER, text TEXT, textId INTEGER,"
            " eventType INTEGER)"
        )
        database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, 'step', NULL, 59)", row)
        database.commit()
    with pytest.raises(UsageError, match=r"report\.sqlite: "):
        summarize_file(path)


def test_a_database_whose_damage_sqlite_cannot_tell(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    path.write_bytes(path.read_bytes().replace(b"CREATE", b"CRXATE").replace(b"String", b"\xabtring"))
    with pytest.raises(UsageError, match=r"report\.sqlite: a damaged database$"):
        summarize_file(path)
