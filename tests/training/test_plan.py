"""Plans: what was measured on a GPU, what strategies share out, and where the edge lies."""

from __future__ import annotations

import pytest
from raising import raises

from lmkit.errors import UsageError
from lmkit.measure.environment import CARDS
from lmkit.recipe.load import load_recipe
from lmkit.recipe.recipe import Recipe
from lmkit.training import plan as planning
from lmkit.training import session
from lmkit.training.plan import measure, plan

H200 = CARDS["H200"]
SHAPE = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size", "context_length")
# Shape and batch (artifacts/h200/step: bf16, fused operations, flash_triton).
SMALLER = (12, 768, 12, 12, 2048, 50_304, 1024), 32
LARGER = (24, 2048, 16, 16, 5504, 50_304, 2048), 8


def keys_of(shape: tuple[int, ...], batch_size: int) -> list[str]:
    sizes = [f"model.{key}={value}" for key, value in zip(SHAPE, shape, strict=True)]
    return [*sizes, "model.tie_embeddings=false", f"train.batch_size={batch_size}"]


FORMER_STORIES = [  # tinystories as it was measured
    *("optimizer.name=adamw", "model.num_heads=16", "model.attention=sdpa", "model.compile=block"),
    "train.batch_size=128",
]
FORMER_SPEEDRUN = ["optimizer.name=adamw", "train.precision=fp32"]  # as it was measured
NARROW = ["train.precision=bf16", "model.attention=flash_triton"]
FORMER_TEXT = ["tokenizer.vocab_size=512", "model.context_length=64", "train.batch_size=16"]  # likewise
UNTIED = ["model.tie_embeddings=false", "model.activation_checkpointing=attention"]
SELECTIVE = ["model.activation_checkpointing=selective", "model.activation_gb=6.0"]
BF16_STATES = 'parallel.options={state_dtype="bf16"}'
# Recipe, keys -> GB of a step without a CUDA graph (one H200, torch 2.11, 2026-11-27).
ON_ONE_GPU = [
    ("llama_1b", keys_of(*SMALLER), 14.0),
    ("llama_1b", keys_of(*LARGER), 47.2),
    ("quickstart", [], 0.0774),
    ("text_files", FORMER_TEXT, 0.0311),
    ("chat", [], 0.1844),
    ("finetune", [], 0.1137),
    ("speedrun", FORMER_SPEEDRUN, 1.5534),
    ("tinystories", FORMER_STORIES, 3.5002),
    ("tinystories", [], 6.0638),
    ("profile", [], 10.0877),
    ("llama_1b", [], 60.6628),
    ("llama_1b", UNTIED, 28.9057),
    ("llama_1b", ["model.activation_checkpointing=block"], 23.0389),
    ("llama_1b", [*SELECTIVE, "model.num_layers=8"], 19.8550),
]
SWITCHED = [
    ("compile=block", 15.132),
    ("operations=plain", 17.571),
    ("activation_checkpointing=block", 4.838),
]
ON_TWO_GPUS = [
    ("course_8b", [], 73.092),
    ("course_8b", [BF16_STATES, "model.num_layers=3", "model.activation_checkpointing=none"], 24.378),
    ("llama_1b", ["parallel.strategy=fsdp", *UNTIED], 15.189),
    ("tinystories", [*FORMER_STORIES, "parallel.strategy=bucketed"], 1.926),
    ("text_files", [*FORMER_TEXT, "parallel.strategy=fsdp"], 0.0173),
    ("quickstart", ["parallel.strategy=zero1"], 0.0589),
    ("profile", ["parallel.strategy=fsdp"], 4.7098),
    ("llama_1b", ["parallel.strategy=zero1"], 33.1444),
    ("llama_1b", ["parallel.strategy=fsdp"], 31.3316),
]


@pytest.fixture(autouse=True)
def no_quickstart(tmp_path, monkeypatch):
    """`chat` and `finetune` name the tokenizer of the quickstart's run; they were measured without one."""
    monkeypatch.chdir(tmp_path)


