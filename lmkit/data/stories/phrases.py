"""Words that a story may vary: wherever a template has a phrase, the story says it in its own way, throughout.

A reader learns a story's manner from its beginning. Without such variety the same eight words would come up in
story after story, and a model could write by copying.
"""

from __future__ import annotations

from lmkit.data.stories.synonyms import SYNONYMS

# verb: adverbs that may stand before it
_ADVERBS = """
took: quickly, gladly, quietly, eagerly
took the: quickly, gladly, quietly, eagerly
put: quickly, carefully, gently, proudly
put the: quickly, carefully, gently, proudly
opened: slowly, carefully, eagerly, boldly
gave: gladly, kindly, shyly, gently, proudly
carried: proudly, carefully, slowly, gladly
sat: quietly, calmly
waited: calmly, quietly, nervously
played: happily, often, gladly
clapped: loudly, gladly, wildly
packed: quickly, neatly, carefully, gladly
dug: eagerly, slowly
read: slowly, silently
brought: kindly, proudly, gladly, soon
closed: slowly, firmly
dropped: clumsily, suddenly
sang: softly, loudly, sweetly
built: slowly, proudly, carefully
fetched: quickly, gladly
pointed: rudely, loudly
dried: gently, slowly
"""

# noun: adjectives that may stand before it
_ADJECTIVES = """
letter: folded, secret, sealed, long, short, crumpled
coins: bright, round, heavy
map: torn, dusty, folded, faded, secret
seed: tiny, round, hard, shiny, flat
basket: round, deep, heavy, woven
feet: bare, cold, dusty, tired
leaf: tiny, round, shiny, tender
bag: paper, leather, heavy, torn, cotton
song: merry, silly, sweet, short
pot: deep, round, heavy, shiny
chest: heavy, wooden, rusty, locked, dusty
plan: secret, clever, simple, bold
lid: heavy, rusty, creaky
cross: crooked, thick, faded
flag: paper, little, torn, ragged
chair: creaky, wooden, broken, low
tree: tall, bent
kitchen: warm, little, tidy, bright
winner: lucky, proud, final
"""


def _read(table: str) -> dict[str, tuple[str, ...]]:
    rows = (line.split(": ") for line in table.strip().splitlines())
    # A comma separates the words, a semicolon those that have commas of their own.
    return {
        phrase: tuple(word.strip() for word in words.split(";" if ";" in words else ","))
        for phrase, words in rows
    }


def _phrases() -> dict[str, tuple[str, ...]]:
    phrases = _read(SYNONYMS)
    for phrase, words in (_read(_ADVERBS) | _read(_ADJECTIVES)).items():
        same = phrases.get(phrase, (phrase,))
        phrases[phrase] = same + tuple(f"{word} {plain}" for word in words for plain in same)
    return phrases


PHRASES = _phrases()
"""What may stand for each phrase: itself or a synonym, perhaps with an adverb or an adjective before it."""
