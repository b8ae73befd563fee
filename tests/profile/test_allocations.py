from lmkit.profile.allocations import (
    Block,
    Census,
    Largest,
    Phase,
    Recording,
    blocks_of,
    categorize,
    profile_memory,
)

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


def test_frees_find_their_allocations():
    blocks = blocks_of(EVENTS)
    assert [(block.address, block.size, block.allocated, block.freed) for block in blocks] == [
        (1000, 100, 1, None),
        (2000, 50, 11, 22),
        (3000, 70, 12, 13),
        (4000, 100, 21, 35),
        (5000, 200, 31, None),
        (3000, 30, 32, 33),
    ]


def test_categories():
    assert categorize(blocks_of(EVENTS), CENSUSES, PHASES) == [
        "parameters",
        "activations",
        "temporary",
        "gradients",
        "optimizer state",
        "temporary",
    ]


def test_a_census_counts_only_while_the_block_is_alive():
    """The same address, freed before the census and allocated again after it."""
    blocks = [Block(1000, 8, 1, 5), Block(1000, 8, 11, 15)]
    censuses = [Census(10, {1000: "parameters"})]
    assert categorize(blocks, censuses, []) == ["temporary", "temporary"]


def test_peaks_by_hand():
    profile = profile_memory(Recording(blocks_of(EVENTS), PHASES, CENSUSES, b"", "a test"))
    assert profile.begins == [("build", 0), ("forward", 1), ("backward", 4), ("optimizer", 6)]
    peaks = {peak.phase: peak for peak in profile.peaks}
    assert [peak.phase for peak in profile.peaks] == ["build", "forward", "backward", "optimizer"]
    assert peaks["build"].bytes == 100
    assert peaks["forward"].bytes == 100 + 50 + 70
    assert peaks["forward"].by_category["activations"] == 50
    assert peaks["backward"].bytes == 100 + 50 + 100
    assert peaks["optimizer"].bytes == 100 + 100 + 200 + 30
    assert profile.peak.bytes == 430
    assert profile.peak.by_category == {
        "parameters": 100,
        "gradients": 100,
        "optimizer state": 200,
        "activations": 0,
        "temporary": 30,
    }
    assert profile.alive["gradients"][-1] == 0
    assert profile.times[0] == 0.0
    assert profile.largest[0] == Largest(200, "optimizer state", "optimizer", 1)


def test_the_largest_are_counted_and_belong_to_the_innermost_phase():
    """A recorder on a GPU lists phases as they close, the inner one first; one on a CPU as they open."""
    events = [(2, 10, 8), (3, 10, -8), (12, 10, 8), (13, 10, -8), (21, 10, 8), (25, 20, 4)]
    phases = [Phase("loss", 1, 9), Phase("loss", 11, 19), Phase("forward", 0, 20), Phase("step", 0, 24)]
    for order in (phases, phases[::-1]):
        profile = profile_memory(Recording(blocks_of(events), order, [], b"", "a test"))
        assert [(found.bytes, found.phase, found.count) for found in profile.largest] == [
            (8, "step", 1),
            (8, "loss", 2),
            (4, "-", 1),
        ]


def test_the_larger_of_two_instances_counts():
    events = [(1, 10, 5), (2, 10, -5), (11, 10, 9), (12, 10, -9)]
    phases = [Phase("forward", 0, 10), Phase("forward", 10, 20)]
    profile = profile_memory(Recording(blocks_of(events), phases, [], b"", "a test"))
    assert [(peak.phase, peak.bytes) for peak in profile.peaks] == [("forward", 9)]


def test_nothing_recorded():
    profile = profile_memory(Recording([], [Phase("build", 0, 1)], [], b"", "a test"))
    assert profile.peak.bytes == 0
    assert profile.peaks[0].bytes == 0
