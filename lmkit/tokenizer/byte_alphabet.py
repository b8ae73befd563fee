"""GPT-2's way to write bytes in JSON: every byte is a visible character, so that a token is a plain string.

Bytes that are visible in Latin-1 stand for themselves; the others, in order, are the characters from U+0100 on. A
space becomes U+0120 (Radford et al. 2019, `bytes_to_unicode` in `encoder.py`).
"""

from __future__ import annotations

_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]

CHARACTER_OF_BYTE = {byte: chr(byte) for byte in _VISIBLE} | {
    byte: chr(256 + i) for i, byte in enumerate(_HIDDEN)
}
_BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}


def to_characters(token: bytes) -> str:
    """b" the" -> "Ġthe"."""
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)


def to_bytes(characters: str) -> bytes:
    """ "Ġthe" -> b" the".

    Raises:
        ValueError: a character outside the alphabet.
    """
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in characters)
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} stands for no byte") from None
