"""Read JSON lines, or one array of JSON objects, and their keys; name the line of every mistake."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.data.formats import Stream, kind_of
from lmkit.errors import LmkitError, UsageError
from lmkit.storage.inputs import parse_json
from lmkit.tokenizer.chunks import REPLACE, Chunk, ErrorMode, valid_utf8

if TYPE_CHECKING:
    from lmkit.tokenizer.chat import Message

_LONGEST_LINE = 1 << 28  # bytes of one JSON document: a small compressed file may hold a line without end
_HALF = re.compile("[\ud800-\udfff]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_HINT = "every line must hold one JSON object"
_EACH = 'every line must hold {"messages": [{"role": "user", "content": "..."}, ...]}'
LEARNED = ("weight", "train")
"""Keys of a line or a message; 0 or false: a model does not learn it."""
_LEARNED_IN_CHAT = (*LEARNED, "training", "loss")
"""The same where there are messages. Elsewhere `loss` is a number that somebody measured."""
_MASKS = ("mask", "masked", "loss_mask", "loss_scale", "train_detail", "training_detail")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_PREFERENCES = ("label", "kto_tag")
"""Keys of a line; false: its answer is a bad one. Other values of `label` say nothing."""
_OF_LINE = (
    *("tools", "functions", "system", "system_prompt", "documents", "chat_template", "chat_template_kwargs"),
    *(*_MEDIA, *_MASKS, "completion_mask", "assistant_mask", "assistant_masks", *_PREFERENCES),
    *("completion", "chosen", "rejected", "rejected_messages", "rejected_response", "rejected_responses"),
    *("preferred_output", "non_preferred_output", "positive_messages", "negative_messages"),
)
"""Keys beside `messages` that would be lost: no chat template of lmkit has a place for them, or they say in another
way what a model learns."""
_OF_MESSAGE = (
    *("tool_calls", "function_call", "name", *_MEDIA),
    *("reasoning_content", "reasoning", "thinking", "refusal", "prefix", *_MASKS),
)
"""The same of a message. Other keys (id, source, ...) say nothing that a model reads or learns."""


def json_records(stream: Stream, path: Path, errors: ErrorMode = "strict") -> Iterator[tuple[str, Any]]:
    """Yield the place, for errors, and the content of every line that is not blank; of a file that holds one JSON
    array, of every item.

    LmkitError: a line is too long, not JSON or not UTF-8. Half a surrogate pair (`\\ud800`) is valid JSON and no
    UTF-8; it is an error or becomes U+FFFD, as `errors` says.
    """
    if kind_of(path) == ".json":
        data = _read_line(stream.read, str(path))
        text = valid_utf8(Chunk(0, 0, len(data), data), path, errors).decode()
        whole = None
        with suppress(ValueError):
            whole = parse_json(text)
        if whole is not None:
            for number, record in enumerate(whole if isinstance(whole, list) else [whole], 1):
                where = f"{path}, item {number}"
                yield where, _without_halves(record, text, where, errors)
            return
        stream = io.BytesIO(data)  # JSON lines
    read = number = 0
    while line := _read_line(stream.readline, f"{path}, line {number + 1}"):
        number += 1
        where = f"{path}, line {number}"
        text = valid_utf8(Chunk(0, read, len(line), line), path, errors).decode()
        read += len(line)
        if not text.strip():
            continue
        try:
            record = parse_json(text)
        except ValueError as error:
            raise LmkitError("corpus.not_json", f"{where}: {error}", hint=_HINT) from None
        yield where, _without_halves(record, text, where, errors)


def _read_line(read: Callable[[int], bytes], where: str) -> bytes:
    data = read(_LONGEST_LINE + 1)
    if len(data) > _LONGEST_LINE:
        message = f"{where}: longer than {_LONGEST_LINE:,} bytes"
        raise LmkitError("corpus.long_line", message, hint=f"{_HINT}, in a file that ends in .jsonl")
    return data


def _without_halves(record: Any, source: str, where: str, errors: ErrorMode) -> Any:
    """Return a record with U+FFFD for surrogates without their other half; LmkitError if `errors` is "strict"."""
    if not _SURROGATE.search(source):
        return record
    text = json.dumps(record, ensure_ascii=False)
    half = _HALF.search(text)
    if half is not None and errors == "strict":
        message = f"{where}: \\u{ord(half[0]):x} without its other half"
        raise LmkitError("text.not_utf8", message, hint=REPLACE)
    return record if half is None else json.loads(_HALF.sub("\ufffd", text))


def is_learned(
    keys: Mapping[str, Any],
    where: str,
    *,
    learned: Sequence[str] = LEARNED,
    lost: Sequence[str] = (),
    field: str = "",
) -> bool:
    """Return whether a model shall learn a line or a message.

    Keys of `learned` say so; `field` is the key that holds the text. UsageError: a key of `lost` holds anything, or
    one of `learned` is neither 0 nor 1 ("corpus.unsupported_key").
    """
    for key in lost:
        value = keys.get(key)
        says_more = value is False if key in _PREFERENCES else bool(value)
        if key == "loss_scale":
            says_more = value not in (None, "", [], 1)
        if says_more:
            hint = "remove the key, which would be left out, or write what it says into contents and weights (0 or 1)"
            raise UsageError("corpus.unsupported_key", f"{where}: {key} is not supported", hint=hint)
    values = {key: keys[key] for key in learned if key != field and keys.get(key) is not None}
    for key, value in values.items():
        if value not in (0, 1):
            hint = "0 or false: read and not learned; 1 or true: learned; a key of another meaning needs another name"
            message = f"{where}: {key} {json.dumps(value)[:40]}, which is neither 0 nor 1"
            raise UsageError("corpus.unsupported_key", message, hint=hint)
    return all(values.values())


def messages_of(record: Any, where: str) -> list[Message]:
    """Return the messages of a conversation, the content of a JSON line; `where` names the line in errors.

    UsageError: no messages ("chat.no_messages"), or one without a role of `ROLES` or a text ("chat.wrong_message"); a
    key changes what a model reads or learns ("corpus.unsupported_key").
    """
    from lmkit.tokenizer.chat import ROLES, Message

    found = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(found, list) or not found:
        raise UsageError("chat.no_messages", f"{where}: no list of messages", hint=_EACH)
    learned, messages = is_learned(record, where, learned=_LEARNED_IN_CHAT, lost=_OF_LINE), []
    for number, message in enumerate(found, 1):
        keys: dict[str, Any] = message if isinstance(message, dict) else {}
        role: Any = keys.get("role")
        content: Any = keys.get("content")
        here = f"{where}: message {number}"
        counts = is_learned(keys, here, learned=_LEARNED_IN_CHAT, lost=_OF_MESSAGE)
        if role not in ROLES or not isinstance(content, str):
            what = f"role {json.dumps(role)[:40]}" if role not in ROLES else "no text as content"
            hint = f"a message has a role ({', '.join(ROLES)}) and a content, which is a text"
            raise UsageError("chat.wrong_message", f"{here}: {what}", hint=hint)
        messages.append(Message(role, content, learned and counts))
    return messages
