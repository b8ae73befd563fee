"""Read and write tokenizer files: Hugging Face's `tokenizer.json`, and GPT-2's `vocab.json` and `merges.txt`.

A `tokenizer.json` of somebody else is read as `tokenizers` reads it, to the same ids, or refused with the field that
lmkit does not support. All formats write a token as a string with one visible character per byte (`to_characters`).
Special tokens are written as they are. JSON is written without a final newline, so that a truncated file is never a
whole document.
"""

from __future__ import annotations

import codecs
import json
import logging
import unicodedata
from collections.abc import Iterable, Mapping
from itertools import count, filterfalse
from json.encoder import encode_basestring
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.errors import LmkitError, UsageError, reason, some_of
from lmkit.recipe.run_folder import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from lmkit.storage.atomic import write_atomic
from lmkit.storage.inputs import parse_json, read_input
from lmkit.tokenizer.marks import added_by, named_by, read_beside
from lmkit.tokenizer.pretokenize import PATTERN, PATTERNS, AddedToken

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
_ONE_FILE = "a tokenizer is one file, tokenizer.json; make it from GPT-2's two with lmkit tokenizer import"
_TWO_FILES = "GPT-2's tokenizer is two files, vocab.json and merges.txt; a tokenizer.json is used as it is"


def damaged(path: str | Path, what: object) -> LmkitError:
    return LmkitError("tokenizer.damaged_file", f"{path}: {what}", hint=_DAMAGED_HINT)


# ---- the byte alphabet

# GPT-2's `bytes_to_unicode` (Radford et al. 2019, `encoder.py`): bytes that are visible in Latin-1 stand for
# themselves; the others, in order, are the characters from U+0100 on. A space becomes U+0120.
_VISIBLE = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
_HIDDEN = sorted({*range(256)} - _VISIBLE)
CHARACTERS = "".join(map(chr, range(256))).translate(dict(zip(_HIDDEN, count(256))))
_ALPHABET = frozenset(CHARACTERS)
_BYTES = codecs.charmap_build(CHARACTERS)  # one character per byte is a codec with a table


def to_characters(token: bytes) -> str:
    """Write a token in the byte alphabet.

    >>> to_characters(b" the")
    'Ġthe'
    """
    return codecs.charmap_decode(token, "strict", CHARACTERS)[0]


def to_bytes(name: str) -> bytes | None:
    """Return the bytes of a token in the byte alphabet; None if it has other characters."""
    try:
        return codecs.charmap_encode(name, "strict", _BYTES)[0]
    except ValueError:
        return None


def _token(name: str) -> bytes | str:
    """Return the bytes of a token, or its name if that is not in the byte alphabet."""
    token = to_bytes(name)
    return name if token is None else token


# ---- tokenizer.json

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_CHANGE_MODEL = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")  # keys that change ids
_ADD_NO_SPACE = ("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast")
"""Classes of transformers that take the words as `tokenizer.json` has them, whatever `add_prefix_space` says."""


def _split(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**_BYTE_LEVEL, "use_regex": False}]}


_DIGITS = {"type": "Digits", "individual_digits": True}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt2": _BYTE_LEVEL,
    "digits": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
    "llama3": _split(PATTERNS["llama3"]),
    "qwen2": _split(PATTERNS["qwen2"]),
}
"""The pre-tokenizer that finds the words of each of `PATTERNS`."""
_SPELLINGS = [
    *_PRE_TOKENIZERS.items(),
    ("gpt2", _split(PATTERN)),
    ("gpt2", _split(PATTERN.replace("'(?:[sdmt]|ll|ve|re)", "'s|'t|'re|'ve|'m|'ll|'d"))),
]


