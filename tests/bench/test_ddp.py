"""The data-parallel benches on two gloo ranks: the numbers that must be exact are; times are only there."""

from __future__ import annotations

import importlib
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmkit.bench import all_reduce, ddp, ddp_contenders, optimizer
from lmkit.bench.ddp_contenders import DdpCase, baseline_of, contender, parse_name
from lmkit.bench.ddp_report import ddp_result, ladder_markdown, optimizer_result
from lmkit.errors import UsageError
from lmkit.measure.limits import Limits
from lmkit.measure.statistics import spread
from lmkit.parallel.collectives import Agreement
from lmkit.parallel.launch import spawn_ranks
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.tables import ModelConfig, ParallelConfig

HERE = str(Path(__file__).parent)
TINY = ModelConfig(vocab_size=64, context_length=8, d_model=16, d_ff=16, num_layers=1, num_heads=1)


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict]]:
    sys.path.insert(0, HERE)  # spawned ranks inherit it
    try:
        return spawn_ranks(2, importlib.import_module("ddp_ranks").measure_all)
    finally:
        sys.path.remove(HERE)


@pytest.fixture(scope="module")
def ladder(measured) -> dict[str, dict]:
    return {row["contender"]: row for row in measured["ladder"]}


def test_every_contender_has_a_row_with_samples(ladder):
    for name, row in ladder.items():
        assert row["status"] == "ok", name
        assert len(row["samples_ms"]) == 6
        assert row["p10_ms"] <= row["step_ms"] <= row["p90_ms"]
        ranks = 1 if name.startswith("one rank") else 2
        assert row["tokens_per_s"] == pytest.approx(ranks * 2 * 16 / row["step_ms"] * 1e3)


def test_losses_of_synchronised_contenders_agree(ladder):
    """Rank 0's loss after three steps: the same training, whoever sums the gradients."""
    expected = ladder["naive"]["loss"]
    for name in ("flat", "overlap", "bucketed", "torch_ddp", "zero1"):
        # bf16 products round differently once weights differ in the last bit: 1e-3 of a loss of 4.7.
        assert ladder[name]["loss"] == pytest.approx(expected, abs=1e-3), name
    assert ladder["none"]["loss"] != pytest.approx(expected, abs=1e-6)


def test_bytes_agree_with_the_formula(ladder):
    for name, row in ladder.items():
        if row["world_size"] == 1 or name == "none":
            assert row["link_bytes"] == 0
            continue
        # Flags (one int32 a parameter) and padding (up to 128 elements a rank and bucket) come on top.
        assert (
            0 <= row["link_bytes"] - row["expected_link_bytes"] < 0.05 * row["expected_link_bytes"] + 512
        ), name
    parameters = ladder["naive"]["parameter_bytes"]
    assert ladder["bucketed"]["expected_link_bytes"] == 2 * 0.5 * parameters
    assert ladder["bucketed bf16 wire"]["expected_link_bytes"] == 0.5 * parameters
    assert ladder["zero1 bf16"]["expected_link_bytes"] == 0.5 * parameters
    assert ladder["torch_ddp + ZeRO"]["expected_link_bytes"] == 3 * 0.5 * parameters
    assert {name: row["gather"] for name, row in ladder.items() if "gather" in row} == dict.fromkeys(
        ("zero1", "zero1 bf16"), "collective"
    )
    assert ladder["naive"]["calls_per_step"] > ladder["bucketed 0.05 MB"]["calls_per_step"]
    assert ladder["bucketed 0.05 MB"]["calls_per_step"] > ladder["bucketed"]["calls_per_step"]


