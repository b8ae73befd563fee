from __future__ import annotations

import random

import numpy as np

from lmkit.tokenizer.word_table import WordTable, joined


def test_numbers_are_those_of_a_dict() -> None:
    rng = random.Random(0)
    alphabet = [bytes([b]) for b in (0, 97, 98, 255)]
    table, known = WordTable(capacity=16), {}
    for _ in range(30):  # the table has to grow several times
        words = [b"".join(rng.choices(alphabet, k=rng.choice([1, 2, 7, 8, 9, 14, 15, 16, 17, 31, 32, 40])))
                 for _ in range(300)]  # fmt: skip
        words += rng.sample(words, 100)
        lengths = np.array([len(word) for word in words])
        starts = np.cumsum(lengths) - lengths
        numbers, new = table.look_up(b"".join(words), starts, lengths)
        new_words = [word.tobytes() for word in np.split(new.text, np.cumsum(new.lengths)[:-1])]
        for number, word in enumerate(new_words, start=len(known)):
            assert word not in known
            known[word] = number
        assert [known[word] for word in words] == numbers.tolist()
        assert table.num_words == len(known)


def test_words_that_differ_only_in_trailing_zeros_differ() -> None:
    words = [b"a", b"a\0", b"a\0\0", b"\0", b"\0\0", b"a" + bytes(14), b"a" + bytes(15), b"a" + bytes(30)]
    lengths = np.array([len(word) for word in words])
    numbers, _ = WordTable().look_up(b"".join(words), np.cumsum(lengths) - lengths, lengths)
    assert len(set(numbers.tolist())) == len(words)


def test_joined() -> None:
    values = np.arange(100)
    assert joined(values, np.array([5, 0, 90]), np.array([2, 0, 3])).tolist() == [5, 6, 90, 91, 92]