def to_json(tokenizer: Tokenizer) -> str:
    """Return the content of `tokenizer.json`. Errors are those of `names_of`."""
    names = names_of(tokenizer)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": token.text,
                "single_word": False,
                "lstrip": token.lstrip,
                "rstrip": token.rstrip,
                "normalized": token.normalized,
                "special": token.special,
            }
            for token, token_id in sorted(tokenizer.specials.ids.items(), key=itemgetter(1))
        ],
        "normalizer": {"type": "NFC"} if tokenizer.nfc else None,
        "pre_tokenizer": _PRE_TOKENIZERS[tokenizer.pattern],
        "post_processor": _template(tokenizer, names) if tokenizer.prefix or tokenizer.suffix else None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if tokenizer.unk_id is None else names[tokenizer.unk_id],
            **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix")),
            "fuse_unk": tokenizer.fuse_unk,
            "byte_fallback": False,
            "ignore_merges": tokenizer.whole_words,
        },
    }
    # The two long parts are joined by hand, with each token quoted once: json.dumps takes twice as long, and every
    # encoding of a corpus waits for the hash of this text.
    quoted = dict(zip(names, map(encode_basestring, names.values()), strict=True))
    vocab = ", ".join([f"{name}: {token_id}" for token_id, name in quoted.items()])
    pairs = tokenizer.merge_table.merges
    merges = ", ".join([f"[{quoted[left]}, {quoted[right]}]" for left, right, _ in pairs])
    the_rest = json.dumps(content, ensure_ascii=False).removesuffix("}}")
    return f'{the_rest}, "vocab": {{{vocab}}}, "merges": [{merges}]}}}}'