@pytest.mark.parametrize(
    ("name", "per_byte"),
    [
        ("flat", 1.5),
        ("none", 0.0),
        ("torch_ddp + ZeRO", 1.5 + 0.75),  # weights are broadcast after whole gradients were reduced
        ("bucketed bf16 wire", 0.75),
        ("bucketed bf16 wire 100 MB", 0.75),
        ("zero1", 1.5),
        ("zero1 bf16 wire", 0.375 + 0.75),  # gradients in half of the weights' width, one way each
        ("zero1 bf16", 1.5),  # of weights that are bf16 already
        ("zero1 bf16 bf16 wire", 1.5),
    ],
)
def test_the_formula_heeds_what_travels_in_which_width(name, per_byte):
    """Four ranks: three quarters of all bytes go one way."""
    assert ddp.expected_link_bytes(name, 1000, 4) == pytest.approx(per_byte * 1000)


def test_baselines_are_those_of_the_same_weights(ladder):
    assert baseline_of("zero1 bf16 100 MB") == "one rank, bf16 weights"
    assert baseline_of("bucketed bf16 wire") == "one rank"
    assert 0 < ladder["zero1 bf16"]["scaling_low"] <= ladder["zero1 bf16"]["scaling"]
    assert "exposed_ms" in ladder["bucketed"]
    assert "exposed_ms" not in ladder["one rank"]
    assert ladder["bucketed"]["communication_alone_ms"] > 0


def test_what_zero_broadcasts_is_counted_as_it_was_sent(measured):
    (seen,) = measured["broadcast"]
    assert seen["payload_bytes"] == seen["sent"] == seen["parameter_bytes"]
    assert seen["calls"] == 2, "one from each rank"
    assert seen["link_bytes"] == 0.5 * seen["sent"]


def test_a_contender_against_itself_is_even(measured):
    assert measured["compared"][0]["ratio"] == 1.0


def test_scaling_and_what_is_exposed_by_hand():
    """Of rounds in which everything took twice as long, and one in which only `bucketed` did."""
    samples = {
        "one rank": [8.0, 16.0, 8.0],
        "one rank, bf16 weights": [4.0, 8.0, 4.0],
        "none": [9.0, 18.0, 9.0],
        "bucketed": [10.0, 20.0, 20.0],
        "zero1 bf16": [5.0, 10.0, 10.0],
    }
    of_ranks = {
        name: [[ddp.Sample(time / 2, math.nan), ddp.Sample(time, math.nan)] for time in times]
        for name, times in samples.items()
    }
    case = DdpCase("tiny", SimpleNamespace(context_length=50), rows=2)  # type: ignore[arg-type]
    ranks = Ranks(world_size=4)
    bucketed = ddp._numbers("bucketed", case, ranks, of_ranks)
    assert (bucketed["scaling"], bucketed["scaling_low"], bucketed["scaling_high"]) == (0.8, 0.4, 0.8)
    assert (bucketed["step_ms"], bucketed["exposed_ms"], bucketed["exposed_share"]) == (20.0, 2.0, 0.1)
    assert bucketed["tokens_per_s"] == 4 * 2 * 50 / 20e-3
    halved = ddp._numbers("zero1 bf16", case, ranks, of_ranks)
    assert halved["scaling"] == 0.8
    assert "exposed_ms" not in halved, "there is no step of bf16 weights without communication"
    alone = ddp._numbers("one rank", case, ranks, of_ranks)
    assert alone["tokens_per_s"] == 2 * 50 / 8e-3
    assert "ahead_ms" not in alone, "on a CPU there is nobody to be ahead of"
    assert "scaling" not in alone
    assert ddp._numbers("flat", case, ranks, of_ranks) == {}
    rows = [{"contender": name, "samples_ms": times} for name, times in samples.items()]
    faster = ddp.compare(rows, "one rank", "bucketed")
    assert (faster["ratio"], faster["low"], faster["high"]) == (1.25, 1.25, 2.5)


def test_memory_is_compared_with_one_rank_of_the_same_weights():
    peaks = {"one rank": 100, "one rank, bf16 weights": 60, "bucketed": 110, "zero1 bf16": 45}
    rows = [{"contender": name, "peak_bytes": peak, "world_size": 2} for name, peak in peaks.items()]
    ddp._add_memory_overhead(rows)
    assert [row["peak_overhead"] for row in rows] == pytest.approx([0.0, 0.0, 0.1, -0.25])


