"""The data-parallel benches on two gloo ranks: the numbers that must be exact are; times are only there."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import ddp_ranks
import planted_strategies
import pytest
import torch
from raising import raises

from lmkit.bench import all_reduce, ddp, ddp_variants, optimizer, training_gate, trainings
from lmkit.bench.ddp import numbers
from lmkit.bench.harness import result_files
from lmkit.bench.summary import summary_of
from lmkit.errors import UsageError
from lmkit.parallel import collectives
from lmkit.parallel.collectives import Averager
from lmkit.parallel.launch import spawn_ranks
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import load_recipe
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import ModelConfig, ParallelConfig, TrainConfig

TINY = ModelConfig(vocab_size=64, context_length=50, d_model=16, d_ff=16, num_layers=1, num_heads=1)
PARALLEL = ParallelConfig()
CASE = Recipe(parallel=PARALLEL, model=TINY, train=TrainConfig(batch_size=2))


@pytest.fixture(scope="module", params=[pytest.param("two ranks", marks=pytest.mark.full)])
def measured() -> dict[str, Any]:
    return spawn_ranks(2, ddp_ranks.measure_all)


@pytest.fixture(scope="module")
def ladder(measured) -> dict[str, dict]:
    return {row["variant"]: row for row in measured["ladder"]}


def test_every_variant_has_a_row_with_samples(ladder):
    for name, row in ladder.items():
        assert row["status"] == "ok", name
        assert len(row["samples_ms"]) == 3
        assert row["p10_ms"] <= row["step_ms"] <= row["p90_ms"]
        ranks = 1 if name.startswith("one rank") else 2
        assert row["tokens_per_s"] == pytest.approx(ranks * 2 * 16 / row["step_ms"] * 1e3)


def test_losses_of_synchronized_variants_agree(ladder):
    """Rank 0's loss after three steps: the same training, whoever sums the gradients."""
    expected = ladder["naive"]["loss"]
    for name in ("flat", "overlap", "bucketed", "torch_ddp", "zero1"):
        # bf16 products round differently once weights differ in the last bit: 1e-3 of a loss of 4.
        assert ladder[name]["loss"] == pytest.approx(expected, abs=1e-3), name
    assert ladder["none"]["loss"] != pytest.approx(expected, abs=1e-6)


def test_bytes_agree_with_the_formula(ladder):
    for name, row in ladder.items():
        if row["world_size"] == 1 or name == "none":
            assert row["link_bytes"] == 0
            continue
        # Flags (one int32 a parameter) and padding (up to 128 elements a rank and bucket) come on top.
        extra = row["link_bytes"] - row["expected_link_bytes"]
        assert 0 <= extra < 0.05 * row["expected_link_bytes"] + 512, name
    gathers = {name: row["gather"] for name, row in ladder.items() if "gather" in row}
    assert gathers == dict.fromkeys(("zero1", "zero1 bf16"), "collective")
    calls = [ladder[name]["calls_per_step"] for name in ("naive", "bucketed 0.05 MB", "bucketed")]
    assert calls == sorted(set(calls), reverse=True)


@pytest.mark.parametrize(
    ("name", "per_byte"),
    [
        ("flat", 1.5),
        ("none", 0.0),
        ("torch_ddp + ZeRO", 1.5 + 0.75),  # weights are broadcast after whole gradients were reduced
        ("bucketed bf16 wire 100 MB", 0.75),
        ("zero1", 1.5),
        ("fsdp", 3 * 0.75),  # weights are gathered twice
        ("zero1 bf16 wire", 0.375 + 0.75),  # gradients in half of the weights' width, one way each
        ("zero1 bf16 bf16 wire", 1.5),  # of weights that are bf16 already
    ],
)
def test_the_formula_knows_what_travels_in_which_width(name, per_byte):
    """Four ranks: three quarters of all bytes go one way."""
    assert ddp_variants.expected_link_bytes(name, 1000, 4, PARALLEL) == pytest.approx(per_byte * 1000)


