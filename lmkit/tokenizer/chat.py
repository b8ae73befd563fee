"""Conversations as text: a template says what stands around each message.

A template lies beside its tokenizer, in `chat_template.json`. It is data, not a program. Hugging Face's templates are
programs (Jinja): lmkit writes them, but reads back only those that it wrote.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from lmkit.errors import LmkitError, UsageError, reason
from lmkit.recipe.run_folder import CHAT_TEMPLATE
from lmkit.storage.atomic import write_atomic
from lmkit.storage.inputs import read_object
from lmkit.tokenizer.pretokenize import split_words
from lmkit.tokenizer.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")
_ROLE = "{role}"
_MOST_BYTES = 1 << 16
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class Message(NamedTuple):
    """One turn of a conversation. `learned`: whether a model shall learn to write it, if it is the assistant's."""

    role: str
    content: str
    learned: bool = True


class Part(NamedTuple):
    """Consecutive tokens of a conversation; `counts`: a model shall learn to write them."""

    ids: list[int]
    counts: bool


@dataclass(frozen=True)
class ChatTemplate:
    """What stands around messages. White space at both ends of a message is dropped.

    `begin` begins every conversation; `before` stands before a message, with its role for `{role}`; `after` stands
    after a message: a special token, which ends the assistant's turn, and perhaps white space.

    >>> CHATML.render([Message("user", "Hi"), Message("assistant", " Ho ")])
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHo<|im_end|>\\n'
    """

    begin: str
    before: str
    after: str

    def __post_init__(self) -> None:
        f"{self.begin}{self.before}{self.after}".encode()
        if self.before.count(_ROLE) != 1:
            raise ValueError(f"before has to hold {_ROLE} once")
        if not self.end:
            raise ValueError("after has to begin with a special token")

    @property
    def end(self) -> str:
        """The special token that ends a message."""
        return self.after.rstrip()

    @property
    def rest(self) -> str:
        """The white space after it."""
        return self.after[len(self.end) :]

    def head(self, role: str) -> str:
        return self.before.replace(_ROLE, role)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation; with what begins an answer, if it is asked for."""
        turns = [self.head(role) + content.strip() + self.after for role, content, _ in messages]
        return "".join([self.begin, *turns, self.head("assistant") if add_generation_prompt else ""])

    def check(self, tokenizer: Tokenizer, path: str | Path) -> None:
        """Refuse a tokenizer that does not keep the template's tokens apart from those of a message.

        UsageError: it lacks the special token at the end of a message ("chat.no_end"), or its words cross the border
        between a message and what stands before it ("chat.border").
        """
        if self.end not in tokenizer.special_ids:
            raise UsageError(
                "chat.no_end",
                f"{path}: has no special token {json.dumps(self.end)}, with which the chat template ends a message",
                hint='choose another: tokenizer.chat_template = "plain" needs an end-of-text token only',
            )
        for role in ROLES:
            *_, (last, _) = tokenizer.specials.split(self.head(role).encode())
            words = functools.partial(split_words, pattern=tokenizer.pattern)
            if any(words(last.decode() + text) != [*words(last.decode()), text] for text in "a1."):
                raise UsageError(
                    "chat.border",
                    f"{path}: words of this tokenizer cross the end of {json.dumps(self.before)}, "
                    "which the chat template has before a message",
                    hint="end it with one new line, or with a special token of the tokenizer",
                )

    def encode(self, messages: Sequence[Message], tokenizer: Tokenizer) -> list[Part]:
        """Return the tokens of a conversation in parts; joined, they are those of `render`.

        A special token that a message spells is plain text: only the template begins and ends turns. What the
        assistant says counts, and the token that ends its turn, unless the message is not to be learned.
        """
        parts, before, known = [], self.begin, 0
        for role, content, learned in messages:
            parts.append(Part(_ids(tokenizer, before + self.head(role))[known:], False))
            text = tokenizer.encode(content.strip(), allowed_special=(), add_special_tokens=False)
            words = [*text, tokenizer.special_ids[self.end]]
            parts.append(Part(words, learned and role == "assistant"))
            before, known = self.after, 1  # with the end's token, which may take the white space behind it
        return [*parts, Part(_ids(tokenizer, before)[known:], False)]

    def to_jinja(self) -> str:
        """Return the template as transformers' `apply_chat_template` reads it, which then renders the same text."""
        first, second = self.before.split(_ROLE)
        begin, before, behind, end, rest, answer = (
            json.dumps(text, ensure_ascii=False)
            for text in (self.begin, first, second, self.end, self.rest, self.head("assistant"))
        )
        words = f"{{{{ message['content'] | trim + {end} }}}}"
        return (
            f"{{{{ {begin} }}}}{{% for message in messages %}}{{{{ {before} + message['role'] + {behind} }}}}"
            f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{words}{{% endgeneration %}}"
            f"{{% else %}}{words}{{% endif %}}{{{{ {rest} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {answer} }}}}{{% endif %}}"
        )

    def save(self, path: Path) -> None:
        write_atomic(path, json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n")


CHATML = ChatTemplate("", "<|im_start|>{role}\n", "<|im_end|>\n")
TEMPLATES = {
    "plain": ChatTemplate("", "{role}:\n", "<|endoftext|>"),
    "chatml": CHATML,
    "llama3": ChatTemplate(
        "<|begin_of_text|>", "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"
    ),
}


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def from_jinja(text: str) -> ChatTemplate | None:
    """Return the template that `to_jinja` wrote as this text; None for other texts. Nothing is evaluated."""
    try:
        begin, first, second, end, _, rest, _ = map(json.loads, _STRING.findall(text))
        template = ChatTemplate(begin, f"{first}{_ROLE}{second}", end + rest)
    except (ValueError, TypeError):
        return None
    return template if template.to_jinja() == text else None


def beside(tokenizer: Path | None) -> ChatTemplate | None:
    """Return the template beside a `tokenizer.json`, if there is one."""
    path = None if tokenizer is None else tokenizer.parent / CHAT_TEMPLATE
    return None if path is None or not path.is_file() else read_template(path)


def named_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return one of `TEMPLATES`. In `plain`, the end-of-text token of the tokenizer ends a message."""
    template = TEMPLATES[name]
    end = tokenizer.marks.end
    return replace(template, after=end) if name == "plain" and end is not None else template


def read_template(path: Path) -> ChatTemplate:
    """Read a `chat_template.json`; LmkitError: it is damaged ("chat.damaged_template")."""
    try:
        content = read_object(path, most_bytes=_MOST_BYTES)
        are_texts = all(isinstance(value, str) for value in content.values())
        if content.keys() != ChatTemplate.__dataclass_fields__.keys() or not are_texts:
            raise ValueError("not an object with the texts begin, before and after")
        return ChatTemplate(**content)
    except (OSError, ValueError) as error:
        hint = "copy it again; a template has the keys begin, before (with {role} in it) and after"
        raise LmkitError("chat.damaged_template", f"{path}: {reason(error)}", hint=hint) from None
