import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmkit.bench import attention_acceptance as acceptance
from lmkit.bench.attention import run_bench
from lmkit.bench.attention_acceptance import trials
from lmkit.bench.attention_cases import AttentionOptions
from lmkit.bench.attention_targets import (
    BARE,
    OURS,
    TARGET_COLUMNS,
    TARGETS,
    Target,
    against_targets,
    rate_table,
    tables,
)
from lmkit.errors import UsageError
from lmkit.measure.limits import Limits
from lmkit.measure.tables import markdown_table

BASE = AttentionOptions(device="cuda", suite="acceptance")


def rows_of(trial, *, ratio=1.5, speedup=60.0, milliseconds=2.0):
    """What a machine would measure on which everything takes two milliseconds."""
    options = trial.options
    directions = ("forward", *(trial.gradients if options.backward else ()))
    for direction in directions:
        for kernel in (*trial.kernels, *(trial.backward_only if direction != "forward" else ())):
            yield {
                "set": trial.name,
                "num_queries": trial.length,
                "num_keys": trial.length,
                "head_dim": options.head_dim,
                "batch": options.batch,
                "heads": options.heads,
                "kv_heads": options.kv_heads,
                "causal": options.causal,
                "dtype": options.dtype,
                "data": options.data,
                "direction": direction,
                "kernel": kernel,
                "status": "ok",
                "detail": "",
                "median_ms": milliseconds * (20.0 if kernel == "vectorized+compile" else 1.0),
                "tflops": 500.0,
                "speedup": speedup,
                "versus_sdpa": None if kernel.startswith("sdpa") else ratio,
                "first_call_s": 1.5,
                **{f"error_{name}": 0.002 for name in ("out", "dq", "dk", "dv")},
            }


def host_time_rows():
    row = {
        "set": "host time",
        "status": "ok",
        "direction": "forward",
        "batch": 1,
        "num_keys": 128,
        "heads": 16,
    }
    row |= {"kv_heads": 16, "head_dim": 64, "causal": True, "dtype": "bf16", "data": "normal"}
    return [row | {"kernel": kernel, "median_ms": ms} for kernel, ms in ((OURS, 0.045), (BARE, 0.016))]


@pytest.fixture
def rows():
    return [row for trial in trials(BASE) for row in rows_of(trial)] + host_time_rows()


def verdicts(rows):
    return {entry["target"]: entry["verdict"] for entry in against_targets(rows)}


def test_the_suite_measures_every_target(rows):
    assert set(verdicts(rows).values()) <= {"aim", "met"}
    assert "**" not in tables(rows)
    assert set(verdicts([]).values()) == {"not measured"}


def test_the_core_cases_hold_as_many_tokens_and_dimensions_at_every_length():
    for trial in trials(BASE):
        if trial.name.startswith("core"):
            assert trial.options.batch * trial.length == 16384
            assert trial.options.heads * trial.options.head_dim == 2048


@pytest.mark.parametrize("at_most", [False, True])
def test_a_verdict_looks_in_the_right_direction(at_most):
    must, aim = (4.1, 3.5) if at_most else (3.5, 4.1)
    target = Target("", must, aim, lambda rows: None, at_most=at_most)
    found = [target.verdict(figure) for figure in (3.4, 3.5, 3.6, 4.1, 4.2)]
    expected = ["aim", "aim", "met", "met", "missed"]
    assert found == (expected if at_most else ["missed", "met", "met", "aim", "aim"])
    assert target.verdict(None) == "not measured"


def test_one_slow_length_misses_its_target_and_no_other(rows):
    for row in rows:
        core = row["set"] == "core D=64 causal" and row["kernel"] == "flash_triton"
        if core and row["direction"] == "forward" and row["num_keys"] == 2048:
            row["versus_sdpa"] = 1.01
    missed = [name for name, verdict in verdicts(rows).items() if verdict == "missed"]
    assert missed == ["forward, D=64, 2k and longer, causal"]
    assert "| **1.01x** | missed |" in tables(rows)


def test_what_gave_a_wrong_result_counts_for_nothing_and_is_listed(rows):
    for row in rows:
        if row["set"] == "head_dim 256":
            row |= {
                "status": "wrong result",
                "detail": "dq: overall error 1, allowed 0.01",
                "median_ms": None,
            }
    assert verdicts(rows)["backward, D=256, 4k, causal"] == "not measured"
    assert "head_dim 256, 4 x 4096, 8 heads, D=256, backward, flash_triton: wrong result (dq:" in tables(rows)


