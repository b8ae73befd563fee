"""The attention bench: what is measured, what the gate refuses, what becomes a row."""

import csv
import io
import json
from contextlib import nullcontext

import pytest
import torch
from planted_kernels import FULL, WRONG, WRONG_ELSEWHERE, wrong_shape
from raising import raises

from lmkit.bench import attention, attention_gate
from lmkit.bench.attention import Case, Options, build_cases, parse_tier
from lmkit.bench.context import Journal
from lmkit.errors import UsageError
from lmkit.measure.memory import PeakMemory

PICTURES = ("forward", "backward", "heatmap", "scaling")
SMALL = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "iters": 6, "warmup": 1, "max_seconds": 1.0}


@pytest.fixture
def measure(run_bench):
    return lambda journal=None, **keys: run_bench("attention", journal, **{**SMALL, **keys})


def rows_by(result, *keys):
    return {tuple(row[key] for key in keys): row for row in result.rows}


def test_everything_is_measured_and_every_file_is_there(measure, tmp_path):
    journal = Journal(tmp_path / "rows")
    kernels = ("reference", "vectorized", "flash_torch", "sdpa", "sdpa:cudnn")
    grid = {"grid_head_dims": (16, 32), "grid_lengths": (24,)}
    result = measure(journal, tiers=("32", "40:24"), kernels=kernels, backward=True, **grid)
    assert len(result.rows) == (2 + 2) * 3 * 5  # tiers and cells of the grid x directions x kernels
    for row in result.rows:
        if row["kernel"] == "sdpa:cudnn":
            assert row["status"] == "unsupported"  # on a CPU
            continue
        assert row["status"] == "ok", row
        assert 1 <= len(row["samples_ms"]) <= 6
        assert row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert 0.0 < row["error_out"] < 1e-6
        assert row["first_call_s"] > 0.0
        assert row["share_of_matmul"] == pytest.approx(row["tflops"])  # of 1 TFLOP/s
        assert row["best_sdpa" if row["kernel"] != "sdpa" else "kernel"] == "sdpa"
    names = ("results.csv", "results.jsonl", "report.md", *(f"{name}.png" for name in PICTURES))
    assert set(result.files) == {f"attention_sweep_{name}" for name in names}
    assert all(content[:4] == b"\x89PNG" for name, content in result.files.items() if name.endswith(".png"))
    stored = [json.loads(line) for line in result.files["attention_sweep_results.jsonl"].splitlines()]
    assert stored == journal.rows() == result.rows
    assert len(list(csv.DictReader(io.StringIO(result.files["attention_sweep_results.csv"])))) == 60


@pytest.mark.usefixtures("_known_limits")
@pytest.mark.parametrize(
    ("words", "cells"),
    [
        ("--tiers 16", {("tiers", 16, 64)}),
        ("--head-dim 8 --set bench.attention.tiers=['16']", {("tiers", 16, 8)}),
        ("--tiers 16 --grid-head-dims 8 --grid-lengths 24", {("tiers", 16, 64), ("grid", 24, 8)}),
        (
            "--tiers 16 --set bench.attention.grid_head_dims=[8] --set bench.attention.grid_lengths=[24]",
            {("tiers", 16, 64), ("grid", 24, 8)},
        ),
    ],
)
def test_flags_mean_all_rows(words, cells, terminal, tmp_path):
    (tmp_path / "recipe.toml").write_text(
        "[run]\ndevice='cpu'\n[bench.attention]\ndtype='fp32'\nbatch=1\nheads=1\nkv_heads=1\niters=1\n"
        "warmup=0\ntiers=['32']\nkernels=['reference','sdpa','vectorized']\ngrid_kernels=['flash_torch']\n"
        "grid_head_dims=[4]\ngrid_lengths=[48]\n"
    )
    out = tmp_path / "out"
    given = [*words.split(), "--kernels", "sdpa,vectorized", "--output", out]
    terminal("bench", "attention", tmp_path / "recipe.toml", *given)
    rows = [json.loads(line) for line in (out / "attention_sweep_results.jsonl").read_text().splitlines()]
    assert {(row["part"], row["num_keys"], row["head_dim"]) for row in rows} == cells
    assert {row["kernel"] for row in rows} == {"sdpa", "vectorized"}


@pytest.mark.full
def test_a_compiled_variant_is_compiled_anew_for_every_shape(measure, monkeypatch):
    compiled_for = []

    def spy(graph, example_inputs):
        compiled_for.append(tuple(example_inputs[0].shape))
        return graph.forward

    real_compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **kw: real_compile(function, **kw, backend=spy))
    tiers = tuple(str(length) for length in range(8, 18))  # more than torch's limit of 8 recompilations
    result = measure(tiers=tiers, kernels=("vectorized+compile",), iters=1)
    assert all(row["status"] == "ok" for row in result.rows)
    assert len(set(compiled_for)) == len(tiers)
    assert "vectorized+compile" in result.table  # names are not cut