def _steps(part: dict[str, Any] | None, key: str = "pretokenizers") -> list[dict[str, Any]]:
    """Return a list of the pre-tokenizers, or normalizers, without what changes offsets only."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[key] for step in _steps(inner, key)]
    step = {**({"use_regex": True} if part["type"] == "ByteLevel" else {}), **part}
    step.pop("trim_offsets", None)
    if (step.get("behavior"), step.get("invert")) == ("Removed", True):  # the patterns match all of a text
        step |= {"behavior": "Isolated", "invert": False}
    return [step]


_PATTERN_OF = {json.dumps(_steps(written), sort_keys=True): name for name, written in _SPELLINGS}


def _template(tokenizer: Tokenizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the post-processor that puts prefix and suffix around a text."""

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
    """Return the arguments of `Tokenizer`. As in transformers, the tokens that begin and end a text are special, and
    `tokenizer_config.json` beside the file may add tokens or change where they are found."""
    beside, marks = read_beside(path)
    config, written = beside.get(TOKENIZER_CONFIG, {}), _read(path, _ONE_FILE)
    try:
        content = parse_json(written, dict)
        model, given = content["model"], list(content.get("added_tokens", ()))
        if beside:
            given += added_by(beside, path, {token.get("id") for token in given})
        content["added_tokens"] = given
        if refused := _unsupported(content, config):
            fields = ", ".join(f"{field} = {json.dumps(value)[:100]}" for field, value in refused)
            hint = "lmkit reads byte-level BPE with the words of GPT-2, Llama 3, Qwen2 or SmolLM"
            raise UsageError("tokenizer.unsupported", f"{path}: not supported: {fields}", hint=hint)
        names = model["vocab"]
        tokens = {name: _token(name) for name in names}
        merges = read_merges(model["merges"], tokens)
        added = {}
        for described in given:
            if text := described["content"]:
                added[text] = AddedToken(text, *map(bool, map(described.get, AddedToken._fields[1:])))
        for mark in (marks.begin, marks.end):
            if mark is not None and (mark in added or mark in names):
                added[mark] = added.get(mark, AddedToken(mark))._replace(special=True)
            elif mark is not None and mark == marks.end:
                raise UsageError(
                    "tokenizer.unsupported",
                    f"{path.with_name(TOKENIZER_CONFIG)} or {SPECIAL_TOKENS_MAP}: "
                    f"eos_token = {json.dumps(mark)} is no token of {path.name}",
                    hint="name a token that the vocabulary has, or remove the key",
                )
        around: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        if (post_processor := content.get("post_processor")) is not None:
            around = _around(post_processor, path)
        new = list(filterfalse(names.__contains__, added))
        ids = (*names.values(), *range(len(names), len(names) + len(new)))
        vocab = by_id(zip((*tokens.values(), *new), ids, strict=True))
    except KeyError as error:
        raise damaged(path, f"not a whole tokenizer.json: no key {error}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise damaged(path, f"not a tokenizer.json: {error}") from error
    if ignored := list(filter(content.get, ("truncation", "padding"))):
        _log.warning("%s: ignoring %s: texts are encoded whole", path, " and ".join(ignored))
    if config and (unread := sorted(named_by(config) - added.keys())):
        _log.warning(
            "%s: names %s, which %s does not add: they stay text, where transformers makes each a token",
            *(path.with_name(TOKENIZER_CONFIG), some_of([json.dumps(name) for name in unread]), path.name),
        )
    unk_id = None if names.keys() >= _ALPHABET else names.get(model.get("unk_token"))
    return {
        "vocab": vocab,
        "merges": merges,
        "special_tokens": tuple(added.values()),
        "prefix": around[0],
        "suffix": around[1],
        "pattern": _PATTERN_OF[json.dumps(_steps(content["pre_tokenizer"]), sort_keys=True)],
        "whole_words": bool(model.get("ignore_merges")),
        "nfc": bool(_steps(content.get("normalizer"), "normalizers")),
        "unk_id": unk_id,
        "fuse_unk": unk_id is not None and bool(model.get("fuse_unk")),
        "marks": marks,
    }


def _unsupported(content: dict[str, Any], config: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the fields, with their values, for which lmkit does not have the ids of Hugging Face's libraries."""
    model = content["model"]
    if (kind := model.get("type", "BPE" if "merges" in model else None)) != "BPE":
        return [("model.type", kind)]
    found = [(f"model.{key}", model[key]) for key in _CHANGE_MODEL if model.get(key)]
    if config.get("add_prefix_space") and config.get("tokenizer_class") not in _ADD_NO_SPACE:
        found.append((f"{TOKENIZER_CONFIG}: add_prefix_space", True))
    if config.get("split_special_tokens"):
        found.append((f"{TOKENIZER_CONFIG}: split_special_tokens", True))
    vocab = model["vocab"]
    if not vocab.keys() >= _ALPHABET:
        if model.get("byte_fallback"):
            found.append(("model.byte_fallback", True))
        unknown = model.get("unk_token")
        parts = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        if unknown is not None and (
            unknown not in vocab or (to_bytes(unknown) is None and any(unknown in pair for pair in parts))
        ):  # not made of bytes, and a part of a merge
            found.append(("model.unk_token", unknown))
    taken = set(vocab.values())
    if len(taken) < len(vocab):
        found.append(("model.vocab", "two tokens with one id"))
    normalizers = list(map(itemgetter("type"), _steps(content.get("normalizer"), "normalizers")))
    if set(normalizers) - {"NFC"}:
        found.append(("normalizer", normalizers))
    steps = _steps(content.get("pre_tokenizer"))
    if json.dumps(steps, sort_keys=True) not in _PATTERN_OF:
        found.append(("pre_tokenizer", steps or None))
    ids, places = dict(vocab), count(len(vocab))
    for i, token in enumerate(content["added_tokens"]):
        text, field = token["content"], token.get("field", f"added_tokens[{i}]")
        if not text:  # is left out
            continue
        # A token that the vocabulary lacks gets the next free id, whatever the file says.
        if text not in ids:
            ids[text] = next(places)
        if token["id"] != ids[text] or (text not in vocab and ids[text] in taken):
            found.append((f"{field}.id", token["id"]))
        if token.get("single_word"):
            found.append((f"{field}.single_word", True))
        if token.get("normalized") and normalizers and not unicodedata.is_normalized("NFC", text):
            found.append((f"{field}.normalized", True))
    return found


def _around(post_processor: dict[str, Any], path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor puts before and after a text."""
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
            message = f"{path}: {field} = {json.dumps(processor)[:60]} is not supported"
            hint = "a post-processor may put tokens before and after the text, once"
            raise UsageError("tokenizer.unsupported", message, hint=hint)
        if any(type(token_id) is not int for side in sides for token_id in side):
            raise ValueError(f"{field}: an id is not an integer")
        found = [tuple(side) for side in sides]
    return (found[0], found[1]) if found else ((), ())


# ---- GPT-2's files


def save_gpt2(tokenizer: Tokenizer, folder: Path) -> None:
    words = (tokenizer.pattern, tokenizer.whole_words, tokenizer.nfc, tokenizer.unk_id)
    special = set(tokenizer.special_ids.values())
    plain = all(token == AddedToken(token.text) for token in tokenizer.added_tokens)
    if words != ("gpt2", False, False, None) or tokenizer.verbatim != special or not plain:
        raise UsageError(
            "tokenizer.unsupported",
            f"{folder}: GPT-2's files cannot say how this tokenizer finds words ({tokenizer.pattern}) or tokens",
            hint="use its tokenizer.json",
        )
    names = names_of(tokenizer)
    vocab = {name: token_id for token_id, name in names.items()}
    lines = [f"{names[left]} {names[right]}" for left, right, _ in tokenizer.merge_table.merges]
    if around := ", ".join(map(names.__getitem__, (*tokenizer.prefix, *tokenizer.suffix))):
        _log.warning("%s: GPT-2's files cannot say that %s stand around each text; left out", folder, around)
    write_atomic(folder / "vocab.json", json.dumps(vocab, ensure_ascii=False))
    write_atomic(folder / "merges.txt", "\n".join([_MERGES_HEADER, *lines]) + "\n")


def load_gpt2(vocab_json: Path, merges_txt: Path) -> dict[str, Any]:
    """Return the arguments of `Tokenizer`. A token that is no byte and comes from no merge is a special token."""
    text, lines = _read(vocab_json, _TWO_FILES), _read(merges_txt, _TWO_FILES).splitlines()
    lines = list(filter(None, lines))
    made = {line.replace(" ", "") for line in lines} | _ALPHABET
    try:
        names = parse_json(text, dict)
        tokens = {name: _token(name) if name in made else name for name in names}
        vocab = by_id((tokens[name], i) for name, i in names.items())
    except ValueError as error:
        raise damaged(vocab_json, error) from None
    special_tokens = tuple(name for name in names if name not in made)
    lost = [name for name in special_tokens if _SPACE in name]
    if lost:  # nobody spells a special token so
        found = some_of(lost, most=1)
        raise damaged(merges_txt, f"no merge makes {found} of {vocab_json.name}; is it complete?")
    try:
        merges = read_merges(lines, tokens)
    except ValueError as error:
        raise damaged(merges_txt, f"not a list of merges ({error})") from error
    return {"vocab": vocab, "merges": merges, "special_tokens": special_tokens}


# ---- both


def read_merges(
    merges: Iterable[str | list[str]], tokens: Mapping[str, bytes | str]
) -> list[tuple[bytes, bytes]]:
    """Return the merges of a file as Hugging Face's library reads them, given the tokens by name.

    Of a merge that is listed twice the last place counts. Merges of tokens that are not in the byte alphabet are left
    out, because no text has these. ValueError says which merge is wrong.
    """
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        if isinstance(merge, str) and merge.startswith("#version"):
            continue
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        pairs.append((left, right))
    read = []
    try:
        for left, right in list(dict.fromkeys(reversed(pairs)))[::-1]:
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

    UsageError: a special token would be read as an ordinary one ("tokenizer.special_tokens").
    """
    names = {}
    for token_id, content in tokenizer.vocab.items():
        if token_id not in tokenizer.verbatim:
            names[token_id] = to_characters(content)
            continue
        names[token_id] = content.decode()
        token = to_bytes(names[token_id])
        is_word = token is not None and (len(token) == 1 or tokenizer.whole_words)
        if is_word and token != content:
            raise UsageError(
                "tokenizer.special_tokens",
                f"the special token {names[token_id]!r} is written like the bytes {token!r} in a tokenizer file",
                hint="choose another special token",
            )
    return names


def _read(path: Path, hint: str) -> str:
    try:
        return read_input(path).decode()
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UsageError("tokenizer.unreadable", f"{path}: {reason(error)}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise damaged(path, f"not UTF-8 at byte {error.start}") from error
