"""The n-gram model that a Transformer has to beat: interpolated absolute discounting over word bigrams.

Text is cut, without losing a byte, into words with the space before them, runs of punctuation, and other white
space; `<|endoftext|>` is one token. With c the counts in the training text and T(v) the number of types after v,

    P(w | v) = max(c(v, w) - D2, 0) / c(v) + D2 T(v) / c(v) * P(w)
    P(w)     = max(c(w) - D1, 0) / N       + D1 V / N       * 257 ** -(bytes(w) + 1)

(Ney, Essen, Kneser 1994; D = n1 / (n1 + 2 n2) as there): an unseen word is spelled byte by byte, each byte and the
end equally likely, so that every text has a probability.
"""

import math
import re
from collections import Counter
from itertools import pairwise

_END = "<|endoftext|>"
_WORD = re.compile(r"<\|endoftext\|>| ?\w+| ?[^\w\s]+|\s")


class BigramModel:
    """A word-bigram model trained on one text."""

    def __init__(self, text: str) -> None:
        words = split_words(text)
        self.unigrams = Counter(words)
        self.bigrams = Counter(pairwise(words))
        self.contexts = Counter(words[:-1])
        self.followers = Counter(first for first, _ in self.bigrams)
        self.num_words = len(words)
        self.unigram_discount = _discount(self.unigrams)
        self.bigram_discount = _discount(self.bigrams)

    def word_probability(self, word: str) -> float:
        spelled = 257.0 ** -(len(word.encode()) + 1)
        reserved = self.unigram_discount * len(self.unigrams) / self.num_words
        kept = max(self.unigrams[word] - self.unigram_discount, 0.0) / self.num_words
        return kept + reserved * spelled

    def probability(self, previous: str, word: str) -> float:
        seen = self.contexts[previous]
        if not seen:
            return self.word_probability(word)
        kept = max(self.bigrams[previous, word] - self.bigram_discount, 0.0) / seen
        reserved = self.bigram_discount * self.followers[previous] / seen
        return kept + reserved * self.word_probability(word)

    def bits_per_byte(self, text: str) -> float:
        words = split_words(text)
        bits = -math.log2(self.word_probability(words[0]))
        bits -= sum(math.log2(self.probability(first, second)) for first, second in pairwise(words))
        return bits / len(text.replace(_END, "").encode())  # the mark has no bytes


def split_words(text: str) -> list[str]:
    words = _WORD.findall(text)
    assert sum(map(len, words)) == len(text), "the words must cover the text"
    return words


def words_without_case(text: str) -> list[str]:
    """Return the words of a text, without punctuation."""
    return re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())


def _discount(counts: Counter) -> float:
    of_counts = Counter(counts.values())
    if not of_counts[1]:
        return 0.5  # nothing was seen just once: the estimate has no data
    return of_counts[1] / (of_counts[1] + 2 * of_counts[2])
