"""Rules that expand to text: a context-free grammar whose choices may look at a story's facts.

A rule is a name on a line of its own and its alternatives, each behind a dash; long ones go on, indented:

    greeting
    - "Hello, {pal}!" [said|called] {hero}.
    - {hero} waved at {pal}. <wave:weather>

`[a|b|]` picks one (it nests, and may pick nothing), `{slot}` is a fact of the story, `<rule>` expands another
rule, `<rule:slot>` the rule named `rule:` plus that fact's value, and `//` starts a new paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

_SYMBOL = re.compile(r"\[|\]|\||<([a-z_]+)(?::([a-z_]+))?>|\{([A-Za-z0-9_]+)\}")


class _RuleOf:
    """`<rule:slot>`: which rule it is depends on the story."""

    def __init__(self, prefix: str, slot: str) -> None:
        self.prefix = prefix
        self.slot = slot


# A template is a sequence of literal text, of choices between templates, and of rules named by a fact.
_Template = list["str | list | _RuleOf"]


class Grammar:
    """Rules by name, ready to expand.

    Args:
        sources: texts in the form above; together they define every rule that they use.
        phrases: words that are slots of their own name wherever a template has them.

    Raises:
        ValueError: a rule is defined twice or not at all, or a bracket is not closed.
    """

    def __init__(self, sources: Iterable[str], phrases: Iterable[str]) -> None:
        longest_first = sorted(phrases, key=len, reverse=True)
        self._phrase = re.compile("|".join(rf"(?<!\w){re.escape(phrase)}(?!\w)" for phrase in longest_first))
        self._rules: dict[str, list[_Template]] = {}
        self.slots: set[str] = set()
        """Every fact that some template uses."""
        for source in sources:
            for name, alternatives in _read_rules(source):
                if self._rules.setdefault(name, []):
                    raise ValueError(f"rule {name} is defined twice")
                self._rules[name] += [self._parse(text) for text in alternatives]
        missing = [name for name, alternatives in self._rules.items() if not alternatives]
        if missing:
            raise ValueError(f"no such rule: {', '.join(missing)}")

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the rules that begin with `prefix`, in the order of their definition."""
        return [name for name in self._rules if name.startswith(prefix)]

    def expand(self, rule: str, facts: Mapping[str, str], random: Callable[[], float]) -> str:
        """Return one text of `rule`; `random` returns uniform numbers in [0, 1)."""
        pieces: list[str] = []
        self._expand(self._rules[rule], facts, random, pieces.append)
        return "".join(pieces) % facts

    def _expand(
        self,
        alternatives: list[_Template],
        facts: Mapping[str, str],
        random: Callable[[], float],
        write: Callable[[str], None],
    ) -> None:
        template = alternatives[int(random() * len(alternatives))]
        for part in template:
            if type(part) is str:
                write(part)
            elif type(part) is list:
                self._expand(part, facts, random, write)
            else:
                assert isinstance(part, _RuleOf)
                self._expand(self._rules[f"{part.prefix}:{facts[part.slot]}"], facts, random, write)

    def _parse(self, text: str) -> _Template:
        """Turn an alternative into a template; slots become %-formats, filled in once for the whole story."""
        if "%" in text:
            raise ValueError(f"a percent sign in {text!r}")
        stack: list[list[_Template]] = [[[]]]  # open brackets, each with the alternatives read so far
        end = 0
        for symbol in _SYMBOL.finditer(text):
            if symbol.start() > end:
                stack[-1][-1].append(self._vary(text[end : symbol.start()]))
            end = symbol.end()
            rule, chosen_by, slot = symbol.groups()
            if slot:
                self.slots.add(slot)
                stack[-1][-1].append(f"%({slot})s")
            elif chosen_by:
                self.slots.add(chosen_by)
                stack[-1][-1].append(_RuleOf(rule, chosen_by))
            elif rule:
                stack[-1][-1].append(self._rules.setdefault(rule, []))
            elif symbol[0] == "[":
                stack.append([[]])
            elif len(stack) == 1:
                raise ValueError(f"{symbol[0]} outside of a bracket in {text!r}")
            elif symbol[0] == "|":
                stack[-1].append([])
            else:
                closed = stack.pop()
                stack[-1][-1].append(closed)
        if len(stack) != 1:
            raise ValueError(f"a bracket is not closed in {text!r}")
        stack[0][0].append(self._vary(text[end:]))
        return stack[0][0]

    def _vary(self, literal: str) -> str:
        """Turn the phrases in a literal text into slots of their own name."""
        self.slots.update(self._phrase.findall(literal))
        return self._phrase.sub(r"%(\g<0>)s", literal)


def _read_rules(source: str) -> list[tuple[str, list[str]]]:
    rules: list[tuple[str, list[str]]] = []
    for line in source.strip().splitlines():
        text = line.strip()
        if line.startswith("- "):
            rules[-1][1].append(text[2:])
        elif line.startswith(" "):
            rules[-1][1][-1] += " " + text
        elif text:
            rules.append((text, []))
    return [(name, [text.replace(" // ", "\n\n") for text in alternatives]) for name, alternatives in rules]
