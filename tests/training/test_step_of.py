"""Every command that makes the step of a recipe makes it from all of its keys."""

import ast
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

import lmkit
from lmkit.bench.ddp_variants import case_of, make_training
from lmkit.parallel.ranks import Ranks
from lmkit.profile.run import Workload
from lmkit.profile.run import make_training as profiled
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    Table,
    TrainConfig,
)
from lmkit.training import run_data, session, setup
from lmkit.training.plan import measure_among
from lmkit.training.setup import TrainingStep
from lmkit.training.verify import verify_resume

RECIPE = Recipe(
    run=RunConfig(device="cpu"),
    data=DataConfig(source="random"),
    model=ModelConfig(
        vocab_size=64,
        d_model=48,
        num_heads=4,
        num_layers=3,
        activation_checkpointing="selective",
        activation_gb=1.0,
    ),
    optimizer=OptimizerConfig(name="muon"),
    train=TrainConfig(batch_size=24, nonfinite="skip"),
)
TABLES = ("model", "optimizer", "train", "parallel")
NOT_IN_THE_STEP = {
    *("init_from", "steps", "tokens_per_parameter", "epochs", "max_minutes"),
    *("log_interval", "eval_interval", "eval_batches", "sample_interval", "tensorboard"),
}
"""Keys of [train]; all other keys of `TABLES` have a part in the step."""
TWO = Ranks(world_size=2)
ALL = {f"parallel.{key}" for key in ParallelConfig.model_fields}
NAMED = {"strategy", "options", "reduce_dtype", "weights", "gather"}
OF_BENCH = {"batch_size", "accumulation", "precision", "cuda_graph"}
ROADS: dict[str, tuple[Any, set[str]]] = {
    "train": (session.train, ALL),
    "verify": (verify_resume, ALL),
    "profile": (lambda recipe: profiled(Workload(recipe)), ALL | {"train.cuda_graph"}),
    "plan --check": (lambda recipe: measure_among(TWO, recipe), set()),
    "bench ddp": (
        lambda recipe: make_training("flat", case_of(recipe, recipe.bench_table("ddp"), "ddp"), TWO),
        {f"train.{key}" for key in OF_BENCH} | {f"parallel.{key}" for key in NAMED},
    ),
}
"""How a command gets to its step, and the keys that it does not take from the recipe."""
VALUES = (
    *(True, False, 2, 24, 0.5, 1e-4, (0.5, 0.5), "LS", Path("weights"), {"momentum": 0.5}),
    *("muon", "adamw", "linear", "small", "vectorized", "plain", "block", "bf16", "off"),
    *("stop", "flat", "collective", "gloo"),
)


class MadeError(Exception):
    """The step is made; what follows is none of this test's business."""


def other(table: Table, key: str) -> Table:
    """Return the table with another value of one key, that it allows."""
    more = {"activation_gb": None} if key == "activation_checkpointing" else {}
    for value in VALUES:
        with suppress(ValidationError):
            made = type(table)(**{**dict(table), **more, key: value})
            if getattr(made, key) != getattr(table, key):
                return made
    raise AssertionError(f"{key}: add a value to VALUES")


@pytest.fixture
def made_of(monkeypatch, tmp_path):
    """Return what a step is made of on some road: the arguments of `build_step` and those of its batches."""
    heard: dict[str, Any] = {}

    def stop(*_: Any, **__: Any) -> Any:
        raise MadeError

    def build(model: ModelConfig, ranks: Ranks, **arguments: Any) -> Any:
        del arguments["fingerprint"]
        heard.update(arguments, model=model)
        return SimpleNamespace(model=None, optimizer=None)

    def batches(vocab_size: int, **arguments: Any) -> Any:
        heard["batches"] = (vocab_size, arguments)
        return SimpleNamespace(batch=stop)

    monkeypatch.setattr(setup, "build_step", build)
    monkeypatch.setattr(run_data, "RandomTokens", batches)
    monkeypatch.setattr(session, "Trainer", stop)
    monkeypatch.setattr(session, "describe_environment", dict)

    def listen(road: Any, recipe: Recipe) -> dict[str, Any]:
        heard.clear()
        with suppress(MadeError):
            road(recipe.changed(run={"folder": tmp_path}))
        return dict(heard)

    return listen


@pytest.mark.parametrize("road", ROADS)
def test_a_command_makes_the_step_from_every_key_of_the_recipe(made_of, road):
    way, own = ROADS[road]
    before, whole = made_of(way, RECIPE), made_of(lambda recipe: TrainingStep(recipe, TWO), RECIPE)
    assert before.keys() == whole.keys()
    overlooked, changed = set(), set()
    for name in TABLES:
        table = getattr(RECIPE, name)
        for key in type(table).model_fields:
            recipe = RECIPE.changed(**{name: other(table, key)})
            if whole == made_of(lambda recipe: TrainingStep(recipe, TWO), recipe):
                assert name == "train"
                assert key in NOT_IN_THE_STEP
                continue
            changed.add(f"{name}.{key}")
            if made_of(way, recipe) == before:
                overlooked.add(f"{name}.{key}")
    assert overlooked == own & changed
    assert changed > ALL


def test_steps_are_made_in_one_place():
    makers = {"Step", "build_step", "step_of"}
    found = {
        (path.name, node.func.id)
        for path in Path(lmkit.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers
    }
    assert found == {
        ("setup.py", "Step"),
        ("setup.py", "build_step"),
        ("setup.py", "step_of"),
        ("session.py", "step_of"),
    }
