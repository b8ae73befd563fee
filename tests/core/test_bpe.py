"""The readable form of BPE, worked by hand."""

import pytest

from lmkit.core.bpe import learn_merges


@pytest.mark.parametrize(
    ("words", "num_merges", "merges"),
    [
        # Sennrich et al. 2016, figure 1, with ties broken by the greatest bytes. 1. st and es occur 9 times, we 8
        # times: st is the greater. 2. e+st occurs 9 times; w+e is left in "lower" alone once newest is n e w est.
        # 3. lo and ow occur 7 times: ow is the greater. 4. l+ow.
        (
            {b"low": 5, b"lower": 2, b"newest": 6, b"widest": 3},
            4,
            [(b"s", b"t"), (b"e", b"st"), (b"o", b"w"), (b"l", b"ow")],
        ),
        ({b"ab": 1, b" cd": 1}, 1, [(b"c", b"d")]),  # of equal counts the greatest
        ({b"ab": 2, b" cd": 1}, 1, [(b"a", b"b")]),  # a count before bytes
        ({b"aaaaa": 1}, 9, [(b"a", b"a"), (b"aa", b"aa"), (b"aaaa", b"a")]),  # left to right, to the end
        ({b"abc": 1}, 0, []),
        ({b"a": 5}, 5, []),
    ],
)
def test_learning_by_hand(words, num_merges, merges):
    assert learn_merges(words, num_merges) == merges
