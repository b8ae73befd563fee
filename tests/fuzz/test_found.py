"""Files that fuzzing found: each once ended in a traceback or was read wrongly."""

from __future__ import annotations

import base64
import gzip
import json
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import formats

from lmkit.errors import LONGEST, LmkitError
from lmkit.training.metrics import read_metrics
from lmkit.training.state import RngState, restore_rng

Damage = bytes | str | Callable[[bytes], bytes]


def changed(*path: Any, value: Any) -> Callable[[bytes], bytes]:
    """Set a value in a JSON document; without a value, delete it."""

    def change(data: bytes) -> bytes:
        document = place = json.loads(data)
        for key in path[:-1]:
            place = place[key]
        if value is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        return json.dumps(document).encode()

    return change


def npy_header(text: str) -> Callable[[bytes], bytes]:
    header = text.encode() + b"\n"
    return lambda data: b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data[128:]


def updated(assignment: str) -> Callable[[bytes], bytes]:
    """Change a row of a database."""

    def change(data: bytes) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.sqlite"
            path.write_bytes(data)
            with closing(sqlite3.connect(path)) as database:
                database.execute(f"UPDATE NVTX_EVENTS SET {assignment} WHERE rowid = 1")
                database.commit()
            return path.read_bytes()

    return change


def event(**changes: Any) -> str:
    plain = {"ph": "X", "cat": "user_annotation", "name": "step", "ts": 0, "dur": 1, "pid": 1, "tid": 1}
    return json.dumps({"traceEvents": [plain | changes]})


def stages(**entry: Any) -> str:
    return json.dumps({"corpus": {"key": "k", "done": True, **entry}})


DEEP = "[" * 100_000
NO_IDS: tuple[Any, ...] = (-1, 1 << 24, 1 << 31, 10**30, True, 1.0, "1", None, 256)
NO_TIMES: tuple[Any, ...] = (["a"], [1.0, None], [0.0], "abc", [float("inf")], [[1.0]], {"a": 1}, [10**400])
REFUSED: list[tuple[str, str, Damage]] = [
    ("recipe", "recipe.toml", "model = " + "{a = " * 400 + "1" + "}" * 400),
    ("recipe", "recipe.toml", ".".join(["a"] * 100_000) + " = 1"),
    ("recipe", "recipe.toml", "x = {" + ".".join(['"a b"'] * 100_000) + " = 1}"),
    ("recipe", "recipe.toml", "# " + "A" * 2_000_000),
    ("recipe", "recipe.toml", "x = " + DEEP),
    ("recipe", "recipe.toml", "[train]\nsteps = " + "9" * 5000),
    ("recipe", "recipe.toml", "[train]\nsteps = 9223372036854775808"),
    ("recipe", "recipe.toml", "[train]\n" + "s" * 100_000 + " = 1"),
    *(("tokenizer.json", "tokenizer.json", changed("model", "vocab", "a", value=id_)) for id_ in NO_IDS),
    *(("tokenizer.json", "tokenizer.json", changed("added_tokens", 0, "id", value=id_)) for id_ in NO_IDS),
    *(("gpt2 vocab.json + merges.txt", "vocab.json", changed("a", value=id_)) for id_ in NO_IDS),
    ("tokenizer.json", "tokenizer.json", lambda data: data.replace(b": 256", b": " + b"9" * 5000)),
    ("token file", "tokens.npy", npy_header("{'descr': '<u2', 'fortran_order': False, 'shape': (((((")),
    ("token file", "tokens.npy", npy_header("{1e400: 1, 'a': 2}")),
    ("token file", "tokens.npy", npy_header("{'descr': (), 'shape': (3,)}")),
    ("token file", "tokens.npy", npy_header("{'descr': '<u2', 'shape': (__import__('os'),), }")),
    ("token file", "tokens.npy", npy_header("'" + "a" * 9000)),
    *(
        ("token file", "tokens.json", changed(key, value=...))
        for key in ("format", "num_tokens", "vocab_size", "tokenizer_sha256", "num_bytes")
    ),
    ("corpus .jsonl and .txt", "corpus.jsonl", DEEP + "\n"),
    *(("results", "rows.jsonl", json.dumps({"kernel": "a", "samples_ms": times})) for times in NO_TIMES),
    *(("finished download", "a.txt.sha256", digest) for digest in ("", " ", "\n", b"\xff", "0" * 64)),
    ("chrome trace", "trace.json", '{"traceEvents": ' + DEEP),
    *(
        ("chrome trace", "trace.json", event(**{key: value}))
        for key, value in (
            ("ts", 1e400),
            ("ts", 1e300),
            ("dur", -1),
            ("name", 7),
            ("name", "\ud800"),
            ("tid", [1]),
        )
    ),
    *(
        ("nsys database", "report.sqlite", updated(assignment))
        for assignment in ("start = 'zero'", "globalTid = NULL", "start = 9, end = 0", "globalTid = x'ff'")
    ),
    (
        "nsys database",
        "report.sqlite",
        lambda data: data.replace(b"CREATE", b"CRXATE").replace(b"String", b"\xabtring"),
    ),
]
READ: list[tuple[str, str, Damage]] = [
    *(("stages.json", "stages.json", text) for text in ("[]", "1", '{"corpus": 1}', DEEP)),
    ("stages.json", "stages.json", stages(outputs={"train": [1]})),
    ("stages.json", "stages.json", stages(outputs={"train": ["A" * 100_000]})),
    (  # RFC 1952: FNAME
        "gzip archive",
        "a.gz",
        lambda data: data[:3] + b"\x08" + data[4:10] + b"../outside.txt\0" + data[10:],
    ),
    ("gzip archive", "a.gz", lambda data: data + gzip.compress(b"more", mtime=0)),
]


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], formats.Format]:
    made: dict[str, formats.Format] = {}
    return lambda name: made.setdefault(name, formats.FORMATS[name](tmp_path_factory.mktemp("good") / "it"))


def read(form: formats.Format, file: str, damage: Damage, folder: Path) -> None:
    if callable(damage):
        data = damage(form.good[file])
    else:
        data = damage.encode("utf-8", "surrogatepass") if isinstance(damage, str) else damage
    files = {file: data} if form.name == "results" else {**form.good, file: data}
    formats.write(files, folder)
    form.read(folder, Random(1))


@pytest.mark.parametrize(
    ("name", "file", "damage"), REFUSED, ids=lambda part: part if part in formats.FORMATS else ""
)
def test_refused_in_one_line(form, name: str, file: str, damage: Damage, tmp_path: Path) -> None:
    with pytest.raises(LmkitError) as caught:
        read(form(name), file, damage, tmp_path / "case")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) <= 2 * LONGEST


@pytest.mark.parametrize(
    ("name", "file", "damage"), READ, ids=lambda part: part if part in formats.FORMATS else ""
)
def test_read_as_if_it_were_not_there(form, name: str, file: str, damage: Damage, tmp_path: Path) -> None:
    read(form(name), file, damage, tmp_path / "case")


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
    state = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    restore_rng(RngState(cpu=state), torch.device("cpu"))
