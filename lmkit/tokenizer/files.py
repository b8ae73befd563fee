"""Tokenizers on disk: Hugging Face's `tokenizer.json`, and GPT-2's `vocab.json` with `merges.txt`.

A damaged file is an LmkitError, another kind of tokenizer a UsageError. Files are written without a final newline:
then no shorter piece of one is a whole JSON document, and a cut file is always noticed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.errors import LmkitError, UsageError
from lmkit.storage import write_atomic
from lmkit.tokenizer.byte_alphabet import to_bytes, to_characters

if TYPE_CHECKING:
    from lmkit.tokenizer.tokenizer import Tokenizer

_DAMAGED = "the file is damaged or cut: make it again, or copy it again"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
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
            "vocab": _vocabulary(tokenizer),
            "merges": [[to_characters(left), to_characters(right)] for left, right in tokenizer.merges],
        },
    }
    return json.dumps(content, ensure_ascii=False)


def save_json(tokenizer: Tokenizer, path: Path) -> None:
    write_atomic(path, to_json(tokenizer))


def load_json(path: Path) -> dict[str, Any]:
    """Return the arguments of `Tokenizer`."""
    content = _parse(path)
    try:
        model = content["model"]
        _check_kind(content, model, path)
        merges = [_pair(merge) for merge in model["merges"]]
        added = {token["id"]: token["content"] for token in content["added_tokens"]}
        vocab = {i: to_bytes(token) for token, i in model["vocab"].items() if added.get(i) != token}
        vocab |= {i: text.encode() for i, text in added.items()}
    except KeyError as error:
        raise LmkitError(f"{path}: not a whole tokenizer.json: no key {error}", hint=_DAMAGED) from error
    except (TypeError, AttributeError, ValueError) as error:
        raise LmkitError(f"{path}: not a tokenizer.json: a value of another kind", hint=_DAMAGED) from error
    return {"vocab": vocab, "merges": merges, "special_tokens": tuple(added.values())}


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
    lines = [f"{to_characters(left)} {to_characters(right)}" for left, right in tokenizer.merges]
    write_atomic(folder / "vocab.json", json.dumps(_vocabulary(tokenizer), ensure_ascii=False))
    write_atomic(folder / "merges.txt", "\n".join([_MERGES_HEADER, *lines]) + "\n")


def load_gpt2(vocab_json: Path, merges_txt: Path) -> dict[str, Any]:
    """Return the arguments of `Tokenizer`."""
    content = _parse(vocab_json)
    lines = _read(merges_txt).splitlines()
    try:
        merges = [_pair(line) for line in lines if line and not line.startswith("#version")]
    except ValueError as error:
        raise LmkitError(f"{merges_txt}: not a list of merges ({error})", hint=_DAMAGED) from error
    made = {to_characters(left + right) for left, right in merges} | {
        to_characters(bytes([b])) for b in range(256)
    }
    vocab, special_tokens = {}, []
    for token, token_id in content.items():
        if not isinstance(token_id, int):
            raise LmkitError(f"{vocab_json}: the id of {token!r} is not a number", hint=_DAMAGED)
        if token in made:
            vocab[token_id] = to_bytes(token)
        else:
            vocab[token_id] = token.encode()
            special_tokens.append(token)
    return {"vocab": vocab, "merges": merges, "special_tokens": tuple(special_tokens)}


# ---- both


def _vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    special = {token_id: text for text, token_id in tokenizer.special_ids.items()}
    tokens = {special.get(i) or to_characters(token): i for i, token in tokenizer.vocab.items()}
    if len(tokens) < len(tokenizer.vocab):
        raise UsageError(
            "a special token reads like an ordinary token in tokenizer.json",
            hint="choose another special token",
        )
    return tokens


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise LmkitError(f"{path}: not JSON (byte {error.pos} or so)", hint=_DAMAGED) from error
    except RecursionError as error:
        raise LmkitError(f"{path}: nested too deeply for a tokenizer", hint=_DAMAGED) from error
    if not isinstance(content, dict):
        raise LmkitError(f"{path}: not a JSON object", hint=_DAMAGED)
    return content


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UsageError(f"{path}: {error.strerror}", hint="give the path of a tokenizer file") from error
    except UnicodeDecodeError as error:
        raise LmkitError(f"{path}: not UTF-8 at byte {error.start}", hint=_DAMAGED) from error
