import math
from pathlib import Path

import pytest
import torch

from lmkit.measure.memory import GIB
from lmkit.model import transformer
from lmkit.model.accounting import count_parameters
from lmkit.profile import memory
from lmkit.profile.summary import BUILD, CATEGORIES, MEMORY, WHOLE_RUN, peak_row
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import ModelConfig, RunConfig, TrainConfig

MODEL = ModelConfig(vocab_size=128, context_length=32, d_model=64, d_ff=128, num_layers=2, num_heads=4)
RECIPE = Recipe(run=RunConfig(device="cpu"), model=MODEL, train=TrainConfig(batch_size=2))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return memory.run_memory(RECIPE, tmp_path_factory.mktemp("memory"), mode="step", steps=2)


def test_categories_have_the_sizes_that_arithmetic_gives(result, ranges_are_on):
    weights = count_parameters(MODEL).total * 4 / GIB
    rows = {row["phase"]: row for row in result.summary["peaks"]}
    work = {"data", "forward", "attention", "loss", "backward", "clip", "optimizer"}
    assert set(rows) - {"sync"} == work | {"build", "step", "whole run"}
    # Allocations are rounded up to 64 bytes or so, and RoPE's tables are not parameters.
    assert rows["step"]["parameters_gib"] == pytest.approx(weights, rel=0.02)
    assert rows["clip"]["gradients_gib"] == pytest.approx(weights, rel=0.02)
    assert rows["data"]["optimizer_state_gib"] == pytest.approx(2 * weights, rel=0.02)
    assert rows["build"]["gradients_gib"] == 0
    assert rows["forward"]["activations_gib"] > 0
    assert rows["data"]["activations_gib"] == 0
    assert rows["whole run"]["peak_gib"] == max(row["peak_gib"] for row in result.summary["peaks"])
    assert not ranges_are_on()


def test_files(result):
    folder = Path(result.folder)
    assert set(result.files) == {path.name for path in folder.iterdir()}
    names = ("peaks.jsonl", "peaks.csv", "timeline.png", "report.md")
    assert set(result.files) == {*(f"memory_{name}" for name in names), "environment.json"}
    assert (folder / "memory_timeline.png").read_bytes()[:4] == b"\x89PNG"
    report = (folder / "memory_report.md").read_text()
    assert all(column.header in report for column in MEMORY)
    assert "![memory_timeline.png](memory_timeline.png)" in report


@pytest.mark.full
def test_a_table_of_contexts_shows_that_naive_attention_grows_as_the_square(tmp_path):
    recipes = [
        RECIPE.changed(model={"attention": kernel, "context_length": context, "num_layers": 1})
        for kernel in ("reference", "flash_torch")
        for context in (256, 512)
    ]
    found = memory.run_memory_table(recipes, tmp_path, steps=1)
    rows = found.summary["rows"]
    naive, flash = (rows[i + 1]["step_computed_gib"] / rows[i]["step_computed_gib"] for i in (0, 2))
    assert naive > 3.0  # scores and probabilities grow four times, the rest twice
    assert flash < 2.2  # what every token keeps grows twice, the tiles not at all
    assert all(row["forward_computed_gib"] < row["step_computed_gib"] for row in rows)
    assert {"memory_contexts_report.md", "memory_contexts.json"} <= set(found.files)
    assert (tmp_path / "reference_step_512_fp32/memory_peaks.jsonl").exists()
    assert not any(tmp_path.rglob("*.pickle"))


def test_what_does_not_fit_is_a_row(monkeypatch, tmp_path):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(memory, "run_memory", full)
    found = memory.run_memory_table([RECIPE], tmp_path, steps=1)
    assert found.summary["rows"][0]["status"] == "out of memory"
    assert "out of memory" in found.text
    assert (tmp_path / "memory_contexts.json").exists()


def test_the_innermost_line_that_counts_is_of_lmkit_or_of_the_user():
    ours, own = transformer.__file__, "/home/me/my_kernel.py"
    inside = [("", 0), ("??", 0), ("<string>", 1), (torch.nn.functional.__file__, 1), (memory.__file__, 3)]
    assert memory.line_of([*inside, (ours, 1), (own, 2)]).startswith("model/transformer.py:1  ")
    assert memory.line_of([*inside, (own, 2), (ours, 1)]) == "my_kernel.py:2"
    assert memory.line_of(inside) == memory.AUTOGRAD


@pytest.mark.parametrize(
    ("peaks", "phase"),
    [
        ({"step": 4.0, "forward": 4.0, "loss": 4.0, "backward": 3.0, "whole run": 4.0}, "loss"),
        ({"pass": 2.0, "whole run": 4.0}, "whole run"),
    ],
)
def test_the_peak_belongs_to_the_innermost_phase(peaks, phase):
    assert peak_row([{"phase": name, "peak_gib": peak} for name, peak in peaks.items()])["phase"] == phase


