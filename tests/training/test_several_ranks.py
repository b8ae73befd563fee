"""Several ranks train as one, stop as one and resume as one; one that dies, hangs or raises ends the others."""

import re
import signal

import pytest
import torch
from marking import full_but, full_except
from processes import TIMEOUT_S, ends
from run_folders import PACKED, assert_same_tensors, losses, newest, saved
from safetensors.torch import load_file

from lmkit.recipe.recipe import Recipe
from lmkit.registry import STRATEGIES
from lmkit.training.checkpoint import model_files
from lmkit.training.weights import open_weights, weights_of

full = pytest.mark.full
# Relative tolerance between different numbers of ranks: the same float32 numbers summed in another order are a few
# units in the last place (6e-8) apart, which ten updates hardly amplify.
SAME = 2e-6


def assert_same_losses(left: Recipe, right: Recipe, kinds=("train",), *, rel: float = SAME) -> None:
    for kind in kinds:
        pairs = list(zip(losses(left, kind), losses(right, kind), strict=True))
        assert pairs
        for (step, one), (other_step, other) in pairs:
            assert step == other_step
            assert other == pytest.approx(one, rel=rel), (kind, step)


ALL_KINDS = ("train", "valid", "final")
BF16 = ("train.precision=bf16", "train.accumulation=4")
FP8 = ("train.precision=fp8", "train.accumulation=4", "run.device=auto")
DRAWN, SIMULATED = "other first weights on rank 1", "no fault: fp8 is simulated"
SHARED = (
    # Evaluations have three batches on two ranks, and at the end all 23, of which the last is shorter.
    (("train.eval_batches=3",), "bucketed", "", SAME, ALL_KINDS),
    # Losses on two ranks are those of one up to rounding; the masters are those of the first rank.
    (BF16, "bucketed", DRAWN, 2e-3, ("train",)),
    *((PACKED, strategy, "", SAME, ALL_KINDS) for strategy in ("bucketed", "zero1", "fsdp")),
    # Scales of fp8 are those of rows, which are the same however a batch is shared out.
    *((FP8, strategy, SIMULATED, 2e-3, ("train",)) for strategy in ("bucketed", "zero1", "fsdp")),
)


@pytest.mark.parametrize(("chosen", "strategy", "fault", "rel", "kinds"), full_but(SHARED[:2], SHARED))
def test_fault_75_one_and_two_ranks_have_the_same_losses_also_where_batches_do_not_divide_by_the_ranks(
    chosen, strategy, fault, rel, kinds, fleet, tiny, settings
):
    for name, ranks in (("one", 1), ("two", 2)):
        given = settings(*chosen, f"parallel.strategy={strategy}", f"run.name={name}")
        fleet.train(given, ranks=ranks, fault=fault)
    assert_same_losses(tiny("run.name=one"), tiny("run.name=two"), kinds, rel=rel)


def test_the_clock_of_rank_0_makes_all_ranks_save(fleet, tiny, settings):
    often = settings("checkpoint.minutes=1e-9", "checkpoint.keep_last=20", "parallel.strategy=zero1")
    fleet.train(often, ranks=2)
    assert saved(tiny()) == [*range(1, 11)]


@pytest.mark.parametrize(
    ("strategy", "precision"),
    full_except(
        ("zero1", "fp32"),
        *((name, "fp32") for name in ("naive", "bucketed", "torch_ddp", "fsdp")),
        *((name, "bf16") for name in ("fsdp", "zero1", "bucketed", "torch_ddp")),
    ),
)
def test_fault_54_two_ranks_resume_bit_for_bit(strategy, precision, fleet, tiny, settings):
    chosen = f"parallel.strategy={strategy}"
    both = (chosen, f"train.precision={precision}", "train.accumulation=4")
    whole, parts = settings(*both, "run.name=whole"), settings(*both, "run.name=parts")
    options = {"ranks": 2, "fault": "no fault: random numbers are drawn"}
    fleet.train(whole, **options)
    fleet.train(parts, **options, stop_at_step=5)
    fleet.train(parts, **options)
    left, right = newest(tiny(chosen, "run.name=whole")), newest(tiny(chosen, "run.name=parts"))
    shards = 2 if "optimizer" in STRATEGIES.facts(strategy).shards else 1
    models = ["model-00000-of-00002", "model-00001-of-00002"] if strategy == "fsdp" else ["model"]
    assert {path.stem for path in left.path.glob("*.safetensors")} == {
        *models, *(f"optimizer-0000{rank}-of-0000{shards}" for rank in range(shards)),
    }  # fmt: skip
    assert left.state.rng == right.state.rng
    assert len(set(left.state.rng)) == 2  # each rank has its own
    assert_same_tensors(left, right)
    for kind in ("train", "valid", "final"):
        assert losses(tiny("run.name=whole"), kind) == losses(tiny("run.name=parts"), kind) != []
    weights_of(left).model("cpu")  # fault 59, for what each strategy wraps a model in
    saved_weights = {}
    for file in model_files(left.entries):
        saved_weights |= load_file(left.path / file)
    opened = open_weights(left.path)
    assert opened.specs.keys() == saved_weights.keys()
    assert all(torch.equal(opened[name], weights) for name, weights in saved_weights.items())


