"""Encoding and counting, in Python and in C, against the textbook; compiling the C code; threads."""

import logging
import random
import threading
import time
from collections import Counter
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkit.tokenizer import PATTERN, engine, split_words
from lmkit.tokenizer.pretokenize import AddedToken, SpecialTokens

NO_SPECIALS = SpecialTokens({})


def ids_of(encoder, data, specials=NO_SPECIALS):
    return encoder(data, specials)[0]


needs_compiler = pytest.mark.skipif(engine.library() is None, reason="no C compiler on this machine")


# ---- encoding


def textbook_encode(text, vocab, merges, special_tokens):
    """The specification of encoding: in every word apply each merge in turn."""
    ids = {token: token_id for token_id, token in sorted(vocab.items(), reverse=True)}
    longest_first = sorted(special_tokens, key=len, reverse=True)
    special = "(" + "|".join(map(regex.escape, longest_first)) + ")"
    parts = regex.split(special, text) if special_tokens else [text]
    result = []
    for part in parts:
        if part in special_tokens:
            result.append(ids[part.encode()])
            continue
        for word in regex.findall(PATTERN, part):
            tokens = [bytes([byte]) for byte in word.encode()]
            for left, right in merges:
                i = 0
                while i < len(tokens) - 1:
                    if (tokens[i], tokens[i + 1]) == (left, right):
                        tokens[i : i + 2] = [left + right]
                    i += 1
            result += [ids[token] for token in tokens]
    return result


def test_fuzzed_text(code, trained, pieces):
    # One for all examples: the words that it remembers must stay right.
    encode = engine.new_encoder(trained.merge_table)

    @settings(max_examples=300, deadline=None)
    @given(st.one_of(st.lists(st.sampled_from(pieces), max_size=60).map("".join), st.text()))
    def check(text):
        expected = textbook_encode(text, trained.vocab, trained.merges, trained.special_tokens)
        assert encode(text.encode(), trained.specials)[0].tolist() == expected

    check()


def test_both_engines_agree_on_a_megabyte(trained, real_text):
    rng = random.Random(0)
    parts = [real_text[i : i + rng.randint(1, 40)] for i in rng.choices(range(len(real_text)), k=50_000)]
    data = "".join(parts).encode()
    expected = ids_of(engine.python_encoder(trained.merge_table), data, trained.specials)
    encoder = engine.new_encoder(trained.merge_table)
    for _ in range(2):  # the second time from memory
        np.testing.assert_array_equal(ids_of(encoder, data, trained.specials), expected)


@pytest.mark.parametrize("nfc", [False, True])
@pytest.mark.parametrize("kind", ["python", pytest.param("native", marks=needs_compiler)])
def test_places_of_special_tokens(kind, nfc):
    """Also of tokens with low ids, and of text that is not in normal form (e and an accent)."""
    specials = SpecialTokens(
        {AddedToken("<a>"): 1, AddedToken("<n\u00e9>", normalized=True): 300, AddedToken("<b>"): 0}
    )
    table = engine.MergeTable(range(2, 258), [], nfc=nfc)
    native = partial(engine.native_encoder, engine.library())
    encode = (engine.python_encoder if kind == "python" else native)(table)
    encode = partial(engine.encode_normal_form, encode) if nfc else encode
    text = "<a>one<b><n\u00e9>e\u0301 two<ne\u0301><a>"
    ids, places = encode(text.encode(), specials)
    assert places.tolist() == [at for at, i in enumerate(ids) if i in (0, 1, 300)]
    assert ids[places].tolist() == ([1, 0, 300, 300, 1] if nfc else [1, 0, 300, 1])


def one_at_a_time(word, merges):
    """The pair of lowest rank, of equals the leftmost, until there is none."""
    ids = list(word)
    while True:
        found = [
            (rank, i)
            for i in range(len(ids) - 1)
            for rank, (left, right, _) in enumerate(merges)
            if (left, right) == (ids[i], ids[i + 1])
        ]
        if not found:
            return ids
        rank, i = min(found)
        ids[i : i + 2] = [merges[rank][2]]


