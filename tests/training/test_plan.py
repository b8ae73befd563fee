"""Plans: what was measured on a GPU, what strategies share out, and where the edge lies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from lmkit.errors import UsageError
from lmkit.measure.limits import CARDS
from lmkit.model.accounting import count_parameters
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.load import load_recipe
from lmkit.recipe.schema import Recipe
from lmkit.training import plan as planning
from lmkit.training import plan_check
from lmkit.training.plan import misfit, plan
from lmkit.training.plan_check import launch, measure, miniature, timed_here
from lmkit.training.setup import TrainingStep

H200 = CARDS["H200"]
SHAPE = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size", "context_length")
MEASURED = {
    "162M": ((12, 768, 12, 12, 2048, 50_304, 1024), 32, 14.0, 56.6),
    "1.3B": ((24, 2048, 16, 16, 5504, 50_304, 2048), 8, 47.2, 254.6),
}
"""Name -> shape, batch, GB and ms of a step (artifacts/h200/step: bf16, fused operations, flash_triton)."""

FORMER_STORIES = [  # tinystories as it was measured
    *("optimizer.name=adamw", "model.num_heads=16", "model.attention=sdpa", "model.compile=block"),
    "train.batch_size=128",
]
FORMER_SPEEDRUN = ["optimizer.name=adamw", "train.precision=fp32"]  # as it was measured
OFF = ["train.cuda_graph=off"]
NARROW = ["train.precision=bf16", "model.attention=flash_triton"]
FORMER_TEXT = [
    "tokenizer.vocab_size=512",
    "model.context_length=64",
    "train.batch_size=16",
]  # as it was measured
UNTIED = ["model.tie_embeddings=false", "model.activation_checkpointing=attention"]
RECIPES = [
    ("quickstart", [], 0.0774, 1.31),
    ("quickstart", NARROW, 0.0691, 1.45),
    ("text_files", FORMER_TEXT, 0.0311, 1.26),
    ("chat", [], 0.1844, 1.56),
    ("finetune", [], 0.1137, 1.50),
    ("speedrun", FORMER_SPEEDRUN, 1.5534, 17.60),
    ("tinystories", FORMER_STORIES, 3.5002, 10.70),
    ("tinystories", [], 6.0638, 18.90),
    ("profile", [], 10.0877, 23.81),
    ("llama_1b", [], 60.6628, 459.93),
    ("llama_1b", UNTIED, 28.9057, 544.26),
    ("llama_1b", [*UNTIED, "model.context_length=2048"], 26.5219, 272.53),
    ("llama_1b", ["model.activation_checkpointing=block"], 23.0389, 568.55),
    (
        "llama_1b",
        [
            *("model.activation_checkpointing=selective", "model.activation_gb=6.0"),
            "model.num_layers=8",
        ],
        19.8550,
        305.80,
    ),
]
"""Recipe, keys -> GB of a step without a CUDA graph, ms of one that `train.cuda_graph = "auto"` makes (one H200,
torch 2.11, 2026-11-27)."""


@pytest.fixture(autouse=True)
def no_quickstart(tmp_path, monkeypatch):
    """`chat` and `finetune` name the tokenizer of the quickstart's run; they were measured without one."""
    monkeypatch.chdir(tmp_path)


def recipe(shape: tuple[int, ...], batch_size: int, *more: str) -> Recipe:
    sizes = [f"model.{key}={value}" for key, value in zip(SHAPE, shape, strict=True)]
    batch = f"train.batch_size={batch_size}"
    return load_recipe("llama_1b", [*sizes, "model.tie_embeddings=false", batch, *more])


@pytest.mark.parametrize("name", MEASURED)
def test_the_plan_agrees_with_what_an_h200_took(name: str) -> None:
    shape, batch_size, gb, ms = MEASURED[name]
    made = plan(recipe(shape, batch_size), H200)
    assert made.fits
    assert made.memory.peak / 1e9 == pytest.approx(gb, rel=0.05)
    assert made.seconds is not None
    assert made.seconds * 1e3 == pytest.approx(ms, rel=0.2)
    assert made.least_seconds is not None
    assert made.least_seconds < made.seconds


@pytest.mark.parametrize(("name", "keys", "gb", "ms"), RECIPES)
def test_the_plan_of_a_recipe_agrees_with_what_an_h200_took(
    name: str, keys: list[str], gb: float, ms: float
) -> None:
    made = plan(load_recipe(name, keys), H200)
    assert made.memory.peak / 1e9 == pytest.approx(gb, rel=0.05)
    assert made.seconds is not None
    assert made.seconds * 1e3 == pytest.approx(ms, rel=0.2)


