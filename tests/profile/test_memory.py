import pickle

import pytest
import torch

from lmkit.measure.memory import GIB
from lmkit.model import transformer
from lmkit.model.accounting import count_parameters
from lmkit.profile import allocations, memory
from lmkit.profile.memory import AUTOGRAD, line_of, run_profile, table
from lmkit.profile.steps import Workload
from lmkit.profile.write_up import MEMORY, most_computed, peak_row
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import ModelConfig, RunConfig, TrainConfig

MODEL = ModelConfig(vocab_size=128, context_length=32, d_model=64, d_ff=128, num_layers=2, num_heads=4)
WORK = Workload(
    Recipe(run=RunConfig(device="cpu"), model=MODEL, train=TrainConfig(batch_size=2)), steps=1, warmup=1
)


@pytest.fixture(scope="module")
def begins():
    """Filled with what the picture says of where phases begin."""
    return {}


@pytest.fixture(scope="module")
def result(begins):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        draw = memory.stacked_areas
        patch.setattr(memory, "stacked_areas", lambda *a, **k: begins.update(k["begins"]) or draw(*a, **k))
        yield run_profile(WORK)
    torch.set_num_threads(before)


def test_categories_have_the_sizes_that_arithmetic_gives(result, ranges_are_on):
    weights = count_parameters(MODEL).total * 4 / GIB
    rows = {row["phase"]: row for row in result.rows}
    work = {"data", "forward", "attention", "loss", "backward", "clip", "optimizer"}
    assert set(rows) - {"sync"} == work | {"build", "step", "whole run"}
    # Allocations are rounded up to 64 bytes or so, and RoPE's tables are not parameters.
    assert rows["step"]["parameters_gib"] == pytest.approx(weights, rel=0.02)
    assert rows["clip"]["gradients_gib"] == pytest.approx(weights, rel=0.02)
    assert rows["data"]["optimizer_state_gib"] == pytest.approx(2 * weights, rel=0.02)
    assert rows["build"]["gradients_gib"] == 0
    assert rows["forward"]["activations_gib"] > 0
    assert rows["data"]["activations_gib"] == 0
    assert rows["whole run"]["peak_gib"] == max(row["peak_gib"] for row in result.rows)
    assert not ranges_are_on()


def test_files(result, begins):
    assert set(result.files) == {
        "memory_peaks.jsonl",
        "memory_peaks.csv",
        "memory_timeline.png",
        "memory_snapshot.pickle",
        "memory_report.md",
        "environment.json",
    }
    (events,) = pickle.loads(result.files["memory_snapshot.pickle"])["device_traces"]
    assert {event["action"] for event in events} == {"alloc", "free_completed"}
    assert result.files["memory_timeline.png"][:4] == b"\x89PNG"
    assert max(map(len, result.text.splitlines())) <= 100
    assert all(column.header in result.files["memory_report.md"] for column in MEMORY)
    assert "![memory_timeline.png](memory_timeline.png)" in result.files["memory_report.md"]
    assert begins["build"] == 0 < begins["warm-up 1"] < begins["step 1"]


def test_bytes_are_attributed_to_source_lines(result):
    """The peak is in the optimizer's step: each moment is as large as the weights, and made on a line of its own."""
    report = result.files["memory_report.md"]
    table = report[report.index("Source lines") :].split("##")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line]
    moments = [cell for cell in cells if "optimizer state" in cell]
    weights = count_parameters(MODEL).total * 4 / GIB
    share = weights / peak_row(result.rows)["peak_gib"]
    assert [line.split(":")[0] for *_, line in moments] == ["core/adamw.py"] * 2
    assert {kind[-13:] for *_, kind in moments} == {"_like(param),"}
    for _, of_peak, *_ in moments:
        assert float(of_peak.strip("%")) / 100 == pytest.approx(share, abs=0.006)  # two digits are shown
    assert "backward()" in next(cell[-1] for cell in cells if "gradients" in cell)
    assert "the lines that hold most" in result.text


@pytest.mark.full
def test_a_table_of_contexts_shows_that_naive_attention_grows_as_the_square():
    def recipe(kernel, context):
        model = MODEL.model_copy(update={"attention": kernel, "context_length": context, "num_layers": 1})
        return WORK.recipe.model_copy(update={"model": model})

    recipes = [recipe(kernel, context) for kernel in ("reference", "flash_torch") for context in (256, 512)]
    files = {}
    kept = []
    rows, text = table(recipes, steps=1, write=lambda more: (files.update(more), kept.append(len(files))))
    assert len(kept) == 4
    assert kept == sorted(set(kept))  # a run that is cut short leaves what it measured
    naive, flash = (rows[i + 1]["step_computed_gib"] / rows[i]["step_computed_gib"] for i in (0, 2))
    assert naive > 3.0  # scores and probabilities grow four times, the rest twice
    assert flash < 2.2  # what every token keeps grows twice, the tiles not at all
    assert all(row["forward_computed_gib"] < row["step_computed_gib"] for row in rows)
    assert {
        "memory_contexts.png",
        "memory_contexts_report.md",
        "reference_step_512_fp32/memory_peaks.jsonl",
    } <= set(files)
    assert not any(name.endswith(".pickle") for name in files)
    assert files["memory_contexts_report.md"].count("from 256 to 512 tokens") == 2
    assert max(map(len, text.splitlines())) <= 100


def test_what_does_not_fit_is_a_row(monkeypatch):
    def full(work):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(memory, "run_profile", full)
    files = {}
    rows, text = table([WORK.recipe], steps=1, write=files.update)
    assert rows[0]["status"] == "out of memory"
    assert "out of memory" in text
    assert "memory_contexts.png" in files


def test_the_innermost_line_that_counts_is_of_lmkit_or_of_the_user():
    ours, own = transformer.__file__, "/home/me/my_kernel.py"
    inside = [
        ("", 0),
        ("??", 0),
        ("<string>", 1),
        (torch.nn.functional.__file__, 1),
        (run_profile.__code__.co_filename, 3),
    ]
    assert line_of([*inside, (ours, 1), (own, 2)]).startswith("model/transformer.py:1  ")
    assert line_of([*inside, (own, 2), (ours, 1)]) == "my_kernel.py:2"
    assert line_of(inside) == AUTOGRAD


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
            (allocations.BUILD, 0.0, 9.0),
            ("forward", 3.0, 0.5),
            ("backward", 3.0, 1.0),
            ("optimizer", 0.0, 0.1),  # the peak of the run: weights, gradients and moments are large
            (allocations.WHOLE_RUN, 0.0, 0.1),
        )
    ]
    assert most_computed(rows) == 4.0
