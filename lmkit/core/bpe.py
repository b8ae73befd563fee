"""Byte-pair encoding (Sennrich et al. 2016, algorithm 1, on bytes as in GPT-2): learn merges, encode, decode.

    >>> merges = learn_merges(count_words("the cat, the hat"), 3)  # in the order of learning
    >>> merges
    [(b't', b'h'), (b'th', b'e'), (b'a', b't')]
    >>> table = MergeTable.of(merges)
    >>> table.encode("the hat")
    [257, 32, 104, 258]
    >>> table.decode([257, 32, 104, 258])
    'the hat'

A tokenizer first splits text into words, and never merges across their borders. So a corpus is a multiset of short
words, and learning needs the counts of the distinct ones.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import regex

Pair = tuple[bytes, bytes]

PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's pattern of words (Radford et al. 2019, `encoder.py`), in the equivalent form that tiktoken uses."""
NEVER = 1 << 62
"""The rank of a pair that is not merged."""


def count_words(text: str) -> Counter[bytes]:
    """Return how often each word stands in a text. Every character belongs to exactly one word.

    >>> count_words("I'll see 42 stars, see?")[b" see"]
    2
    """
    return Counter(word.encode() for word in regex.findall(PATTERN, text))


def learn_merges(words: Mapping[bytes, int], num_merges: int, *, max_token_bytes: int = 256) -> list[Pair]:
    """Learn merges from the distinct words of a corpus and their counts.

    Repeat: count every pair of neighbouring tokens, take the most frequent pair (of equally frequent pairs the
    greatest, compared as bytes), and merge it in every word. A pair of more than `max_token_bytes` bytes is not
    merged. Return fewer than `num_merges` merges if no pair is left.

    >>> learn_merges({b"aaab": 2, b"ab": 1}, 2)
    [(b'a', b'a'), (b'a', b'b')]
    """
    splits = {word: [bytes([byte]) for byte in word] for word in words}
    merges: list[Pair] = []
    while len(merges) < num_merges:
        counts: Counter[Pair] = Counter()
        for word, tokens in splits.items():
            for left, right in pairwise(tokens):
                if len(left + right) <= max_token_bytes:
                    counts[left, right] += words[word]
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        for tokens in splits.values():
            merge_pair(tokens, best)
    return merges


def merge_pair(tokens: list[bytes], pair: Pair) -> None:
    """Replace every occurrence of `pair` by one token, from left to right, in place.

    >>> tokens = [b"a", b"a", b"a", b"b"]
    >>> merge_pair(tokens, (b"a", b"a"))
    >>> tokens
    [b'aa', b'a', b'b']
    """
    i = 0
    while i < len(tokens) - 1:
        if (tokens[i], tokens[i + 1]) == pair:
            tokens[i : i + 2] = [pair[0] + pair[1]]
        i += 1


class MergeTable:
    """The merges of a tokenizer by token id.

    Args:
        byte_ids: the token id of each of the 256 bytes.
        merges: (left id, right id, id of the merged token) in the order in which the merges were learned. The
            position of a merge is its rank.

    >>> MergeTable(range(256), [(ord("h"), ord("e"), 256), (256, ord("l"), 257)]).encode_word(b"hello")
    [257, 108, 111]
    """

    def __init__(self, byte_ids: Sequence[int], merges: Sequence[tuple[int, int, int]]) -> None:
        self.byte_ids = list(byte_ids)
        self.merges = list(merges)

    @classmethod
    def of(cls, merges: Sequence[Pair]) -> MergeTable:
        """Return the table of learned merges: token i is the byte i below 256, then come the merged tokens."""
        ids = {bytes([byte]): byte for byte in range(256)}
        for left, right in merges:
            ids.setdefault(left + right, len(ids))
        return cls(range(256), [(ids[left], ids[right], ids[left + right]) for left, right in merges])

    @functools.cached_property
    def ranks(self) -> dict[tuple[int, int], int]:
        """Pair of ids -> rank; a pair that is listed twice keeps its first rank."""
        return {(left, right): rank for rank, (left, right, _) in reversed(list(enumerate(self.merges)))}

    @functools.cached_property
    def vocab(self) -> dict[int, bytes]:
        """Token id -> its bytes."""
        vocab = {token: bytes([byte]) for byte, token in enumerate(self.byte_ids)}
        for left, right, merged in self.merges:
            vocab[merged] = vocab[left] + vocab[right]
        return vocab

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, word by word."""
        return [i for word in regex.findall(PATTERN, text) for i in self.encode_word(word.encode())]

    def encode_word(self, word: bytes) -> list[int]:
        """Return the token ids of one word."""
        return self.merge([self.byte_ids[byte] for byte in word])

    def merge(self, ids: list[int]) -> list[int]:
        """Merge the pair of lowest rank, the leftmost first, until no neighbouring pair is in the table; in place."""
        while len(ids) > 1:
            rank, i = min((self.ranks.get(pair, NEVER), i) for i, pair in enumerate(pairwise(ids)))
            if rank == NEVER:
                break
            ids[i : i + 2] = [self.merges[rank][2]]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.vocab.__getitem__, ids)).decode("utf-8", errors="replace")
