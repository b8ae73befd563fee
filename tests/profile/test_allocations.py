import math

import pytest

from lmkit.profile.allocations import Block, Census, Phase, Recording, blocks_of, categorize, profile_memory

PHASES = [
    Phase("build", 0, 10),
    Phase("forward", 10, 20),
    Phase("backward", 20, 30),
    Phase("optimizer", 30, 40),
]
# (time, address, size): worked by hand in the tests below
EVENTS = [
    (1, 1000, 100),  # parameters
    (11, 2000, 50),  # kept for backward
    (12, 3000, 70),  # a temporary of the forward pass
    (13, 3000, -70),
    (21, 4000, 100),  # gradients, in the middle of the block
    (22, 2000, -50),
    (31, 5000, 200),  # optimizer state
    (32, 3000, 30),  # the address of an old temporary again
    (33, 3000, -30),
    (35, 4000, -100),
    (36, 9999, -5),  # allocated before the recording
]
CENSUSES = [
    Census(10, {1000: "parameters"}),
    Census(20, {1000: "parameters"}),
    Census(30, {1000: "parameters", 4060: "gradients"}),
    Census(40, {1000: "parameters", 5000: "optimizer state"}),
]


def profile(events, phases, censuses=()):
    return profile_memory(Recording(blocks_of(events), phases, censuses, b"", "a test"))


def test_frees_find_their_allocations_and_blocks_their_categories():
    blocks = blocks_of(EVENTS)
    assert [block[:4] for block in blocks] == [
        (1000, 100, 1, math.inf),
        (2000, 50, 11, 22),
        (3000, 70, 12, 13),
        (4000, 100, 21, 35),
        (5000, 200, 31, math.inf),
        (3000, 30, 32, 33),
    ]
    assert categorize(blocks, CENSUSES, PHASES) == [
        *("parameters", "activations", "temporary", "gradients", "optimizer state", "temporary")
    ]


def test_a_census_counts_only_while_the_block_is_alive():
    """The same address, freed before the census and allocated again after it."""
    blocks = [Block(1000, 8, 1, 5), Block(1000, 8, 11, 15)]
    assert categorize(blocks, [Census(10, {1000: "parameters"})], []) == ["temporary", "temporary"]


def test_peaks_by_hand():
    found = profile(EVENTS, PHASES, CENSUSES)
    assert found.begins == [("build", 0), ("forward", 1), ("backward", 4), ("optimizer", 6)]
    assert {phase: sum(peak.values()) for phase, peak in found.peaks.items()} == {
        "build": 100,
        "forward": 100 + 50 + 70,
        "backward": 100 + 50 + 100,
        "optimizer": 100 + 100 + 200 + 30,
        "whole run": 430,
    }
    assert found.peaks["forward"]["activations"] == 50
    assert found.peaks["whole run"] == {
        "parameters": 100,
        "gradients": 100,
        "optimizer state": 200,
        "activations": 0,
        "temporary": 30,
    }
    assert found.alive["gradients"][-1] == 0
    assert found.largest[0] == {"bytes": 200, "category": "optimizer state", "phase": "optimizer", "count": 1}


@pytest.mark.parametrize("order", [1, -1])
def test_the_largest_are_counted_and_belong_to_the_innermost_phase(order):
    events = [(2, 10, 8), (3, 10, -8), (12, 10, 8), (13, 10, -8), (21, 10, 8), (25, 20, 4)]
    phases = [Phase("loss", 1, 9), Phase("loss", 11, 19), Phase("forward", 0, 20), Phase("step", 0, 24)]
    found = profile(events, phases[::order])
    assert [(block["bytes"], block["phase"], block["count"]) for block in found.largest] == [
        (8, "step", 1),
        (8, "loss", 2),
        (4, "-", 1),
    ]


def test_the_larger_of_two_instances_counts():
    events = [(1, 10, 5), (2, 10, -5), (11, 10, 9), (12, 10, -9), (21, 10, 7), (22, 10, -7)]
    found = profile(events, [Phase("forward", start, start + 10) for start in (0, 10, 20)])
    assert {phase: sum(peak.values()) for phase, peak in found.peaks.items()} == {
        "forward": 9,
        "whole run": 9,
    }


def test_what_is_alive_when_a_phase_begins_counts():
    peaks = profile([(1, 10, 5), (12, 10, -5)], [Phase("backward", 10, 20)]).peaks
    assert sum(peaks["backward"].values()) == 5


def test_nothing_recorded():
    peaks = profile([], [Phase("build", 0, 1)]).peaks
    assert {phase: sum(peak.values()) for phase, peak in peaks.items()} == {"build": 0, "whole run": 0}
