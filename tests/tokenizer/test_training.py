"""`train_tokenizer` as a whole: files, special tokens, workers, mistakes."""

from collections import Counter

import pytest
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.tokenizer import chunks, learn_merges, split_words, train_tokenizer, training


@pytest.fixture
def write(tmp_path):
    def write_text(content, name="corpus.txt"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write_text


def _make_chunks_small(monkeypatch):
    monkeypatch.setattr(chunks.exact_chunks, "__kwdefaults__", {"size": 700, "source": 0})
    monkeypatch.setattr(chunks.read_blocks, "__defaults__", (500,))


def test_merges_ids_and_specials(write, real_text):
    text = real_text[:30_000]
    special = ("<|endoftext|>", "<|pad|>")
    tokenizer = train_tokenizer([write(text)], vocab_size=500, special_tokens=special)
    words = Counter(word.encode() for part in text.split("<|endoftext|>") for word in split_words(part))
    merges = learn_merges(words, 500 - 256 - 2)
    assert tokenizer.merges == merges
    assert [tokenizer.vocab[i] for i in range(256)] == [bytes([i]) for i in range(256)]
    assert [tokenizer.vocab[256 + i] for i in range(len(merges))] == [a + b for a, b in merges]
    assert tokenizer.special_ids == {"<|endoftext|>": 498, "<|pad|>": 499}


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_fault_25_any_number_of_workers_and_chunks(write, real_text, monkeypatch, code, workers):
    path = write(real_text[:150_000])
    special = ("<|endoftext|>", "def __init__(self")  # chunks like to end at a space
    alone = train_tokenizer([path], vocab_size=800, special_tokens=special, workers=1)
    _make_chunks_small(monkeypatch)
    together = train_tokenizer([path], vocab_size=800, special_tokens=special, workers=workers)
    assert together.merges == alone.merges
    assert together.sha256 == alone.sha256


def test_several_files_are_texts_of_their_own(write):
    one, two = write("ab", "one.txt"), write("ab", "two.txt")
    tokenizer = train_tokenizer([one, two], vocab_size=300)
    assert tokenizer.merges == [(b"a", b"b")]  # not across the files: then "ba" would be a pair too


def test_one_path_strings_and_no_special_tokens(write):
    path = write("some text")
    expected = train_tokenizer([path], vocab_size=258, special_tokens=())
    for paths in (path, str(path), [str(path)], (path,)):
        assert train_tokenizer(paths, vocab_size=258, special_tokens=None).sha256 == expected.sha256
    assert expected.special_tokens == ()
    one = train_tokenizer(path, vocab_size=258, special_tokens="<|pad|>")
    assert one.special_ids == {"<|pad|>": 257}


def test_empty_corpus(write):
    for paths, named in (([write("")], "corpus.txt"), ([], "no files")):
        with raises(UsageError, "text.empty", named):
            train_tokenizer(paths, vocab_size=300)


@pytest.mark.parametrize("workers", [1, 2])
def test_fault_20_invalid_utf8(write, workers):
    path = write(b"good text " * 200_000 + b"\xff bad")
    with raises(LmkitError, "text.not_utf8", "corpus.txt", "2000000", hint="--errors"):
        train_tokenizer([path], vocab_size=300, workers=workers)
    path.write_bytes(b"good \xff\xff\xff\xfftext " * 9)  # so often that the replacement becomes a token
    replaced = train_tokenizer([path], vocab_size=270, workers=workers, errors="replace")
    written = write("good \ufffd\ufffd\ufffd\ufffdtext " * 9, "replaced.txt")
    expected = train_tokenizer([written], vocab_size=270)
    assert replaced.sha256 == expected.sha256
    assert (b"\xef", b"\xbf") in replaced.merges


def test_no_special_token_in_the_corpus_is_one_warning(write, caplog):
    train_tokenizer([write("some text without it")], vocab_size=260)
    (record,) = caplog.records
    assert "<|endoftext|>" in record.getMessage()


def test_vocabulary_too_small_states_the_minimum(write):
    with raises(UsageError, "tokenizer.vocab_size", "vocab_size = 257", "258", hint="258"):
        train_tokenizer([write("text")], vocab_size=257, special_tokens=("<|a|>", "<|b|>"))


def test_unreachable_vocabulary_says_the_real_size(write, caplog):
    tokenizer = train_tokenizer([write("abc<|endoftext|>")], vocab_size=1000)
    assert tokenizer.vocab_size == 256 + 2 + 1
    (record,) = caplog.records
    assert "259" in record.getMessage()


def test_an_endless_word_makes_no_endless_tokens(write, code, caplog):
    path = write("a" * 5000 + " " + "xyz" * 2000)
    for options, limit in (({}, 256), ({"max_token_bytes": 20}, 20)):
        caplog.clear()
        made = [train_tokenizer(path, vocab_size=400, workers=n, **options) for n in (1, 3)]
        assert made[0].sha256 == made[1].sha256
        ordinary = [token for i, token in made[0].vocab.items() if i not in made[0].special_ids.values()]
        assert limit // 2 < max(map(len, ordinary)) <= limit
        assert any(f"{limit} bytes" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("special", [("",), ("<|a|>", "<|a|>"), ("x",), ("é",), ("<|a|>", "Ġ")])
def test_impossible_special_tokens_are_refused_at_once(write, special, monkeypatch):
    monkeypatch.setattr(training, "TextFiles", lambda *_, **__: pytest.fail("the training began"))
    with raises(UsageError, "tokenizer.special_tokens"):
        train_tokenizer([write("text")], vocab_size=300, special_tokens=special)


def test_a_special_token_that_is_written_like_a_learned_one(write):
    with raises(UsageError, "tokenizer.special_tokens", "Ġthe"):
        train_tokenizer([write("the the the the")], vocab_size=260, special_tokens=("Ġthe",))
