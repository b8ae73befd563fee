"""Token ids to text while they arrive."""

from __future__ import annotations

import codecs

from lmkit.tokenizer import Tokenizer


class TextStream:
    """Turns tokens into pieces of text that can be shown at once.

    A token may end in the middle of a character: its bytes are held back until the rest has come. Bytes that can
    never become a character turn into U+FFFD, as in `Tokenizer.decode`; the pieces joined equal the whole decoded.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """What is held back: U+FFFD where the stream ended inside a character, nothing otherwise."""
        return self._decoder.decode(b"", final=True)
