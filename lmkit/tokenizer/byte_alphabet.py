"""GPT-2's way to write bytes in JSON: every byte is a visible character, so that a token is a plain string.

Bytes that are visible in Latin-1 stand for themselves; the others, in order, are the characters from U+0100 on. A
space becomes U+0120 (Radford et al. 2019, `bytes_to_unicode` in `encoder.py`).
"""

from __future__ import annotations

_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]

_CHARACTERS = {byte: chr(256 + i) for i, byte in enumerate(_HIDDEN)}
_BYTES = {ord(character): chr(byte) for byte, character in _CHARACTERS.items()}
_BYTES |= dict.fromkeys(_HIDDEN, "\uffff")  # no part of the alphabet, and not of Latin-1


def to_characters(token: bytes) -> str:
    """b" the" -> "Ġthe"."""
    return token.decode("latin-1").translate(_CHARACTERS)


def to_bytes(characters: str) -> bytes:
    """ "Ġthe" -> b" the".

    Raises:
        ValueError: a character outside the alphabet.
    """
    return characters.translate(_BYTES).encode("latin-1")
