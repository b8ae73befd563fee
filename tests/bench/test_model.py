"""The model bench: what is measured, what does not fit, and the sentences that rows support."""

from __future__ import annotations

import json

import pytest
import torch

from lmkit.bench import model as bench
from lmkit.bench.harness import Journal
from lmkit.bench.model import findings, versus_fp32
from lmkit.data.batches import RandomTokens
from lmkit.errors import UsageError
from lmkit.measure import plots
from lmkit.model.accounting import flops_per_token, forward_flops_per_token
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import PRESETS, ModelConfig
from lmkit.training import setup
from lmkit.training.setup import TrainingStep

SMALL = {"vocab_size": 64, "lengths": (8,), "batch_size": 2, "warmup": 0, "iters": 3, "warmup_study": ()}
TINY = ModelConfig(preset="tiny", **PRESETS["tiny"], vocab_size=64, context_length=8)
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


def test_everything_is_measured_and_every_file_is_there(run_bench):
    result = run_bench("model", **{**SMALL, "precisions": ("fp32", "bf16"), "warmup_study": (0, 2)})
    models = [row for row in result.rows if row["part"] == "model"]
    assert [(row["mode"], row["precision"]) for row in models] == [
        (mode, precision) for mode in ("forward", "fwd+bwd", "step") for precision in ("fp32", "bf16")
    ]
    for row in models:
        assert row["status"] == "ok"
        assert len(row["samples_ms"]) == 3
        assert row["tokens_per_s"] == pytest.approx(2 * 8 / (row["median_ms"] / 1e3))
        flops = (forward_flops_per_token if row["mode"] == "forward" else flops_per_token)(TINY, 8)
        peak = {"fp32": 1e12, "bf16": 2e12}[row["precision"]]
        assert row["mfu"] == row["share_of_matmul"] == pytest.approx(row["tokens_per_s"] * flops / peak)
        assert "measured" in row["mfu_basis"]  # no data sheet has this chip
        floor = {"step": pytest.approx(32 * row["parameters"] / 1e10 * 1e3)}
        assert row.get("optimizer_floor_ms") == floor.get(row["mode"])
        if row["precision"] == "bf16":
            assert row["versus_fp32_low"] <= row["versus_fp32"] <= row["versus_fp32_high"]
        else:
            assert "versus_fp32" not in row
    study = [row for row in result.rows if row["part"] == "warm-up"]
    assert [row["warmup"] for row in study] == [0, 2]
    assert all(row["first_ms"] == row["samples_ms"][0] and row["std_ms"] > 0 for row in study)
    assert {len(row["samples_ms"]) for row in study} == {10}
    assert set(result.files) == {
        *("model_results.csv", "model_results.jsonl", "model_report.md"),
        *(f"model_{picture}.png" for picture in ("time", "memory", "throughput", "warmup")),
    }
    assert [json.loads(line) for line in result.files["model_results.jsonl"].splitlines()] == result.rows
    assert max(map(len, result.table.splitlines())) <= 100


@pytest.mark.parametrize("method", [pytest.param("forward_backward", marks=pytest.mark.full), "run"])
def test_fault_85_what_does_not_fit_is_a_row_and_the_others_complete(run_bench, monkeypatch, method):
    def crowded(step, **options):
        raise FULL

    monkeypatch.setattr(setup.TrainingStep, method, crowded)
    result = run_bench("model", **{**SMALL, "warmup_study": (0,)})
    full = {"forward_backward": "fwd+bwd", "run": "step"}[method]
    rows = {row["mode"]: row for row in result.rows if row["part"] == "model"}
    assert (rows.pop(full)["status"], len(rows)) == ("out of memory", 2)
    assert all(row["median_ms"] > 0 for row in rows.values())
    study = next(row for row in result.rows if row["part"] == "warm-up")
    assert study["status"] == ("out of memory" if method == "run" else "ok")
    assert "CUDA out of memory" in result.files["model_report.md"]


def test_fault_85_what_fits_alone_but_not_in_turns_is_a_row_too(run_bench, monkeypatch):
    real, turns = bench.time_variants, []

    def crowded(calls, **options):
        turns.append(list(calls))
        if "step fp32" in calls:
            raise FULL
        return real(calls, **options)

    monkeypatch.setattr(bench, "time_variants", crowded)
    peaks = iter([1, 2, 3])
    monkeypatch.setattr(bench, "track_peak", lambda device: _Peak(next(peaks)))
    rows = {row["mode"]: row for row in run_bench("model", **SMALL).rows}
    assert turns == [["forward fp32", "fwd+bwd fp32", "step fp32"], ["forward fp32", "fwd+bwd fp32"]]
    assert rows["step"]["status"] == "out of memory"
    assert "in turns with 2 others" in rows["step"]["detail"]
    assert rows["forward"]["median_ms"] > 0
    assert rows["fwd+bwd"]["median_ms"] > 0


