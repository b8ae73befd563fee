"""The lm-matrix: real trainings that must agree, cells that do not fit, and the sentences that rows support."""

import gzip
import json

import matrix_ranks
import numpy as np
import pytest
from raising import raises

from lmkit.bench import harness
from lmkit.bench import lm_matrix as bench
from lmkit.bench.harness import run_bench as run_on_ranks
from lmkit.bench.lm_matrix import Options, tokens_of
from lmkit.bench.summary import summary_of
from lmkit.data.token_files import TokenFileWriter
from lmkit.errors import UsageError
from lmkit.recipe.load import load_recipe

SMALL = {"num_layers": 1, "d_model": 32, "d_ff": 64, "num_heads": 2, "context_length": 32, "batch_size": 4}
SMALL |= {"steps_per_epoch": 2, "timed_epochs": 6, "lr": 3e-3}


def measure(nproc=1, output=None, progress=None, **keys):
    flags = {f"bench.lm_matrix.{key}": value for key, value in keys.items()}
    recipe = load_recipe(None, flags=flags, benches=True).changed(run={"device": "cpu"})
    stored = run_on_ranks("lm_matrix", recipe, output, nproc=nproc, progress=progress or (lambda *_: None))
    assert stored is not None
    return stored


@pytest.mark.full
def test_kernels_train_alike_and_every_file_is_there(run_bench):
    kernels = ["reference", "vectorized", "flash_torch", "sdpa"]
    result = run_bench("lm_matrix", kernels=kernels, strategies=["none", "flat"], **SMALL)
    assert [(row["kernel"], row["strategy"]) for row in result.rows] == [
        (kernel, strategy) for kernel in kernels for strategy in ("none", "flat")
    ]
    first = result.rows[0]["losses"]
    assert len(first) == 3 + 2 * (1 + 6)  # the steps of the check, then warm-up and timed epochs
    assert first[-1] < first[0] - 0.5  # it learns
    for row in result.rows:
        assert row["status"] == "ok"
        assert len(row["samples_ms"]) == 6
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / (row["median_ms"] / 1e3))
        # fp32 sums in another order; 15 steps of AdamW let that grow, to far less than a wrong gradient would
        assert row["losses"] == pytest.approx(first, rel=1e-3)
    assert set(result.files) == {
        *(f"lm_matrix_{name}" for name in ("results.csv", "results.jsonl", "report.md")),
        *(f"lm_matrix_{picture}.png" for picture in ("time", "memory", "throughput", "convergence")),
        *(f"{kernel}_lm_matrix_throughput.png" for kernel in kernels),
        *(f"lm_matrix_table_{kernel}.png" for kernel in kernels),
    }
    assert [json.loads(line) for line in result.files["lm_matrix_results.jsonl"].splitlines()] == result.rows
    assert [("speedup" in row) for row in result.rows] == [False, True] * len(kernels)


@pytest.mark.full
def test_two_ranks_train_as_one(tmp_path):
    """The same global batch on one and on two ranks: the mean of the two ranks' gradients is one rank's."""
    keys = {**SMALL, "timed_epochs": 1, "warmup_epochs": 0, "kernels": ["sdpa"], "steps_per_epoch": 4}
    names = ["Local No DDP", "none", "naive", "zero1"]
    together = measure(nproc=2, output=tmp_path / "two", strategies=names, **keys)
    by_strategy = {row["strategy"]: row for row in together.rows}
    assert [row["ranks"] for row in together.rows] == [1, 2, 2, 2]
    for key in ("losses", "valid_loss"):
        alone, none, naive, zero1 = (row[key] for row in by_strategy.values())
        # fp32 sums in another order; the losses are the mean of the ranks'
        assert zero1 == pytest.approx(naive, rel=1e-4)
        assert naive == pytest.approx(alone, rel=1e-4)
        assert none != pytest.approx(naive, rel=1e-4)  # ranks learn from their half alone
    assert by_strategy["naive"]["valid_loss"] == pytest.approx(by_strategy["naive"]["losses"][-1], rel=0.1)


@pytest.mark.full
def test_a_kernel_that_one_rank_refuses_leaves_no_rank_behind(tmp_path):
    """Rank 0 alone builds the training of one rank; the other must not wait for it."""
    keys = SMALL | {"kernels": ["flash_triton"], "strategies": ["one rank", "naive"]}
    result = measure(nproc=2, output=tmp_path, **keys)
    assert {row["status"] for row in result.rows} == {"unsupported"}  # fp32 on a CPU


@pytest.mark.full
def test_fault_85_one_of_two_ranks_out_of_memory_is_a_row_and_the_others_complete(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "_on_rank", matrix_ranks.crowded_rank)
    added = []
    keep = harness.Journal.rows
    monkeypatch.setattr(harness.Journal, "rows", lambda journal: added.append(keep(journal)) or added[-1])
    keys = {**SMALL, "kernels": ["sdpa", "reference"], "strategies": ["naive", "flat"]}
    keys |= {"timed_epochs": 1, "warmup_epochs": 0}
    reports: list[tuple[str, int, int]] = []
    result = measure(nproc=2, output=tmp_path, progress=lambda *report: reports.append(report), **keys)
    # Ranks start again after the cell that did not fit.
    assert reports == [("kernels", done, 2) for done in (0, 1, 0, 1, 2)]
    assert [(row["kernel"], row["strategy"], row["status"]) for row in result.rows] == [
        *(("sdpa", "naive", "ok"), ("sdpa", "flat", "ok"), ("reference", "naive", "ok")),
        ("reference", "flat", "out of memory"),
    ]
    assert "1 other trainings" in result.rows[3]["detail"]
    assert [len(rows) for rows in added] == [0, 3, 3]  # sdpa was not trained again


