"""Several ranks train as one, stop as one and go on as one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from process_fleet import Fleet, assert_same_tensors, newest
from run_folders import losses, saved

from lmkit.recipe.schema import Recipe
from lmkit.registry import STRATEGIES
from lmkit.training.checkpoint import step_name
from lmkit.training.model_state import plain_model

Tiny = Callable[..., Recipe]


def test_one_and_two_ranks_have_the_same_losses(
    fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    one, two = settings("run.name=one"), settings("run.name=two")
    assert fleet.train(one) == [0]
    assert fleet.train(two, ranks=2) == [0, 0]
    for kind in ("train", "valid", "final"):
        pairs = list(zip(losses(tiny("run.name=one"), kind), losses(tiny("run.name=two"), kind), strict=True))
        assert pairs
        for (step, single), (_, double) in pairs:
            # The same float32 numbers, summed in another order: a few units in the last place (6e-8 relative),
            # which ten updates hardly amplify.
            assert double == pytest.approx(single, rel=2e-6), (kind, step)


def test_whole_weights_survive_a_session_with_bf16_ones(
    fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    """fp32 weights become fp32 masters, not what their bf16 copies have left of them."""
    still = ("optimizer.lr=1e-12", "optimizer.min_lr=0.0")
    narrow = ("parallel.strategy=zero1", "parallel.weights=bf16")
    assert fleet.train(settings(), ranks=2, stop_at_step=2) == [0, 0], fleet.said()
    before = newest(tiny()).model_tensors()
    assert fleet.train(settings(*still, *narrow), ranks=2, stop_at_step=3) == [0, 0], fleet.said()
    rounded = newest(tiny()).model_tensors()
    assert fleet.train(settings(*still), ranks=2, stop_at_step=4) == [0, 0], fleet.said()
    after = newest(tiny()).model_tensors()
    for name, weights in before.items():
        assert rounded[name].dtype == torch.bfloat16
        assert torch.allclose(after[name], weights, rtol=0, atol=1e-10), name  # two updates of at most 1e-12


@pytest.mark.parametrize("strategy", ["naive", "bucketed", "torch_ddp", "zero1"])
def test_fault_54_two_ranks_resume_bit_for_bit(
    strategy: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    assert strategy in STRATEGIES.names
    chosen = f"parallel.strategy={strategy}"
    whole, parts = settings(chosen, "run.name=whole"), settings(chosen, "run.name=parts")
    options = {"ranks": 2, "fault": "no fault: random numbers are drawn"}
    assert fleet.train(whole, **options) == [0, 0], fleet.said()
    assert fleet.train(parts, **options, stop_at_step=5) == [0, 0], fleet.said()
    assert fleet.train(parts, **options) == [0, 0], fleet.said()
    left, right = newest(tiny(chosen, "run.name=whole")), newest(tiny(chosen, "run.name=parts"))
    assert left.state.optimizer_shards == (2 if strategy == "zero1" else 1)
    shards = [
        f"optimizer-0000{i}-of-0000{left.state.optimizer_shards}" for i in range(left.state.optimizer_shards)
    ]
    tensors = {path.stem for path in left.path.glob("*.safetensors")}
    assert tensors == {"model", *shards}  # each written by one rank
    assert left.state.rng == right.state.rng
    assert len(set(left.state.rng)) == 2  # each rank has its own
    assert_same_tensors(left, right)
    for kind in ("train", "valid", "final"):
        assert losses(tiny("run.name=whole"), kind) == losses(tiny("run.name=parts"), kind) != []
    plain_model(left, device="cpu")  # fault 59, for what each strategy wraps a model in


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((1, "none"), (2, "zero1")),
        ((2, "zero1"), (1, "none")),
        ((2, "bucketed"), (1, "none")),
    ],
)
def test_fault_56_another_number_of_ranks_goes_on_with_the_same_run_and_says_so(
    first: tuple[int, str],
    then: tuple[int, str],
    fleet: Fleet,
    tiny: Tiny,
    settings: Callable[..., list[str]],
) -> None:
    assert fleet.train(settings("run.name=whole")) == [0]
    for (ranks, strategy), options in ((first, {"stop_at_step": 5}), (then, {})):
        changed = settings("run.name=parts", f"parallel.strategy={strategy}")
        assert fleet.train(changed, ranks=ranks, **options) == [0] * ranks, fleet.said()
    assert f"saved by {first[0]} rank" in fleet.said()
    for (step, expected), (_, found) in zip(
        losses(tiny("run.name=whole")), losses(tiny("run.name=parts")), strict=True
    ):
        assert found == pytest.approx(expected, rel=2e-6), step  # as for one against two ranks


@pytest.mark.parametrize("fault", ["nan loss on rank 1", "infinite gradient on rank 1"])
def test_fault_66_and_67_all_ranks_stop_before_the_update_that_one_cannot_make(
    fault: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    sharded = ("checkpoint.interval=3", "parallel.strategy=zero1")  # so that both ranks have to write
    recipe = tiny(*sharded)
    assert fleet.train(settings(*sharded), ranks=2, fault=fault) == [1, 1], fleet.said()
    culprit = "step 4: loss nan on rank 1: not finite" if "nan" in fault else "gradient norm inf: not finite"
    assert fleet.said().count(culprit) == 2, fleet.said()
    assert fleet.said().count("step 4: loss") == 2
    for rank in (0, 1):
        assert f"rank {rank}: weights untouched" in fleet.said()
    assert saved(recipe) == [3]
    tensors = newest(recipe).model_tensors()
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


@pytest.mark.parametrize("where", ["", " in evaluation", " in a save"])
def test_fault_69_and_70_a_signal_to_one_rank_makes_all_save_the_same_step(
    where: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    sharded = ["parallel.strategy=zero1"]  # so that both ranks have to write
    if where == " in a save":
        sharded.append("checkpoint.interval=3")
    assert fleet.train(settings(*sharded, "run.name=whole"), ranks=2) == [0, 0], fleet.said()
    assert fleet.train(settings(*sharded), ranks=2, fault="SIGTERM to rank 1" + where) == [143, 143], (
        fleet.said()
    )
    recipe = tiny(*sharded)
    last = saved(recipe)[-1]
    # A save goes on beside the steps that follow: which of them meets the signal is up to the machine. Two are kept.
    with_intervals = sorted({*range(3, last + 1, 3), last})[-2:]
    assert {"": [3], " in evaluation": [4], " in a save": with_intervals}[where] == saved(recipe)
    assert (newest(recipe).path.name, newest(recipe).state.world_size) == (step_name(last), 2)
    assert fleet.train(settings(*sharded), ranks=2) == [0, 0]
    assert_same_tensors(newest(tiny("run.name=whole")), newest(recipe))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("model.d_ff=48", "model differs"),
        ("model.num_layers=2", "model differs"),
        ("optimizer.lr=0.5", "recipe or data differs"),
        ("run.seed=9", "recipe or data differs"),
    ],
)
def test_fault_74_another_model_or_recipe_on_one_rank_is_an_error_at_the_start(
    change: str, what: str, fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    assert fleet.train(settings(), ranks=2, of_rank_1=[change]) == [1, 1], fleet.said()
    assert fleet.said().count(f"rank 1: {what} from rank 0's") == 2, fleet.said()
    assert losses(tiny()) == []
    assert saved(tiny()) == []


def test_fault_75_evaluation_batches_that_do_not_divide_by_the_ranks(
    fleet: Fleet, tiny: Tiny, settings: Callable[..., list[str]]
) -> None:
    """Three batches on two ranks, and at the end all 23, of which the last is shorter."""
    uneven = ("train.eval_batches=3", "train.steps=4")
    assert fleet.train(settings(*uneven, "run.name=one")) == [0], fleet.said()
    assert fleet.train(settings(*uneven, "run.name=two"), ranks=2) == [0, 0], fleet.said()
    for kind in ("valid", "final"):
        ((_, single),) = losses(tiny("run.name=one"), kind)
        ((_, double),) = losses(tiny("run.name=two"), kind)
        assert double == pytest.approx(single, rel=2e-6)  # as above: sums in another order