class _Peak:
    def __init__(self, gigabytes: int) -> None:
        self.peak_bytes = gigabytes * 10**9

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_fault_85_a_model_larger_than_the_host_is_not_even_built(run_bench, monkeypatch):
    monkeypatch.setattr(bench, "available_memory", lambda: 1_000_000)
    monkeypatch.setattr(setup, "TrainingStep", None)
    result = run_bench("model", **{**SMALL, "warmup_study": (0,)})
    assert {row["status"] for row in result.rows} == {"out of memory"}
    assert "GB free" in result.rows[0]["detail"]
    assert "does not fit" in result.files["model_report.md"]


def test_rows_are_in_the_journal_as_they_come(run_bench, tmp_path):
    journal = Journal(tmp_path / "new folder" / "rows.partial")
    journal.start()
    result = run_bench("model", journal=journal, **{**SMALL, "warmup_study": (0,)})
    assert journal.rows() == result.rows


def test_a_step_moves_the_weights_and_the_other_modes_do_not():
    step = TrainingStep(TINY, Ranks(), RandomTokens(64, batch_size=2, context_length=8, seed=0))
    before = step.model.lm_head.weight.detach().clone()
    step.forward()
    step.forward_backward()
    assert torch.equal(step.model.lm_head.weight, before)
    assert step.model.lm_head.weight.grad is None
    step.run()
    assert not torch.equal(step.model.lm_head.weight, before)


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("sizes", ("huge",), "recipe.wrong_value"),
        ("precisions", ("int8",), "recipe.wrong_value"),
        ("modes", ("back",), "recipe.wrong_value"),
        ("compile", ("some",), "recipe.wrong_value"),
        ("precisions", ("fp16",), "bench.precision_needs_gpu"),
    ],
)
def test_bad_options(run_bench, key, value, code):
    with pytest.raises(UsageError) as refused:
        run_bench("model", **{**SMALL, key: value})
    assert refused.value.code == code
    assert f"bench.model.{key}" in refused.value.message
    assert refused.value.hint


def test_a_single_sample_has_no_spread_and_few_are_said_to_be_few(run_bench):
    result = run_bench("model", **{**SMALL, "modes": ("forward",), "iters": 50, "max_seconds": 1e-9})
    (row,) = result.rows
    assert (row["repeats"], row["spread"]) == (1, None)
    assert "1 of 1 rows have fewer than 6 samples" in result.files["model_report.md"]


def test_precisions_are_compared_round_by_round():
    fp32 = {"samples_ms": [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]}
    bf16 = {"samples_ms": [5.0, 10.0, 15.0, 20.0, 25.0, 30.0]}
    found = versus_fp32(bf16, fp32)
    assert [found[f"versus_fp32{end}"] for end in ("", "_low", "_high")] == [2.0] * 3
    assert found["versus_fp32_verdict"] == "faster"
    assert versus_fp32(fp32, fp32)["versus_fp32_verdict"] == "no difference"
    few = versus_fp32({"samples_ms": [5.0]}, {"samples_ms": [10.0]})
    assert few["versus_fp32_verdict"] == "too few repeats"
    assert versus_fp32(bf16, None) == versus_fp32({"status": "out of memory"}, fp32) == {}


def passing(mode, precision, length, ms):
    row = {"part": "model", "size": "small", "length": length, "precision": precision, "compile": "none"}
    numbers = {"median_ms": ms, "mfu": 1 / ms, "mfu_basis": "a peak", "tokens_per_s": length / ms}
    return row | {"mode": mode, "status": "ok"} | numbers | {"optimizer_floor_ms": 0.5, "repeats": 6}


def test_findings_name_what_the_rows_show():
    rows = [
        passing("fwd+bwd", "bf16", 256, 9.0),
        passing("step", "bf16", 256, 12.0) | {"versus_fp32": 2.0, "versus_fp32_verdict": "faster"},
        passing("step", "bf16", 1024, 15.0) | {"versus_fp32": 6.4, "versus_fp32_verdict": "too few repeats"},
        passing("step", "fp32", 256, 24.0),
        passing("step", "fp32", 1024, 96.0),
    ]
    text = "\n".join(findings(rows, []))
    for said in (
        "Best utilization in bf16: small at 256, compile none, fwd+bwd",
        "Best utilization in fp32: small at 256",
        "A step in bf16 is 6.40 (small at 1024) to 2.00 (small at 256) times as fast",
        "too few repeats 1, faster 1",
        "1.25 (small, bf16, 256 to 1024)",
        "up to 25% of a step (small at 256, bf16), 3.00 ms; moving their bytes takes 0.50 ms",
    ):
        assert said in text
    assert "small, fp32, 256 to 1024" not in text  # four times the tokens, four times the time
    assert "samples" not in text


def test_the_warm_up_picture_reaches_from_the_fastest_to_the_slowest_step(run_bench, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "png", lambda figure: figures.append(figure) or b"")
    rows = run_bench("model", **{**SMALL, "modes": ("forward",), "warmup_study": (0,)}).rows
    samples = next(row["samples_ms"] for row in rows if row["part"] == "warm-up")
    (whisker,) = figures[-1].axes[0].collections[0].get_segments()
    assert [end[1] for end in whisker] == [pytest.approx(min(samples)), pytest.approx(max(samples))]
