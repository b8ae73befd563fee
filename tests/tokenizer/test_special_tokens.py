from __future__ import annotations

import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkit.tokenizer.special_tokens import Span, SpecialTokens

TOKENS = {"ab": 0, "abc": 1, "b c": 2, "cab": 3, "aa": 4, "é": 5}


@settings(max_examples=500, deadline=None)
@given(st.text("abc é", max_size=30))
def test_fault_26_leftmost_longest(text: str) -> None:
    data = text.encode()
    longest_first = sorted((token.encode() for token in TOKENS), key=len, reverse=True)
    expected = [
        Span(*match.span(), TOKENS[match.group().decode()])
        for match in regex.finditer(b"|".join(map(regex.escape, longest_first)), data)
    ]
    assert SpecialTokens(TOKENS).find(data) == expected


def test_fault_26_longest_wins_where_two_begin() -> None:
    specials = SpecialTokens({"<|x|>": 0, "<|x|><|x|>": 1})
    assert specials.find(b"<|x|><|x|><|x|>") == [Span(0, 10, 1), Span(10, 15, 0)]


def test_would_be_cut() -> None:
    specials = SpecialTokens({"<| |>": 0})
    data = b"ab <| |> cd"
    assert [at for at in range(len(data)) if specials.would_be_cut(data, at)] == [4, 5, 6, 7]
