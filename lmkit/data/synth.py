"""Generate a corpus: English stories of any size, the same for a seed on every machine.

A story is drawn from a grammar. In its rules

    [a|b]    picks one; it nests and may be empty
    <rule>   expands a rule, anew each time
    {name}   is a fact: drawn when the story first needs it, then kept. {name2} is another of its kind, {row.column}
             belongs to the row that was drawn for {row}, {Name} begins with a capital
    //       begins a paragraph

and words of `VOICE` are facts, too. Facts hold a story together: the kite that is lost in the first paragraph is the
kite that is found in the last.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from lmkit.errors import UsageError
from lmkit.recipe import END_OF_TEXT
from lmkit.storage.atomic import atomic_path
from lmkit.storage.outputs import refuse_existing, refuse_too_large
from lmkit.streams import Progress

_, RULES, WORDS, ROWS, VOICE = re.split(
    r"\n== .*\n", Path(__file__).with_name("stories.txt").read_text("utf-8")
)
_PROGRESS_EVERY = 1 << 20
_PRONOUNS = {
    "girl": {"he": "she", "him": "her", "his": "her"},
    "boy": {"he": "he", "him": "him", "his": "his"},
}
_BEFORE_VOWEL = re.compile(r"(?<=\b[Aa]) (?=[aeio]|hon|ug)")  # "a apple" -> "an apple"


_Rule = list[list[Any]]  # alternatives, each a list of texts and rules
_TOKEN = re.compile(r"( \| |[\[\]|]|<[\w ]+>|\{[\w. ]+\})")


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and body of every `name: body`; a body goes on in lines that are indented or begin with a bar."""
    for section in re.split(r"\n(?=\w)", text.strip()):
        name, _, body = section.partition(":")
        yield name, re.sub(r"\s+", " ", re.sub(r"(?<! )\|\n +", "|", body)).strip()


def _parse(text: str, rules: dict[str, _Rule]) -> _Rule:
    """Return the alternatives of a rule. A fact becomes a %-format: it is filled in when the text is complete."""
    stack: list[_Rule] = [[[]]]  # the open brackets, each with its alternatives so far
    for token in _TOKEN.split(text):
        if token == "[":
            stack.append([[]])
        elif token == "]":
            closed = stack.pop()
            stack[-1][-1].append(closed)
        elif token in ("|", " | "):
            stack[-1].append([])
        elif token.startswith("<"):
            stack[-1][-1].append(rules[token[1:-1]])
        else:
            stack[-1][-1].append(f"%({token[1:-1]})s" if token.startswith("{") else token)
    assert len(stack) == 1, f"a bracket is open in {text!r}"
    return stack[0]


def _read_grammar() -> tuple[dict[str, _Rule], dict[str, dict[str, dict[str, str]]]]:
    """Return the rules by name, and the rows by name and first word."""
    rules: dict[str, _Rule] = defaultdict(list)
    rows: dict[str, dict[str, dict[str, str]]] = {}
    voices = [entry.split(", ") for entry in " ".join(VOICE.split()).split("; ")]
    longest_first = sorted([word for word, *_ in voices], key=len, reverse=True)
    voiced = re.compile(rf"(?<![{{.<])\b({'|'.join(longest_first)})\b")  # not in {beast.cried}
    for name, body in _sections(RULES):
        rules[name] += _parse(voiced.sub(r"{\1}", body), rules)
    for name, body in _sections(WORDS):
        rules[name] += [[word] for word in re.split(", " if "," in body else " ", body)]
    for words in voices:
        rules[words[0]] += [[word] for word in words]
    for heading, body in _sections(ROWS):
        name, *columns = re.findall(r"\w+", heading)
        keys = ["", *[f".{column}" for column in columns]]
        rows[name] = {}
        for row in body.split("; "):
            words = row.split(", ")
            rows[name][words[0]] = dict(zip(keys, words, strict=True))
        rules[f"{name} row"] += [[word] for word in rows[name]]
    return rules, rows


_RULES, _ROWS = _read_grammar()
_SPEECH = "|".join(["thought", *chain(*_RULES["said"], *_RULES["replied"], *_RULES["asked"])])
# The letter that begins a sentence. After "Look!" and the like the sentence may go on: "Look!" said Tom.
_SENTENCE_START = re.compile(rf'(?:^|\n\n|[.!?]"? )"?(?!(?:{_SPEECH})\b)[a-z]')


