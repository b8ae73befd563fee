"""Special tokens: pieces of text that are one token, never split and never merged with their neighbours."""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Span(NamedTuple):
    """Where a special token stands in a piece of bytes: data[start:end]."""

    start: int
    end: int
    token_id: int


class SpecialTokens:
    """A set of special tokens, found from left to right; of several that begin at one place the longest wins.

    Args:
        ids: text -> token id.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        # Longest first: of those that begin at one place, `min` in `find` then takes the longest.
        self._tokens = sorted(
            ((text.encode(), token_id) for text, token_id in ids.items()), key=lambda item: -len(item[0])
        )
        self.longest = max((len(token) for token, _ in self._tokens), default=0)

    def only(self, allowed: Collection[str]) -> SpecialTokens:
        """Return those that are in `allowed`; the others are then ordinary text.

        Raises:
            ValueError: a name in `allowed` is not a special token.
        """
        unknown = sorted(set(allowed) - set(self.ids))
        if unknown:
            raise ValueError(f"no special token {unknown[0]!r}; known: {', '.join(map(repr, self.ids))}")
        return SpecialTokens({text: self.ids[text] for text in allowed})

    @functools.cached_property
    def packed(self) -> bytes:
        """All of them for compiled code: the id and the size (int32) of each, then its bytes; longest first."""
        return b"".join(struct.pack("=ii", token_id, len(token)) + token for token, token_id in self._tokens)

    def find(self, data: bytes) -> list[Span]:
        """Return the special tokens in `data`, ascending and disjoint.

        One search per special token runs ahead of the scan; searching for a literal is many times faster than
        one regular expression for all.
        """
        ahead = [span for token, token_id in self._tokens if (span := _next_span(data, token, token_id, 0))]
        spans = []
        while len(ahead) > 1:
            found = min(ahead, key=lambda span: span.start)  # the first of equals, which is the longest
            spans.append(found)
            moved = [
                span
                if span.start >= found.end
                else _next_span(data, data[span.start : span.end], span.token_id, found.end)
                for span in ahead
            ]
            ahead = [span for span in moved if span is not None]
        if ahead:  # only one of them occurs any more, as in most texts from the beginning
            (start, end, token_id) = ahead[0]
            token, size = data[start:end], end - start
            while start >= 0:
                spans.append(Span(start, start + size, token_id))
                start = data.find(token, start + size)
        return spans

    def would_be_cut(self, data: bytes, at: int) -> bool:
        """Tell whether some special token in `data` stands on both sides of offset `at`."""
        low = max(0, at - self.longest + 1)
        around = data[low : at + self.longest - 1]
        for token, _ in self._tokens:
            start = around.find(token)
            while start >= 0:
                if low + start < at < low + start + len(token):
                    return True
                start = around.find(token, start + 1)
        return False


def _next_span(data: bytes, token: bytes, token_id: int, begin: int) -> Span | None:
    start = data.find(token, begin)
    return Span(start, start + len(token), token_id) if start >= 0 else None
