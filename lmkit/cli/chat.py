"""`lmkit chat`: talk with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.cli.console import Result, write
from lmkit.cli.generate import loaded_model
from lmkit.cli.options import Commands

if TYPE_CHECKING:
    from lmkit.model.transformer import TransformerLM
    from lmkit.recipe.tables import GenerateConfig
    from lmkit.tokenizer import Tokenizer
    from lmkit.tokenizer.chat import ChatTemplate

app = Commands()

RESET = "/reset"


@app.add(
    "lmkit chat artifacts/runs/quickstart",
    keys=("generate.max_new_tokens", "generate.temperature", "generate.seed"),
)
def chat(
    run: Path,
    *,
    flags: dict[str, Any],
    tokenizer: Path | None = None,
    device: str = "auto",
    set_: list[str] | None = None,
    as_json: bool = False,
) -> Result | None:
    """Talk with a trained model, line by line.

    A model that was trained on conversations answers, by the chat_template.json beside its tokenizer. Any other model
    continues all lines so far, its own and yours; an empty line lets it go on. The oldest text is forgotten where the
    context is full. /reset forgets all. Ctrl-C ends an answer, Ctrl-D the program. Other settings:
    --set generate.top_p=0.9.

    Args:
        tokenizer: A tokenizer.json; default: the model's.
    """
    from lmkit.tokenizer.chat import beside
    from lmkit.training.exchange import their_template

    turns = []
    with loaded_model(run, tokenizer, set_ or (), flags, device) as (model, loaded, table, path):
        template = beside(path) or their_template(path.parent)
        conversation = Conversation(model, loaded, table, template)
        for line in _lines():
            if line == RESET:
                conversation.reset()
                continue
            text = ""
            with suppress(KeyboardInterrupt):  # it ends the answer
                for piece in conversation.answer(line):
                    text += piece
                    if not as_json:
                        write(piece)
            if not as_json:
                write("\n")
            turns.append({"prompt": line, "text": text})
    return Result("", {"turns": turns}) if as_json else None


def _lines() -> Iterator[str]:
    """Yield the lines of stdin; a terminal is asked for each, and Ctrl-C there begins a new one."""
    if not sys.stdin.isatty():
        for raw in sys.stdin.buffer:
            yield raw.decode("utf-8", "replace").rstrip("\r\n")
        return
    import readline  # noqa: F401  lets `input` edit lines

    while True:
        try:
            yield input("> ")
        except EOFError:
            write("\n")
            return
        except KeyboardInterrupt:
            write("\n")


class Conversation:
    """Text that a user and a model write in turn. Only the newest that fits into the context is kept."""

    def __init__(
        self,
        model: TransformerLM,
        tokenizer: Tokenizer,
        options: GenerateConfig,
        template: ChatTemplate | None,
    ) -> None:
        from lmkit.generation.generate import decoder_for, drawn_from

        self._tokenizer, self._seed, self._template = tokenizer, options.seed, template
        limits = drawn_from(tokenizer, options)
        if template is not None:
            template.check(tokenizer, "lmkit chat")
            limits["stops"] = {*tokenizer.marks.stops, tokenizer.special_ids[template.end]}
        self._decoder = decoder_for(model, options, rows=1, **limits)
        # Room for the answer; one that needs more than half of the context makes the text slide.
        capacity = self._decoder.capacity
        self._kept = max(1, capacity - min(options.max_new_tokens, capacity // 2))
        self.reset()

    def reset(self) -> None:
        """Forget the text: a new document begins."""
        start = self._tokenizer.start_id
        self._ids: list[int] = [*self._tokenizer.prefix] or ([] if start is None else [start])
        self._goes_on = False
        if self._template is not None:
            self._ids, self._before, self._known = [], self._template.begin, 0

    def answer(self, line: str) -> Iterator[str]:
        """Add a line to the text; yield pieces of what the model adds."""
        from lmkit.generation.generate import TextStream, draw_tokens

        self._ids = [*self._ids, *self._asked(line)][-self._kept :]
        if not self._ids:
            return
        stream, self._goes_on = TextStream(self._tokenizer), True
        self._seed += 1  # another stream for each answer
        for _, token, _ in draw_tokens(self._decoder, [self._ids[:]], self._seed - 1):
            if token not in self._decoder.stops:
                self._ids.append(token)
                yield stream.push(token)
            elif self._template is None or token == self._tokenizer.special_ids[self._template.end]:
                self._ids.append(token)
                self._goes_on = False
            # Any other stop is left out: the next message puts the template's end there, as in training.
        yield stream.finish()

    def _asked(self, line: str) -> list[int]:
        """Return the tokens of a user's message and of all that stands around it."""

        def encode(text: str, **allowed: Collection[str]) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False, **allowed)

        if (template := self._template) is None:
            return encode("\n" + line if line and self._goes_on else line, allowed_special=frozenset())
        # The end of the last answer is there, unless the answer was cut; it may take the white space behind it.
        before = encode(self._before + template.head("user"))[0 if self._goes_on else self._known :]
        self._before, self._known = template.after, 1
        asked = encode(line.strip(), allowed_special=frozenset())
        after = template.after + template.head("assistant")
        return [*before, *asked, *encode(after)]