def test_baselines_are_those_of_the_same_weights(ladder):
    assert ddp_variants.baseline_of("zero1 bf16 100 MB") == "one rank bf16"
    assert ddp_variants.baseline_of("bucketed bf16 wire") == "one rank"
    assert 0 < ladder["zero1 bf16"]["scaling_low"] <= ladder["zero1 bf16"]["scaling"]
    assert "exposed_ms" in ladder["bucketed"]
    assert "exposed_ms" not in ladder["one rank"]
    assert ladder["bucketed"]["communication_alone_ms"] > 0


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("mine_bf16", training_gate.EXACT),
        ("mine_bf16 100 MB compiled", training_gate.EXACT),
        *((name, training_gate.ROUNDED) for name in ("flat bf16 wire", "zero1 bf16", "fsdp bf16 states")),
    ],
)
def test_options_and_not_the_name_of_a_strategy_decide_what_it_may_round(monkeypatch, name, budget):
    monkeypatch.setattr(training_gate, "judge", lambda mine, theirs, budget, **_: ({"budget": budget}, []))
    monkeypatch.setattr(training_gate, "after_timing", lambda training, budget: {"budget": budget})
    variant = ddp_variants.variant_of(name, {}, CASE, Ranks(), "", lambda *_: {})
    assert variant.judge(None) == variant.check(None) == {"budget": budget}


@pytest.mark.parametrize("bench", ["ddp", "optimizer"])
def test_the_optimizer_of_the_recipe_makes_the_steps(measured, bench):
    """A variant that cannot take it is a row that says why."""
    rows = measured["muon"][bench]
    assert [row.get("status", "ok") for row in rows] == ["ok", "ok", "unsupported", "unsupported"]
    assert measured["muon"]["names"] == {"bucketed": "Muon", "torch_ddp": "Muon"}
    summary, _ = result_files(bench, rows, {})
    reasons = [reason for reason in summary.not_measured if reason.startswith("unsupported: ")]
    assert ["muon" in reason or "AdamW" in reason for reason in reasons] == [True, True]


@pytest.mark.parametrize("bench", ["ddp", "optimizer", "rounded"])
def test_strategies_that_do_not_average_in_every_step_are_wrong_and_not_timed(measured, bench):
    rows = {row["variant"]: row for row in measured["planted"][bench]}
    for name in planted_strategies.WRONG:
        assert rows[name]["status"] == "wrong result", name
        assert not {"step_ms", "tokens_per_s", "samples_ms"} & rows[name].keys()
    assert rows["every_other"]["detail"].startswith("rank 0: step 1: the gradient of ")
    assert "step 2" in rows["first_only"]["detail"]
    assert "ln_final" in rows["forgets"]["detail"] or "lm_head" in rows["forgets"]["detail"]
    assert "the norm of the mean gradient: relative error 1," in rows["sums"]["detail"]  # twice as large
    assert "step 2: the norm of the " in rows["halves"]["detail"]
    assert "the norm of the clipped gradient: " in rows["never_clips"]["detail"]
    for name in ("stops", "sums_later"):
        assert rows[name]["detail"].startswith("after timing: ")
    for name, line in zip(planted_strategies.FAILED, ("broken", "tired"), strict=True):
        assert (rows[name]["status"], rows[name]["detail"]) == ("failed", f"RuntimeError: {line}")
    assert rows["right"]["status"] == "ok"
    assert rows["right"]["step_ms"] > 0


def test_a_kernel_that_is_wrong_while_it_is_timed_is_wrong_with_every_strategy(measured):
    assert [row["variant"] for row in measured["late"]] == ["one rank", "fsdp", "zero1"]
    for row in measured["late"]:
        assert row["status"] == "wrong result", row
        assert "after timing: " in row["detail"]
        assert not {"step_ms", "samples_ms"} & row.keys()


