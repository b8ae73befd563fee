"""`lmkit recipe`, and --print-recipe."""

import json
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("recipe", "command"),
    [
        ("quickstart", "run 'a copy.toml'"),
        ("bench_attention_cpu", "bench attention 'a copy.toml'"),
        ("lm_matrix_cpu", "bench lm-matrix 'a copy.toml'"),
        ("bench_ddp_cpu", "bench ddp 'a copy.toml' --nproc 2"),
        ("profile", "profile kineto 'a copy.toml'"),
        ("own.toml", "train 'a copy.toml'"),
    ],
)
def test_a_copy_comes_with_its_command(recipe, command, terminal):
    Path("own.toml").write_text('[data]\ntrain = "tokens.npy"\n[model]\n[train]\n')
    copied = terminal("recipe", "copy", recipe, "a copy.toml", "--json")
    assert json.loads(copied)["command"] == f"lmkit {command}"
    terminal("recipe", "validate", "a copy.toml")
    terminal.refuses("recipe", "copy", recipe, "a copy.toml", code="output.exists")
    terminal("recipe", "copy", recipe, "a copy.toml", "--force")


@pytest.mark.parametrize("command", ["run quickstart", "train quickstart", "bench ddp quickstart"])
def test_print_recipe_prints_a_recipe(command, terminal):
    command += " --set train.steps=7 --print-recipe"
    Path("printed.toml").write_text(terminal(command))
    shown = terminal("recipe show printed.toml")
    assert "\nsteps = 7 " in shown
    assert shown.startswith("# parameters: ")
    assert json.loads(terminal(f"{command} --json"))["train"]["steps"] == 7


def test_steps_on_the_command_line_take_the_place_of_epochs(terminal):
    Path("own.toml").write_text("[train]\nepochs = 2\n")
    for command in ("train quickstart --set train.epochs=2 --steps 7", "run own.toml --set train.steps=7"):
        printed = json.loads(terminal(f"{command} --print-recipe --json"))
        assert (printed["train"]["steps"], printed["train"]["epochs"]) == (7, None)
