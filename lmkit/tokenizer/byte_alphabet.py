"""GPT-2's way to write bytes in JSON: every byte is a visible character, so that a token is a plain string.

Bytes that are visible in Latin-1 stand for themselves; the others, in order, are the characters from U+0100 on. A
space becomes U+0120 (Radford et al. 2019, `bytes_to_unicode` in `encoder.py`). A character for each byte is an 8-bit
encoding: Python's codecs do it with a table, a charmap.
"""

from __future__ import annotations

import codecs

_VISIBLE = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]

_CHARACTERS = "".join(chr(byte if byte in _VISIBLE else 256 + _HIDDEN.index(byte)) for byte in range(256))
_BYTES = codecs.charmap_build(_CHARACTERS)

BYTE_CHARACTERS = frozenset(_CHARACTERS)


def to_characters(token: bytes) -> str:
    """b" the" -> "Ġthe"."""
    return codecs.charmap_decode(token, "strict", _CHARACTERS)[0]


def to_bytes(characters: str) -> bytes:
    """ "Ġthe" -> b" the".

    Raises:
        ValueError: a character outside the alphabet.
    """
    return codecs.charmap_encode(characters, "strict", _BYTES)[0]