@pytest.mark.parametrize(
    ("switch", "gb"),
    [("compile=block", 15.132), ("operations=plain", 17.571), ("activation_checkpointing=block", 4.838)],
)
def test_the_plan_knows_what_compilers_and_plain_operations_keep(switch: str, gb: float) -> None:
    shape, batch_size, *_ = MEASURED["162M"]
    made = plan(recipe(shape, batch_size, f"model.{switch}"), H200)
    assert made.memory.peak / 1e9 == pytest.approx(gb, rel=0.005)


@pytest.mark.parametrize(
    ("name", "keys", "gb"),
    [
        ("course_8b", ['parallel.options={state_dtype="bf16"}'], 48.712),
        ("course_8b", [], 73.092),
        (
            "course_8b",
            [
                *("model.num_layers=3", "model.activation_checkpointing=none"),
                'parallel.options={state_dtype="bf16"}',
            ],
            24.378,
        ),
        ("llama_1b", ["parallel.strategy=fsdp", *UNTIED], 15.189),
        ("tinystories", [*FORMER_STORIES, "parallel.strategy=bucketed"], 1.926),
        ("text_files", [*FORMER_TEXT, "parallel.strategy=fsdp"], 0.0173),
        ("quickstart", ["parallel.strategy=zero1"], 0.0589),
        ("profile", ["parallel.strategy=fsdp"], 4.7098),
        ("llama_1b", ["parallel.strategy=zero1"], 33.1444),
        ("llama_1b", ["parallel.strategy=fsdp"], 31.3316),
    ],
)
def test_the_plan_of_several_ranks_agrees_with_what_two_h200_took(
    name: str, keys: list[str], gb: float
) -> None:
    made = plan(load_recipe(name, keys), H200, ranks=2)
    assert made.memory.peak / 1e9 == pytest.approx(gb, rel=0.01)


@pytest.mark.parametrize(
    ("name", "keys", "megabytes"),
    [
        ("text_files", [*FORMER_TEXT, "train.batch_size=12"], 46.3),
        ("quickstart", [], 88.1),
        ("quickstart", NARROW, 81.9),
        ("quickstart", ["model.num_layers=8"], 157.4),
        ("chat", [], 268.6),
        ("chat", NARROW, 151.2),
        ("speedrun", FORMER_SPEEDRUN, 1625.5),
        ("speedrun", [*FORMER_SPEEDRUN, *NARROW], 964.8),
    ],
)
def test_small_models_fit_where_their_segments_do(name: str, keys: list[str], megabytes: float) -> None:
    """Against the least that the allocator needed on an H200."""
    memory = plan(load_recipe(name, keys), H200).memory
    assert memory.peak < megabytes * 1e6 < memory.most


@pytest.mark.parametrize(
    ("name", "keys", "strategy", "ms"),
    [
        ("text_files", [], "zero1", 1.12),
        ("text_files", [], "fsdp", 1.30),
        ("quickstart", [], "zero1", 1.24),
        ("quickstart", [], "fsdp", 1.51),
        ("chat", [], "zero1", 1.40),
        ("chat", [], "fsdp", 1.54),
        ("finetune", [], "zero1", 1.28),
        ("finetune", [], "fsdp", 1.56),
        ("speedrun", [], "zero1", 2.90),
        ("speedrun", [], "fsdp", 3.42),
        ("speedrun", FORMER_SPEEDRUN, "zero1", 9.75),
        ("speedrun", FORMER_SPEEDRUN, "fsdp", 10.05),
        ("tinystories", [], "zero1", 10.3),
        ("tinystories", [], "fsdp", 10.6),
        ("tinystories", ["optimizer.name=adamw"], "zero1", 9.56),
        ("tinystories", ["optimizer.name=adamw"], "fsdp", 9.86),
        ("profile", [], "zero1", 15.2),
        ("profile", [], "fsdp", 17.5),
    ],
)
def test_the_time_of_two_ranks_in_a_graph_agrees_with_what_two_h200_took(name, keys, strategy, ms):
    """Its constants were fitted to these times."""
    made = plan(load_recipe(name, [*keys, f"parallel.strategy={strategy}"]), H200, ranks=2)
    assert made.host_seconds == 0
    assert made.seconds * 1e3 == pytest.approx(ms, rel=0.15)


