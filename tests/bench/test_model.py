import json

import pytest
import torch

from lmkit.bench import model as bench
from lmkit.bench.journal import Journal
from lmkit.bench.model import ModelOptions, run_bench, versus_fp32
from lmkit.bench.model_report import findings
from lmkit.errors import UsageError
from lmkit.measure import plots
from lmkit.measure.limits import Limits
from lmkit.model.accounting import flops_per_token, forward_flops_per_token, preset_config

SMALL = {"vocab_size": 64, "lengths": (8,), "batch_size": 2, "warmup": 0, "iters": 3, "warmup_study": ()}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Known limits, and one thread: tiny models gain nothing from more."""
    measured = Limits("a test", {"fp32": 1e12, "bf16": 2e12}, 1e10)
    monkeypatch.setattr(bench, "measure_limits", lambda device, dtypes: measured)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_everything_is_measured_and_every_file_is_there():
    options = ModelOptions(**{**SMALL, "precisions": ("fp32", "bf16"), "warmup_study": (0, 2)})
    result = run_bench(options)
    models = [row for row in result.rows if row["part"] == "model"]
    assert [(row["mode"], row["precision"]) for row in models] == [
        (mode, precision) for mode in ("forward", "fwd+bwd", "step") for precision in ("fp32", "bf16")
    ]
    config = preset_config("tiny", vocab_size=64, context_length=8)
    for row in models:
        assert row["status"] == "ok"
        assert len(row["samples_ms"]) == 3
        assert row["tokens_per_s"] == pytest.approx(2 * 8 / (row["median_ms"] / 1e3))
        flops = (forward_flops_per_token if row["mode"] == "forward" else flops_per_token)(config, 8)
        peak = {"fp32": 1e12, "bf16": 2e12}[row["precision"]]
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * flops / peak)
        assert "measured" in row["mfu_basis"]
        assert row["share_of_matmul"] == pytest.approx(row["mfu"])  # no data sheet has this chip
        floor = {"step": pytest.approx(32 * row["parameters"] / 1e10 * 1e3)}
        assert row.get("optimizer_floor_ms") == floor.get(row["mode"])
        compared = (
            [row[f"versus_fp32{end}"] for end in ("", "_low", "_high")] if "versus_fp32" in row else None
        )
        assert (compared is None) == (row["precision"] == "fp32")
        assert compared is None or compared[1] <= compared[0] <= compared[2]
    assert "## Precisions, paired" in result.files["model_report.md"]
    study = [row for row in result.rows if row["part"] == "warm-up"]
    assert [row["warmup"] for row in study] == [0, 2]
    assert all(row["first_ms"] == row["samples_ms"][0] and row["std_ms"] > 0 for row in study)
    assert {len(row["samples_ms"]) for row in study} == {10}
    assert set(result.files) == {
        "model_results.csv",
        "model_results.jsonl",
        "model_time.png",
        "model_memory.png",
        "model_throughput.png",
        "model_warmup.png",
        "model_report.md",
    }
    assert [json.loads(line) for line in result.files["model_results.jsonl"].splitlines()] == result.rows
    assert max(map(len, result.table().splitlines())) <= 100
    assert "Best utilisation" in result.files["model_report.md"]


def test_fault_85_what_does_not_fit_is_a_row_and_the_others_complete(monkeypatch):
    real = bench.TrainingStep

    class Crowded(real):
        def forward_backward(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(bench, "TrainingStep", Crowded)
    rows = {row["mode"]: row for row in run_bench(ModelOptions(**SMALL)).rows}
    assert rows["fwd+bwd"]["status"] == "out of memory"
    assert rows["fwd+bwd"]["detail"] == "CUDA out of memory"
    assert rows["forward"]["median_ms"] > 0
    assert rows["step"]["median_ms"] > 0


def test_fault_85_what_fits_alone_but_not_in_turns_is_a_row_too(monkeypatch):
    real, turns = bench.time_variants, []

    def crowded(calls, **options):
        turns.append(list(calls))
        if "step fp32" in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return real(calls, **options)

    monkeypatch.setattr(bench, "time_variants", crowded)
    rows = {row["mode"]: row for row in run_bench(ModelOptions(**SMALL)).rows}
    assert turns == [["forward fp32", "fwd+bwd fp32", "step fp32"], ["forward fp32", "fwd+bwd fp32"]]
    assert rows["step"]["status"] == "out of memory"
    assert "in turns with 2 other modes" in rows["step"]["detail"]
    assert rows["forward"]["median_ms"] > 0
    assert rows["fwd+bwd"]["median_ms"] > 0


def test_fault_85_a_step_that_does_not_fit_is_a_row_of_the_warm_up_study_too(monkeypatch):
    class Crowded(bench.TrainingStep):
        def run(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(bench, "TrainingStep", Crowded)
    rows = run_bench(ModelOptions(**{**SMALL, "modes": ("forward",), "warmup_study": (0, 2)})).rows
    assert [(row["part"], row["status"]) for row in rows] == [
        ("warm-up", "out of memory"),
        ("warm-up", "out of memory"),
        ("model", "ok"),
    ]
    assert rows[0]["detail"] == "CUDA out of memory"


def test_rows_are_in_the_journal_as_they_come(tmp_path):
    journal = Journal(tmp_path / "new folder" / "rows.partial")
    journal.start()
    result = run_bench(ModelOptions(**{**SMALL, "warmup_study": (0,)}), journal=journal)
    assert journal.rows() == result.rows


def test_fault_85_a_model_larger_than_the_host_is_not_even_built(monkeypatch):
    monkeypatch.setattr(bench, "available_memory", lambda: 1_000_000)
    result = run_bench(ModelOptions(**{**SMALL, "warmup_study": (0,)}))
    assert {row["status"] for row in result.rows} == {"out of memory"}
    assert "GB free" in result.rows[0]["detail"]
    assert "does not fit" in result.files["model_report.md"]


def test_a_step_moves_the_weights_and_the_other_modes_do_not():
    options = ModelOptions(**SMALL)
    config = preset_config("tiny", vocab_size=64, context_length=8)
    step = bench._build(config, options)
    before = step.model.lm_head.weight.detach().clone()
    step.forward()
    step.forward_backward()
    assert torch.equal(step.model.lm_head.weight, before)
    assert step.model.lm_head.weight.grad is None
    step.run()
    assert not torch.equal(step.model.lm_head.weight, before)


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": ("huge",)},
        {"precisions": ("int8",)},
        {"precisions": ("fp16",)},  # on a CPU
        {"modes": ("back",)},
        {"compile": ("some",)},
    ],
)
def test_bad_options(change):
    with pytest.raises(UsageError):
        run_bench(ModelOptions(**{**SMALL, **change}))


def test_a_single_sample_has_no_spread_and_few_are_said_to_be_few():
    result = run_bench(ModelOptions(**{**SMALL, "modes": ("forward",), "iters": 50, "max_seconds": 0.0}))
    (row,) = result.rows
    assert (row["repeats"], row["spread"]) == (1, None)
    assert result.table().splitlines()[2].split()[7] == "-"
    assert "1 of 1 rows have fewer than 6 samples, the fewest 1" in result.files["model_report.md"]


def test_precisions_are_compared_round_by_round():
    fp32 = {"samples_ms": [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]}
    bf16 = {"samples_ms": [5.0, 10.0, 15.0, 20.0, 25.0, 30.0]}
    assert versus_fp32(bf16, fp32) == {
        "versus_fp32": 2.0,
        "versus_fp32_low": 2.0,
        "versus_fp32_high": 2.0,
        "versus_fp32_verdict": "faster",
    }
    assert versus_fp32(fp32, fp32)["versus_fp32_verdict"] == "no difference"
    assert (
        versus_fp32({"samples_ms": [5.0]}, {"samples_ms": [10.0]})["versus_fp32_verdict"] == "too few repeats"
    )
    assert versus_fp32(bf16, None) == versus_fp32({"status": "out of memory"}, fp32) == {}


def passing(mode, precision, length, ms, *, size="small"):
    row = {"part": "model", "size": size, "length": length, "precision": precision, "compile": "none"}
    numbers = {"median_ms": ms, "mfu": 1 / ms, "mfu_basis": "a peak", "tokens_per_s": length / ms}
    floor = {"optimizer_floor_ms": 0.5, "repeats": 6}
    return row | {"mode": mode, "status": "ok"} | numbers | floor


def test_findings_name_what_the_rows_show():
    rows = [
        passing("fwd+bwd", "bf16", 256, 9.0),
        passing("step", "bf16", 256, 12.0) | {"versus_fp32": 2.0, "versus_fp32_verdict": "faster"},
        passing("step", "bf16", 1024, 15.0) | {"versus_fp32": 6.4, "versus_fp32_verdict": "too few repeats"},
        passing("step", "fp32", 256, 24.0),
        passing("step", "fp32", 1024, 96.0),
    ]
    text = "\n".join(findings(rows))
    assert "Best utilisation in bf16: small at 256, compile none, fwd+bwd" in text
    assert "Best utilisation in fp32: small at 256" in text
    assert (
        "A step in bf16 is 6.40 (small at 1024) to 2.00 (small at 256) times as fast as in fp32; verdicts of the "
        "paired rounds: too few repeats 1, faster 1." in text
    )
    assert (
        "Steps in bf16, compile none, that grow far less than their tokens: 1.25 (small, 256 to 1024)" in text
    )
    assert "Steps in fp32" not in text  # four times the tokens, four times the time
    assert (
        "up to 25% of a step (small at 256, bf16), 3.00 ms; moving their bytes takes 0.50 ms at the copy"
        in text
    )
    assert "samples" not in text


def test_the_warm_up_picture_reaches_from_the_fastest_to_the_slowest_step(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "png", lambda figure: figures.append(figure) or b"")
    rows = run_bench(ModelOptions(**{**SMALL, "modes": ("forward",), "warmup_study": (0,)})).rows
    samples = next(row["samples_ms"] for row in rows if row["part"] == "warm-up")
    (whisker,) = figures[-1].axes[0].collections[0].get_segments()
    assert [end[1] for end in whisker] == [pytest.approx(min(samples)), pytest.approx(max(samples))]