WRONG_NAMES = tuple(function.__name__ for function in (*WRONG, *WRONG_ELSEWHERE, wrong_shape))
FAULTS = {
    **dict.fromkeys(WRONG_NAMES, ("wrong result", "out: ")),
    "returns_none": ("wrong result", "NoneType,"),
    "wide": ("wrong result", "torch.float64,"),
    "writes": ("wrong result", "writes into its inputs: k, v"),
    "out_of_memory": ("out of memory", "CUDA out of memory"),
    "broken": ("failed", "RuntimeError: ptxas died"),
    "leaks": ("ok", ""),
}
LATER = {"remembers": "wrong result", "wrong_later": "wrong result", "tires": "failed"}


@pytest.mark.usefixtures("_planted_kernels")
@pytest.mark.parametrize(
    ("length", "dtype", "faults"),
    [
        ("48", "fp32", FAULTS),
        *(("8", "fp32", {name: (status, "")}) for name, status in LATER.items()),
        pytest.param("48", "bf16", {name: FAULTS[name] for name in WRONG_NAMES}, marks=pytest.mark.full),
    ],
)
def test_what_is_wrong_or_fails_is_a_row_and_the_others_are_timed(measure, length, dtype, faults):
    """However short the case, and though the timed inputs lie where the checked ones lay."""
    baseline = next(iter(faults))
    kernels = (*faults, "vectorized", "sdpa")
    result = measure(tiers=(length,), kernels=kernels, dtype=dtype, baseline=baseline)
    rows = {row["kernel"]: row for row in result.rows}
    for name, (status, detail) in faults.items():
        row = rows[name]
        assert (row["status"], detail in row["detail"]) == (status, True), row
        assert ("after timing" in row["detail"]) == (name in LATER and status == "wrong result")
        assert not row.keys() & {"median_ms", "tflops", "share_of_matmul", "samples_ms"} or status == "ok"
    for name in ("vectorized", "sdpa"):
        assert rows[name]["median_ms"] > 0
        assert "speedup" not in rows[name]  # over what is wrong
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (True, torch.float32)


@pytest.mark.usefixtures("_planted_kernels")
def test_attention_that_does_not_see_all_keys_is_timed_and_said_to_be_unchecked(measure):
    result = measure(tiers=("24",), kernels=("window",))
    (row,) = result.rows
    assert (row["status"], row["median_ms"] > 0, "error_out" in row) == ("ok", True, False)
    said = f"not checked: 24 16 forward window: {row['unchecked']}"
    assert said in result.files["attention_sweep_report.md"]


@pytest.mark.usefixtures("_planted_kernels")
def test_a_dropped_gradient_is_found_in_the_backward_pass_only(measure):
    result = measure(tiers=("32",), kernels=("vectorized", "gradient_dropped"), backward=True)
    rows = rows_by(result, "kernel", "direction")
    assert rows["gradient_dropped", "forward"]["status"] == "ok"
    assert rows["gradient_dropped", "backward"]["status"] == "wrong result"
    assert "dk" in rows["gradient_dropped", "backward"]["detail"]
    assert rows["vectorized", "backward"]["status"] == "ok"


@pytest.mark.usefixtures("_planted_kernels")
def test_inputs_that_do_not_fit_are_rows_and_the_forward_pass_settles_the_backward_pass(measure, monkeypatch):
    real_inputs = attention_gate.make_inputs

    def too_long(options, num_queries, num_keys, *others, **keywords):
        if num_keys > 100:
            raise FULL
        return real_inputs(options, num_queries, num_keys, *others, **keywords)

    monkeypatch.setattr(attention_gate, "make_inputs", too_long)
    kernels = ("sdpa", "out_of_memory")
    result = measure(tiers=("128", "32"), kernels=kernels, backward=True, longest_call_seconds=1e9)
    rows = rows_by(result, "tier", "kernel", "direction")
    for direction in ("forward", "fwd+bwd", "backward"):
        assert rows["128", "sdpa", direction]["status"] == "out of memory"
        assert rows["32", "sdpa", direction]["median_ms"] > 0
    assert rows["128", "sdpa", "forward"]["detail"] == "inputs: CUDA out of memory"
    assert rows["32", "out_of_memory", "backward"]["status"] == "out of memory"