def recipe(shape: tuple[int, ...], batch_size: int, *more: str) -> Recipe:
    return load_recipe("llama_1b", [*keys_of(shape, batch_size), *more])


@pytest.mark.parametrize(
    ("ranks", "rel", "name", "keys", "gb"),
    [
        *((1, 0.05, *case) for case in ON_ONE_GPU),
        *((1, 0.005, "llama_1b", [*keys_of(*SMALLER), f"model.{switch}"], gb) for switch, gb in SWITCHED),
        *((2, 0.01, *case) for case in ON_TWO_GPUS),
    ],
)
def test_the_plan_agrees_with_what_a_step_took(ranks, rel, name, keys, gb):
    made = plan(load_recipe(name, keys), H200, ranks=ranks)
    assert made.fits
    assert made.memory.peak / 1e9 == pytest.approx(gb, rel=rel)


@pytest.mark.parametrize(
    ("name", "keys", "megabytes"),
    [
        ("text_files", [*FORMER_TEXT, "train.batch_size=12"], 46.3),
        ("quickstart", [], 88.1),
        ("quickstart", NARROW, 81.9),
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


def test_the_largest_batch_and_context_fit_and_the_next_do_not() -> None:
    shape, batch_size = LARGER
    made = plan(recipe(shape, batch_size), CARDS["A100"])
    for rows, fits in ((made.most_rows, True), (made.most_rows + 1, False)):
        assert plan(recipe(shape, rows), CARDS["A100"]).fits is fits
    for context, fits in ((made.most_context, True), (made.most_context + 64, False)):
        assert plan(recipe((*shape[:-1], context), batch_size), CARDS["A100"]).fits is fits
    assert plan(recipe(shape, batch_size), CARDS["T4"]).most_rows == 0


@pytest.mark.parametrize(
    ("strategy", "weights", "state", "gradients"),
    [("bucketed", 1, 1, 1), ("zero1", 1, 1 / 4, 1), ("flat", 1, 1, 2)],
)
def test_a_rank_holds_what_the_strategy_says(strategy, weights, state, gradients):
    shape, batch_size = SMALLER
    alone = plan(recipe(shape, batch_size), H200).memory
    shared = plan(recipe(shape, batch_size, f"parallel.strategy={strategy}"), H200, ranks=4)
    assert shared.rows == batch_size // 4
    assert shared.memory.weights == pytest.approx(weights * alone.weights)
    assert shared.memory.optimizer == pytest.approx(state * alone.optimizer)
    packed = 52_428_800 if strategy == "zero1" else 0  # a bucket of 50 MiB
    assert shared.memory.gradients == pytest.approx(gradients * alone.gradients + packed, rel=1e-3)


def test_what_cannot_be_planned() -> None:
    for code, made, ranks in (
        ("batches.indivisible", recipe(*SMALLER), 3),
        ("recipe.missing_table", load_recipe("bench_step"), 1),
        ("recipe.no_vocabulary", load_recipe("quickstart").changed(tokenizer=None), 1),
    ):
        with raises(UsageError, code):
            plan(made, H200, ranks=ranks)


@pytest.mark.parametrize(("card", "is_said"), [("A100 40GB", True), ("H100", False)])
def test_a_recipe_that_will_not_fit_is_said(monkeypatch, card, is_said):
    course = load_recipe("course_8b")
    assert session.misfit(course.changed(run={"device": "cpu"}), ranks=2) is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(session, "card_here", lambda: CARDS[card])
    said = session.misfit(course, ranks=2)
    assert (said is not None) == is_said
    assert said is None or CARDS[card].name in said


SMALL = ["run.device=cpu", "model.num_layers=2", "model.context_length=8", "train.batch_size=4"]


def test_two_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, for which nothing is planned: as a rank does on a GPU."""
    monkeypatch.setattr(planning, "SAMPLED_S", 0.0)
    found = measure(load_recipe("quickstart", [*SMALL, "train.accumulation=2"]))
    assert found.peak_bytes is not None
    assert found.seconds > 0
