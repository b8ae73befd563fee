import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lmkit.bench import lm_matrix as bench
from lmkit.bench import lm_matrix_cells as cells
from lmkit.bench.journal import Journal
from lmkit.bench.lm_matrix import run_bench
from lmkit.bench.lm_matrix_cells import LmMatrixOptions
from lmkit.bench.lm_matrix_report import _coinciding_curves, findings
from lmkit.errors import UsageError
from lmkit.measure.limits import Limits

SMALL = {
    "num_layers": 1,
    "d_model": 32,
    "d_ff": 64,
    "num_heads": 2,
    "context_length": 32,
    "batch_size": 4,
    "steps_per_epoch": 2,
    "timed_epochs": 6,
    "lr": 3e-3,
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny models gain nothing from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _limits_at_hand(monkeypatch):
    measured = Limits("a test", {"fp32": 1e12}, 1e10)
    monkeypatch.setattr(bench, "measure_limits", lambda device, dtypes: measured)


@pytest.mark.usefixtures("_limits_at_hand")
def test_kernels_train_alike_and_every_file_is_there():
    kernels = ("reference", "vectorized", "flash_torch", "sdpa")
    result = run_bench(LmMatrixOptions(kernels=kernels, strategies=("none", "flat"), **SMALL))
    assert [(row["kernel"], row["strategy"]) for row in result.rows] == [
        (kernel, strategy) for kernel in kernels for strategy in ("none", "flat")
    ]
    first = result.rows[0]["losses"]
    assert len(first) == 1 + 2 * (1 + 6)  # the first step, then warm-up and timed epochs
    assert first[-1] < first[0] - 0.5  # it learns
    for row in result.rows:
        assert row["status"] == "ok"
        assert len(row["samples_ms"]) == 6
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / (row["median_ms"] / 1e3))
        # fp32 sums in another order; 15 steps of AdamW let that grow, to far less than a wrong gradient would
        assert row["losses"] == pytest.approx(first, rel=1e-3)
    assert set(result.files) == {
        "lm_matrix_results.csv",
        "lm_matrix_results.jsonl",
        "lm_matrix_time.png",
        "lm_matrix_memory.png",
        "lm_matrix_throughput.png",
        "lm_matrix_convergence.png",
        "lm_matrix_report.md",
        *(f"{kernel}_lm_matrix_throughput.png" for kernel in kernels),
        *(f"lm_matrix_table_{kernel}.png" for kernel in kernels),
    }
    assert [json.loads(line) for line in result.files["lm_matrix_results.jsonl"].splitlines()] == result.rows
    assert max(map(len, result.table().splitlines())) <= 100
    report = result.files["lm_matrix_report.md"]
    assert "Fastest" in report
    assert "Convergence" in report


def test_two_ranks_train_as_one():
    """The same global batch on one and on two ranks: the mean of the two ranks' gradients is one rank's."""
    options = {**SMALL, "timed_epochs": 1, "warmup_epochs": 0, "kernels": ("sdpa",), "steps_per_epoch": 4}
    alone = run_bench(LmMatrixOptions(strategies=("none",), **options))
    together = run_bench(LmMatrixOptions(strategies=("none", "naive", "zero1"), nproc=2, **options))
    by_strategy = {row["strategy"]: row for row in together.rows}
    assert {row["ranks"] for row in together.rows} == {2}
    naive, none = by_strategy["naive"]["losses"], by_strategy["none"]["losses"]
    assert by_strategy["zero1"]["losses"] == pytest.approx(naive, rel=1e-4)  # fp32 sums in another order
    assert none != pytest.approx(naive, rel=1e-4)  # without communication rank 0 learns from its half alone
    # Rank 0 shows the loss of its half of the batch: near the whole batch's, not equal to it.
    assert naive == pytest.approx(alone.rows[0]["losses"], rel=0.05)


@pytest.mark.usefixtures("_limits_at_hand")
def test_fault_85_what_does_not_fit_is_a_row_and_the_others_complete(monkeypatch):
    real = cells.TrainingStep

    def build(config, *args, **kwargs):
        if config.attention == "reference":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return real(config, *args, **kwargs)

    monkeypatch.setattr(cells, "TrainingStep", build)
    result = run_bench(LmMatrixOptions(kernels=("reference", "sdpa"), **SMALL))
    assert [row["status"] for row in result.rows] == ["out of memory", "ok"]
    assert "out of memory" in result.table()
    assert "reference x none: out of memory" in result.files["lm_matrix_report.md"]