def test_wrong_strategies_are_never_fastest(measured):
    summary, files = result_files("ddp", measured["planted"]["ddp"], {})
    assert len(summary.wrong) == len(planted_strategies.WRONG)
    (best,) = [line for line in files["ddp_report.md"].splitlines() if line.startswith("- Lowest ms/step: ")]
    assert best.endswith(", right.")


def test_what_one_process_has_no_room_for_is_timed_and_said_to_be_unchecked(measured):
    (row,) = measured["without room"]
    assert (row["status"], bool(row["unchecked"])) == ("ok", True)
    assert row["step_ms"] > 0
    summary, _ = result_files("ddp", [row], {})
    assert f"not checked: naive: {row['unchecked']}" in summary.notes


def test_ranks_agree_on_what_fits_and_when_time_is_up(measured):
    assert [row["status"] for row in measured["full"]] == ["out of memory", "ok"]
    assert len(measured["full"][1]["samples_ms"]) == 1
    assert [len(row["samples_ms"]) for row in measured["short"]] == [1, 1]
    assert measured["gradients_left"] == 0  # of measuring communication alone
    assert measured["slowest"] == [2.0, 3.0]  # what a sample of several ranks is


def test_rows_are_in_the_journal_as_they_come(measured):
    """The collectives of a size and dtype, or a variant."""
    for bench, at_once in (("all_reduce", 3), ("optimizer", 1)):
        added = measured[f"{bench}_kept"]
        assert [len(rows) for rows in added] == [at_once] * (len(measured[bench]) // at_once)


def test_collectives_have_bandwidths(measured):
    rows = measured["all_reduce"]
    assert {row["operation"] for row in rows} == {"all_reduce", "reduce_scatter", "all_gather"}
    for row in rows:
        passes = 2 if row["operation"] == "all_reduce" else 1
        seconds = row["median_us"] / 1e6
        assert row["bus_gb_per_s"] == pytest.approx(passes * 0.5 * row["bytes"] / seconds / 1e9)
    names = ("results.csv", "results.jsonl", "bandwidth.png", "report.md")
    assert set(result_files("all_reduce", rows, {})[1]) == {f"all_reduce_{name}" for name in names}


@pytest.mark.parametrize("operation", all_reduce.OPERATIONS)
def test_a_collective_is_timed_to_its_end(monkeypatch, operation):
    events: list[str] = []

    def start(self: Averager, given: object) -> SimpleNamespace:
        events.append("starts")
        return SimpleNamespace(wait=lambda: events.append("ends"))

    monkeypatch.setattr(Averager, "__init__", lambda self, ranks, traffic: None)
    monkeypatch.setattr(Averager, operation, start)
    all_reduce._call(operation, torch.zeros(256), Ranks(world_size=2))()
    assert events == ["starts", "ends"]


def test_sharded_state_is_one_share(measured):
    shares = {row["variant"]: row["state_share"] for row in measured["optimizer"]}
    assert shares["bucketed"] == 1.0
    assert 0.5 <= shares["zero1"] < 0.51
    assert 0.5 <= shares["zero1 bf16"] < 0.51
    assert 0.3 < shares["torch_ddp + ZeRO"] < 0.7  # dealt out parameter by parameter
    names = ("results.csv", "results.jsonl", "state_bytes.png", "report.md")
    _, files = result_files("optimizer", measured["optimizer"], {})
    assert set(files) == {f"optimizer_{name}" for name in names}
    assert all(row["mfu"] > 0 for row in measured["optimizer"])


# Names


@pytest.mark.parametrize(
    "name",
    [
        *("naiv", "bucketed many MB", "bucketed 0 MB", "torch_ddp fast", "one rank fp32", "naive bf16", ""),
        # Options that the strategy does not use, also where they name the default; and those said twice.
        *("none 100 MB", "none bf16 wire", "overlap 25 MB", "flat 50 MB bf16 wire", "flat collective"),
        *("zero1 bf16 states", "fsdp compiled fast", "fsdp compiled compiled"),
        *("bucketed bf16", "torch_ddp collective", "torch_ddp static 50 MB", "bucketed 50 MB 100 MB"),
    ],
)
def test_unknown_variants_are_refused_before_anything_runs(name):
    for bench, module in (("ddp", ddp), ("optimizer", optimizer)):
        recipe = load_recipe("bench_ddp_cpu", flags={f"bench.{bench}.variants": ["bucketed", name]})
        with raises(UsageError, "bench.unknown_variant", f"bench.{bench}.variants", hint="bucketed 100 MB"):
            module.check(recipe)


def test_the_optimizer_bench_has_no_variants_of_one_rank():
    recipe = load_recipe("bench_ddp_cpu", flags={"bench.optimizer.variants": ["one rank bf16"]})
    assert recipe.bench_table("optimizer").variants == ("one rank bf16",)
    with raises(UsageError, "bench.not_of_all_ranks"):
        optimizer.check(recipe)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one rank bf16", {"strategy": "zero1", "weights": "bf16"}),
        ("flat bf16 wire", {"reduce_dtype": "bf16"}),
        ("bucketed", {"bucket_mb": 7.0}),  # the recipe's
        ("bucketed 100 MB bf16 wire", {"bucket_mb": 100.0, "reduce_dtype": "bf16"}),
        ("bucketed 1e+06 MB", {"bucket_mb": 1e6}),
        ("bucketed 5e-05 MB", {"bucket_mb": 5e-5}),
        ("torch_ddp", {"bucket_mb": 25.0}),
        ("torch_ddp 2.5 MB bf16 wire", {"bucket_mb": 2.5, "reduce_dtype": "bf16"}),
        ("torch_ddp static", {"bucket_mb": 25.0, "options": {"static_graph": True}}),
        ("zero1 bf16 collective", {"weights": "bf16", "gather": "collective"}),
        ("fsdp bf16 states", {"options": {"state_dtype": "bf16"}}),
        ("torch_fsdp bf16 states compiled", {"options": {"state_dtype": "bf16"}}),
    ],
)
def test_a_variant_has_the_options_that_its_name_says(name, options):
    found = ddp_variants.parallel_of(name, ParallelConfig(bucket_mb=7.0, reduce_dtype="bf16"))
    assert found == ParallelConfig(**{"strategy": name.partition(" ")[0], "bucket_mb": 7.0, **options})


