"""`Tokenizer`: round trips, special tokens, streams, other libraries."""

import itertools
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkit.errors import UsageError
from lmkit.tokenizer import Tokenizer, inspect_tokenizer

SMALL = {i: bytes([i]) for i in range(256)} | {256: b"he", 257: b"hel"}
MERGES = [(b"h", b"e"), (b"he", b"l")]


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_fault_24_every_text_round_trips(trained, text):
    ids = trained.encode(text)
    assert trained.decode(ids) == text


@pytest.mark.parametrize("text", ["\0", "a\0b", "\ufeffBOM", "one\r\ntwo\r\n", "\r", "\x1c\x85"])
def test_fault_24_nul_bom_crlf(trained, text):
    assert trained.decode(trained.encode(text)) == text
    assert trained.decode(trained.encode(text * 5000)) == text * 5000


def test_encode_iterable_leaves_no_trace_of_where_strings_end(trained, real_text):
    text = real_text[-20_000:] + " \n\n  x<|endoftext|><|pad|>\n\n\n"
    rng = random.Random(0)
    cuts = sorted(rng.sample(range(len(text)), 3000))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert list(trained.encode_iterable(pieces)) == trained.encode(text)
    assert list(trained.encode_iterable(text.splitlines(keepends=True))) == trained.encode(text)
    assert list(trained.encode_iterable([])) == []


def test_encode_iterable_is_lazy(trained):
    asked = 0

    def endless():
        nonlocal asked
        while True:
            asked += 1
            yield "some words and more " * 100

    ids = trained.encode_iterable(endless())
    list(itertools.islice(ids, 1000))
    assert asked * 2000 < 200_000


def test_special_tokens_and_allowed_special(trained):
    end, both, pad = (trained.special_ids[t] for t in ("<|endoftext|>", "<|endoftext|><|pad|>", "<|pad|>"))
    text = "hi<|endoftext|><|pad|><|pad|>"
    assert trained.encode(text)[-2:] == [both, pad]
    plain = trained.encode(text, allowed_special=frozenset())
    assert not set(plain) & set(trained.special_ids.values())
    assert trained.decode(plain) == text
    assert trained.encode(text, allowed_special=frozenset({"<|endoftext|>"})).count(end) == 1
    assert trained.encode(text, allowed_special="<|endoftext|>").count(end) == 1
    for unknown in ({"x"}, "x"):
        with pytest.raises(ValueError, match="'x'"):
            trained.encode(text, allowed_special=unknown)
    assert trained.encode("a<|two words|>b")[1:-1] == [trained.special_ids["<|two words|>"]]
    assert trained.end_of_text_id == end
    # The text between special tokens is split as if it stood alone.
    assert trained.encode("x  \n<|endoftext|>  y") == [*trained.encode("x  \n"), end, *trained.encode("  y")]


def test_what_the_constructor_makes_of_special_tokens():
    tokenizer = Tokenizer(vocab=SMALL, merges=MERGES, special_tokens=("<|b|>", "he", "a"))
    assert tokenizer.special_ids == {"<|b|>": 258, "he": 256, "a": 97}
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode("he hel") == [256, 32, 256, 108]
    assert tokenizer.encode("hel", allowed_special=frozenset()) == [257]
    given = Tokenizer(vocab=SMALL | {300: b"<|b|>"}, merges=MERGES, special_tokens=("<|b|>",))
    assert given.special_ids == {"<|b|>": 300}
    assert given.vocab_size == 301
    assert given.end_of_text_id is None


def test_decoding_half_a_character(trained):
    ids = trained.encode("日")
    assert trained.decode([0xE6, 0x97]) == "\ufffd"
    assert trained.decode_bytes(ids) == "日".encode()
    with pytest.raises(ValueError, match="1000000"):
        trained.decode([10**6])


def test_ids_are_decoded_whatever_they_are_kept_in(trained):
    torch = pytest.importorskip("torch")
    ids = trained.encode("one fish two fish")
    tensor = torch.tensor(ids)
    arrays = (np.array(ids), tensor, iter(tensor), list(tensor), [*ids[:2], *tensor[2:]])
    for kept in (tuple(ids), iter(ids), *arrays):
        assert trained.decode(kept) == "one fish two fish"


def test_inspection(trained, tmp_path, real_text):
    text, path = tmp_path / "text.txt", tmp_path / "tokenizer.json"
    text.write_text(real_text, "utf-8")
    trained.save(path)
    facts = inspect_tokenizer(path, text=text)
    assert (facts.path, facts.vocab_size, facts.num_merges) == (str(path), 2000, 2000 - 256 - 4)
    assert facts.sha256 == trained.sha256
    parts = re.split("|".join(map(re.escape, trained.special_tokens)), real_text)  # marks are no text
    num_tokens = sum(len(trained.encode(part)) for part in parts)
    assert facts.bytes_per_token == pytest.approx(len("".join(parts).encode()) / num_tokens)
    text.write_text("")
    assert inspect_tokenizer(path).bytes_per_token is None
    assert inspect_tokenizer(path, text=text).bytes_per_token is None
    with pytest.raises(UsageError, match="missing"):
        inspect_tokenizer(path, text=tmp_path / "missing.txt")


@pytest.mark.parametrize("unk_id", [None, 1])
def test_the_first_text_that_loses_characters_is_told(caplog, unk_id):
    vocab = {0: b"a", 1: b"?", 2: "<|é|>"}
    tokenizer = Tokenizer(vocab=vocab, merges=[], special_tokens=["<|é|>"], unk_id=unk_id)
    with caplog.at_level("WARNING", "lmkit"):
        assert tokenizer.encode("aa<|é|>") == [0, 0, 2]
        assert not caplog.records
        assert tokenizer.encode("aé") == [0, *([] if unk_id is None else [1, 1])]
        tokenizer.encode("é")
    assert len(caplog.records) == 1