def test_without_a_graph_a_small_step_takes_as_long_as_its_host() -> None:
    fsdp = ["parallel.strategy=fsdp", *OFF]
    alone, two = plan(load_recipe("quickstart"), H200), plan(load_recipe("quickstart", fsdp), H200, ranks=2)
    captured = plan(load_recipe("quickstart", ["parallel.strategy=bucketed"]), H200, ranks=2)
    assert alone.host_seconds == captured.host_seconds == 0
    assert plan(load_recipe("quickstart", fsdp[:1]), H200, ranks=2).host_seconds == 0
    assert alone.seconds is not None
    assert two.seconds == two.host_seconds > alone.seconds
    large = plan(load_recipe("llama_1b", fsdp), H200, ranks=2)
    assert large.seconds is not None
    assert large.seconds > large.host_seconds > 0


def test_the_largest_batch_and_context_fit_and_the_next_do_not() -> None:
    shape, batch_size, *_ = MEASURED["1.3B"]
    made = plan(recipe(shape, batch_size), CARDS["A100"])
    for rows, fits in ((made.most_rows, True), (made.most_rows + 1, False)):
        assert plan(recipe(shape, rows), CARDS["A100"]).fits is fits
    for context, fits in ((made.most_context, True), (made.most_context + 64, False)):
        assert plan(recipe((*shape[:-1], context), batch_size), CARDS["A100"]).fits is fits
    assert plan(recipe(shape, batch_size), CARDS["T4"]).most_rows == 0


def test_checkpointing_takes_less_memory_and_more_time() -> None:
    shape, batch_size, *_ = MEASURED["1.3B"]
    levels = ("block", "attention", "none")
    plans = [plan(recipe(shape, batch_size, f"model.activation_checkpointing={how}"), H200) for how in levels]
    peaks, times = [made.memory.peak for made in plans], [made.seconds for made in plans]
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)  # type: ignore[type-var]
    budget = ("model.activation_checkpointing=selective", "model.activation_gb=15")
    chosen = plan(recipe(shape, batch_size, *budget), H200)
    assert peaks[1] < chosen.memory.peak < peaks[2]
    # What blocks keep: all but the norm in front of the head.
    assert 14e9 < sum(chosen.memory.activations.values()) < 15.1e9


@pytest.mark.parametrize(
    ("strategy", "weights", "state", "gradients"),
    [("bucketed", 1, 1, 1), ("zero1", 1, 1 / 4, 1), ("flat", 1, 1, 2)],
)
def test_a_rank_holds_what_the_strategy_says(
    strategy: str, weights: float, state: float, gradients: float
) -> None:
    shape, batch_size, *_ = MEASURED["162M"]
    alone = plan(recipe(shape, batch_size), H200).memory
    shared = plan(recipe(shape, batch_size, f"parallel.strategy={strategy}"), H200, ranks=4)
    assert shared.rows == batch_size // 4
    assert shared.memory.weights == pytest.approx(weights * alone.weights)
    assert shared.memory.optimizer == pytest.approx(state * alone.optimizer)
    packed = 52_428_800 if strategy == "zero1" else 0  # a bucket of 50 MiB
    assert shared.memory.gradients == pytest.approx(gradients * alone.gradients + packed, rel=1e-3)


def test_hybrid_sharding_divides_by_the_ranks_of_one_copy() -> None:
    course = load_recipe("course_8b", ["train.batch_size=8"])
    hybrid = load_recipe("course_8b", ["train.batch_size=8", "parallel.options={shard_ranks=2}"])
    two, eight = plan(course, H200, ranks=2).memory, plan(course, H200, ranks=8).memory
    of_copy = plan(hybrid, H200, ranks=8).memory
    assert two.weights == of_copy.weights == 4 * eight.weights
    assert two.optimizer == of_copy.optimizer


def test_what_cannot_be_planned() -> None:
    shape, *_ = MEASURED["162M"]
    for code, made, ranks in (
        ("batches.indivisible", recipe(shape, 32), 3),
        ("recipe.missing_table", load_recipe("bench_step"), 1),
    ):
        with pytest.raises(UsageError) as caught:
            plan(made, H200, ranks=ranks)
        assert caught.value.code == code
    no_vocabulary = load_recipe("quickstart").model_copy(update={"tokenizer": None})
    with pytest.raises(UsageError) as caught:
        plan(no_vocabulary, H200)
    assert caught.value.code == "recipe.no_vocabulary"