def test_collectives_have_bandwidths(measured):
    rows = measured["all_reduce"]
    assert {row["operation"] for row in rows} == {"all_reduce", "reduce_scatter", "all_gather"}
    for row in rows:
        passes = 2 if row["operation"] == "all_reduce" else 1
        seconds = row["median_us"] / 1e6
        assert row["bus_gb_per_s"] == pytest.approx(passes * 0.5 * row["bytes"] / seconds / 1e9)


@pytest.mark.parametrize("operation", all_reduce.OPERATIONS)
def test_a_collective_is_timed_to_its_end(monkeypatch, operation):
    events: list[str] = []

    def start(given: object) -> SimpleNamespace:
        events.append("starts")
        return SimpleNamespace(wait=lambda: events.append("ends"))

    averager = SimpleNamespace(**dict.fromkeys(all_reduce.OPERATIONS, start))
    monkeypatch.setattr(all_reduce, "Averager", lambda ranks, traffic: averager)
    all_reduce._work(operation, torch.zeros(256), Ranks(world_size=2))()
    assert events == ["starts", "ends"]


def test_sharded_state_is_one_share(measured):
    shares = {row["contender"]: row["state_share"] for row in measured["optimizer"]}
    assert shares["bucketed"] == 1.0
    assert 0.5 <= shares["zero1"] < 0.51
    assert 0.5 <= shares["zero1 bf16"] < 0.51
    assert 0.3 < shares["torch_ddp + ZeRO"] < 0.7  # dealt out parameter by parameter


def test_the_update_alone_is_measured_and_reported(measured):
    rows = {row["way"]: row for row in measured["update"]}
    assert list(rows) == ["operations", "torch fused", "torch foreach"]  # no kernel of ours on a CPU
    for row in rows.values():
        assert row["parameters"] == measured["optimizer"][0]["parameters"]
        assert row["gb_per_s"] == pytest.approx(28 * row["parameters"] / row["update_ms"] / 1e6)
        assert row["low"] <= row["times_as_fast"] <= row["high"]
    assert rows["torch fused"]["times_as_fast"] == 1.0
    limits = Limits("a test", {"bf16": 1e12}, 1e10)
    result = optimizer_result(measured["optimizer"], measured["update"], Ranks(world_size=2), limits)
    assert "| torch foreach |" in result.files["optimizer_report.md"]
    assert result.files["adamw_update_results.jsonl"].count("\n") == 3
    assert "AdamW's update alone: operations" in " ".join(result.table().split())
    assert max(map(len, result.table().splitlines())) <= 100
    for row in result.rows:
        per_rank = row["tokens_per_s"] / 2 * row["flops_per_token"]
        assert row["mfu"] == pytest.approx(per_rank / 1e12)
    for row in rows.values():
        assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / 10)
        assert row["spread"] == spread(row["samples_ms"]).relative
    head, first = (result.table().splitlines()[line].split() for line in (0, 2))
    plain = result.rows[0]
    assert first[head.index("spread")] == f"{(plain['p90_ms'] - plain['p10_ms']) / plain['step_ms']:.1%}"
    assert "copy 10.0 GB/s" in result.files["optimizer_report.md"]


def test_progress_counts_contenders_samples_and_rounds(measured, ladder):
    def reported(stage):
        return [(row["done"], row["total"]) for row in measured["progress"] if row["stage"] == stage]

    contenders, samples = len(ladder), 6 * len(ladder)
    assert reported("building") == [(number, contenders) for number in range(contenders)]
    assert reported("timing") == [(number, samples) for number in range(samples)]
    names = len(measured["optimizer"])
    assert reported("optimizer") == [(number, names) for number in range(names + 1)]
    assert reported("update alone") == [(number, 6) for number in range(7)]


def test_what_does_not_fit_on_one_rank_is_measured_on_none(measured):
    assert [row["status"] for row in measured["full"]] == ["out of memory", "ok"]
    assert len(measured["full"][1]["samples_ms"]) == 1


