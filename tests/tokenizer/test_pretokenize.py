"""Words and special tokens, in Python and in C, against the regular expression itself."""

import random
import time
from collections import Counter

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from marking import full_except

from lmkit.tokenizer.engine import new_counter
from lmkit.tokenizer.pretokenize import PATTERN, AddedToken, SpecialTokens, character_classes, split_words

# Special tokens that begin alike, contain one another, contain a space, and begin like ordinary words.
SPECIAL = ("<|pad|>", "<|pad|><|endoftext|>", "<|endoftext|>", "a b", "日本")


def expected(text, special=()):
    """Word counts and the number of special tokens, by definition."""
    pattern = "|".join(map(regex.escape, sorted(special, key=len, reverse=True)))
    parts = regex.split(pattern, text) if special else [text]
    words = Counter(word.encode() for part in parts for word in regex.findall(PATTERN, part))
    return words, len(parts) - 1


def counted(*texts, special=()):
    """The same as the engine counts it."""
    counter = new_counter(SpecialTokens(dict.fromkeys(special, 0)))
    for text in texts:
        counter.add(text.encode())
    words = counter.result()
    ends = np.cumsum(words.lengths)
    joined = words.text.tobytes()
    each = [joined[end - size : end] for end, size in zip(ends.tolist(), words.lengths.tolist(), strict=True)]
    assert len(set(each)) == len(each)  # every word once
    return dict(zip(each, words.counts.tolist(), strict=True)), words.num_special


@pytest.mark.parametrize("special", [SPECIAL, ("<|endoftext|>",), ()])
def test_fuzzed_text(code, pieces, special):
    texts = st.one_of(st.lists(st.sampled_from([*pieces, *special]), max_size=60).map("".join), st.text())

    @settings(max_examples=300, deadline=None)
    @given(texts)
    def check(text):
        assert counted(text, special=special) == expected(text, special)

    check()


@pytest.mark.parametrize("template", full_except("  {}1", "ab{}cdefghijk", "  {}  "))
def test_every_code_point(template):
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    text = "\n".join(map(template.format, points))
    assert counted(text) == expected(text)


@pytest.mark.parametrize("special", ["so", "l", " ", "'", "ve", "日"])
def test_text_around_special_tokens_is_split_as_if_it_stood_alone(code, special):
    for text in ("it'so", "'ll", "we'll've", "a  b", "'s's", "日 日本", "x 's"):
        assert counted(text, special=(special,)) == expected(text, (special,)), text


def test_the_table_of_classes_covers_what_lies_beyond_its_search():
    for c in random.Random(0).sample(range(0x40000, 0x110000), 20_000):
        assert character_classes()[c] == 0
        assert split_words("a" + chr(c)) == ["a", chr(c)]


# ---- special tokens

TOKENS = {"ab": 0, "abc": 1, "b c": 2, "cab": 3, "aa": 4, "é": 5}


@settings(max_examples=300, deadline=None)
@given(st.text("abc é", max_size=30))
def test_leftmost_longest(text):
    """Found by hand: at each place the longest token that begins there."""
    data, parts, ids, i, end = text.encode(), [], [], 0, 0
    while i < len(data):
        here = [token for token in TOKENS if data.startswith(token.encode(), i)]
        if here:
            longest = max(here, key=len)
            parts.append(data[end:i])
            ids.append(TOKENS[longest])
            i = end = i + len(longest.encode())
        else:
            i += 1
    found = list(SpecialTokens(TOKENS).split(data))
    assert found == [*zip(parts, ids, strict=True), (data[end:], None)]


def test_would_be_cut():
    specials = SpecialTokens({"<| |>": 0, "c": 1})
    data = b"ab <| |> cd"
    assert [at for at in range(len(data)) if specials.would_be_cut(data, at)] == [4, 5, 6, 7]


def test_many_strings_are_searched_for_at_once():
    names = [f"<|reserved_{i}|>" for i in range(3000)] + [" " * n for n in range(2, 120)]
    specials = SpecialTokens({name: i for i, name in enumerate(names)})
    data = b"a" + b"".join(b" %d<|reserved_%d|>   <|reserved_x|>" % (i, i) for i in range(2990, 3010))
    found = [token_id for _, token_id in specials.split(data) if token_id is not None]
    assert found == [i for n in range(2990, 3000) for i in (n, 3001)] + [3001] * 10
    start = time.process_time()
    assert not any(specials.would_be_cut(b"one two three " * 9, at) for at in range(100))
    for _ in specials.split(data * 1000):
        pass
    assert time.process_time() - start < 20  # trying one string after the other takes minutes


def test_whitespace_beside_a_token_and_its_normal_form_are_not_cut():
    strips = SpecialTokens({AddedToken("ab", rstrip=True): 0, AddedToken("c", lstrip=True): 1})
    assert list(strips.split(b"x ab \n y \xc2\xa0c")) == [(b"x ", 0), (b"y", 1), (b"", None)]
    assert [at for at in range(7) if strips.would_be_cut(b"x ab  y", at)] == [3, 4]
    composed = SpecialTokens({AddedToken("\u00e9!x", normalized=True): 0})
    data = "ae\u0301!x b".encode()
    assert [at for at in range(len(data)) if composed.would_be_cut(data, at)] == [4, 5]
