"""Streaming never shows half a character."""

from hypothesis import given
from hypothesis import strategies as st

from lmkit.generation import TextStream


def pieces(tokenizer, ids):
    stream = TextStream(tokenizer)
    return [stream.push(token) for token in ids] + [stream.finish()]


def test_a_stream_cut_inside_a_character_ends_in_one_replacement(tokenizer):
    for cut in (1, 2, 3):
        ids = [ord("a"), *"😀".encode()[:cut]]
        assert pieces(tokenizer, ids) == ["a", *[""] * cut, "\ufffd"]


def test_bytes_that_are_no_utf8_are_replaced_at_once(tokenizer):
    assert pieces(tokenizer, [0xFF, ord("a"), 0x80]) == ["\ufffd", "a", "\ufffd", ""]


@given(ids=st.lists(st.integers(0, 259), max_size=40))
def test_the_pieces_joined_are_the_whole_decoded(tokenizer, ids):
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