def test_hard_data_say_which_mask_they_are_of(rows):
    lines = [line for line in tables(rows).splitlines() if "D=64" in line and "ramp down | forward" in line]
    assert len(lines) == 4, "ours and the rival's, each with and without a mask"
    assert sum(", full, ramp down" in line for line in lines) == 2


def test_errors_of_exactly_zero_are_even_or_infinitely_apart(rows):
    name = "the same on large logits, sinks, ramps, forward"
    zeros = [row | {"error_out": 0.0} if row["data"] == "sink" else row for row in rows]
    assert verdicts(zeros)[name] == "met"
    ours = [
        row | {"error_out": 1e-9} if row["data"] == "sink" and row["kernel"] == OURS else row for row in zeros
    ]
    assert verdicts(ours)[name] == "missed"


def test_errors_on_hard_data_are_those_of_hard_data(rows):
    for row in rows:
        if row["kernel"] == OURS and row["data"] == "logits x 8":
            row["error_out"] *= 1.5
    missed = [name for name, verdict in verdicts(rows).items() if verdict == "missed"]
    assert missed == ["the same on large logits, sinks, ramps, forward"]
    easy = [row for row in rows if row["data"] == "normal"]
    assert verdicts(easy)["the same on large logits, sinks, ramps, forward"] == "not measured"


def test_rates_stand_beside_their_ratio(rows):
    table = rate_table(rows, "backward")
    assert "| backward | 1k | 2k | 4k | 8k | 16k |" in table
    assert "| D=64 causal, flash_triton:deterministic | 500 (1.50x) | 500 (1.50x) |" in table
    assert "| D=64 causal, sdpa:cudnn | 500 | 500 |" in table


def test_the_suite_writes_its_files_and_says_what_it_missed(monkeypatch):
    class FakeSweep:
        def __init__(self, options, limits):
            self.options = options

        def measure(self, case, kernels, gradients, backward_only):
            trial = acceptance.Trial("", case.num_keys, kernels, self.options, gradients, backward_only)
            found = list(rows_of(trial, ratio=1.0))
            for row in found:
                del row["set"]
            return found

    monkeypatch.setattr(acceptance, "Sweep", FakeSweep)
    measured = Limits("a test", {"bf16": 1e15, "fp16": 1e15, "fp32": 1e14, "tf32": 4e14}, 1e12)
    monkeypatch.setattr(acceptance, "measure_limits", lambda device, dtypes: measured)
    rounds = []
    monkeypatch.setattr(
        acceptance,
        "_host_time",
        lambda: SimpleNamespace(sample=lambda: rounds.append(1), rows=host_time_rows),
    )
    result = run_bench(BASE)
    assert len(rounds) == len(list(trials(BASE))) > 20
    assert set(result.files) == {"acceptance.jsonl", "acceptance.csv", "acceptance.md", "forward.png"}
    assert [json.loads(line) for line in result.files["acceptance.jsonl"].splitlines()] == result.rows
    assert {row["set"] for row in result.rows} == {trial.name for trial in trials(BASE)} | {"host time"}
    met = sum(verdict in ("aim", "met") for verdict in verdicts(result.rows).values())
    assert 0 < met < len(TARGETS)
    table = result.table()
    assert f"{met} of {len(TARGETS)} targets met" in table
    assert max(map(len, table.splitlines())) <= 100
    assert "…" not in table  # no name is cut


def test_the_committed_report_shows_the_committed_rows():
    folder = Path(__file__).resolve().parents[2] / "artifacts/h200/attention"
    rows = [json.loads(line) for line in (folder / "acceptance.jsonl").read_text().splitlines()]
    report = (folder / "report.md").read_text()
    assert (folder / "acceptance.md").read_text() == tables(rows)
    for table in (
        markdown_table(against_targets(rows), TARGET_COLUMNS),
        rate_table(rows, "forward"),
        rate_table(rows, "backward"),
    ):
        assert table in report


def test_the_suite_needs_a_gpu():
    with pytest.raises(UsageError, match="needs a GPU"):
        run_bench(AttentionOptions(device="cpu", suite="acceptance"))


def test_a_refused_result_misses_a_target():
    def measured(*statuses):
        rows = [{"kernel": OURS, "status": status, "set": "data"} for status in statuses]
        return next(e for e in against_targets(rows) if e["target"] == "results that the gate refused")

    assert (measured("ok", "ok")["measured"], measured("ok")["verdict"]) == ("0", "met")
    assert (measured("ok", "wrong result")["measured"], measured("wrong result")["verdict"]) == (
        "**1**",
        "missed",
    )
