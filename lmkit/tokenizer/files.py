"""Read and write GPT-2's tokenizer files, `vocab.json` and `merges.txt`, and what `tokenizer.json` has in common.

Both formats write a token as a string with one visible character per byte (`to_characters`). Special tokens are
written as they are. JSON is written without a final newline, so that a truncated file is never a whole document.
"""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.errors import LmkitError, UsageError, reason, some_of
from lmkit.storage import write_atomic
from lmkit.storage.inputs import parse_object, read_input
from lmkit.tokenizer.pretokenize import AddedToken

if TYPE_CHECKING:
    from lmkit.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger("lmkit")

_DAMAGED_HINT = (
    "not a tokenizer? Replace a damaged file: train again (lmkit tokenizer train) or copy it again"
)
_MOST_IDS = 1 << 24  # an embedding needs a row for each id, used or not
_MERGES_HEADER = "#version: 0.2"
_SPACE = "Ġ"
"""A space, in the characters that stand for bytes."""
_TWO_FILES = "GPT-2's tokenizer is two files, vocab.json and merges.txt; a tokenizer.json is used as it is"


def damaged(path: str | Path, what: object) -> LmkitError:
    """Return the error for a tokenizer file whose content is wrong."""
    return LmkitError("tokenizer.damaged_file", f"{path}: {what}", hint=_DAMAGED_HINT)


# ---- the byte alphabet

# GPT-2's `bytes_to_unicode` (Radford et al. 2019, `encoder.py`): bytes that are visible in Latin-1 stand for
# themselves; the others, in order, are the characters from U+0100 on. A space becomes U+0120.
_VISIBLE = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
CHARACTERS = "".join(chr(byte if byte in _VISIBLE else 256 + _HIDDEN.index(byte)) for byte in range(256))
_BYTES = codecs.charmap_build(CHARACTERS)  # one character per byte is a codec with a table


def to_characters(token: bytes) -> str:
    """Write a token in the byte alphabet.

    >>> to_characters(b" the")
    'Ġthe'
    """
    return codecs.charmap_decode(token, "strict", CHARACTERS)[0]


def to_bytes(characters: str) -> bytes:
    """Read a token in the byte alphabet.

    Raises:
        ValueError: a character outside the alphabet.

    >>> to_bytes("Ġthe")
    b' the'
    """
    return codecs.charmap_encode(characters, "strict", _BYTES)[0]


def from_name(name: str) -> bytes | None:
    """Return the bytes of a token in the byte alphabet; None if it has other characters."""
    try:
        return to_bytes(name)
    except ValueError:
        return None


# ---- GPT-2's files


def save_gpt2(tokenizer: Tokenizer, folder: Path) -> None:
    if tokenizer.pattern != "gpt2" or tokenizer.whole_words or tokenizer.nfc:
        lost = f"how this tokenizer finds words ({tokenizer.pattern})"
    elif tokenizer.unk_id is not None or tokenizer.verbatim != set(tokenizer.special_ids.values()):
        lost = "which tokens of this tokenizer are special, or unknown"
    elif any(token != AddedToken(token.text) for token in tokenizer.added_tokens):
        lost = "where this tokenizer finds its added tokens"
    else:
        lost = None
    if lost is not None:
        raise UsageError(
            "tokenizer.unsupported",
            f"{folder}: GPT-2's files cannot say {lost}",
            hint="use its tokenizer.json",
        )
    names = names_of(tokenizer)
    vocab = {name: token_id for token_id, name in names.items()}
    lines = [f"{names[left]} {names[right]}" for left, right, _ in tokenizer.merge_table.merges]
    if tokenizer.prefix or tokenizer.suffix:
        around = " and ".join(
            f"{names[token_id]} {where} each text"
            for where, ids in (("before", tokenizer.prefix), ("after", tokenizer.suffix))
            for token_id in ids
        )
        _log.warning("%s: GPT-2's files cannot say that a tokenizer puts %s; left out", folder, around)
    write_atomic(folder / "vocab.json", json.dumps(vocab, ensure_ascii=False))
    write_atomic(folder / "merges.txt", "\n".join([_MERGES_HEADER, *lines]) + "\n")