def test_communication_alone_leaves_no_gradients(measured):
    assert measured["left"] == [{"gradients": 0}]


def test_there_are_three_steps_before_the_first_sample_however_few_are_asked_for(measured, ladder):
    """The loss is that of the last one of them."""
    assert [row["loss"] for row in measured["short"]] == [ladder[name]["loss"] for name in ("naive", "flat")]


def test_out_of_memory_is_a_row(monkeypatch):
    def full(name, case, ranks):
        raise torch.OutOfMemoryError("no room")

    case = DdpCase("tiny", TINY, rows=1)
    monkeypatch.setattr(
        ddp, "contender", lambda *given: full(*given) if given[0] == "flat" else contender(*given)
    )
    rows = ddp.ddp_rows(case, ("one rank", "flat"), Ranks(), rounds=1, steps_per_sample=1)
    assert [row["status"] for row in rows] == ["ok", "out of memory"]
    text = ddp_result(rows[1:], [], Ranks()).table()
    assert "out of memory" in text, "also where no contender has a time"
    assert "scaling" not in text.splitlines()[0], "columns without a value leave their room to the others"


@pytest.mark.parametrize(
    "name",
    [
        *("naiv", "bucketed many MB", "bucketed 0 MB", "torch_ddp fast", "one rank bf16", "naive bf16", ""),
        # What the strategy would not heed, also where it names the default; and what is said twice.
        *("none 100 MB", "none bf16 wire", "naive bf16 wire", "naive bf16 wire", "overlap 25 MB"),
        *("flat 100 MB", "flat 50 MB bf16 wire", "flat collective", "bucketed collective", "bucketed bf16"),
        *("torch_ddp collective", "torch_ddp bf16", "torch_ddp static 50 MB", "bucketed 50 MB 100 MB"),
    ],
)
def test_unknown_contenders_are_refused_before_anything_runs(name):
    case = DdpCase("tiny", None, rows=1)  # type: ignore[arg-type]
    for bench, rows in {
        "ddp": ddp.ddp_rows,
        "optimizer": partial(optimizer.optimizer_rows, rounds=1),
    }.items():
        with pytest.raises(UsageError, match=rf"^bench\.{bench}\.contenders: there is no") as refused:
            rows(case, ranks=Ranks(), names=("one rank", name))
        assert "bucketed 100 MB" in refused.value.hint
    with pytest.raises(UsageError, match=r"^bench\.optimizer\.contenders: 'one rank' is not of all ranks"):
        optimizer.optimizer_rows(case, Ranks(), names=("bucketed", "one rank"))


def test_a_contender_has_the_options_that_its_name_says():
    for name, strategy, options in (
        ("flat bf16 wire", "flat", ParallelConfig(strategy="flat", reduce_dtype="bf16")),
        (
            "bucketed 100 MB bf16 wire",
            "bucketed",
            ParallelConfig(strategy="bucketed", bucket_mb=100.0, reduce_dtype="bf16"),
        ),
        ("bucketed 1e+06 MB", "bucketed", ParallelConfig(strategy="bucketed", bucket_mb=1e6)),
        ("bucketed 5e-05 MB", "bucketed", ParallelConfig(strategy="bucketed", bucket_mb=5e-5)),
        ("torch_ddp", "torch_ddp", ParallelConfig(strategy="torch_ddp", bucket_mb=25.0)),
        (
            "torch_ddp 2.5 MB bf16 wire",
            "torch_ddp",
            ParallelConfig(strategy="torch_ddp", bucket_mb=2.5, reduce_dtype="bf16"),
        ),
        (
            "zero1 bf16 collective",
            "zero1",
            ParallelConfig(strategy="zero1", weights="bf16", gather="collective"),
        ),
        (
            "zero1 1000 MB bf16 wire",
            "zero1",
            ParallelConfig(strategy="zero1", bucket_mb=1000.0, reduce_dtype="bf16"),
        ),
    ):
        assert parse_name(name) == (strategy, name.partition(" ")[2], options)
    assert parse_name("torch_ddp + ZeRO") == (
        "torch_ddp",
        "+ ZeRO",
        ParallelConfig(strategy="torch_ddp", bucket_mb=25.0),
    )
    assert parse_name("one rank, bf16 weights")[2].weights == "bf16"


