"""Cuts of a text stream: the words of the chunks are the words of the whole."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from lmkit.errors import LmkitError, UsageError
from lmkit.tokenizer.chunks import Chunk, exact_chunks, last_cut, read_blocks, valid_utf8
from lmkit.tokenizer.pretokenize import PATTERNS, SpecialTokens, split_words

SPECIAL = "<|a b|>"
PIECES = [*"aé日1½ \n\r\t\u3000.,'😀", "'s", "e\u0301", "  ", "\r\n", SPECIAL, "<|a", " b|>", "|>"]


def words(text, pattern):
    result = []
    for i, part in enumerate(text.split(SPECIAL)):
        result += ([SPECIAL] if i else []) + split_words(part, pattern)
    return result


def blocks(data, size):
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=200).map("".join), st.integers(1, 50), st.integers(16, 64))
def test_pieces_have_the_words_of_the_whole(pattern, text, block, size):
    data = text.encode()
    chunks = list(exact_chunks(blocks(data, block), SpecialTokens({SPECIAL: 0}), size=size))
    assert b"".join(chunk.data for chunk in chunks) == data
    assert all(chunk.num_bytes == len(chunk.data) for chunk in chunks)
    assert [data[chunk.offset :][: len(chunk.data)] for chunk in chunks] == [chunk.data for chunk in chunks]
    found = [word for chunk in chunks for word in words(chunk.data.decode(), pattern)]
    assert found == words(text, pattern)


@pytest.mark.parametrize("text", ["word " * 4000, "日本語、" * 4000, "a.b.c." * 3000, "x\n" * 9000])
def test_ordinary_text_of_any_script_is_cut_to_size(text):
    data = text.encode()
    chunks = exact_chunks(blocks(data, 512), SpecialTokens({SPECIAL: 0}), size=1024)
    sizes = [len(chunk.data) for chunk in chunks]
    assert max(sizes) <= 1536
    assert len(sizes) > len(data) // 1536


@pytest.mark.parametrize("character", ["a", " ", "\n", "日", "\u3000"])
def test_one_enormous_word_is_not_searched_again_and_again(character):
    data = (character * 2_000_000).encode()
    start = time.process_time()
    chunks = exact_chunks(blocks(data, 1 << 12), SpecialTokens({}), size=1 << 12)
    assert [len(chunk.data) for chunk in chunks] == [len(data)]
    # Looking at everything after each of the blocks would take minutes.
    assert time.process_time() - start < 30


def test_a_special_token_at_the_end_may_not_be_whole_yet():
    specials = SpecialTokens({SPECIAL: 0})
    assert last_cut(b"one two <|a", specials) == 3
    assert last_cut(b"one two <|a b|> three", specials) == 7


def test_fault_20_invalid_utf8_names_the_byte():
    chunk = Chunk(0, 100, 7, b"abc\xffdef")
    with raises(LmkitError, "text.not_utf8", "text.txt", "103", hint="--errors"):
        valid_utf8(chunk, Path("text.txt"), "strict")
    assert valid_utf8(chunk, Path("text.txt"), "replace") == "abc\ufffddef".encode()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from([b"a", b" ", b"\n", b"\xff", b"\xe6\x97", b"\xa5", b"\xf0\x9f", b"1", b"."]),
        max_size=80,
    )
)
def test_fault_20_replacement_does_not_depend_on_where_chunks_end(parts):
    data = b"".join(parts)
    chunks = exact_chunks(blocks(data, 5), SpecialTokens({}), size=16)
    replaced = b"".join(valid_utf8(chunk, Path(), "replace") for chunk in chunks)
    assert replaced == data.decode("utf-8", "replace").encode()


def test_missing_file_or_folder(tmp_path):
    for path in (tmp_path / "nothing.txt", tmp_path):
        with raises(UsageError, "text.unreadable", path):
            list(read_blocks(path))
