"""The readable form of BPE: worked by hand, and against one merge at a time."""

import random

import pytest

from lmkit.core.bpe import learn_merges
from lmkit.tokenizer.engine import MergeTable


def test_the_example_of_the_paper_worked_by_hand():
    """Sennrich et al. 2016, figure 1, with ties broken by the greatest bytes."""
    words = {b"low": 5, b"lower": 2, b"newest": 6, b"widest": 3}
    # 1. st and es occur 9 times, we 8 times: st is the greater. 2. e+st occurs 9 times; w+e is left in "lower" alone
    # once newest is n e w est. 3. lo and ow occur 7 times: ow is the greater. 4. l+ow.
    assert learn_merges(words, 4) == [(b"s", b"t"), (b"e", b"st"), (b"o", b"w"), (b"l", b"ow")]


@pytest.mark.parametrize(
    ("words", "num_merges", "merges"),
    [
        ({b"ab": 1, b" cd": 1}, 1, [(b"c", b"d")]),  # of equal counts the greatest
        ({b"ab": 2, b" cd": 1}, 1, [(b"a", b"b")]),  # a count before bytes
        ({b"aaaaa": 1}, 9, [(b"a", b"a"), (b"aa", b"aa"), (b"aaaa", b"a")]),  # left to right, to the end
        ({b"abc": 1}, 0, []),
        ({b"a": 5}, 5, []),
    ],
)
def test_learning_by_hand(words, num_merges, merges):
    assert learn_merges(words, num_merges) == merges


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


def random_merges(seed, count, *, shuffled=False):
    """Merges of a, b, c. Shuffled: as a file from elsewhere may have them, a token used before it is made."""
    rng = random.Random(seed)
    tokens = {97: b"a", 98: b"b", 99: b"c"}
    merges: dict[tuple[int, int], int] = {}
    while len(merges) < count:
        left, right = rng.choice(list(tokens)), rng.choice(list(tokens))
        text = tokens[left] + tokens[right]
        if (left, right) not in merges and len(text) < 30:
            made = next((token for token, other in tokens.items() if other == text), 256 + len(merges))
            tokens[made] = text
            merges[left, right] = made
    rows = [(left, right, made) for (left, right), made in merges.items()]
    if shuffled:
        rng.shuffle(rows)
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_words_short_and_long(seed):
    """Words of up to 64 bytes and longer ones take different ways."""
    rng = random.Random(seed)
    merges = random_merges(seed, rng.choice([1, 5, 40]), shuffled=seed % 2 == 1)
    table = MergeTable(range(256), merges)
    for size in [1, 2, 3, 8, 30, 64, 65, 150] * 4:
        word = bytes(rng.choices(b"abcd", k=size))
        assert table.encode_word(word) == one_at_a_time(word, merges)


def test_no_merges_and_a_pair_listed_twice():
    assert MergeTable(range(256), []).encode_word(b"abc") == [97, 98, 99]
    table = MergeTable(range(256), [(97, 98, 256), (98, 99, 257), (97, 98, 258)])
    assert table.encode_word(b"abc") == [256, 99]  # the first rank counts