BF16_STATES = "fsdp parallel.options.state_dtype=bf16"


@pytest.mark.parametrize(
    ("first", "then"),
    full_except(
        ((2, "zero1"), (1, "none")),
        *(((2, BF16_STATES), then) for then in ((2, "zero1"), (1, "none"), (4, "fsdp"), (2, "fsdp"))),
        *(((1, "none"), then) for then in ((2, BF16_STATES), (2, "zero1"))),
        ((2, "bucketed"), (1, "none")),
        *(((2, "fsdp"), then) for then in ((2, BF16_STATES), (1, "none"), (2, "zero1"), (4, "fsdp"))),
        ((4, "fsdp parallel.options.shard_ranks=2"), (2, "fsdp")),
        ((4, "zero1"), (2, "fsdp")),
        ((4, "fsdp"), (2, "zero1")),
    ),
)
def test_fault_56_another_number_of_ranks_goes_on_with_the_same_run_and_says_so(
    first, then, fleet, tiny, settings
):
    fleet.train(settings("run.name=whole"))
    for (ranks, strategy), options in ((first, {"stop_at_step": 5}), (then, {})):
        changed = settings("run.name=parts", *f"parallel.strategy={strategy}".split())
        fleet.train(changed, ranks=ranks, **options)
    assert (f"saved by {first[0]} rank" in fleet.said()) == (first[0] != then[0])
    rel = 0.01 if BF16_STATES in (first[1], then[1]) else SAME  # bf16 weights lose small updates
    assert_same_losses(tiny("run.name=whole"), tiny("run.name=parts"), rel=rel)


@pytest.mark.parametrize(
    ("fault", "strategy"),
    full_except(
        ("nan loss on rank 1, found a step late", "zero1"),
        ("nan loss on rank 1", "zero1"),
        ("nan loss on rank 1", "fsdp"),
        ("infinite gradient on rank 1", "zero1"),
    ),
)
def test_fault_66_and_67_all_ranks_stop_before_the_update_that_one_cannot_make(
    fault, strategy, fleet, tiny, settings
):
    """Nor does the step change anything that is launched before the host learns of it."""
    sharded = ["checkpoint.interval=3", f"parallel.strategy={strategy}"]  # so that both ranks have to write
    sharded.append("train.eval_interval=0")  # which would wait for step 4 before step 5 is launched
    recipe = tiny(*sharded)
    fleet.train(settings(*sharded), ranks=2, fault=fault, exits=[1, 1])
    said = re.findall(r"train\.nonfinite \| (.*)", fleet.said())
    assert len(said) == 2
    for line in said:
        assert "step 4" in line
        assert ("loss nan on rank 1" if "nan" in fault else "norm inf") in line
    assert saved(recipe) == [3]
    tensors = dict(weights_of(newest(recipe)))
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


@pytest.mark.parametrize("where", full_except("", " in evaluation", " in a save"))
def test_fault_69_and_70_a_signal_to_one_rank_makes_all_save_the_same_step(where, fleet, tiny, settings):
    sharded = ["parallel.strategy=zero1"]  # so that both ranks have to write
    if where == " in a save":
        sharded.append("checkpoint.interval=3")
    fleet.train(settings(*sharded, "run.name=whole"), ranks=2)
    fleet.train(settings(*sharded), ranks=2, fault="SIGTERM to rank 1" + where, exits=[143, 143])
    recipe = tiny(*sharded)
    last = saved(recipe)[-1]
    # Steps go on while a save is written: which of them meets the signal is up to the machine. Two are kept.
    with_intervals = sorted({*range(3, last + 1, 3), last})[-2:]
    assert {"": [3], " in evaluation": [4], " in a save": with_intervals}[where] == saved(recipe)
    assert (newest(recipe).state.step, newest(recipe).state.world_size) == (last, 2)
    fleet.train(settings(*sharded), ranks=2)
    assert_same_tensors(newest(tiny("run.name=whole")), newest(recipe))


