"""Read and write tokenizers: Hugging Face's `tokenizer.json`, and GPT-2's `vocab.json` with `merges.txt`.

Both formats write a token as a string with one visible character per byte (`to_characters`). JSON is written without
a final newline, so that a truncated file is never a whole document.
"""

from __future__ import annotations

import codecs
import json
import logging
from collections.abc import Iterable, Iterator
from json.encoder import encode_basestring
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.errors import LmkitError, UsageError, reason, some_of
from lmkit.storage import write_atomic
from lmkit.storage.inputs import read_input
from lmkit.storage.json_files import parse_object
from lmkit.tokenizer.pretokenize import PATTERNS

if TYPE_CHECKING:
    from lmkit.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger("lmkit")

_DAMAGED_HINT = (
    "not a tokenizer? Replace a damaged file: train again (lmkit tokenizer train) or copy it again"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_CHANGE_MODEL = (  # keys of the model that change ids
    "dropout",
    "byte_fallback",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)
_MOST_IDS = 1 << 24  # an embedding needs a row for each id, used or not
_MERGES_HEADER = "#version: 0.2"
_ONE_FILE = "a tokenizer is one file, tokenizer.json; make it from GPT-2's two with lmkit tokenizer import"
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
_CHARACTERS = "".join(chr(byte if byte in _VISIBLE else 256 + _HIDDEN.index(byte)) for byte in range(256))
_BYTES = codecs.charmap_build(_CHARACTERS)  # one character per byte is a codec with a table


def to_characters(token: bytes) -> str:
    """Write a token in the byte alphabet.

    >>> to_characters(b" the")
    'Ġthe'
    """
    return codecs.charmap_decode(token, "strict", _CHARACTERS)[0]


def to_bytes(characters: str) -> bytes:
    """Read a token in the byte alphabet.

    Raises:
        ValueError: a character outside the alphabet.

    >>> to_bytes("Ġthe")
    b' the'
    """
    return codecs.charmap_encode(characters, "strict", _BYTES)[0]


# ---- tokenizer.json


def to_json(tokenizer: Tokenizer) -> str:
    """Return the content of `tokenizer.json`."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": text, **plain, "special": True}
            for text, token_id in sorted(tokenizer.special_ids.items(), key=lambda item: item[1])
        ],
        "normalizer": {"type": "NFC"} if tokenizer.nfc else None,
        "pre_tokenizer": _pre_tokenizer(tokenizer.pattern),
        "post_processor": _template(tokenizer),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
            "ignore_merges": tokenizer.whole_words,
        },
    }
    # The two long parts are joined by hand, with each token quoted once: json.dumps takes twice as long, and every
    # encoding of a corpus waits for the hash of this text.
    quoted = {token_id: encode_basestring(name) for token_id, name in _names(tokenizer).items()}
    vocab = ", ".join([f"{name}: {token_id}" for token_id, name in quoted.items()])
    pairs = tokenizer.merge_table.merges
    merges = ", ".join([f"[{quoted[left]}, {quoted[right]}]" for left, right, _ in pairs])
    the_rest = json.dumps(content, ensure_ascii=False).removesuffix("}}")
    return f'{the_rest}, "vocab": {{{vocab}}}, "merges": [{merges}]}}}}'


def _pre_tokenizer(pattern: str) -> dict[str, Any]:
    """Return the pre-tokenizer that finds the words of one of `PATTERNS`."""
    if pattern == "gpt2":
        return _BYTE_LEVEL
    if pattern == "digits":
        return {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
        }
    split = {"pattern": {"Regex": PATTERNS[pattern]}, "behavior": "Isolated", "invert": False}
    byte_level = {**_BYTE_LEVEL, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [{"type": "Split", **split}, byte_level]}


def _pattern_of(pre_tokenizer: dict[str, Any]) -> str | None:
    """Return which of `PATTERNS` a pre-tokenizer is; None for others."""
    found = _steps(pre_tokenizer)
    return next((name for name in PATTERNS if _steps(_pre_tokenizer(name)) == found), None)


def _steps(pre_tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a list of the pre-tokenizers, without what changes offsets only."""
    is_sequence = pre_tokenizer.get("type") == "Sequence"
    steps = pre_tokenizer["pretokenizers"] if is_sequence else [pre_tokenizer]
    defaults = {"use_regex": True, "trim_offsets": None}
    return [{**defaults, **step} | {"trim_offsets": None} for step in steps]


def _template(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the post-processor that puts prefix and suffix around a text."""
    if not (tokenizer.prefix or tokenizer.suffix):
        return None
    names = _names(tokenizer)

    def around(text: str, type_id: int) -> list[dict[str, Any]]:
        before, after = (
            [{"SpecialToken": {"id": names[token_id], "type_id": type_id}} for token_id in ids]
            for ids in (tokenizer.prefix, tokenizer.suffix)
        )
        return [*before, {"Sequence": {"id": text, "type_id": type_id}}, *after]

    used = {i: names[i] for i in (*tokenizer.prefix, *tokenizer.suffix)}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in used.items()},
    }


def load_json(path: Path) -> dict[str, Any]:
    """Return the arguments of `Tokenizer`."""
    content = _parse(path)
    try:
        model = content["model"]
        if refused := [f"{field} = {json.dumps(value)[:60]}" for field, value in _other_ids(content)]:
            raise UsageError(
                "tokenizer.unsupported",
                f"{path}: would encode differently here: {', '.join(refused)}",
                hint="lmkit reads byte-level BPE with the words of GPT-2, Llama 3, Qwen2 or SmolLM",
            )
        prefix, suffix = _around(content.get("post_processor"), path)
        merges = _distinct(_pair(merge) for merge in model["merges"])
        added = [(token["content"], token["id"]) for token in content["added_tokens"]]
        ordinary = [item for item in model["vocab"].items() if item not in added]
        vocab = _by_id(
            [*((to_bytes(token), i) for token, i in ordinary), *((t.encode(), i) for t, i in added)]
        )
    except KeyError as error:
        raise damaged(path, f"not a whole tokenizer.json: no key {error}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise damaged(path, f"not a tokenizer.json: {error}") from error
    if ignored := [field for field in ("truncation", "padding") if content.get(field) is not None]:
        _log.warning("%s: ignoring %s: texts are encoded whole", path, " and ".join(ignored))
    return {
        "vocab": vocab,
        "merges": merges,
        "special_tokens": tuple(text for text, _ in added),
        "prefix": prefix,
        "suffix": suffix,
        "pattern": _pattern_of(content["pre_tokenizer"]),
        "whole_words": bool(model.get("ignore_merges")),
        "nfc": content.get("normalizer") is not None,
    }


def _other_ids(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields, with their values, for which Hugging Face's ids would differ from lmkit's."""
    model, before, added = content["model"], content["pre_tokenizer"] or {}, content["added_tokens"]
    if model["type"] != "BPE":
        yield "model.type", model["type"]
    for key in _CHANGE_MODEL:
        if model.get(key):
            yield f"model.{key}", model[key]
    normalizer = content.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        yield "normalizer", normalizer
    if before.get("type") == "ByteLevel" and before.get("add_prefix_space"):
        yield "pre_tokenizer.add_prefix_space", before["add_prefix_space"]
    elif before.get("type") == "ByteLevel" and not before.get("use_regex", True):
        yield "pre_tokenizer.use_regex", before["use_regex"]
    elif _pattern_of(before) is None:
        yield "pre_tokenizer", content["pre_tokenizer"]

    vocab = model.get("vocab", {})
    next_free = len(vocab)
    found_first = [token["content"] for token in added if not token.get("normalized")]
    for i, token in enumerate(added):
        for key in ("single_word", "lstrip", "rstrip"):
            if token[key]:
                yield f"added_tokens[{i}].{key}", token[key]
        # A token that the vocabulary lacks gets the next free id, whatever the file says.
        if token["id"] != (expected := vocab.get(token["content"], next_free)):
            yield f"added_tokens[{i}].id", token["id"]
        next_free = max(next_free, expected + 1)
        # Normalized tokens are looked for in what the others have left: another order only if they overlap.
        if token.get("normalized") and (
            normalizer is not None or any(_overlap(token["content"], other) for other in found_first)
        ):
            yield f"added_tokens[{i}].normalized", True


def _overlap(a: str, b: str) -> bool:
    """Return whether a text may contain both strings with a character in common."""
    sizes = range(1, min(len(a), len(b)) + 1)
    return a in b or b in a or any(a[-n:] == b[:n] or b[-n:] == a[:n] for n in sizes)


def _around(post_processor: dict[str, Any] | None, path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor puts before and after a text."""
    if post_processor is None:
        return (), ()
    is_sequence = post_processor["type"] == "Sequence"
    found: list[tuple[int, ...]] = []
    for i, processor in enumerate(post_processor["processors"] if is_sequence else [post_processor]):
        field = f"post_processor.processors[{i}]" if is_sequence else "post_processor"
        kind = processor["type"]
        if kind == "ByteLevel":  # changes offsets only
            continue
        if kind in ("BertProcessing", "RobertaProcessing"):
            sides = [[token_id] for _, token_id in (processor["cls"], processor["sep"])]
        elif kind == "TemplateProcessing":
            sides = [[]]
            for piece in processor["single"]:
                if "Sequence" in piece:
                    sides.append([])
                else:
                    sides[-1] += processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        else:
            sides = []
        if len(sides) != 2 or found:
            raise UsageError(
                "tokenizer.unsupported",
                f"{path}: {field} = {json.dumps(processor)[:60]} is not supported",
                hint="a post-processor may put tokens before and after the text, once",
            )
        if any(type(token_id) is not int for side in sides for token_id in side):
            raise ValueError(f"{field}: an id is not an integer")
        found = [tuple(side) for side in sides]
    return (found[0], found[1]) if found else ((), ())


def _pair(merge: str | list[str]) -> tuple[bytes, bytes]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return to_bytes(left), to_bytes(right)


def _distinct(merges: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return each merge at the last place where the file lists it, which is its rank in Hugging Face's library."""
    return list(dict.fromkeys(reversed(list(merges))))[::-1]


# ---- GPT-2's files


def save_gpt2(tokenizer: Tokenizer, folder: Path) -> None:
    if tokenizer.pattern != "gpt2" or tokenizer.whole_words or tokenizer.nfc:
        raise UsageError(
            "tokenizer.unsupported",
            f"{folder}: GPT-2's files cannot say how this tokenizer finds words ({tokenizer.pattern})",
            hint="use its tokenizer.json",
        )
    names = _names(tokenizer)
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
    content = _parse(vocab_json, _TWO_FILES)
    lines = _read(merges_txt, _TWO_FILES).splitlines()
    try:
        merges = _distinct(_pair(line) for line in lines if line and not line.startswith("#version"))
    except ValueError as error:
        raise damaged(merges_txt, f"not a list of merges ({error})") from error
    made = {to_characters(left + right) for left, right in merges} | {
        to_characters(bytes([b])) for b in range(256)
    }
    try:
        vocab = _by_id(
            (to_bytes(token) if token in made else token.encode(), i) for token, i in content.items()
        )
    except ValueError as error:
        raise damaged(vocab_json, error) from error
    special_tokens = tuple(token for token in content if token not in made)
    lost = [token for token in special_tokens if _SPACE in token]
    if lost:  # nobody spells a special token so
        found = some_of(lost, most=1)
        raise damaged(merges_txt, f"no merge makes {found} of {vocab_json.name}; is it complete?")
    return {"vocab": vocab, "merges": merges, "special_tokens": special_tokens}


# ---- both


def _by_id(tokens: Iterable[tuple[bytes, Any]]) -> dict[int, bytes]:
    """Return id -> token. ValueError: a token has no id, or the id of another token."""
    vocab: dict[int, bytes] = {}
    for token, token_id in tokens:
        if type(token_id) is not int or not 0 <= token_id < _MOST_IDS:
            raise ValueError(f"{token!r} has {token_id!r} instead of an id below {_MOST_IDS}")
        if token_id in vocab:
            raise ValueError(f"{token!r} and {vocab[token_id]!r} have the same id, {token_id}")
        vocab[token_id] = token
    return vocab


def _names(tokenizer: Tokenizer) -> dict[int, str]:
    """Return id -> the token as it is written: special tokens unchanged, others in the byte alphabet."""
    special = {token_id: text for text, token_id in tokenizer.special_ids.items()}
    names = {i: special.get(i) or to_characters(token) for i, token in tokenizer.vocab.items()}
    if len(set(names.values())) < len(names):
        raise UsageError(
            "tokenizer.special_tokens",
            "a special token is written like an ordinary token in tokenizer.json",
            hint="choose another special token",
        )
    return names


def _parse(path: Path, hint: str = _ONE_FILE) -> dict[str, Any]:
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