def test_the_8b_model_fits_two_h200() -> None:
    made = plan(load_recipe("course_8b"), H200, ranks=2)
    assert made.parameters == 8_125_698_048
    assert made.fits
    assert not plan(load_recipe("course_8b"), CARDS["A100 40GB"], ranks=2).fits


@pytest.mark.parametrize(("card", "is_said"), [("A100 40GB", True), ("H100", False)])
def test_a_recipe_that_will_not_fit_is_said(
    monkeypatch: pytest.MonkeyPatch, card: str, is_said: bool
) -> None:
    course = load_recipe("course_8b")
    assert (
        misfit(course.model_copy(update={"run": load_recipe("quickstart", ["run.device=cpu"]).run}), ranks=2)
        is None
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(planning, "card_here", lambda: CARDS[card])
    said = misfit(course, ranks=2)
    assert (said is not None) == is_said
    assert said is None or CARDS[card].name in said


SMALL = ["run.device=cpu", "model.num_layers=2", "model.context_length=8", "train.batch_size=4"]


def test_two_steps_are_measured_and_a_step_in_miniature_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, for which nothing is planned: as a rank does on a GPU."""
    monkeypatch.setattr(plan_check, "SAMPLED_S", 0.0)
    small = load_recipe("quickstart", [*SMALL, "train.accumulation=2"])
    found = measure(small)
    assert found.peak_bytes is not None
    assert found.seconds is not None
    assert found.seconds > 0
    assert launch(small) > 0


class Calls(TorchDispatchMode):
    """Count the operations of PyTorch by name, which a host calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "foreach" not in str(func):  # of AdamW: so many elements at a time, on a CPU
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "keys",
    [
        ["model.qk_norm=true", "train.accumulation=2"],
        ["model.num_heads=8", "model.num_kv_heads=2", "optimizer.name=adamw"],
        ["model.attention=sdpa", "model.activation_checkpointing=block", "model.tie_embeddings=false"],
    ],
    ids=str,
)
def test_a_miniature_calls_the_same_operations(monkeypatch: pytest.MonkeyPatch, keys: list[str]) -> None:
    small = load_recipe("quickstart", [*SMALL, *keys])
    made = plan(small, H200)
    counts = []
    recipes = [small.changed(model=made.config, train=made.train), miniature(made, small)]
    for each in recipes:
        step = TrainingStep(each, Ranks())
        step.run()
        with Calls() as calls:
            step.run()
        counts.append(calls.counts)
    assert counts[0] == counts[1]
    assert counts[0].total() > 100
    assert recipes[1].model is not None
    assert count_parameters(recipes[1].model).total < made.parameters / 2


def test_the_host_is_timed_with_as_many_ranks_as_this_machine_has_gpus(monkeypatch):
    """With fewer GPUs, one rank's share of what was expected scales the plan."""
    recipe = load_recipe("quickstart", ["parallel.strategy=fsdp", *OFF])
    made, alone = plan(recipe, H200, ranks=2), plan(recipe, H200)
    monkeypatch.setattr(plan_check, "spawn_ranks", lambda ranks, target, args: {1: 0.05, 2: 0.125}[ranks])
    assert timed_here(made, recipe) is made  # no GPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    scaled = made.host_seconds * 0.05 / alone.host_seconds
    for gpus, timed, seconds in ((2, "here", 0.125), (1, "scaled", scaled)):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        found = timed_here(made, recipe)
        assert found.timed == timed
        assert found.seconds == found.host_seconds == pytest.approx(seconds)
    captured = load_recipe("quickstart")
    made = plan(captured, H200)
    assert timed_here(made, captured) is made


def test_fp8_takes_the_place_of_bf16_products() -> None:
    shape, batch_size, _, _ = MEASURED["1.3B"]
    narrow, low = (
        plan(recipe(shape, batch_size, f"train.precision={name}"), H200) for name in ("bf16", "fp8")
    )
    assert low.memory == narrow.memory
    assert narrow.seconds is not None
    assert low.seconds is not None
    assert 1.1 < narrow.seconds / low.seconds < 1.3
    flops = [sum(part.flops for part in made.work.values()) for made in (narrow, low)]
    assert flops[0] == flops[1]
    shape, batch_size, _, _ = MEASURED["162M"]  # too narrow
    narrow, low = (
        plan(recipe(shape, batch_size, f"train.precision={name}"), H200) for name in ("bf16", "fp8")
    )
    assert low.work == narrow.work