@pytest.mark.usefixtures("_planted_kernels")
def test_a_kernel_that_is_wrong_where_only_it_is_evaluated_is_wrong(run_bench):
    (row,) = run_bench("lm_matrix", kernels=["wrong_without_gradients"], **SMALL).rows
    assert (row["status"], "step 1: " in row["detail"]) == ("wrong result", True)


@pytest.mark.full
@pytest.mark.usefixtures("_planted_kernels")
def test_a_kernel_that_is_wrong_on_one_of_two_ranks_is_wrong_on_both(monkeypatch, tmp_path):
    """The ranks agree before one of them leaves the cell, or the other would wait for it."""
    monkeypatch.setattr(harness, "_on_rank", matrix_ranks.planted_rank)
    kernels = ["without_gradients_on_rank_1", "later_on_rank_1", "sdpa"]
    keys = {**SMALL, "kernels": kernels, "strategies": ["naive"], "num_layers": 2, "timed_epochs": 16}
    rows = {row["kernel"]: row for row in measure(nproc=2, output=tmp_path, **keys).rows}
    first, later, right = (rows[kernel] for kernel in kernels)
    assert (first["status"], later["status"], right["status"]) == ("wrong result", "wrong result", "ok")
    assert first["detail"].startswith("rank 1: step 1: ")
    assert later["detail"].startswith("after timing: rank ")


def test_it_trains_on_a_token_file(run_bench, tmp_path):
    path = tmp_path / "train.npy"
    with TokenFileWriter(path, vocab_size=300, tokenizer_sha256="a" * 64) as writer:
        writer.append(np.full(1000, 299))
        writer.finish(num_bytes=1000, source_sha256="b" * 64)
    result = run_bench("lm_matrix", kernels=["sdpa"], tokens=str(path), vocab_size=300, **SMALL)
    assert result.rows[0]["final_loss"] < 3  # always the same token: soon known
    with TokenFileWriter(tmp_path / "train2.npy", vocab_size=300, tokenizer_sha256="a" * 64) as writer:
        writer.append(np.arange(100))
        writer.finish(num_bytes=1000, source_sha256="b" * 64)
    tokens = tokens_of(Options(tokens=tmp_path / "train*.npy"), seed=0)
    assert (len(tokens), tokens[1099]) == (1100, 99)
    with raises(UsageError, "bench.small_vocabulary", "bench.lm_matrix.vocab_size", path, hint="300"):
        measure(output=tmp_path, kernels=["sdpa"], tokens=str(path), **SMALL)


def test_the_bytes_of_a_compressed_text_are_those_of_the_text(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"abcd" * 50))
    assert tokens_of(Options(tokens=path), seed=0).tobytes() == b"abcd" * 50


def cell(strategy, ms, *, kernel="sdpa", ranks=2, last=3.0):
    samples = [ms + 0.01 * i for i in range(8)]
    row = {"kernel": kernel, "strategy": strategy, "ranks": ranks, "status": "ok", "peak_gb": 1.0}
    row |= {"median_ms": ms, "samples_ms": samples, "tokens_per_s": 1000 / ms}
    return row | {"losses": [4.0, last], "first_loss": 4.0, "final_loss": last}


def test_findings_on_several_ranks_call_nothing_fastest_that_does_not_synchronize():
    rows = [cell("one rank", 18.0, ranks=1), cell("none", 8.0, last=3.5)]
    rows += [cell("naive", 12.0), cell("bucketed", 10.0)]
    best, naive, alone, convergence = summary_of(bench, rows).findings
    assert best.startswith("Highest tokens/s: 100, sdpa bucketed")
    assert "bucketed against naive 1.199x" in naive
    assert "bucketed against one rank 1.797x" in alone
    assert "3 trainings differ by at most 0 of the loss" in convergence
    on_one = [cell("none", 10.0, ranks=1), cell("flat", 9.0, kernel="fast", ranks=1)]
    findings = summary_of(bench, on_one).findings
    assert "fast flat" in findings[0]
    assert len(findings) == 2  # without ranks there is no naive to compare with
    assert summary_of(bench, [cell("none", 8.0)]).findings == []


def test_scaling_is_against_one_rank_and_overhead_against_no_communication():
    rows = [cell("one rank", 18.0, ranks=1), cell("none", 8.0), cell("naive", 12.0) | {"peak_gb": 1.25}]
    bench._add_ratios({row["strategy"]: row for row in rows})
    one, none, naive = rows
    assert not {"scaling", "overhead"} & one.keys()
    assert (none["scaling"], naive["scaling"]) == pytest.approx((18 / 8 / 2, 18 / 12 / 2), rel=0.01)
    assert (none["overhead"], naive["overhead"]) == (0, 0.25)
    assert naive["speedup"] == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize(
    ("key", "value", "code", "nproc"),
    [
        ("vocab_size", 100, "bench.small_vocabulary", 1),
        ("tokens", "none.txt", "bench.no_text", 1),
        ("context_length", 1_000_000, "bench.context_length", 1),
        pytest.param("batch_size", 3, "bench.batch_size", 2, marks=pytest.mark.full),
    ],
)
def test_bad_options(tmp_path, key, value, code, nproc):
    with raises(UsageError, code, f"bench.lm_matrix.{key}"):
        measure(nproc=nproc, output=tmp_path, **{**SMALL, key: value})
