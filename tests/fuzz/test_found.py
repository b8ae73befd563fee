"""Files that fuzzing found: each once ended in a traceback or was read wrongly."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import exchange_formats  # noqa: F401  registers its formats
import formats
import pytest
import run_formats  # noqa: F401

from lmkit.errors import LONGEST, LmkitError

Damage = bytes | str | Callable[[bytes], bytes]


def changed(*path, value):
    """Set a value in a JSON document; `...` deletes it."""

    def change(data):
        document = place = json.loads(data)
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        if value is ...:
            del place[path[-1]]
        return json.dumps(document).encode()

    return change


def npy(text):
    header = text.encode() + b"\n"
    return lambda data: b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data[128:]


DEEP = "[" * 100_000
NO_IDS: tuple[Any, ...] = (-1, 1 << 24, 10**30, True, 1.0, "1", None, 256)
REFUSED: dict[tuple[str, str], list[Damage]] = {
    ("recipe", "recipe.toml"): [
        *("model = " + "{a = " * 400 + "1" + "}" * 400, "# " + "A" * 2_000_000, "x = " + DEEP),
        *("[train]\nsteps = " + "9" * 5000, "[train]\nsteps = 9223372036854775808"),
        "[train]\n" + "s" * 100_000 + " = 1",
    ],
    ("hugging face tokenizer.json", "tokenizer.json"): [
        *(changed("model", "vocab", "a", value=id_) for id_ in NO_IDS),
        *(changed("added_tokens", 0, "id", value=id_) for id_ in NO_IDS),
        lambda data: data.replace(b": 256", b": " + b"9" * 5000),
    ],
    ("gpt2 vocab.json + merges.txt", "vocab.json"): [changed("a", value=id_) for id_ in NO_IDS],
    ("token file", "tokens.npy"): [
        npy("{'descr': '<u2', 'fortran_order': False, 'shape': ((((("),
        npy("{1e400: 1, 'a': 2}"),
        npy("{'descr': '<u2', 'shape': (__import__('os'),), }"),
        npy("'" + "a" * 9000),
    ],
    ("token file", "tokens.json"): [
        changed(key, value=...)
        for key in ("format", "num_tokens", "vocab_size", "tokenizer_sha256", "num_bytes")
    ]
    + [changed("\ud800", value=1)],
    ("corpus .jsonl and .txt", "c.jsonl"): [DEEP + "\n"],
    ("hugging face config.json", "config.json"): [
        changed("model_type", value=value) for value in (["llama"], {}, None)
    ],
}
READ: dict[tuple[str, str], list[Damage]] = {
    ("stages.json", "stages.json"): [
        *("[]", "1", '{"corpus": 1}', DEEP),
        *(
            json.dumps({"corpus": {"key": "k", "done": True, "outputs": {"train": [path]}}})
            for path in (1, "A" * 100_000)
        ),
    ]
}


@pytest.fixture(scope="module")
def form(tmp_path_factory):
    made: dict[str, formats.Format] = {}
    return lambda name: made.setdefault(name, formats.FORMATS[name](tmp_path_factory.mktemp("good")))


def read(form, file, damage, folder):
    good = next(good for good in form.goods if file in good)
    data = damage(good[file]) if callable(damage) else damage
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    formats.write({**good, file: data}, folder)
    form.read(folder, good, Random(1))


@pytest.mark.parametrize(("name", "file"), REFUSED, ids=str)
def test_refused_in_one_line(form, name, file, tmp_path):
    for number, damage in enumerate(REFUSED[name, file]):
        with pytest.raises(LmkitError) as caught:
            read(form(name), file, damage, tmp_path / "case")
        assert "\n" not in caught.value.message, number
        assert len(caught.value.message) <= 2 * LONGEST, number


@pytest.mark.parametrize(("name", "file"), READ, ids=str)
def test_read_as_if_it_were_not_there(form, name, file, tmp_path):
    for damage in READ[name, file]:
        read(form(name), file, damage, tmp_path / "case")