def test_fault_85_one_of_two_ranks_out_of_memory_is_a_row_and_the_others_complete(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # spawned ranks inherit it
    monkeypatch.setattr(bench, "_run_rank", importlib.import_module("matrix_ranks").crowded_rank)
    journal = Journal(tmp_path / "rows.partial")
    options = {**SMALL, "kernels": ("sdpa", "reference"), "strategies": ("naive", "flat"), "nproc": 2}
    options |= {"timed_epochs": 1, "warmup_epochs": 0}
    reports: list[tuple[str, int, int]] = []
    result = run_bench(
        LmMatrixOptions(**options), progress=lambda *report: reports.append(report), journal=journal
    )
    # Ranks start again after the cell that did not fit.
    assert reports == [("kernels", done, 2) for done in (0, 1, 0, 1, 2)]
    assert [(row["kernel"], row["strategy"], row["status"]) for row in result.rows] == [
        ("sdpa", "naive", "ok"),
        ("sdpa", "flat", "ok"),
        ("reference", "naive", "ok"),
        ("reference", "flat", "out of memory"),
    ]
    assert result.rows[3]["detail"] == "CUDA out of memory, beside 1 other trainings"
    assert len(journal.rows()) == 4  # sdpa was not trained again


@pytest.mark.usefixtures("_limits_at_hand")
def test_fault_85_what_fits_at_first_but_not_later_is_a_row_too(monkeypatch):
    real = cells.TrainingStep

    class Growing(real):
        runs = 0

        def run(self):
            Growing.runs += 1
            if Growing.runs == 8:  # in the second timed epoch of a single training
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            return super().run()

    monkeypatch.setattr(cells, "TrainingStep", Growing)
    result = run_bench(LmMatrixOptions(kernels=("reference", "sdpa"), **SMALL))
    assert [row["status"] for row in result.rows] == ["out of memory", "ok"]


@pytest.mark.usefixtures("_limits_at_hand")
def test_the_threads_of_the_recipe_are_obeyed(monkeypatch):
    seen = []
    real = cells.TrainingStep.run
    monkeypatch.setattr(
        cells.TrainingStep, "run", lambda step: seen.append(torch.get_num_threads()) or real(step)
    )
    run_bench(LmMatrixOptions(kernels=("sdpa",), **{**SMALL, "timed_epochs": 1}, threads=3))
    assert set(seen) == {3}
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("_limits_at_hand")
def test_it_trains_on_a_token_file(monkeypatch):
    asked = []

    class File:
        tokens = np.zeros(1000, dtype=np.uint16)

    monkeypatch.setattr(bench, "open_tokens", lambda path: asked.append(path) or File)
    options = LmMatrixOptions(kernels=("sdpa",), tokens=Path("corpus/train.npy"), **SMALL)
    result = run_bench(options)
    assert asked == [options.tokens]
    assert result.rows[0]["final_loss"] < 3  # always the same token: soon known
    assert "trained on train.npy" in result.files["lm_matrix_report.md"]


def cell(strategy, ms, *, kernel="sdpa", ranks=2, last=3.0):
    return {
        "kernel": kernel,
        "strategy": strategy,
        "ranks": ranks,
        "status": "ok",
        "samples_ms": [ms + 0.01 * i for i in range(8)],
        "median_ms": ms,
        "tokens_per_s": 1000 / ms,
        "mfu": 0.1,
        "peak_gb": 1.0,
        "losses": [4.0, last],
        "first_loss": 4.0,
        "final_loss": last,
        "speedup": 10.0 / ms,
    }


def test_findings_on_several_ranks_call_nothing_fastest_that_does_not_synchronise():
    rows = [cell("none", 8.0, last=3.5), cell("naive", 12.0), cell("bucketed", 10.0)]
    found = findings(rows)
    assert "Fastest: sdpa with bucketed" in found[0]
    (compared,) = [line for line in found if line.startswith("sdpa:")]
    assert "bucketed is 1.199 times as fast as naive" in compared
    assert "reaches 80% of the speed without communication" in compared
    assert "2 trainings differ by at most 0 of the loss" in " ".join(found)


def test_findings_tell_what_trained_without_synchronising_from_what_did_not_run():
    assert "Only `none` ran" in " ".join(findings([cell("none", 8.0)]))
    assert findings([{"kernel": "sdpa", "strategy": "none", "ranks": 2, "status": "unsupported"}]) == [
        "Nothing ran."
    ]


def test_findings_on_one_rank_do_not_compare_strategies_that_do_nothing():
    rows = [
        cell("none", 10.0, ranks=1),
        cell("flat", 9.8, ranks=1),
        cell("flat", 9.0, kernel="fast", ranks=1),
    ]
    found = findings(rows)
    assert "Kernels, each with its fastest strategy: fast 9.00 ms, sdpa 9.80 ms per step." in found
    assert any("With one rank no strategy communicates" in line for line in found)
    assert not any(line.startswith("sdpa:") for line in found)


def test_curves_that_coincide_are_one():
    rows = [cell("none", 8.0, last=3.5), cell("naive", 12.0), cell("flat", 10.0, last=3.0001)]
    assert list(_coinciding_curves(rows)) == [
        "sdpa, none",
        "2 trainings, 3e-05 of the loss apart (naive, flat)",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"kernels": ("fast",)},
        {"strategies": ("ddp2",)},
        {"vocab_size": 100},
        {"context_length": 1_000_000},
    ],
)
def test_bad_options(change):
    (key,) = change
    with pytest.raises(UsageError, match=rf"^bench\.lm_matrix\.{key}: "):
        run_bench(LmMatrixOptions(**{**SMALL, **change}))


def test_a_batch_that_the_ranks_do_not_divide_is_refused():
    with pytest.raises(UsageError, match=r"bench\.lm_matrix\.batch_size: 3 .* 2 ranks"):
        run_bench(LmMatrixOptions(nproc=2, **{**SMALL, "batch_size": 3}))


def test_the_ranks_meet_as_the_options_say(monkeypatch):
    seen = []

    def group(device, **settings):
        seen.append((device, settings))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "process_group", group)
    with pytest.raises(KeyboardInterrupt):
        run_bench(LmMatrixOptions(backend="gloo", timeout_s=9, **SMALL))
    assert seen == [("cpu", {"backend": "gloo", "timeout_s": 9})]