class _Story(dict[str, str]):
    """The facts of one story by name; a fact that is missing is drawn."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._taken: set[str] = set()
        # A pronoun says who of the two is meant.
        genders = ("girl", "boy") if draw() < 0.5 else ("boy", "girl")
        for role, gender in zip(("hero", "pal"), genders, strict=True):
            is_animal = draw() < 0.3
            self._add_person(role, self._another("pet" if is_animal else gender), gender)
            self[f"{role}.kind"] = self._another("species") if is_animal else gender
        for name in ("kind", "he", "him", "his"):
            self[name] = self[f"hero.{name}"]
        gender = "girl" if draw() < 0.5 else "boy"
        title, look = self._another(f"{gender}_elder"), self["elder_look"]
        is_parent = title in ("Mom", "Dad")
        self._add_person("elder", title if is_parent else f"{title} {self._another(gender)}", gender)
        self["elder_full"] = (
            f"{self['his']} {look} {title.lower()}" if is_parent else f"{look} {self['elder']}"
        )
        gender = "girl" if draw() < 0.5 else "boy"
        self._add_person("helper", f"{self._another(f'{gender}_title')} {self._another('surname')}", gender)

    def _add_person(self, role: str, name: str, gender: str) -> None:
        self[role] = name
        for pronoun, word in _PRONOUNS[gender].items():
            self[f"{role}.{pronoun}"] = word

    def __missing__(self, name: str) -> str:
        if name[0].isupper() and name not in _RULES:
            value = self[name[0].lower() + name[1:]]
            return value[0].upper() + value[1:]
        owner = name.partition(".")[0]
        kind = owner.rstrip("0123456789")
        if kind in _ROWS:
            row = _ROWS[kind][self._another(f"{kind} row")]
            for column, word in row.items():
                self[owner + column] = word
        else:
            self[owner] = self._another(kind)
        return self[name]

    def _another(self, kind: str) -> str:
        """Return a form of a rule that no other fact of the story has; of a rule of one form, another text."""
        rule = _RULES[kind]
        while True:
            index = int(self._draw() * len(rule))
            text = self.expand([rule[index]])
            key = f"{kind} {index}" if len(rule) > 1 else text
            if key not in self._taken:
                self._taken.add(key)
                return text

    def expand(self, rule: _Rule) -> str:
        pieces: list[str] = []
        self._write(rule, pieces.append)
        return "".join(pieces) % self

    def _write(self, rule: _Rule, write: Callable[[str], None]) -> None:
        for piece in rule[int(self._draw() * len(rule))]:
            if isinstance(piece, str):
                write(piece)
            else:
                self._write(piece, write)


def generate_stories(seed: int) -> Iterator[str]:
    """Yield stories without end, each closed by a line break. Everything is drawn with `random.Random.random`, whose
    numbers Python promises to keep for a seed."""
    draw = random.Random(seed).random
    while True:
        text = _Story(draw).expand(_RULES["story"]).replace(" // ", "\n\n")
        text = _BEFORE_VOWEL.sub("n ", text)
        yield _SENTENCE_START.sub(lambda start: start[0].upper(), text) + "\n"


def write_stories(
    path: str | os.PathLike[str],
    *,
    size_mb: float,
    seed: int,
    end: str = END_OF_TEXT,
    force: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write stories until the file holds at least `size_mb` * 10^6 bytes, each followed by `end`.

    The last story is whole. A longer corpus of the same seed begins with the shorter one. Memory does not depend on
    the size. The stories are ASCII; the file appears when it is complete.

    Args:
        force: replace a file that exists.
        progress: called with ("stories", bytes written, bytes wanted).

    UsageError: `size_mb` is not finite and positive ("synth.size"), or more than the disk has free
    ("output.too_large"); the file exists ("output.exists").
    """
    if not 0 < size_mb < math.inf:
        raise UsageError("synth.size", f"size_mb: {size_mb} is not a size", hint="for example --size-mb 20")
    refuse_existing(Path(path), force=force)
    refuse_too_large(Path(path), size_mb * 1e6)
    wanted = int(size_mb * 1_000_000)
    written = reported = 0
    with atomic_path(path) as partial, open(partial, "w", encoding="utf-8", newline="") as file:
        for story in generate_stories(seed):
            written += file.write(story) + file.write(end)
            if progress is not None and (written >= reported + _PROGRESS_EVERY or written >= wanted):
                progress("stories", min(written, wanted), wanted)
                reported = written
            if written >= wanted:
                break
