"""Sketches of texts find what of a held-out text was learned."""

import json
import random
import re

import numpy as np
import pytest
from raising import raises

from lmkit.data import overlap as module
from lmkit.data.encoding import encode_chat, encode_corpus
from lmkit.data.overlap import MODULUS, WORDS, Sketch, overlap_of
from lmkit.errors import LmkitError, UsageError
from lmkit.tokenizer import Tokenizer
from lmkit.tokenizer.chat import TEMPLATES

MARK = "<|endoftext|>"


def hashes(text, *, pieces=1, mark=MARK):
    """(hashes of documents, of sampled 13-grams) of a text that comes in pieces."""
    text, sketch = text.encode(), Sketch()
    size = -(-len(text) // pieces) or 1
    for place in range(0, len(text), size):
        sketch.add(text[place : place + size].replace(mark.encode(), b"\xff"))
    sketch.add(b"", last=True)
    return {*sketch.documents.sorted().tolist()}, {*sketch.ngrams.sorted().tolist()}


def document(seed, words=60):
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(10**6)}" for _ in range(words))


@pytest.fixture
def all_ngrams(monkeypatch):
    monkeypatch.setattr(module, "MODULUS", 1)


@pytest.fixture(params=["C", "Python"])
def hasher(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(module, "library", lambda: None)
        monkeypatch.setattr(module, "_LONGEST", 6000)


@pytest.fixture
def encode(tmp_path, tokenizer):
    def encode(name, texts):
        source = tmp_path / f"{name}.txt"
        source.write_text("".join(f"{text}{MARK}" for text in texts), "utf-8")
        encode_corpus(source, tmp_path / f"{name}.npy", tokenizer, force=True)
        return tmp_path / f"{name}.npy"

    return encode


def test_13_grams_are_those_of_words_inside_documents(all_ngrams, hasher):
    draw = random.Random(0)
    pieces = ["the", "The", "Naïve", "x1", "it's", "日本", "語", "--", ". ", "\n\n", "\t", "été", "\u2019"]
    texts = ["".join(f"{draw.choice(pieces)}{draw.choice(' ,')}" for _ in range(n)) for n in range(5, 60)]
    distinct = set()
    for text in texts:
        lower = re.sub("[A-Z]", lambda match: match[0].lower(), text)
        words = re.findall(
            r"[日本語](?:[^\x00-\x7f日本語]|[0-9a-z])*|(?:[0-9a-z]|[^\x00-\x7f日本語])+", lower
        )
        distinct |= {tuple(words[i : i + WORDS]) for i in range(len(words) + 1 - WORDS)}
    found = hashes(MARK.join(texts))[1]
    assert len(found) == len(distinct) > 500
    assert found == set().union(*(hashes(text)[1] for text in texts))


@pytest.mark.parametrize("pieces", [1, 2, 17, 400])
def test_hashes_depend_neither_on_pieces_nor_on_the_compiler(all_ngrams, pieces, hasher):
    texts = [document(seed, words) for seed, words in enumerate((1, 12, 13, 14, 500, 0, 3, 900))]
    texts += ["x" * 5000 + " y", "", "日本語の長い文章、これは。 ABC-def", document(50, 40).upper()]
    text = MARK.join(texts) + MARK + "\n"
    whole = [hashes(one) for one in texts]
    expected = tuple(set().union(*part) for part in zip(*whole, strict=True))
    assert len(expected[0]) == len(texts) - 2  # without the empty ones
    found = hashes(text.replace(MARK, "\x01"), pieces=pieces, mark="\x01")  # chunks do not cut marks
    assert found == expected


def test_white_space_does_not_count_but_everything_else_does(hasher):
    text = "One, two\nthree  four."
    same = ["  One, two\n\nthree four.\r\n", "One,\ttwo three four."]
    other = [
        "one, two three four.",
        "One two three four.",
        "One, twothree four.",
        "One, two four three.",
        "One, two",
    ]
    assert {*map(frozenset, (hashes(some)[0] for some in [text, *same]))} == {frozenset(hashes(text)[0])}
    assert len(set().union(*(hashes(some)[0] for some in [text, *other]))) == 1 + len(other)
    assert hashes(" \n ") == (set(), set())


def test_one_in_64_shared_13_grams_is_found():
    text = document(5, 300_000)
    count = 300_000 + 1 - WORDS
    found = len(hashes(text)[1])
    deviation = (count * (1 / MODULUS) * (1 - 1 / MODULUS)) ** 0.5
    assert abs(found - count / MODULUS) < 5 * deviation


def test_a_planted_overlap_of_one_in_a_thousand_is_found(encode):
    learned = [document(seed) for seed in range(6000)]
    held_out = [document(seed) for seed in range(10_000, 13_000)]
    clean = overlap_of([encode("train", learned)], [encode("valid", held_out)], name="valid")
    assert (clean.documents, clean.exact, clean.shared) == (3000, 0, 0)
    for number in (7, 1500, 2999):
        held_out[number] = learned[2 * number].replace(" ", "\n ", 3)
    planted = overlap_of([encode("train", learned)], [encode("valid", held_out)], name="valid")
    assert (planted.documents, planted.exact) == (3000, 3)
    assert 0 < planted.shared <= 3 * 48
    with raises(LmkitError, "overlap.found", "valid.npy", "3 of 3,000") as caught:
        overlap_of([encode("train", learned)], [encode("valid", held_out)], name="valid.npy", strict=True)
    assert caught.value.exit_code == 1


def test_passages_in_other_documents_are_found_by_their_13_grams(encode):
    learned = [document(seed, 3000) for seed in range(20)]
    held_out = [
        document(100 + seed, 1500) + " " + learned[seed].upper().replace(" ", ", ") for seed in range(10)
    ]
    found = overlap_of([encode("train", learned)], [encode("valid", held_out)], name="valid")
    assert found.exact == 0
    assert found.shared / found.ngrams == pytest.approx(
        2 / 3, abs=0.05
    )  # 700 in the sample: 5 sigma are 0.09
    with raises(LmkitError, "overlap.found", "valid"):
        overlap_of([encode("train", learned)], [encode("valid", held_out)], name="valid", strict=True)


def test_questions_are_counted_by_themselves(encode):
    learned = [document(seed, 2000) for seed in range(5)]
    train = encode("train", [*learned, "2 + 2 = 4"])
    questions = ["2 + 2 =  4", "3 + 3 = 6", " ".join(learned[3].split()[500:1500])]
    found = overlap_of([train], questions=questions, name="questions")
    assert (found.kind, found.documents, found.exact, found.sharing) == ("questions", 3, 1, 1)
    assert found.shared == found.ngrams > 0
    assert overlap_of([train], questions=["3 + 3 = 6"], name="questions", strict=True).ngrams == 0


def test_several_files_are_learned(encode):
    texts = [document(seed) for seed in range(4)]
    files = [encode("a", texts[:1]), encode("b", texts[1:3])]
    held_out = [encode("valid", texts[:2]), encode("more", texts[1:])]
    found = overlap_of(files, held_out, name="valid")
    assert (found.documents, found.exact) == (4, 3)


def test_a_large_sketch_keeps_a_nested_sample(monkeypatch, encode):
    texts = [document(seed, 400) for seed in range(400)]
    whole = hashes(MARK.join(texts))
    monkeypatch.setattr(module, "MOST", 600)
    monkeypatch.setattr(module, "_NEW", 100)
    documents, ngrams = hashes(MARK.join(texts))
    assert documents == whole[0]  # 400
    nested = ({one for one in whole[1] if one % modulus == 0} for modulus in (64, 128, 256, 512, 1024))
    assert ngrams == next(some for some in nested if len(some) <= 600)
    train = encode("train", texts)
    monkeypatch.undo()
    found = overlap_of([train], [encode("valid", texts[:100])], name="valid")
    assert (found.exact, found.one_in > 64, found.shared) == (100, True, found.ngrams)


def test_a_sketch_of_another_text_is_none(encode, tmp_path):
    train, valid = encode("train", ["a b c"]), encode("valid", ["a b c"])
    assert overlap_of([train], [valid], name="valid").exact == 1
    encode("other", ["d"])
    (tmp_path / "other.overlap").rename(tmp_path / "train.overlap")
    assert overlap_of([train], [valid], name="valid") is None
    valid.with_suffix(".overlap").unlink()
    for learned in ([valid], [train], []):
        assert overlap_of(learned, [valid], name="valid") is None
        with raises(UsageError, "overlap.no_sketch", "--strict"):
            overlap_of(learned, [valid], name="valid", strict=True)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_sketch_is_refused(encode, seed):
    train = encode("train", [document(number) for number in range(50)])
    path, draw = train.with_suffix(".overlap"), random.Random(seed)
    data = bytearray(path.read_bytes())
    if seed < 10:
        del data[draw.randrange(len(data)) :]
    else:
        place = draw.randrange(128, len(data))
        data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    with raises(LmkitError, "overlap.damaged", path):
        overlap_of([train], [train], name="train")


def test_the_file_is_one_of_numpy(encode):
    path = encode("train", [document(number) for number in range(50)]).with_suffix(".overlap")
    with open(path, "rb") as file:
        numbers = np.lib.format.read_array(file, allow_pickle=False)
    assert (numbers.dtype, numbers[2]) == (np.uint64, 50)
    for part in (numbers[9:59], numbers[59:-1]):
        assert (part[1:] > part[:-1]).all()


def test_a_conversation_is_a_document(tmp_path):
    tokenizer = Tokenizer.from_merges([], [MARK])
    talks = [[("user", document(n)), ("assistant", document(-n))] for n in range(1, 9)]
    files = []
    for name, some in (("train", talks), ("valid", [talks[3], [("assistant", document(99))]])):
        lines = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in some]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        files.append(tmp_path / f"{name}.npy")
        encode_chat([tmp_path / f"{name}.jsonl"], files[-1], tokenizer, TEMPLATES["plain"])
    found = overlap_of(files[:1], files[1:], name="valid")
    assert (found.documents, found.exact) == (2, 1)


def test_both_hashers_give_the_same(all_ngrams):
    draw = random.Random(3)
    letters = "aZ09 \t\n.\u00e9\u3042\u8a9e\u2019\uac00\xff"
    text = "".join(draw.choice(letters) * draw.choice((1, 1, 3)) for _ in range(20_000)).encode()
    text = text.replace(b"09", b"\xff") + b"\xff"
    found = [module.python_hasher()(text), module.new_hasher()(text)]
    assert all((one == other).all() for one, other in zip(*found, strict=True))
    assert [*map(len, found[0])] == [*map(len, found[1])]
    assert min(map(len, found[0])) > 100


def test_a_run_without_white_space_is_cut_without_a_compiler(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST", 100)
    hash_more = module.python_hasher()
    assert [len(hash_more(b"x" * 99).documents), len(hash_more(b"y" * 9 + b"\xff").documents)] == [0, 1]