def test_how_far_hosts_are_ahead_is_of_the_contender_whose_turn_it_was(monkeypatch):
    """Turns change from round to round; a row has the median over rounds of the rank with the least."""
    orders = [("none", "one rank"), ("one rank", "none"), ("none", "one rank")]
    of_sample = {"none": iter([5.0, 7.0, 6.0]), "one rank": iter([1.0, 3.0, 2.0])}
    monkeypatch.setattr(ddp, "agree", lambda ranks, **stop: SimpleNamespace(stop=False))

    def run_in_turn(variants, *, prepare, clock, after_round, **options):
        for order in orders:
            for name in order:
                prepare[name]()
                clock.ahead_ms.append(next(of_sample[name]))
            after_round(dict.fromkeys(variants, 10.0))
        return {}

    monkeypatch.setattr(ddp, "time_variants", run_in_turn)
    ranks = Ranks(device=torch.device("cuda"))
    built = {name: SimpleNamespace(step=None) for name in ("one rank", "none")}
    samples = ddp._time_together(built, ranks, 3, 1, math.inf, None, lambda samples: None)
    assert [[sample.ahead_ms for sample in of_rank] for of_rank in samples["none"]] == [[5.0], [7.0], [6.0]]

    case = SimpleNamespace(tokens_per_step=1)
    late = [[ddp.Sample(10.0, ahead), ddp.Sample(0.0, 0.5)] for ahead in (1.0, 3.0, 2.0)]
    for name, ahead_ms in (("none", 0.5), ("one rank", 2.0)):
        row = ddp._numbers(name, case, Ranks(device=torch.device("cuda"), world_size=2), {name: late})
        assert row["ahead_ms"] == ahead_ms, (
            "the other ranks have nothing to do while one rank is measured alone"
        )


def test_a_sample_is_the_slowest_ranks(measured, ladder):
    """Round by round; and while one rank is measured alone, the other, which waits, is no faster one."""
    assert measured["slowest"] == [{"samples_ms": [2.0, 3.0]}]
    assert ladder["one rank"]["step_ms"] > 0.1 * ladder["none"]["step_ms"]


def test_what_each_rank_takes_by_itself_is_told(ladder, measured):
    alone = ladder["none"]["rank_ms"]
    assert len(alone) == 2
    assert 0 < min(alone) <= max(alone) <= ladder["none"]["p90_ms"]
    assert [name for name, row in ladder.items() if "rank_ms" in row] == ["none"]
    expected = (
        f"Without communication the ranks take {alone[0]:.2f}, {alone[1]:.2f} ms a step, each by itself."
    )
    assert expected in ladder_markdown(measured["ladder"])


def test_rows_are_in_the_journal_round_by_round(measured):
    """What a run that is killed in its fourth round leaves is what one of three rounds would have written."""
    assert [len(rows[0]["samples_ms"]) for rows in measured["kept"]] == [1, 2, 3, 4, 5, 6]
    assert measured["kept"][-1] == measured["ladder"]
    third = {row["contender"]: row for row in measured["kept"][2]}
    for row in measured["ladder"]:
        assert third[row["contender"]]["samples_ms"] == row["samples_ms"][:3]