@pytest.mark.parametrize("seed", range(6))
def test_merges_in_any_order(seed):
    """A file from elsewhere may use a token before it is made, make it twice, or list a pair twice. Words of up to
    64 bytes and longer ones take different ways."""
    rng = random.Random(seed)
    tokens = {byte: bytes([byte]) for byte in b"abc"}
    merges = [(97, 98, 256), (98, 99, 257), (97, 98, 258)]
    for i in range(30):
        left, right = rng.choice(list(tokens)), rng.choice(list(tokens))
        tokens[300 + i] = tokens[left] + tokens[right]
        merges.append((left, right, 300 + i))
    rng.shuffle(merges)
    table = engine.MergeTable(range(256), merges)
    words = [bytes(rng.choices(b"abc", k=size)) for size in [1, 2, 3, 8, 30, 64, 65, 150] * 4]
    expected = [one_at_a_time(word, merges) for word in words]
    assert [table.encode_word(word) for word in words] == expected
    text = b"".join(word + b"\n\n" for word in words)
    joined = [token for ids in expected for token in (*ids, 10, 10)]
    for encoder in (engine.python_encoder(table), engine.new_encoder(table)):
        assert ids_of(encoder, text).tolist() == joined


@pytest.mark.parametrize("text", ["a" * 1_000_000, "\n" * 1_000_000, "👩‍👩‍👧‍👦" * 40_000])
def test_pathological_words_take_n_log_n(code, trained, text):
    start = time.process_time()
    ids = ids_of(engine.new_encoder(trained.merge_table), text.encode())
    assert trained.decode(ids.tolist()) == text
    assert time.process_time() - start < 60  # quadratic: hours


def test_more_words_than_an_encoder_remembers(trained, monkeypatch):
    """It forgets all of them in the middle of a text. Encoders that see fewer words give the expected ids."""
    thirds = [b"".join(b" %d" % i for i in range(start, start + 150_000)) for start in (0, 150_000, 300_000)]
    expected = np.concatenate([ids_of(engine.new_encoder(trained.merge_table), third) for third in thirds])
    encoder = engine.new_encoder(trained.merge_table)
    for _ in range(2):
        np.testing.assert_array_equal(ids_of(encoder, b"".join(thirds)), expected)
    monkeypatch.setattr(engine, "_MOST_WORDS", 1000)
    python = engine.python_encoder(trained.merge_table)
    for _ in range(3):
        text, fresh = thirds[0][:20_000], engine.new_encoder(trained.merge_table)
        np.testing.assert_array_equal(ids_of(python, text), ids_of(fresh, text))


@needs_compiler
def test_words_with_equal_hashes_are_told_apart(trained):
    """Words of 16 bytes with the hash of one another, forged by running `mix` of words.c on their first halves."""

    def mix(x):
        product = x * np.uint64(0x9E3779B97F4A7C15)
        return product ^ product >> np.uint64(32)

    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", np.uint8)
    first_halves = letters[np.random.default_rng(0).integers(0, 52, (3_000_000, 8))].view(np.uint64)[:, 0]
    word = np.frombuffer(b"abcdefghijklmnop", np.uint64)
    second_halves = mix(first_halves) ^ mix(word[:1]) ^ word[1]
    is_letter = np.isin(second_halves.view(np.uint8).reshape(-1, 8), letters).all(axis=1)
    forged = np.stack((first_halves, second_halves), axis=1)[is_letter]
    assert len(forged) > 0
    text = word.tobytes() + b"".join(b"." + pair.tobytes() for pair in forged)
    assert trained.decode_bytes(ids_of(engine.new_encoder(trained.merge_table), text).tolist()) == text


def test_ids_stay_when_more_is_encoded(code, trained):
    encoder = engine.new_encoder(trained.merge_table)
    assert ids_of(encoder, b"", trained.specials).tolist() == []
    first = ids_of(encoder, b"the first of two texts", trained.specials)
    kept = first.tolist()
    ids_of(encoder, b"another one, longer than the first", trained.specials)
    assert first.tolist() == kept


# ---- counting