def load_gpt2(vocab_json: Path, merges_txt: Path) -> dict[str, Any]:
    """Return the arguments of `Tokenizer`. A token that is no byte and comes from no merge is a special token."""
    names = parse(vocab_json, _TWO_FILES)
    lines = [line for line in _read(merges_txt, _TWO_FILES).splitlines() if line]
    made = {line.replace(" ", "") for line in lines} | set(CHARACTERS)
    special_tokens = tuple(name for name in names if name not in made)
    lost = [name for name in special_tokens if _SPACE in name]
    if lost:  # nobody spells a special token so
        found = some_of(lost, most=1)
        raise damaged(merges_txt, f"no merge makes {found} of {vocab_json.name}; is it complete?")
    tokens = {name: to_bytes(name) if name in made else name for name in names}
    try:
        merges = read_merges(lines, tokens)
    except ValueError as error:
        raise damaged(merges_txt, f"not a list of merges ({error})") from error
    try:
        vocab = by_id((tokens[name], i) for name, i in names.items())
    except ValueError as error:
        raise damaged(vocab_json, error) from error
    return {"vocab": vocab, "merges": merges, "special_tokens": special_tokens}


# ---- both


def read_merges(
    merges: Iterable[str | list[str]], tokens: Mapping[str, bytes | str]
) -> list[tuple[bytes, bytes]]:
    """Return the merges of a file as Hugging Face's library reads them, given the tokens by name.

    Of a merge that is listed twice the last place counts. No text has a token that is not in the byte alphabet, so
    that its merges are left out.

    Raises:
        ValueError: says which merge is wrong.
    """
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        if not isinstance(merge, str):
            left, right = merge
        elif merge.startswith("#version"):
            continue
        else:
            left, right = merge.split(" ")
        pairs.append((left, right))
    if len(set(pairs)) < len(pairs):
        pairs = list(dict.fromkeys(reversed(pairs)))[::-1]
    read = []
    try:
        for left, right in pairs:
            a, b = tokens[left], tokens[right]
            if isinstance(a, bytes) and isinstance(b, bytes):
                read.append((a, b))
            else:
                tokens[left + right]  # has to be there
    except KeyError as error:
        raise ValueError(f"the vocabulary lacks {error}, which a merge uses or makes") from None
    return read


def by_id(tokens: Iterable[tuple[bytes | str, Any]]) -> dict[int, bytes | str]:
    """Return id -> token. ValueError: a token has no id, or the id of another token."""
    vocab: dict[int, bytes | str] = {}
    for token, token_id in tokens:
        if type(token_id) is not int or not 0 <= token_id < _MOST_IDS:
            raise ValueError(f"{token!r} has {token_id!r} instead of an id below {_MOST_IDS}")
        if token_id in vocab:
            raise ValueError(f"{token!r} and {vocab[token_id]!r} have the same id, {token_id}")
        vocab[token_id] = token
    return vocab


def names_of(tokenizer: Tokenizer) -> dict[int, str]:
    """Return id -> the token as it is written: in the byte alphabet, or as it is.

    Raises:
        UsageError: a special token would be read as an ordinary one ("tokenizer.special_tokens").
    """
    verbatim, vocab = tokenizer.verbatim, tokenizer.vocab
    names = {i: t.decode() if i in verbatim else to_characters(t) for i, t in vocab.items()}
    for token_id in verbatim:
        token = from_name(names[token_id])
        is_word = token is not None and (len(token) == 1 or tokenizer.whole_words)
        if is_word and token != vocab[token_id]:
            raise UsageError(
                "tokenizer.special_tokens",
                f"the special token {names[token_id]!r} is written like the bytes {token!r} in a tokenizer file",
                hint="choose another special token",
            )
    return names


def parse(path: Path, hint: str) -> dict[str, Any]:
    try:
        return parse_object(_read(path, hint))
    except ValueError as error:
        raise damaged(path, error) from None


def _read(path: Path, hint: str) -> str:
    try:
        return read_input(path).decode()
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UsageError("tokenizer.unreadable", f"{path}: {reason(error)}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise damaged(path, f"not UTF-8 at byte {error.start}") from error
