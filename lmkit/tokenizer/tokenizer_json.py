"""Read and write Hugging Face's `tokenizer.json`.

A file of somebody else is read as `tokenizers` reads it, to the same ids, or refused with the field that lmkit does
not support.
"""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from json.encoder import encode_basestring
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.errors import UsageError, some_of
from lmkit.recipe.run_folder import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from lmkit.tokenizer.files import CHARACTERS, by_id, damaged, from_name, names_of, parse, read_merges
from lmkit.tokenizer.marks import NO_MARKS, Marks, added_by, named_by, read_config
from lmkit.tokenizer.pretokenize import PATTERN, PATTERNS, AddedToken

if TYPE_CHECKING:
    from lmkit.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger("lmkit")

_ONE_FILE = "a tokenizer is one file, tokenizer.json; make it from GPT-2's two with lmkit tokenizer import"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_CHANGE_MODEL = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")  # keys that change ids
_ADD_NO_SPACE = ("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast")
"""Classes of transformers that take the words as `tokenizer.json` has them, whatever `add_prefix_space` says."""
_GPT2_WRITTEN_OUT = PATTERN.replace("'(?:[sdmt]|ll|ve|re)", "'s|'t|'re|'ve|'m|'ll|'d")


def to_json(tokenizer: Tokenizer) -> str:
    """Return the content of `tokenizer.json`.

    Raises:
        UsageError: a special token would be read as an ordinary one ("tokenizer.special_tokens").
    """
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
            for token, token_id in sorted(tokenizer.specials.ids.items(), key=lambda item: item[1])
        ],
        "normalizer": {"type": "NFC"} if tokenizer.nfc else None,
        "pre_tokenizer": _pre_tokenizer(tokenizer.pattern),
        "post_processor": _template(tokenizer),
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
    quoted = {token_id: encode_basestring(name) for token_id, name in names.items()}
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
    return _split(PATTERNS[pattern])