def test_the_model_comes_from_the_recipe_and_its_vocabulary_from_the_tokenizer():
    """A training recipe without [bench.ddp] is enough."""
    recipe = load_recipe("quickstart")
    case = ddp_variants.case_of(recipe, recipe.bench_table("ddp"), "ddp")
    assert recipe.model is not None
    assert recipe.tokenizer is not None
    assert case.model.vocab_size == recipe.tokenizer.vocab_size
    assert case.model.d_model == recipe.model.d_model
    bare = recipe.model_copy(update={"tokenizer": None})
    with raises(UsageError, "recipe.no_vocabulary"):
        ddp_variants.case_of(bare, bare.bench_table("ddp"), "ddp")


@pytest.mark.parametrize("name", ddp_variants.SOLO)
def test_one_rank_trains_on_the_rows_of_one_rank(name):
    inputs, _ = ddp_variants.make_training(name, CASE, Ranks(world_size=3)).next_batch()
    assert inputs.shape == (1, 2, TINY.context_length)


# Fields of rows by hand


def test_scaling_and_what_is_exposed_by_hand():
    """Rounds in which everything took twice as long, and one in which only `bucketed` did."""
    samples = {
        "one rank": [8.0, 16.0, 8.0],
        "one rank bf16": [4.0, 8.0, 4.0],
        "none": [9.0, 18.0, 9.0],
        "bucketed": [10.0, 20.0, 20.0],
        "zero1 bf16": [5.0, 10.0, 10.0],
    }
    context: Any = SimpleNamespace(ranks=Ranks(world_size=4), device="cpu")
    fields = partial(numbers, case=CASE, context=context, limits=None, samples=samples)
    bucketed = fields("bucketed")
    assert (bucketed["scaling"], bucketed["scaling_low"], bucketed["scaling_high"]) == (0.8, 0.4, 0.8)
    assert (bucketed["step_ms"], bucketed["exposed_ms"], bucketed["exposed_share"]) == (20.0, 2.0, 0.1)
    assert bucketed["tokens_per_s"] == 4 * 2 * 50 / 20e-3
    halved = fields("zero1 bf16")
    assert halved["scaling"] == 0.8
    assert "exposed_ms" not in halved, "there is no step of bf16 weights without communication"
    alone = fields("one rank")
    assert alone["tokens_per_s"] == 2 * 50 / 8e-3
    assert "scaling" not in alone


