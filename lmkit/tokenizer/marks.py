"""Find the special tokens that begin and end a text, in the files of a tokenizer.

A `tokenizer.json` does not name them. Hugging Face folders do, beside it: `tokenizer_config.json` has `bos_token` and
`eos_token`, and may add tokens; in older folders, so do `special_tokens_map.json` and `added_tokens.json`.
`generation_config.json`, or `config.json`, has the ids at which generation stops.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.recipe.run_folder import (
    ADDED_TOKENS,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from lmkit.storage.inputs import read_object

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
"""Where no file names the token that ends a text, the first of these that the vocabulary has: the names of GPT-2,
Llama 3, Llama 2, Gemma and DeepSeek."""
CONFIG = "config.json"
_FILES = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, GENERATION_CONFIG, CONFIG)
_DECODER = "added_tokens_decoder"
Beside = Mapping[str, dict[str, Any]]
"""Names of files beside a tokenizer -> their content."""


class Marks(NamedTuple):
    """The special tokens that begin and end a text, and the ids at which generation stops; None and (): not said."""

    begin: str | None = None
    end: str | None = None
    stops: tuple[int, ...] = ()


NO_MARKS = Marks()


def resolve_marks(said: Marks, special_ids: Mapping[str, int]) -> Marks:
    """Return the marks of a tokenizer with these special tokens.

    `said.end` ends a text (ValueError: it is none of them), else the first of `said.stops` that is a special token,
    else that with the first of `END_NAMES`. The end-of-text id is the first of the `stops` of the result.

    >>> resolve_marks(NO_MARKS, {"<s>": 0, "</s>": 1})
    Marks(begin=None, end='</s>', stops=(1,))
    >>> resolve_marks(Marks(stops=(5, 0)), {"<s>": 0, "</s>": 1})
    Marks(begin=None, end='<s>', stops=(0, 5))
    """
    if said.end is not None and said.end not in special_ids:
        raise ValueError(f"{said.end!r} ends a text, but is not a special token")
    texts = dict(zip(special_ids.values(), special_ids, strict=True))
    names = (*map(texts.get, said.stops), *END_NAMES) if said.end is None else (said.end,)
    end = next(filter(special_ids.__contains__, names), None)
    begin = said.begin if said.begin in special_ids else None
    first = () if end is None else (special_ids[end],)
    return Marks(begin, end, tuple(dict.fromkeys((*first, *said.stops))))


def no_end_of_text(where: object) -> UsageError:
    """Return the error for a tokenizer without a token that ends a document."""
    message = f"{where}: holds documents, and the tokenizer has no token that ends one"
    hint = "name one of its special tokens: tokenizer.end_of_text in a recipe, or --end-of-text"
    return UsageError("tokenizer.no_end_of_text", message, hint=hint)


def read_beside(path: Path) -> tuple[Beside, Marks]:
    """Read the files beside a `tokenizer.json`; return them, and what they say of begin, end and stops.

    Files beside a tokenizer of another name belong to something else. As in transformers, the keys of
    `special_tokens_map.json` take precedence over those of a `tokenizer_config.json` without `added_tokens_decoder`.
    LmkitError: a file is damaged ("tokenizer.damaged_marks").
    """
    beside = {}
    for name in _FILES if path.name == TOKENIZER else ():
        if (file := path.with_name(name)).is_file() and (content := _read(file)):
            beside[name] = content
    mapped, config = beside.pop(SPECIAL_TOKENS_MAP, {}), beside.get(TOKENIZER_CONFIG, {})
    if mapped and _DECODER not in config:
        beside[TOKENIZER_CONFIG] = config | mapped
    if not beside:
        return beside, NO_MARKS
    named, generation = beside.get(TOKENIZER_CONFIG, {}), beside.get(GENERATION_CONFIG, {})
    found = (generation if "eos_token_id" in generation else beside.get(CONFIG, {})).get("eos_token_id")
    stops = tuple(i for i in (found if isinstance(found, list) else [found]) if type(i) is int)
    return beside, Marks(_text(named.get("bos_token")), _text(named.get("eos_token")), stops)


def _text(token: Any) -> str | None:
    """Return a token, which older files describe as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def added_by(beside: Beside, path: Path, known: Collection[int]) -> list[dict[str, Any]]:
    """Return the `added_tokens_decoder` of a `tokenizer_config.json`, else the tokens of `added_tokens.json`, as the
    `added_tokens` of a `tokenizer.json`, each with its `field`, for errors.

    `known`: ids of the tokenizer's added tokens, which `added_tokens.json` does not describe. LmkitError: the file is
    damaged ("tokenizer.damaged_marks").
    """
    config = beside.get(TOKENIZER_CONFIG, {})
    if _DECODER not in config:
        special = named_by(config)
        return [
            {
                "content": text,
                "id": i,
                "special": text in special,
                "normalized": text not in special,
                "field": f"{ADDED_TOKENS}: {json.dumps(text)}",
            }
            for text, i in sorted(beside.get(ADDED_TOKENS, {}).items(), key=itemgetter(1))
            if i not in known
        ]
    try:
        found = {int(token_id): token for token_id, token in (config[_DECODER] or {}).items()}
        field = f"{TOKENIZER_CONFIG}: {_DECODER}"
        return [
            {**found[i], "content": str(found[i]["content"]), "id": i, "field": f"{field}.{i}"}
            for i in sorted(found)
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path.with_name(TOKENIZER_CONFIG), f"{_DECODER}: {error!r}") from None


def named_by(config: Mapping[str, Any]) -> set[str]:
    """Return the special tokens that keys of a `tokenizer_config.json` name."""
    found = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"):
        value = config.get(key) or ()
        found += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set(filter(None, map(_text, found)))


def files_of_marks(path: Path, marks: Marks, special_ids: Mapping[str, int]) -> dict[Path, dict[str, Any]]:
    """Return the files beside a tokenizer that have to say its marks, and their objects; {} if they say them already.

    UsageError: they have to be written, and the tokenizer is not called tokenizer.json ("tokenizer.marks"), or such a
    file stands there without a tokenizer, or has more keys than lmkit writes ("tokenizer.replaces_marks").
    """
    try:
        if resolve_marks(read_beside(path)[1], special_ids) == marks:
            return {}
    except (LmkitError, ValueError):  # those of another tokenizer, which this one replaces
        pass
    if path.name != TOKENIZER:
        message = f"{path}: {json.dumps(marks.end)} cannot be stored as the token that ends a text"
        hint = f"name the file {TOKENIZER}; {TOKENIZER_CONFIG} beside it then names the token"
        raise UsageError("tokenizer.marks", message, hint=hint)
    files: dict[Path, dict[str, Any]] = {
        path.with_name(TOKENIZER_CONFIG): {"bos_token": marks.begin, "eos_token": marks.end},
        path.with_name(GENERATION_CONFIG): {"eos_token_id": list(marks.stops) or None},
    }
    for file, content in {**files, path.with_name(SPECIAL_TOKENS_MAP): {}}.items():
        found = _read(file) if file.is_file() else {}
        is_replaced = path.is_file() and found.keys() <= content.keys()
        if found and found != content and not is_replaced:
            message = f"{file}: belongs to another tokenizer; it names other tokens that begin and end a text"
            hint = f"write {path.name} into another folder, or move that file away"
            raise UsageError("tokenizer.replaces_marks", message, hint=hint)
    return files


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, reason(error)) from None


def _damaged(path: Path, why: object) -> LmkitError:
    hint = "copy or download it again; it names the tokens that begin and end a text"
    return LmkitError("tokenizer.damaged_marks", f"{path}: {why}", hint=hint)
