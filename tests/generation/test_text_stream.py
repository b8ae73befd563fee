"""Streaming never shows half a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmkit.generation import TextStream
from lmkit.tokenizer import Tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [stream.push(token) for token in ids] + [stream.finish()]


def test_bytes_are_held_back_until_the_character_is_complete(tokenizer: Tokenizer) -> None:
    snow = "☃".encode()
    assert pieces(tokenizer, [ord("a"), snow[0], snow[1], snow[2], ord("b")]) == ["a", "", "", "☃", "b", ""]
    assert pieces(tokenizer, [258, snow[2]]) == ["", "☃", ""]


def test_fault_94_a_stream_cut_inside_a_character_ends_in_one_replacement(tokenizer: Tokenizer) -> None:
    for cut in (1, 2, 3):
        ids = [ord("a"), *"😀".encode()[:cut]]
        assert pieces(tokenizer, ids) == ["a", *[""] * cut, "\ufffd"]


def test_fault_94_bytes_that_are_no_utf8_are_replaced_at_once(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [0xFF, ord("a"), 0x80]) == ["\ufffd", "a", "\ufffd", ""]


@given(ids=st.lists(st.integers(0, 259), max_size=40))
def test_fault_94_the_pieces_joined_are_the_whole_decoded(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=st.text(max_size=40))
def test_text_streams_without_replacements(tokenizer: Tokenizer, text: str) -> None:
    streamed = pieces(tokenizer, list(text.encode()))
    assert "".join(streamed) == text
    assert streamed.count("") >= len(text.encode()) + 1 - len(text)