def _split(regex: str) -> dict[str, Any]:
    split = {"pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    byte_level = {**_BYTE_LEVEL, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [{"type": "Split", **split}, byte_level]}


def _pattern_of(steps: list[dict[str, Any]]) -> str | None:
    """Return which of `PATTERNS` pre-tokenizers are; None for others."""
    written = {name: [_pre_tokenizer(name)] for name in PATTERNS}
    written["gpt2"] += [_split(PATTERN), _split(_GPT2_WRITTEN_OUT)]
    return next((name for name in written if steps in map(_steps, written[name])), None)


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


def _template(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the post-processor that puts prefix and suffix around a text."""
    if not (tokenizer.prefix or tokenizer.suffix):
        return None
    names = names_of(tokenizer)

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


def load_json(path: Path, marks: Marks = NO_MARKS) -> dict[str, Any]:
    """Return the arguments of `Tokenizer`. As in transformers, the tokens that begin and end a text are special, and
    `tokenizer_config.json` beside the file may add tokens or change where they are found."""
    content, config = parse(path, _ONE_FILE), read_config(path)
    try:
        model, given = content["model"], list(content.get("added_tokens", ()))
        content["added_tokens"] = [*given, *added_by(config, path, {token.get("id") for token in given})]
        if refused := [
            f"{field} = {json.dumps(value)[:100]}" for field, value in _unsupported(content, config)
        ]:
            raise UsageError(
                "tokenizer.unsupported",
                f"{path}: not supported: {', '.join(refused)}",
                hint="lmkit reads byte-level BPE with the words of GPT-2, Llama 3, Qwen2 or SmolLM",
            )
        names = model["vocab"]
        tokens = {name: name if (token := from_name(name)) is None else token for name in names}
        merges = read_merges(model["merges"], tokens)
        flags = ("special", "normalized", "lstrip", "rstrip")
        added = {
            token["content"]: AddedToken(token["content"], *(bool(token.get(flag)) for flag in flags))
            for token in content["added_tokens"]
            if token["content"]
        }
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
        prefix, suffix = _around(content.get("post_processor"), path)
        new = [text for text in added if text not in names]
        ids = [(tokens[name], token_id) for name, token_id in names.items()]
        vocab = by_id([*ids, *zip(new, count(len(names)), strict=False)])
    except KeyError as error:
        raise damaged(path, f"not a whole tokenizer.json: no key {error}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise damaged(path, f"not a tokenizer.json: {error}") from error
    if ignored := [field for field in ("truncation", "padding") if content.get(field) is not None]:
        _log.warning("%s: ignoring %s: texts are encoded whole", path, " and ".join(ignored))
    if unread := sorted(named_by(config) - added.keys()):
        _log.warning(
            "%s: names %s, which %s does not add: they stay text, where transformers makes each a token",
            *(path.with_name(TOKENIZER_CONFIG), some_of([json.dumps(name) for name in unread]), path.name),
        )
    unk_id = names.get(model.get("unk_token")) if _lacks_bytes(names) else None
    return {
        "vocab": vocab,
        "merges": merges,
        "special_tokens": tuple(added.values()),
        "prefix": prefix,
        "suffix": suffix,
        "pattern": _pattern_of(_steps(content["pre_tokenizer"])),
        "whole_words": bool(model.get("ignore_merges")),
        "nfc": bool(_steps(content.get("normalizer"), "normalizers")),
        "unk_id": unk_id,
        "fuse_unk": unk_id is not None and bool(model.get("fuse_unk")),
    }


def _unsupported(content: dict[str, Any], config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields, with their values, for which lmkit does not have the ids of Hugging Face's libraries."""
    model = content["model"]
    if config.get("add_prefix_space") and config.get("tokenizer_class") not in _ADD_NO_SPACE:
        yield f"{TOKENIZER_CONFIG}: add_prefix_space", True
    if (kind := model.get("type", "BPE" if "merges" in model else None)) != "BPE":
        yield "model.type", kind
        return
    for key in _CHANGE_MODEL:
        if model.get(key):
            yield f"model.{key}", model[key]
    vocab = model["vocab"]
    if _lacks_bytes(vocab):
        if model.get("byte_fallback"):
            yield "model.byte_fallback", True
        unknown = model.get("unk_token")
        parts = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        if unknown is not None and (
            unknown not in vocab or (from_name(unknown) is None and any(unknown in pair for pair in parts))
        ):  # not made of bytes, and a part of a merge
            yield "model.unk_token", unknown
    if len(set(vocab.values())) < len(vocab):
        yield "model.vocab", "two tokens with one id"
    normalizers = [step["type"] for step in _steps(content.get("normalizer"), "normalizers")]
    if set(normalizers) - {"NFC"}:
        yield "normalizer", normalizers
    steps = _steps(content.get("pre_tokenizer"))
    if _pattern_of(steps) is None:
        yield "pre_tokenizer", [_described(step) for step in steps] or None
    yield from _unsupported_added(content["added_tokens"], vocab, nfc=bool(normalizers))


def _unsupported_added(
    added: Iterable[Mapping[str, Any]], vocab: Mapping[str, int], *, nfc: bool
) -> Iterator[tuple[str, Any]]:
    """Do what `_unsupported` does for the added tokens."""
    ids, taken, places = dict(vocab), set(vocab.values()), count(len(vocab))
    for i, token in enumerate(added):
        text, field = token["content"], token.get("field", f"added_tokens[{i}]")
        if not text:  # is left out
            continue
        # A token that the vocabulary lacks gets the next free id, whatever the file says.
        if text not in ids:
            ids[text] = next(places)
        if token["id"] != ids[text] or (text not in vocab and ids[text] in taken):
            yield f"{field}.id", token["id"]
        if token.get("single_word"):
            yield f"{field}.single_word", True
        if token.get("normalized") and nfc and not unicodedata.is_normalized("NFC", text):
            yield f"{field}.normalized", True


def _described(step: dict[str, Any]) -> str:
    """Return a pre-tokenizer in a few words."""
    regex = step.get("pattern", {}).get("Regex")
    fields = {key: value for key, value in step.items() if key not in ("type", "pattern")}
    return " ".join([step["type"], *([regex] if regex else []), json.dumps(fields)])


def _lacks_bytes(vocab: Mapping[str, Any]) -> bool:
    return not all(character in vocab for character in CHARACTERS)


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
