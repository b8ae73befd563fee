"""Tokenizers on disk: Hugging Face's `tokenizer.json`, and GPT-2's `vocab.json` with `merges.txt`.

A damaged file is an LmkitError, another kind of tokenizer a UsageError. Files are written without a final newline:
then no shorter piece of one is a whole JSON document, and a cut file is always noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from json.encoder import encode_basestring
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.storage import write_atomic
from lmkit.tokenizer.byte_alphabet import to_bytes, to_characters

if TYPE_CHECKING:
    from lmkit.tokenizer.tokenizer import Tokenizer

DAMAGED = (
    "another kind of file? One that is damaged or cut is made again (lmkit tokenizer train) or copied again"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_MOST_IDS = 1 << 24  # an embedding needs a row for each, used or not
_MERGES_HEADER = "#version: 0.2"


# ---- tokenizer.json


def to_json(tokenizer: Tokenizer) -> str:
    """Return the content of `tokenizer.json`.

    Raises:
        UsageError: a special token reads like an ordinary one in the byte alphabet of the format.
    """
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for text, token_id in sorted(tokenizer.special_ids.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
        },
    }
    # The two long parts are put together by hand, every token quoted once: every encoding waits for the hash of this
    # text, and json.dumps takes twice as long.
    quoted = {token_id: encode_basestring(name) for token_id, name in _names(tokenizer).items()}
    vocab = ", ".join([f"{name}: {token_id}" for token_id, name in quoted.items()])
    pairs = tokenizer.merge_table.pairs()
    merges = ", ".join([f"[{quoted[left]}, {quoted[right]}]" for left, right in pairs])
    all_but_these = json.dumps(content, ensure_ascii=False).removesuffix("}}")
    return f'{all_but_these}, "vocab": {{{vocab}}}, "merges": [{merges}]}}}}'


def save_json(tokenizer: Tokenizer, path: Path) -> None:
    write_atomic(path, to_json(tokenizer))


def load_json(path: Path) -> dict[str, Any]:
    """Return the arguments of `Tokenizer`."""
    content = _parse(path)
    try:
        model = content["model"]
        _check_kind(content, model, path)
        merges = [_pair(merge) for merge in model["merges"]]
        added = [(token["content"], token["id"]) for token in content["added_tokens"]]
        ordinary = [item for item in model["vocab"].items() if item not in added]
        vocab = _by_id(
            [*((to_bytes(token), i) for token, i in ordinary), *((t.encode(), i) for t, i in added)]
        )
    except _WrongId as error:
        raise LmkitError(f"{path}: {error}", hint=DAMAGED) from error
    except KeyError as error:
        raise LmkitError(f"{path}: not a whole tokenizer.json: no key {error}", hint=DAMAGED) from error
    except (TypeError, AttributeError, ValueError) as error:
        raise LmkitError(f"{path}: not a tokenizer.json: a value of another kind", hint=DAMAGED) from error
    return {"vocab": vocab, "merges": merges, "special_tokens": tuple(text for text, _ in added)}


def _check_kind(content: dict[str, Any], model: dict[str, Any], path: Path) -> None:
    """Refuse what would load but encode differently here."""
    before = content["pre_tokenizer"] or {}
    same = (
        model["type"] == "BPE"
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and not before.get("add_prefix_space")
        and not any(
            model.get(key) for key in ("dropout", "ignore_merges", "byte_fallback", "end_of_word_suffix")
        )
        and content.get("normalizer") is None
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] for token in content["added_tokens"]
        )
    )
    if not same:
        raise UsageError(
            f"{path}: not a byte-level BPE tokenizer with GPT-2's pre-tokenisation",
            hint="train one with: lmkit tokenizer train",
        )


def _pair(merge: str | list[str]) -> tuple[bytes, bytes]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return to_bytes(left), to_bytes(right)


# ---- GPT-2's files


def save_gpt2(tokenizer: Tokenizer, folder: Path) -> None:
    names = _names(tokenizer)
    vocab = {name: token_id for token_id, name in names.items()}
    lines = [f"{names[left]} {names[right]}" for left, right in tokenizer.merge_table.pairs()]
    write_atomic(folder / "vocab.json", json.dumps(vocab, ensure_ascii=False))
    write_atomic(folder / "merges.txt", "\n".join([_MERGES_HEADER, *lines]) + "\n")


def load_gpt2(vocab_json: Path, merges_txt: Path) -> dict[str, Any]:
    """Return the arguments of `Tokenizer`."""
    content = _parse(vocab_json)
    lines = _read(merges_txt).splitlines()
    try:
        merges = [_pair(line) for line in lines if line and not line.startswith("#version")]
    except ValueError as error:
        raise LmkitError(f"{merges_txt}: not a list of merges ({error})", hint=DAMAGED) from error
    made = {to_characters(left + right) for left, right in merges} | {
        to_characters(bytes([b])) for b in range(256)
    }
    try:
        vocab = _by_id(
            (to_bytes(token) if token in made else token.encode(), i) for token, i in content.items()
        )
    except ValueError as error:
        raise LmkitError(f"{vocab_json}: {error}", hint=DAMAGED) from error
    special_tokens = tuple(token for token in content if token not in made)
    return {"vocab": vocab, "merges": merges, "special_tokens": special_tokens}


# ---- both


class _WrongId(ValueError):
    """A token without an id of its own."""


def _by_id(tokens: Iterable[tuple[bytes, Any]]) -> dict[int, bytes]:
    """Return id -> token.

    Raises:
        _WrongId: an id is none, or is there twice.
    """
    vocab: dict[int, bytes] = {}
    for token, token_id in tokens:
        if type(token_id) is not int or not 0 <= token_id < _MOST_IDS:
            raise _WrongId(f"{token!r} has {token_id!r} instead of an id below {_MOST_IDS}")
        if token_id in vocab:
            raise _WrongId(f"{token!r} and {vocab[token_id]!r} have the same id, {token_id}")
        vocab[token_id] = token
    return vocab


def _names(tokenizer: Tokenizer) -> dict[int, str]:
    """Return how each token is written in a file, by id: special tokens as they are, others in the byte alphabet.

    Raises:
        UsageError: two would be written alike.
    """
    special = {token_id: text for text, token_id in tokenizer.special_ids.items()}
    names = {i: special.get(i) or to_characters(token) for i, token in tokenizer.vocab.items()}
    if len(set(names.values())) < len(names):
        raise UsageError(
            "a special token reads like an ordinary token in tokenizer.json",
            hint="choose another special token",
        )
    return names


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise LmkitError(f"{path}: not JSON (byte {error.pos} or so)", hint=DAMAGED) from error
    except RecursionError as error:
        raise LmkitError(f"{path}: nested too deeply for a tokenizer", hint=DAMAGED) from error
    except ValueError as error:  # Python reads no number of thousands of digits
        raise LmkitError(f"{path}: a number is too long", hint=DAMAGED) from error
    if not isinstance(content, dict):
        raise LmkitError(f"{path}: not a JSON object", hint=DAMAGED)
    return content


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UsageError(
            f"{path}: {reason(error)}",
            hint="a tokenizer is one file, tokenizer.json; lmkit tokenizer import makes it of GPT-2's two",
        ) from error
    except UnicodeDecodeError as error:
        raise LmkitError(f"{path}: not UTF-8 at byte {error.start}", hint=DAMAGED) from error