@pytest.mark.parametrize(("bench", "at_once"), [("all_reduce", 3), ("optimizer", 1)])
def test_rows_are_in_the_journal_as_they_come(measured, bench, at_once):
    """The collectives of one size and dtype, one contender."""
    added = measured["added"][bench]
    assert [len(rows) for rows in added] == [at_once] * (len(measured[bench]) // at_once)
    assert [row for rows in added for row in rows] == measured[bench]


def test_ranks_end_after_the_same_round_when_time_is_up(measured):
    """Rank 1 has all the time in the world; rank 0's is up after the first round."""
    assert [len(row["samples_ms"]) for row in measured["short"]] == [1, 1]


@pytest.mark.parametrize(
    ("device", "world_size", "settled"),
    [("cuda", 2, ["flat", "none"]), ("cuda", 1, []), ("cpu", 2, [])],
)
def test_gpus_that_rested_work_before_the_next_sample(monkeypatch, device, world_size, settled):
    """All but one rest while one rank is measured alone, and all do before the first sample: on GPUs the next sample
    of all would show it. Whatever comes before a sample, ranks begin it together."""
    events: list[str] = []
    monkeypatch.setattr(ddp, "_settle", lambda built, ranks, steps: events.append(built.name))
    monkeypatch.setattr(ddp, "agree", lambda ranks: events.append("together"))

    def run_in_turn(variants, *, prepare, **options):
        for name in ("flat", "one rank", "one rank, bf16 weights", "none", "bucketed"):
            prepare[name]()
            assert events.pop() == "together"
        return {}

    monkeypatch.setattr(ddp, "time_variants", run_in_turn)
    built = {name: SimpleNamespace(name=name, step=None) for name in ("flat", *ddp.SOLO, "none", "bucketed")}
    ranks = Ranks(device=torch.device(device), world_size=world_size)
    ddp._time_together(built, ranks, 1, 1, math.inf, None, lambda samples: None)
    assert events == settled


@pytest.mark.parametrize("first_s", [0.0, 0.4, 60.0])
def test_settling_begins_when_the_rank_that_was_measured_has_come(monkeypatch, first_s):
    """On a rank that rested: the first agreement waits for rank 0, which is still in its sample."""
    now = 100.0
    waits = iter([first_s])
    events: list[str] = []

    def agree(ranks, *, stop=False):
        nonlocal now
        now += next(waits, 0.0)
        return Agreement(stop=stop, nonfinite=False)

    def step() -> None:
        nonlocal now
        now += 0.1
        events.append("step")

    monkeypatch.setattr(ddp, "agree", agree)
    monkeypatch.setattr(ddp.time, "perf_counter", lambda: now)
    monkeypatch.setattr(ddp.torch.cuda, "synchronize", lambda device: events.append("wait"))
    ddp._settle(SimpleNamespace(step=step), Ranks(), 2)
    # 1.5 s in samples of two steps of 0.1 s, each waited for: a host that runs ahead would launch thousands.
    assert events == ["step", "step", "wait"] * 8


@pytest.mark.parametrize(
    ("device", "settles"), [("cuda", ["wait", "let go of collectives", "release"]), ("cpu", ["release"])]
)
def test_what_a_contender_left_is_not_on_the_next_ones_account(monkeypatch, device, settles):
    """NCCL frees the tensors of a collective late: on the account of whoever is measured then."""
    events: list[str] = []

    def note(event: str):
        return lambda *given, **named: events.append(event)

    monkeypatch.setattr(ddp_contenders.torch.cuda, "synchronize", note("wait"))
    monkeypatch.setattr(ddp_contenders, "release_collectives", note("let go of collectives"))
    monkeypatch.setattr(ddp_contenders, "release_memory", note("release"))
    monkeypatch.setattr(optimizer, "claim_workspaces", note("claim"))
    monkeypatch.setattr(
        optimizer, "_measure_memory", lambda *given: events.append("measure") or (None, {"state_bytes": 1})
    )
    monkeypatch.setattr(optimizer, "_time_alone", lambda *given: [1.0])
    ranks = Ranks(device=torch.device(device), world_size=2)
    optimizer.optimizer_rows(DdpCase("tiny", TINY, rows=1), ranks, names=("bucketed", "zero1"))
    assert events == ["claim", *settles, "measure", *settles, "measure"]
    events.clear()
    monkeypatch.setattr(ddp, "contender", note("build"))  # what it gives fails at its first step
    with pytest.raises(AttributeError):
        ddp._build_and_measure("bucketed", DdpCase("tiny", TINY, rows=1), Ranks(), 3)
    assert events == ["release", "build"]