def test_a_kernel_that_fits_alone_but_not_in_turns_is_a_row_and_the_others_are_timed(measure, monkeypatch):
    real_time = attention.time_variants

    def crowded(calls, *, prepare, **options):
        if "backward reference" in calls:
            raise FULL
        return real_time(calls, prepare=prepare, **options)

    monkeypatch.setattr(attention, "time_variants", crowded)
    monkeypatch.setattr(attention, "track_peak", lambda device: nullcontext(PeakMemory(0, next(peaks))))
    peaks = iter([1, 1, 1, 9])  # bytes: sdpa and reference forward, then with backward
    rows = rows_by(
        measure(tiers=("32",), kernels=("sdpa", "reference"), backward=True), "kernel", "direction"
    )
    assert rows["reference", "backward"]["status"] == "out of memory"
    assert rows["reference", "backward"]["detail"] == "in turns with 2 others: CUDA out of memory"
    assert rows["sdpa", "backward"]["median_ms"] > 0


def test_host_memory_is_asked_for_before_the_kernel_kills_the_process(measure, monkeypatch):
    monkeypatch.setattr(attention, "available_memory", lambda: 10_000)
    rows = rows_by(measure(tiers=("64",), kernels=("vectorized", "sdpa")), "kernel")
    assert rows["vectorized",]["status"] == "out of memory"
    assert rows["sdpa",]["status"] == "ok"


def test_a_kernel_whose_next_length_would_take_too_long_is_skipped(measure):
    result = measure(tiers=("32", "64"), kernels=("sdpa",), backward=True, longest_call_seconds=1e-9)
    assert [row["status"] for row in result.rows] == ["ok"] * 3 + ["skipped"] * 3
    assert "longest_call_seconds is 1e-09" in result.rows[-1]["detail"]


@pytest.mark.usefixtures("_planted_kernels")
def test_a_long_case_alone_has_its_kernels_checked_at_a_short_length_first(measure, monkeypatch):
    checked = []
    real_gate = attention_gate.Gate
    watched = lambda inputs, *seed: checked.append(inputs.q.shape[2]) or real_gate(inputs, *seed)  # noqa: E731
    monkeypatch.setattr(attention_gate, "Gate", watched)
    rows = rows_by(measure(tiers=("1100", "1101"), kernels=("sdpa", "mask_too_wide")), "tier", "kernel")
    # Each kernel once at the odd and the short length; each case again after timing.
    assert checked == [1100, 100, 1024, 100, 1024, 1100, 1101, 1101]
    assert rows["1100", "sdpa"]["status"] == rows["1101", "sdpa"]["status"] == "ok"
    assert "at 1024:1024, out: " in rows["1101", "mask_too_wide"]["detail"]


def test_flops_by_hand():
    options = Options(batch=2, heads=4, kv_heads=4)
    case = Case("tiers", "", 4, 4, 8)
    assert case.flops(options, "forward") == 4 * 2 * 4 * 8 * (4 * 4 / 2)
    assert case.flops(options, "backward") == 2.5 * case.flops(options, "forward")
    assert Case("tiers", "", 6, 4, 8).flops(options, "forward") == 4 * 2 * 4 * 8 * (4 * 4 / 2 + 2 * 4)
    assert Case("tiers", "", 4, 9, 8).flops(options, "forward") == 4 * 2 * 4 * 8 * (4 * 4 / 2)
    assert case.flops(Options(batch=2, heads=4, kv_heads=4, causal=False), "forward") == 4 * 2 * 4 * 8 * 16


def test_tiers():
    assert [parse_tier(text) for text in ("XXL", "131072")] == [(2048, 2048), (131072, 131072)]
    options = Options(tiers=("Small", "8:4"), grid_head_dims=(16, 32), grid_lengths=(256,))
    assert build_cases(options) == [
        Case("tiers", "Small", 128, 128, 64),
        Case("tiers", "8:4", 8, 4, 64),
        *(Case("grid", "256", 256, 256, head_dim) for head_dim in (16, 32)),
    ]


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("kernels", ("flash",), "bench.unknown_kernel"),
        ("kernels", ("vectorized:tf32",), "bench.unknown_kernel"),
        *((key, value, "recipe.wrong_value") for key, value in (("dtype", "int8"), ("heads", 5))),
        *(("tiers", (tier,), "recipe.wrong_value") for tier in ("Smal", "0", "-1", "12:", ":12", "1.5")),
    ],
)
def test_bad_options(key, value, code, measure):
    with raises(UsageError, code, "bench.attention"):
        measure(**{"tiers": ("16",), "kernels": ("sdpa",), key: value})
