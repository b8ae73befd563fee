"""The model bench: what is measured, what does not fit, and the sentences that rows support."""

import json

import pytest
import torch
from raising import raises

from lmkit.bench import harness
from lmkit.bench.context import Journal
from lmkit.errors import UsageError
from lmkit.measure.statistics import paired_ratio
from lmkit.model.accounting import flops_per_token, forward_flops_per_token
from lmkit.recipe.tables import PRESETS, ModelConfig
from lmkit.training import setup

SMALL = {"vocab_size": 64, "lengths": (8,), "batch_size": 2, "warmup": 0, "iters": 3, "warmup_study": ()}
TINY = ModelConfig(preset="tiny", **PRESETS["tiny"], vocab_size=64, context_length=8)
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


@pytest.mark.usefixtures("_planted_kernels")
@pytest.mark.parametrize("modes", [("forward",), ("fwd+bwd",)])
def test_a_kernel_that_is_wrong_without_gradients_only_is_wrong_where_that_is_timed(run_bench, modes):
    precisions = ("fp32", "bf16")
    options = {**SMALL, "modes": modes, "precisions": precisions, "attention": "wrong_without_gradients"}
    for row in run_bench("model", **options).rows:
        assert row["status"] == ("wrong result" if modes == ("forward",) else "ok"), row
        assert ("median_ms" in row) == (row["status"] == "ok")


def test_everything_is_measured_and_every_file_is_there(run_bench, tmp_path):
    journal = Journal(tmp_path / "new folder" / "rows.partial")
    result = run_bench("model", journal, **{**SMALL, "precisions": ("fp32", "bf16"), "warmup_study": (0, 2)})
    models = {(row["mode"], row["precision"]): row for row in result.rows if row["part"] == "model"}
    assert list(models) == [
        (mode, precision) for mode in ("forward", "fwd+bwd", "step") for precision in ("fp32", "bf16")
    ]
    for (mode, precision), row in models.items():
        assert row["status"] == "ok"
        assert len(row["samples_ms"]) == 3
        assert row["tokens_per_s"] == pytest.approx(2 * 8 / (row["median_ms"] / 1e3))
        flops = (forward_flops_per_token if mode == "forward" else flops_per_token)(TINY, 8)
        peak = {"fp32": 1e12, "bf16": 2e12}[precision]
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * flops / peak)
        assert "measured" in row["mfu_basis"]  # no data sheet has this chip
        if precision == "bf16":  # compared round by round
            ratio = paired_ratio(row["samples_ms"], models[mode, "fp32"]["samples_ms"])
            assert row["versus_fp32"] == ratio.speedup
            assert row["versus_fp32_verdict"] == "too few repeats"
    study = [row for row in result.rows if row["part"] == "warm-up"]
    assert [(row["warmup"], len(row["samples_ms"])) for row in study] == [(0, 10), (2, 10)]
    assert all(row["first_ms"] == row["samples_ms"][0] for row in study)
    names = ("results.csv", "results.jsonl", "report.md", "time.png")
    assert set(result.files) == {f"model_{name}" for name in names}
    assert [json.loads(line) for line in result.files["model_results.jsonl"].splitlines()] == result.rows
    assert journal.rows() == result.rows


def test_fault_85_what_does_not_fit_is_a_row_and_the_others_complete(run_bench, monkeypatch):
    def crowded(step, **options):
        raise FULL

    monkeypatch.setattr(setup.TrainingStep, "forward_backward", crowded)
    result = run_bench("model", **{**SMALL, "warmup_study": (0,)})
    rows = {row["mode"]: row for row in result.rows if row["part"] == "model"}
    assert (rows.pop("fwd+bwd")["status"], len(rows)) == ("out of memory", 2)
    assert all(row["median_ms"] > 0 for row in rows.values())
    assert "CUDA out of memory" in result.files["model_report.md"]


def test_fault_85_a_model_larger_than_the_host_is_not_even_built(run_bench, monkeypatch):
    monkeypatch.setattr(harness, "available_memory", lambda: 1_000_000)
    monkeypatch.setattr(setup, "TrainingStep", None)
    result = run_bench("model", **{**SMALL, "warmup_study": (0,)})
    assert {row["status"] for row in result.rows} == {"out of memory"}


def test_fp16_needs_a_gpu(run_bench):
    with raises(UsageError, "bench.precision_needs_gpu", "bench.model.precisions"):
        run_bench("model", **{**SMALL, "precisions": ("fp16",)})


def test_a_single_sample_has_no_spread(run_bench):
    (row,) = run_bench("model", **{**SMALL, "modes": ("forward",), "iters": 50, "max_seconds": 1e-9}).rows
    assert (row["repeats"], row["spread"]) == (1, None)