def test_what_a_step_computes_is_taken_from_the_phase_that_holds_most_of_it():
    rows = [
        {"phase": phase, "activations_gib": activations, "temporary_gib": temporary}
        for phase, activations, temporary in (
            (BUILD, 0.0, 9.0),
            ("forward", 3.0, 0.5),
            ("backward", 3.0, 1.0),
            ("optimizer", 0.0, 0.1),  # the peak of the run: weights, gradients and moments are large
            (WHOLE_RUN, 0.0, 0.1),
        )
    ]
    assert memory.most_computed(rows) == 4.0


# ---- peaks worked by hand

NAMES = ("build", "forward", "backward", "optimizer")
PHASES = [memory.Phase(name, 10 * i, 10 * i + 10) for i, name in enumerate(NAMES)]
# (time, address, size): worked by hand in the tests below
EVENTS = [
    (1, 1000, 100),  # parameters
    (11, 2000, 50),  # kept for backward
    (12, 3000, 70),  # a temporary of the forward pass
    (13, 3000, -70),
    (21, 4000, 100),  # gradients, in the middle of the block
    (22, 2000, -50),
    (31, 5000, 200, "adamw.py:9"),  # optimizer state
    (32, 3000, 30),  # the address of an old temporary again
    (33, 3000, -30),
    (35, 4000, -100),
    (36, 9999, -5),  # allocated before the recording
]
CENSUSES = [
    memory.Census(10, {1000: "parameters"}),
    memory.Census(20, {1000: "parameters"}),
    memory.Census(30, {1000: "parameters", 4060: "gradients"}),
    memory.Census(40, {1000: "parameters", 5000: "optimizer state"}),
]


def profile(events, phases, censuses=()):
    return memory.profile_memory(memory.Recording(memory.blocks_of(events), phases, censuses, None, "a test"))


def sums_of(peaks):
    return {phase: sum(peak.values()) for phase, peak in peaks.items()}


def test_frees_find_their_allocations_and_blocks_their_categories():
    blocks = memory.blocks_of(EVENTS)
    assert [block[:4] for block in blocks] == [
        (1000, 100, 1, math.inf),
        (2000, 50, 11, 22),
        (3000, 70, 12, 13),
        (4000, 100, 21, 35),
        (5000, 200, 31, math.inf),
        (3000, 30, 32, 33),
    ]
    assert memory.categorize(blocks, CENSUSES, PHASES) == [
        *("parameters", "activations", "temporary", "gradients", "optimizer state", "temporary")
    ]


def test_a_census_counts_only_while_the_block_is_alive():
    """The same address, freed before the census and allocated again after it."""
    blocks = [memory.Block(1000, 8, 1, 5), memory.Block(1000, 8, 11, 15)]
    assert memory.categorize(blocks, [memory.Census(10, {1000: "parameters"})], []) == ["temporary"] * 2


def test_peaks_by_hand():
    found = profile(EVENTS, PHASES, CENSUSES)
    assert found.begins == [("build", 0), ("forward", 1), ("backward", 4), ("optimizer", 6)]
    of_step = {"forward": 100 + 50 + 70, "backward": 100 + 50 + 100, "optimizer": 100 + 100 + 200 + 30}
    assert sums_of(found.peaks) == {"build": 100, **of_step, "whole run": 430}
    assert found.peaks["forward"]["activations"] == 50
    assert tuple(found.peaks["whole run"].values()) == (100, 100, 200, 0, 30)
    assert tuple(found.peaks["whole run"]) == CATEGORIES
    assert found.alive["gradients"][-1] == 0
    assert found.lines == [{"bytes": 200, "category": "optimizer state", "line": "adamw.py:9"}]


@pytest.mark.parametrize(
    ("events", "phases", "expected"),
    [
        ([(1, 10, 5), (2, 10, -5), (11, 10, 9), (12, 10, -9), (21, 10, 7), (22, 10, -7)],
         [("forward", start) for start in (0, 10, 20)], {"forward": 9, "whole run": 9}),
        ([(1, 10, 5), (12, 10, -5)], [("backward", 10)], {"backward": 5, "whole run": 5}),
        ([], [("build", 0)], {"build": 0, "whole run": 0}),
    ],
    ids=["the larger of several", "alive when it begins", "nothing"],
)  # fmt: skip
def test_the_peak_of_a_phase(events, phases, expected):
    found = profile(events, [memory.Phase(name, start, start + 10) for name, start in phases])
    assert sums_of(found.peaks) == expected