@pytest.mark.parametrize(
    ("change", "code", "what"),
    full_except(
        *((f"model.{size}", "parallel.ranks_differ", "model") for size in ("d_ff=48", "num_layers=2")),
        *((key, "parallel.ranks_differ", "recipe") for key in ("optimizer.lr=0.5", "run.seed=9")),
        ("run.folder=elsewhere", "run.not_shared", "run.folder"),  # every machine has a disk of its own
    ),
)
def test_fault_74_another_model_or_recipe_on_one_rank_is_an_error_at_the_start(
    change, code, what, fleet, tiny, settings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    fleet.train(settings(), ranks=2, of_rank_1=[change], exits=[2 if code == "run.not_shared" else 1] * 2)
    lines = [line for line in fleet.said().splitlines() if line.startswith(code)]
    assert len(lines) == 2, fleet.said()
    assert all("rank 1" in line and what in line for line in lines)
    assert losses(tiny()) == []
    assert saved(tiny()) == []
    assert code != "run.not_shared" or not list(tiny().run.path.glob("*"))


# What the survivor names: its own rank, the step, and who is missing. gloo notices a death at once, a hang at the
# timeout; a part of a checkpoint that does not come is noticed by whoever waits for it.
LATE = r"step-00000003: rank 1\b"
COLLECTIVES = ("in a gather", "in a reduction")
LOST = {
    **dict.fromkeys(("in backward", *COLLECTIVES), r"rank 0, step 3\b.*\brank 1\b"),
    "in evaluation": r"rank 0, after step 4\b.*\brank 1\b",
    "in a save": r"rank 0, (after |saving )?step \d\b.*\brank 1\b|" + LATE,
    "in a save that is waited for": r"rank 0, (after step 6|saving step 3)\b.*\brank 1\b|" + LATE,
}
PLACES = (
    *((place, "zero1") for place in LOST if place not in COLLECTIVES),
    *((place, "fsdp") for place in (*COLLECTIVES, "in a save")),
)


@pytest.mark.parametrize(
    ("what", "where", "strategy"),
    full_except(*(("dies", *place) for place in PLACES), ("raises", "in backward", "bucketed")),
)
def test_fault_72_a_rank_that_dies_ends_the_other_which_names_it_and_the_step(
    what, where, strategy, fleet, tiny, settings
):
    """An exception on one rank is no hang, either."""
    sharded = (f"parallel.strategy={strategy}", "checkpoint.interval=3")
    ends_by = 1 if what == "raises" else -signal.SIGKILL
    fleet.train(settings(*sharded), ranks=2, fault=f"rank 1 {what} {where}", exits=[1, ends_by])
    assert re.search(LOST[where], fleet.said()), fleet.said()
    assert "Traceback" not in fleet.said() or what == "raises"
    assert ("ZeroDivisionError" in fleet.said()) == (what == "raises")
    fleet.train(settings(*sharded), ranks=2)
    assert newest(tiny(*sharded)).state.step == 10
    fleet.train(settings(*sharded, "run.name=whole"), ranks=2)
    assert losses(tiny()) == losses(tiny("run.name=whole"))


@full
def test_fault_72_a_first_rank_that_dies_while_it_looks_where_to_begin_ends_the_other(fleet, settings):
    fleet.train(settings(), ranks=2, fault="rank 0 dies at the start", exits=[-signal.SIGKILL, 1])
    assert re.search(r"rank 1, between steps\b.*\brank 0\b", fleet.said()), fleet.said()
    assert len(fleet.said().splitlines()) == 1


@pytest.mark.parametrize(("where", "strategy"), full_except(*PLACES))
def test_fault_73_a_rank_that_hangs_is_named_with_the_step_at_the_timeout(where, strategy, fleet, settings):
    options = (f"parallel.strategy={strategy}", "checkpoint.interval=3", f"parallel.timeout_s={TIMEOUT_S}")
    waiting, hanging = fleet.start(settings(*options), ranks=2, fault=f"rank 1 hangs {where}")
    assert ends([waiting]) == [1], fleet.said()
    assert re.search(LOST[where], fleet.said()), fleet.said()
    assert "Traceback" not in fleet.said()
    # In a save the trainer of rank 1 went on, and lost rank 0.
    assert hanging.is_alive() or where.startswith("in a save")
