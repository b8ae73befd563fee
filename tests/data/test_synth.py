"""Generated stories: the same for a seed, varied, well formed, and coherent from first line to last."""

import math
import random
import re
from itertools import islice

import pytest
from raising import raises

from lmkit.data import generate_stories, synth, write_stories
from lmkit.errors import UsageError

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def stories():
    return list(islice(generate_stories(0), 2000))


def test_a_seed_decides_every_byte(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        write_stories(tmp_path / name, size_mb=0.05, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c
    write_stories(tmp_path / "long", size_mb=0.1, seed=5)
    assert (tmp_path / "long").read_bytes().startswith(a)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c", "long"}


@pytest.mark.parametrize("size_mb", [math.nan, math.inf, 0.0, -1.0])
def test_a_size_is_a_positive_number(tmp_path, size_mb):
    with raises(UsageError, "synth.size"):
        write_stories(tmp_path / "s", size_mb=size_mb, seed=0)


@pytest.mark.parametrize("size_mb", [1e300, 1e12])
def test_more_stories_than_the_disk_holds_are_refused(tmp_path, size_mb, monkeypatch):
    monkeypatch.setattr(synth, "generate_stories", pytest.fail)  # a failing test must not fill the disk
    with raises(UsageError, "output.too_large", tmp_path / "new" / "s"):
        write_stories(tmp_path / "new" / "s", size_mb=size_mb, seed=0)
    assert not any(tmp_path.iterdir())


def test_every_rule_and_fact_that_the_grammar_names_exists():
    assert [name for name, forms in synth._RULES.items() if not forms] == []
    facts = set(re.findall(r"\{([\w.]+)\}", synth.RULES + synth.WORDS))
    assert len(facts) > 50
    # One story for each: no list has to be long enough for all of them.
    assert all(synth._Story(random.Random(0).random)[fact] for fact in sorted(facts))


def test_every_story_is_new_and_every_plot_is_told(stories):
    assert len(set(stories)) == len(stories)
    for number, plot in enumerate(synth._RULES["plot"]):
        story = synth._Story(random.Random(number).random)
        text = story.expand([plot])
        # Whoever is introduced comes up again.
        assert text.count(story["hero"]) + text.count(story["kind"]) >= 2
        assert text.count(" // ") >= 1
