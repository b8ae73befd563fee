from __future__ import annotations

import random
import time

import numpy as np
import pytest

from lmkit.tokenizer.bpe import MergeTable

BYTE_IDS = list(range(256))


def slow(word: bytes, merges: list[tuple[int, int, int]]) -> list[int]:
    ids = list(word)
    for left, right, made in merges:
        i = 0
        while i < len(ids) - 1:
            if (ids[i], ids[i + 1]) == (left, right):
                ids[i : i + 2] = [made]
            i += 1
    return ids


def random_merges(rng: random.Random, count: int) -> list[tuple[int, int, int]]:
    """Merges as training makes them: each pair once, of tokens that exist by then."""
    tokens, merges = [97, 98, 99], {}
    while len(merges) < count:
        left, right = rng.choice(tokens), rng.choice(tokens)
        if (left, right) not in merges:
            merges[left, right] = 256 + len(merges)
            tokens.append(merges[left, right])
    return [(left, right, made) for (left, right), made in merges.items()]


@pytest.mark.parametrize("seed", range(20))
def test_short_long_and_many_words_agree_with_one_merge_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    merges = random_merges(rng, rng.choice([1, 5, 60]))
    table = MergeTable(BYTE_IDS, merges)
    words = [bytes(rng.choices(b"abcd", k=rng.choice([1, 2, 3, 8, 30, 64, 65, 200]))) for _ in range(60)]
    expected = [slow(word, merges) for word in words]
    assert [table.merge_word(word) for word in words] == expected
    tokens, sizes = table.merge_words(
        np.frombuffer(b"".join(words), np.uint8), np.array([len(w) for w in words])
    )
    assert [part.tolist() for part in np.split(tokens, np.cumsum(sizes)[:-1])] == expected


@pytest.mark.parametrize("seed", range(20))
def test_many_words_agree_with_one_word_where_merges_are_in_any_order(seed: int) -> None:
    """As files from elsewhere may have them: a token that two merges make, or one that is used before it is made."""
    rng = random.Random(seed)
    tokens = {97: b"a", 98: b"b", 99: b"c"}
    merges = []
    for _ in range(30):
        left, right = rng.choice(list(tokens)), rng.choice(list(tokens))
        text = tokens[left] + tokens[right]
        made = next((token for token, other in tokens.items() if other == text), 256 + len(tokens))
        tokens[made] = text
        merges.append((left, right, made))
    if seed % 2:
        rng.shuffle(merges)
    table = MergeTable(BYTE_IDS, merges)
    words = [bytes(rng.choices(b"abc", k=rng.choice([1, 2, 3, 8, 30, 65]))) for _ in range(60)]
    expected = [table.merge_word(word) for word in words]
    assert expected == [lowest_first(word, merges) for word in words]
    joined, sizes = table.merge_words(
        np.frombuffer(b"".join(words), np.uint8), np.array([len(word) for word in words])
    )
    assert [part.tolist() for part in np.split(joined, np.cumsum(sizes)[:-1])] == expected


def lowest_first(word: bytes, merges: list[tuple[int, int, int]]) -> list[int]:
    """The pair that comes first in the list, of equal ones the leftmost, until there is none."""
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


def test_no_merges_at_all() -> None:
    table = MergeTable(BYTE_IDS, [])
    assert table.merge_word(b"abc") == [97, 98, 99]
    tokens, sizes = table.merge_words(np.frombuffer(b"abc", np.uint8), np.array([2, 1]))
    assert (tokens.tolist(), sizes.tolist()) == ([97, 98, 99], [2, 1])


def test_a_pair_listed_twice_keeps_its_first_rank() -> None:
    table = MergeTable(BYTE_IDS, [(97, 98, 256), (98, 99, 257), (97, 98, 256)])
    assert table.merge_word(b"abc") == [256, 99]
    assert table.merge_words(np.frombuffer(b"abc", np.uint8), np.array([3]))[0].tolist() == [256, 99]


def test_a_word_of_a_million_letters_takes_n_log_n() -> None:
    rng = random.Random(0)
    table = MergeTable(BYTE_IDS, random_merges(rng, 60))
    word = bytes(rng.choices(b"ab", k=300_000))
    start = time.process_time()
    ids = table.merge_word(word)
    assert time.process_time() - start < 60  # quadratic: hours
    assert len(ids) < len(word)
