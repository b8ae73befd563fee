"""One story: a cast, a plot, and the grammar that tells it."""

from __future__ import annotations

import re

from lmkit.data.stories.cast import Random, draw_facts
from lmkit.data.stories.grammar import Grammar
from lmkit.data.stories.openings import OPENING
from lmkit.data.stories.phrases import PHRASES
from lmkit.data.stories.plots_courage import COURAGE
from lmkit.data.stories.plots_deeds import DEEDS
from lmkit.data.stories.plots_things import THINGS
from lmkit.data.stories.references import REFERENCES
from lmkit.data.stories.scenes import SCENES

GRAMMAR = Grammar([OPENING, REFERENCES, *SCENES, THINGS, DEEDS, COURAGE], PHRASES)
PLOTS = tuple(name.removeprefix("plot:") for name in GRAMMAR.names("plot:"))

# "One rainy day,~ They went": after such a start a sentence goes on in lower case, unless with a name.
_AFTER_WHEN = re.compile(
    r"~ (That|This|One|The|They|There|He|She|His|Her|A|An|In|On|At|By|It|Under|Behind|Beside|Near)\b"
)
# Behind a question or an exclamation, what follows the quotation mark may still belong to it: "Look!" said Tom.
_SPEECH = "he|she|said|replied|answered|murmured|called|whispered|cried|announced|asked|wondered|inquired"
_SENTENCE_START = re.compile(rf'((?:^|\n\n|[.!?] |\." |[!?]" (?!(?:{_SPEECH})\b))"?)([a-z])')

# The proverb of a story begins with a word that fits what happened.
PROVERB_LOOKS = {
    "lost": "careful",
    "share": "generous",
    "broken": "honest",
    "earn": "busy",
    "swap": "grateful",
    "treasure": "clever",
    "gift": "loving",
    "trade": "fair",
    "cook": "helping",
    "build": "steady",
    "grow": "patient",
    "learn": "tireless",
    "race": "humble",
    "help": "kind",
    "letter": "faithful",
    "afraid": "brave",
    "rescue": "gentle",
    "astray": "watchful",
    "noise": "calm",
    "wish": "wise",
    "newcomer": "friendly",
    "picnic": "merry",
}


def tell_story(random: Random) -> str:
    """Return one story of a few paragraphs, without an end mark; `random` decides everything."""
    facts = draw_facts(random)
    facts["plot"] = PLOTS[int(random() * len(PLOTS))]
    facts["proverb"] = f"{PROVERB_LOOKS[facts['plot']]} {facts['proverb']}"
    text = GRAMMAR.expand("story", facts, random)
    text = _AFTER_WHEN.sub(lambda match: " " + match[1].lower(), text).replace("~", "")
    return _SENTENCE_START.sub(lambda match: match[1] + match[2].upper(), text)