def test_counters_add_up_and_keep_the_order(code, real_text):
    """Tables that grow several times; words of all lengths, some of them in both counters."""
    rng = random.Random(0)
    specials = SpecialTokens({"<|endoftext|>": 0})
    sizes = [2, 5, 7, 8, 9, 15, 16, 17, 40]
    words = ["".join(rng.choices("abcdefgé", k=rng.choice(sizes))) for _ in range(40_000)]
    texts = ["one two one three one. " + real_text, " ".join(words[:25_000]), " ".join(words[15_000:])]
    one, two = engine.new_counter(specials), engine.new_counter(specials)
    one.add(texts[0].encode())
    two.add(texts[1].encode())
    two.add(texts[2].encode())
    result = one.result(two, engine.new_counter(specials))
    expected: Counter[bytes] = Counter()
    for text in texts:
        for part in text.split("<|endoftext|>"):
            expected.update(word.encode() for word in split_words(part))
    assert result.text.tobytes() == b"".join(expected)  # in order of their first appearance
    assert result.lengths.tolist() == [len(word) for word in expected]
    assert result.counts.tolist() == list(expected.values())
    assert result.num_special == real_text.count("<|endoftext|>")


# ---- UTF-8


@needs_compiler
def test_utf8_is_what_python_says():
    """Every pair of bytes, alone and inside text; the borders of table 3-7; and damaged real characters."""

    def to_python(data):
        try:
            data.decode()
        except UnicodeDecodeError:
            return False
        return True

    tails = [b"", b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf", b"\x80\x80\x80", b"a"]
    for first in range(256):
        for second in range(256):
            head = bytes((first, second))
            for data in (head, *(head + tail for tail in tails)) if first >= 0xC0 else (head,):
                assert engine.is_utf8(data) == to_python(data), data
                data = b"some text." + data + b" and more text"
                assert engine.is_utf8(data) == to_python(data), data
    rng = random.Random(0)
    borders = [65, 0xE9, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
    text = "".join(chr(rng.choice(borders)) for _ in range(60)).encode()
    assert engine.is_utf8(b"")
    for _ in range(3000):
        data = bytearray(text)
        data[rng.randrange(len(data))] = rng.randrange(256)
        assert engine.is_utf8(bytes(data)) == to_python(bytes(data))


# ---- compiling


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder."""
    if engine.library() is None:
        pytest.skip("no C compiler on this machine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine.library.cache_clear()
    yield tmp_path / "lmkit"
    engine.library.cache_clear()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_python_does_it_and_warns_once(cache, monkeypatch, caplog, trained, compiler):
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING, "lmkit"):
        assert engine.new_encoder(trained.merge_table).__qualname__.startswith(engine.python_encoder.__name__)
        assert isinstance(engine.new_counter(trained.specials), engine.PythonCounter)
        assert engine.is_utf8("é".encode())
        assert not engine.is_utf8(b"\xff")
    (record,) = caplog.records
    assert compiler in record.getMessage()
    assert list(cache.iterdir()) == []


# ---- threads


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_results_are_finished_in_order_whoever_is_slow(workers):
    """The first item is held back until the others are as far ahead as they may be: three items per worker."""
    far_ahead = threading.Event()
    begun: list[int] = []
    finished: list[int] = []
    most_ahead = 3 * workers - 1

    def work(item):
        begun.append(item)
        if workers > 1 and item == 0:
            assert far_ahead.wait(60)
            assert max(begun) == most_ahead
        if item == most_ahead:
            far_ahead.set()
        return item * item

    for item, square in engine.share_out(range(200), [work] * workers):
        assert square == item * item
        finished.append(item)
    assert finished == list(range(200))


@pytest.mark.parametrize("where", ["items", "work", "finish"])
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_an_error_anywhere_ends_all_threads(where, workers):
    finished, begun = [], []

    def fail(here, item):
        if where == here and item == 50:
            raise KeyError(item)

    def items():
        for i in range(1000):
            fail("items", i)
            yield i

    def work(item):
        begun.append(item)
        fail("work", item)
        return item

    before = threading.active_count()

    def consume():
        with closing(engine.share_out(items(), [work] * workers)) as results:
            for item, _ in results:
                fail("finish", item)
                finished.append(item)

    with pytest.raises(KeyError, match="50"):
        consume()
    assert threading.active_count() <= before  # threads of earlier tests may end meanwhile
    assert finished == list(range(len(finished)))
    assert len(finished) <= 50
    assert len(begun) <= 50 + 3 * workers