def test_memory_is_compared_with_one_rank_of_the_same_weights():
    peaks = {"one rank": 100, "one rank bf16": 60, "bucketed": 110, "zero1 bf16": 45}
    rows = [{"variant": name, "peak_bytes": peak, "world_size": 2} for name, peak in peaks.items()]
    ddp.compare_with_expected(rows, CASE)
    assert [row["peak_overhead"] for row in rows] == pytest.approx([0.0, 0.0, 0.1, -0.25])


# Time on GPUs, with clocks of our own


@pytest.mark.parametrize(("device", "settled"), [("cuda", ["settle flat"]), ("cpu", [])])
def test_gpus_that_rested_work_before_the_first_sample(monkeypatch, device, settled):
    """They rest while the last variant is built. Whatever comes before a sample, ranks begin it together."""
    events: list[str] = []
    names = ("flat", *ddp_variants.SOLO, "none", "bucketed")
    ranks = Ranks(device=torch.device(device), world_size=2)
    context: Any = SimpleNamespace(ranks=ranks, recipe=Recipe(), device=device)
    monkeypatch.setattr(collectives, "agree", lambda ranks, *, stop=False: events.append("together") or stop)
    monkeypatch.setattr(
        trainings, "time_variants", lambda variants, *, prepare, **_: [prepare[name]() for name in names]
    )
    monkeypatch.setattr(trainings, "settle", lambda run, ranks, steps: events.append(f"settle {run}"))
    steps: Any = {name: name for name in names}
    trainings.samples_in_turns(steps, context, events.append, SimpleNamespace(), rounds=3, settled=1)
    assert events == ["flat", *settled, "together", *(x for name in names[1:] for x in (name, "together"))]


def test_the_best_of_lmkit_is_compared_with_pytorchs():
    def timed(name: str, ms: float, **more: object) -> dict[str, Any]:
        row = {"case": "small", "variant": name, "world_size": 2, "step_ms": ms, "samples_ms": [ms] * 6}
        return row | more

    ladder = {"one rank": 9.0, "naive": 14.0, "bucketed": 11.0, "torch_ddp": 22.0}
    ladder |= {"zero1": 10.0, "zero1 bf16": 8.0, "torch_ddp + ZeRO": 12.0}
    rows = [timed(name, ms) for name, ms in ladder.items()]
    rows += [timed(name, ms, part="bucket sweep") for name, ms in (("none", 9.0), ("bucketed 10 MB", 9.5))]
    summary = summary_of(ddp, rows)
    assert "none" not in [row["variant"] for row in summary.rows]
    best, plain, sharded = summary.findings
    assert best == "Lowest ms/step: 9.50, bucketed 10 MB."  # without a bf16 option
    assert plain.startswith("bucketed against torch_ddp: 2.000x")
    assert sharded.startswith("zero1 bf16 against torch_ddp + ZeRO: 1.500x")
    assert summary.measured
    assert set(result_files("ddp", rows, {})[1]) >= {"ddp_step_ms.png"}
