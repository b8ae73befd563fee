"""Draw the facts of one story: who, where, when, what is owned and wanted, and the words it is told in.

They are drawn once and hold to the last line, so that what a story says late follows from what it said early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lmkit.data.stories import people, places, things, voice
from lmkit.data.stories.phrases import PHRASES

Random = Callable[[], float]
Item = TypeVar("Item")

_PRONOUNS = {
    "girl": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
    "boy": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
}
_ELDERS = (
    ("mom", "girl"),
    ("dad", "boy"),
    ("grandma", "girl"),
    ("grandpa", "boy"),
    ("aunt", "girl"),
    ("uncle", "boy"),
)


class Facts(dict[str, str]):
    """Facts by slot name. A name with a capital is the same fact, capitalised, for the start of a sentence."""

    def __missing__(self, slot: str) -> str:
        value = self[slot[0].lower() + slot[1:]] if slot[0].isupper() else ""
        if not value:
            raise KeyError(slot)
        return value[0].upper() + value[1:]


def draw_facts(random: Random) -> Facts:
    """Return the facts of one story; the same stream of `random` gives the same facts on every platform."""
    facts = Facts()
    _draw_people(facts, random)
    _draw_things(facts, random)
    _draw_places(facts, random)
    _draw_events(facts, random)
    for table in (voice.VOICE, PHRASES):
        for slot, choices in table.items():
            facts[slot] = _pick(choices, random)
    facts["walk_how"] = _pick(people.WALK_HOW, random)
    facts["walked"] = _pick(voice.WALKED, random)
    return facts


def _draw_people(facts: Facts, random: Random) -> None:
    # Hero and friend differ in gender, so that every pronoun says who is meant.
    genders = ("girl", "boy") if random() < 0.5 else ("boy", "girl")
    species = _sample(people.ANIMALS, 3, random)
    for role, gender, animal in zip(("hero", "pal"), genders, species, strict=False):
        prefix = "" if role == "hero" else "pal_"
        for slot, pronoun in _PRONOUNS[gender].items():
            facts[prefix + slot] = pronoun
        is_animal = random() < (0.25 if role == "hero" else 0.5)
        names = people.ANIMAL_NAMES if is_animal else people.GIRLS if gender == "girl" else people.BOYS
        name = _pick_other(names, facts, random)
        facts[f"{role}_surname"] = _pick(people.SURNAMES, random)
        trait = facts[f"{role}_trait"] = _pick(people.TRAITS, random)
        facts[f"{role}_look"] = _pick(people.LOOKS, random)
        kind = facts[f"{role}_kind"] = animal[0] if is_animal else gender
        facts[role] = name
        facts[f"a_{role}"] = with_article(f"{trait} {facts[f'{role}_look']} {kind}")
        facts[f"{role}_type"] = "animal" if is_animal else "child"
        facts[f"a_{role}_voice"] = f"{with_article(_pick(people.VOICES, random))} voice"

    look = facts["elder_look"] = _pick(people.ELDER_LOOKS, random)
    noun, gender = _pick(_ELDERS, random)
    if noun in ("mom", "dad"):
        facts["elder"] = noun.capitalize()
        facts["elder_full"] = f"{facts['his']} {look} {noun}"
    else:
        names = people.GIRLS if gender == "girl" else people.BOYS
        facts["elder"] = f"{noun.capitalize()} {_pick_other(names, facts, random)}"
        facts["elder_full"] = f"{look} {facts['elder']}"
    for slot, pronoun in _PRONOUNS[gender].items():
        facts["elder_" + slot] = pronoun

    for role, pronoun in (("hero", "his"), ("pal", "pal_his"), ("elder", "elder_his")):
        facts[f"{role}_quirk"] = (
            f"{_pick(people.QUIRK_VERBS, random)} {facts[pronoun]} {_pick(people.QUIRK_PARTS, random)}"
        )

    look = _pick(things.GOODS_LOOKS, random)
    job = _pick(people.JOBS, random)
    facts["job"], facts["shop"], facts["goods"], facts["job_do"], facts["job_did"] = job
    facts["goods"] = f"{look} {facts['goods']}"
    gender = "girl" if random() < 0.5 else "boy"
    facts["neighbor"] = ("Mrs. " if gender == "girl" else "Mr. ") + _pick(people.SURNAMES, random)
    for slot, pronoun in _PRONOUNS[gender].items():
        facts["neighbor_" + slot] = pronoun

    animal = species[2]
    while animal[0] not in people.SMALL_ANIMALS or animal in species[:2]:
        animal = _pick(people.ANIMALS, random)
    facts["beast"], facts["beast_cried"], facts["beast_moved"], facts["beast_home"], facts["beast_food"] = (
        animal
    )
    facts["beast_look"] = f"{_pick(people.ANIMAL_LOOKS, random)} {_pick(people.FURS, random)}"
    facts["a_beast"] = with_article(f"{facts['beast_look']} {animal[0]}")
    facts["lone_beast"] = with_article(animal[0])


def _draw_things(facts: Facts, random: Random) -> None:
    rows = _sample(things.THINGS, 3, random)
    colors = _sample(things.COLORS, 3, random)
    shapes = _sample(things.SHAPES, 3, random)
    for role, row, color, shape in zip(("thing", "gift", "other"), rows, colors, shapes, strict=True):
        facts[role], facts[f"{role}_do"], facts[f"{role}_did"], facts[f"{role}_how"] = row
        facts[f"{role}_color"] = color
        facts[f"a_{role}_color"] = with_article(color)
        facts[f"color_{role}"] = f"{color} {row[0]}"
        facts[f"whole_{role}"] = f"{shape} {color} {row[0]}"
        facts[f"a_{role}"] = with_article(facts[f"whole_{role}"])
    color, cloth, garment = (
        _pick(choices, random) for choices in (things.COLORS, people.CLOTHS, people.CLOTHES)
    )
    facts["wear"] = f"{color} {garment}"
    facts["a_wear"] = with_article(f"{color} {cloth} {garment}")
    facts["whole_wear"] = f"{color} {cloth} {garment}"
    facts["plain_food"], *parts = _pick(things.FOODS, random)
    facts["food"] = f"{_pick(things.FOOD_LOOKS, random)} {facts['plain_food']}"
    for number, part in enumerate(_sample(parts, 3, random), start=1):
        facts[f"part{number}"] = f"{_pick(things.PART_LOOKS, random)} {part}"
    facts["tool"] = f"{_pick(things.TOOL_LOOKS, random)} {_pick(things.TOOL_KINDS, random)}"
    facts["a_tool"] = with_article(facts["tool"])
    facts["treasure"] = f"{_pick(things.TREASURE_LOOKS, random)} {_pick(things.TREASURES, random)}"
    facts["building"], facts["material"], facts["ruin"], facts["support"] = _pick(things.BUILDINGS, random)
    facts["breakable"], facts["broke"] = _pick(things.BREAKABLES, random)
    for slot, looks in (("building", things.BUILDING_LOOKS), ("breakable", things.BREAKABLE_LOOKS)):
        facts[f"whole_{slot}"] = f"{_pick(looks, random)} {facts[slot]}"
        facts[f"a_{slot}"] = with_article(facts[f"whole_{slot}"])
    facts["plant"], facts["harvest"] = _pick(things.PLANTS, random)
    facts["a_plant_color"] = with_article(_pick(things.COLORS, random))


def _draw_places(facts: Facts, random: Random) -> None:
    for role, row in zip(("place", "far"), _sample(places.PLACES, 2, random), strict=True):
        noun, preposition, *spots, sight = row
        facts[role] = noun
        facts[f"in_{role}"] = f"{preposition} the {noun}"
        facts[f"{role}_sight"] = sight
        look = _pick(places.PLACE_LOOKS, random)
        facts[f"whole_{role}"] = f"{look} {noun}"
        facts[f"in_whole_{role}"] = f"{preposition} the {look} {noun}"
        for number, spot in enumerate(_sample(spots, 4, random), start=1):
            before, article, thing = spot.split(" ", 2)
            thing = f"{_pick(places.SPOT_LOOKS, random)} {thing}"
            facts[f"{role}{number}"] = (
                f"{before} {f'the {thing}' if article == 'the' else with_article(thing)}"
            )
    facts["town"] = f"{_pick(places.TOWN_FIRST, random)} {_pick(places.TOWN_LAST, random)}"
    facts["house"] = f"{_pick(things.COLORS, random)} {_pick(places.HOUSE_KINDS, random)}"
    facts["whole_house"] = f"{_pick(places.HOUSE_LOOKS, random)} {facts['house']}"
    facts["a_house"] = with_article(facts["whole_house"])
    facts["landmark"] = f"the {_pick(places.LANDMARK_LOOKS, random)} {_pick(places.LANDMARK_KINDS, random)}"


def _draw_events(facts: Facts, random: Random) -> None:
    facts["weather"] = _pick(tuple(places.WEATHER), random)
    facts["weather_look"] = _pick(places.WEATHER[facts["weather"]], random)
    facts["a_weather"] = with_article(facts["weather_look"])
    facts["time"] = _pick(places.TIMES, random)
    facts["day"] = _pick(places.DAYS, random)
    facts["number"] = _pick(places.NUMBERS, random)
    chores = _sample(things.CHORES, 3, random)
    for number, (present, past) in enumerate(chores, start=1):
        facts[f"chore{number}"], facts[f"chore{number}_did"] = present, past
    facts["skill"], facts["skill_did"], facts["mishap"], facts["advice"] = _pick(things.SKILLS, random)
    facts["fear"], facts["fear_why"], facts["fear_help"], facts["fear_truth"] = _pick(things.FEARS, random)
    facts["game"] = _pick(things.GAMES, random)
    facts["trap"] = _pick(things.TRAPS, random)
    facts["noise"], facts["noise_source"] = _pick(things.NOISES, random)
    facts["proverb"] = f"{_pick(voice.PROVERB_NOUNS, random)} {_pick(voice.PROVERB_ENDS, random)}"


def with_article(phrase: str) -> str:
    """Return the phrase behind "a" or "an"."""
    return ("an " if phrase[0] in "aeiou" or phrase.startswith("honest") else "a ") + phrase


def _pick(choices: Sequence[Item], random: Random) -> Item:
    return choices[int(random() * len(choices))]


def _pick_other(names: Sequence[str], facts: Facts, random: Random) -> str:
    """Return a name that neither the hero nor the friend has."""
    name = _pick(names, random)
    while name in (facts.get("hero"), facts.get("pal")):
        name = _pick(names, random)
    return name


def _sample(choices: Sequence[Item], count: int, random: Random) -> list[Item]:
    """Return `count` different items, in random order."""
    left = list(choices)
    return [left.pop(int(random() * len(left))) for _ in range(count)]
