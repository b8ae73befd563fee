"""Conversations become tokens and a mask; batches and evaluation read both."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from raising import raises

from lmkit.core.batches import evaluation_windows
from lmkit.data import token_files
from lmkit.data.corpora import prepare_corpus
from lmkit.data.encoding import encode_chat
from lmkit.data.json_lines import messages_of
from lmkit.data.shards import open_tokens
from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.tables import CorpusConfig
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.chat import TEMPLATES, Message

TALKS = [
    [Message("user", f"{n} the é"), Message("assistant", "yes " * n), Message("user", "")]
    for n in range(1, 30)
]


def line(talk: list[Message]) -> str:
    return json.dumps({"messages": [{"role": a, "content": b, "weight": c} for a, b, c in talk]}) + "\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(line(talk) for talk in TALKS))  # with blank lines
    return path


def masked(path: Path, flags: list[bool], part: int = 5) -> None:
    """Write a token file whose ids count up, in parts of tokens that all count or not."""
    with token_files.TokenFileWriter(path, vocab_size=1000, tokenizer_sha256="a", masked=True) as writer:
        for start in range(0, len(flags), part):
            for token, counts in enumerate(flags[start : start + part], start):
                writer.append(np.array([token]), counts=counts)
        writer.finish(num_bytes=9, source_sha256="b", counted_bytes=4)


@pytest.mark.parametrize("name", ["plain", "chatml"])
def test_words_of_the_assistant_count_and_survive(name, corpus, tmp_path):
    template = TEMPLATES[name]
    tokenizer = Tokenizer.from_merges([], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    meta = encode_chat([corpus], tmp_path / "t.npy", tokenizer, template)
    file = open_tokens(tmp_path / "t.npy", tokenizer_sha256=tokenizer.sha256)
    between = "" if name == "plain" else "<|endoftext|>"
    text = "".join(template.render(talk) + between for talk in TALKS)
    assert tokenizer.decode(file.tokens) == text
    assert (meta.num_documents, meta.num_bytes) == (len(TALKS), len(re.sub(r"<\|\w+\|>", "", text).encode()))
    # A conversation is a document, also where the token that ends a message ends a text.
    sizes = [len(tokenizer.encode(template.render(talk) + between)) for talk in TALKS]
    assert file.documents.tolist() == [sum(sizes[:i]) for i in range(len(TALKS))]
    assert file.mask is not None
    flags = np.unpackbits(file.mask)[: len(file.tokens)].astype(bool)
    answers = "".join(talk[1].content.strip() + template.end for talk in TALKS)
    assert tokenizer.decode(file.tokens[flags]) == answers
    assert (meta.counted_tokens, meta.counted_bytes) == (flags.sum(), len(re.sub(r"<\|\w+\|>", "", answers)))


def test_windows_mark_targets_that_do_not_count(tmp_path):
    flags = (np.random.default_rng(0).random(203) < 0.4).tolist()
    masked(tmp_path / "t.npy", flags)
    file = open_tokens(tmp_path / "t.npy")
    windows = list(evaluation_windows(file.tokens, 13, 4, mask=file.mask))
    assert [int(token) for rows, _ in windows for token in rows.flatten()] == list(range(202))
    assert (np.unpackbits(file.mask)[:203] == flags).all()
    assert (tmp_path / "t.mask").stat().st_size == 26  # of many parts
    seen = [int(token) for _, rows in windows for token in rows.flatten()]
    assert seen == [token if flags[token] else -1 for token in range(1, 203)]


@pytest.mark.parametrize("damage", ["missing", "short", "long", "flipped", "beyond", "count"])
def test_a_damaged_mask_is_named(damage, tmp_path):
    path = tmp_path / "t.npy"
    masked(path, [True, False] * 10)
    mask, data = path.with_suffix(".mask"), path.with_suffix(".mask").read_bytes()
    if damage == "missing":
        mask.unlink()
    elif damage == "count":
        path.with_suffix(token_files.SIDECAR).write_text(
            path.with_suffix(token_files.SIDECAR).read_text().replace(": 10,", ": 11,")
        )
    else:
        changed = {"short": data[:-1], "long": data + b"\0", "flipped": b"\0" + data[1:]}
        mask.write_bytes(changed.get(damage, data[:-1] + bytes([data[-1] | 1])))
    with raises(LmkitError, "tokens.damaged", mask):
        open_tokens(path)


def test_a_file_without_mask_is_described_as_ever(tmp_path):
    with token_files.TokenFileWriter(tmp_path / "t.npy", vocab_size=9, tokenizer_sha256="a") as writer:
        writer.append(np.arange(9))
        writer.finish(num_bytes=9, source_sha256="b")
    assert "counted" not in (tmp_path / "t.npy").with_suffix(token_files.SIDECAR).read_text()
    assert not (tmp_path / "t.mask").exists()


def test_the_last_conversations_are_held_out(corpus, tmp_path):
    again = tmp_path / "again.jsonl"
    again.write_bytes(corpus.read_bytes())
    table = CorpusConfig(source="chat", train=(corpus, again), valid_fraction=0.1)
    files = prepare_corpus(table, tmp_path / "corpus")
    assert [path.name for path in files.train + files.valid] == ["train.jsonl", "valid.jsonl"]
    lines = [json.loads(text) for path in files.train + files.valid for text in path.read_text().splitlines()]
    assert lines == [json.loads(line(talk)) for talk in TALKS * 2]
    assert len(files.valid[0].read_text().splitlines()) < 12
    named = CorpusConfig(source="chat", train=(corpus,), valid=(corpus,))
    files = prepare_corpus(named, tmp_path / "named")
    assert files.train[0].read_bytes() == files.valid[0].read_bytes()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *(('{"messages": 1}\n', "chat.no_messages"), (line(TALKS[0]) + "{\n", "corpus.not_json")),
        *((line(TALKS[0]), "corpus.too_short"), ("\n", "corpus.empty")),
    ],
)
def test_what_is_no_corpus_of_conversations_is_refused(text, code, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with raises(LmkitError, code, path):
        prepare_corpus(CorpusConfig(source="chat", train=(path,)), tmp_path / "corpus")
    assert not any((tmp_path / "corpus").glob("*.jsonl"))


@pytest.mark.parametrize("prepared", [False, True])
def test_an_answer_of_weight_0_is_read_and_not_learned(tmp_path, prepared):
    def talk(*answers, **line):
        answers = [{"role": "assistant", "content": word, **keys} for word, keys in answers]
        return json.dumps({"messages": [{"role": "user", "content": "Hello?"}, *answers], **line}) + "\n"

    path = tmp_path / "a.jsonl"
    path.write_text(
        talk(("no", {"weight": 0}), ("yes", {"weight": 1, "name": None, "reasoning_content": ""}))
        + talk(("never", {}), weight=0, tools=[], id=3, source="web", metadata={"train": False})
        + talk(("not", {"train": False}), ("sure", {"train": True, "weight": None}), train=True)
        + talk(("bad", {"loss": False}), ("good", {"loss": 1, "loss_scale": 1, "prefix": False}), label=True)
        + talk(
            ("none", {"training": 0}), ("fine", {"loss_scale": None, "mask": ""}), prompt="Hello?", label="x"
        )
    )
    if prepared:  # as a run does
        table = CorpusConfig(source="chat", train=(path,), valid=(path,))
        path = prepare_corpus(table, tmp_path / "corpus").train[0]
    tokenizer = Tokenizer.from_merges([], ["<|endoftext|>"])
    encode_chat([path], tmp_path / "t.npy", tokenizer, TEMPLATES["plain"])
    file = open_tokens(tmp_path / "t.npy")
    assert file.mask is not None
    read = tokenizer.decode(file.tokens.tolist())
    assert all(word in read for word in ("no<", "never<", "not<", "bad<", "none<"))
    learned = file.tokens[np.unpackbits(file.mask)[: len(file.tokens)] == 1]
    answers = tokenizer.decode(learned.tolist()).split("<|endoftext|>")
    assert answers == ["yes", "sure", "good", "fine", ""]


def test_conversations_without_an_answer_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(line([Message("user", "Hello?")]))
    tokenizer = Tokenizer.from_merges([], ["<|endoftext|>"])
    with raises(UsageError, "chat.no_answer"):
        encode_chat([path], tmp_path / "t.npy", tokenizer, TEMPLATES["plain"])
    assert not list(tmp_path.glob("t.*"))


def test_documents_that_teach_nothing_within_the_context_are_left_out():
    """Three documents of 10 tokens; the only targets that count are those from the third token of the second on."""
    mask = np.packbits([12 <= i < 20 for i in range(40)])
    meta = token_files.TokenMeta("", 40, 40, 3, 40, "", 2)
    file = token_files.TokenFile(np.arange(40, dtype=np.uint16), meta, mask)
    assert token_files.starts_that_count(file, np.array([0, 10, 20]), 4).tolist() == [10]
    with raises(UsageError, "tokens.no_targets"):
        token_files.starts_that_count(file, np.array([0, 10, 20]), 1)


ANSWER = {"role": "assistant", "content": "a"}
OF_A_MESSAGE = ("function_call", "reasoning_content", "name", "weight", "tool_calls", "loss_mask")
OF_A_LINE = ("tools", "system_prompt", "images", "weight", "completion", "rejected", "assistant_masks")
VALUES = {"loss_scale": (0, 0.5), "prefix": (True,), "loss": ("no",), "weight": (0.5,), "train": ("no",)}
REFUSED = {
    "chat.no_messages": [[], {"messages": []}, {"messages": "user"}],
    "chat.wrong_message": [
        *({"messages": [{"role": role, "content": ""}]} for role in ("tool", ["user"])),
        *({"messages": [message]} for message in ("user", {"role": "user", "content": [{"type": "text"}]})),
    ],
    "corpus.unsupported_key": [
        *({"messages": [ANSWER | {key: [{"b": 1}]}]} for key in OF_A_MESSAGE),
        *({"messages": [ANSWER | {key: value}]} for key, values in VALUES.items() for value in values),
        *({"messages": [ANSWER], key: False} for key in ("label", "kto_tag")),
        *({"messages": [ANSWER], key: ["b"]} for key in OF_A_LINE),
    ],
}


@pytest.mark.parametrize(("code", "record"), [(code, each) for code in REFUSED for each in REFUSED[code]])
def test_what_is_no_conversation_is_refused(code, record):
    with raises(UsageError, code, "a.jsonl, line 3"):
        messages_of(record, "a.jsonl, line 3")
