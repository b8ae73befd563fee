"""`lmkit recipe`, and --print-recipe."""

import json
from pathlib import Path

import pytest


def test_a_copy_is_the_recipe(terminal):
    terminal("recipe", "copy", "bench_ddp_cpu", "a copy.toml")
    terminal("recipe", "validate", "a copy.toml")
    terminal.refuses("recipe", "copy", "quickstart", "a copy.toml", code="output.exists")
    terminal("recipe", "copy", "quickstart", "a copy.toml", "--force")
    shown = [terminal("recipe", "show", name) for name in ("quickstart", "a copy.toml")]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("command", ["run quickstart", "train quickstart", "bench ddp quickstart"])
def test_print_recipe_prints_a_recipe(command, terminal):
    command += " --set train.steps=7 --print-recipe"
    Path("printed.toml").write_text(terminal(command))
    shown = terminal("recipe show printed.toml")
    assert "\nsteps = 7 " in shown
    assert json.loads(terminal(f"{command} --json"))["train"]["steps"] == 7
