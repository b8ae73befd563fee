"""`--plugin FILE`: code of the user's registers kernels before the recipe is validated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmkit import registry
from lmkit.cli.app import root_command, run_command_line
from lmkit.registry import ATTENTION

PLUGIN = """
from lmkit.registry import ATTENTION

@ATTENTION.register("mine")
def mine(q, k, v, *, causal, scale=None):
    return v
"""
USES_IT = ["recipe", "validate", "quickstart", "--set", "model.attention=mine"]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "my_kernels.py"
    path.write_text(PLUGIN)
    monkeypatch.setattr(registry, "PLUGINS", [])
    yield path
    if "mine" in ATTENTION.names:
        ATTENTION.unregister("mine")


def test_what_a_plugin_registers_may_stand_in_a_recipe(plugin: Path, capsys) -> None:
    assert run_command_line(USES_IT) == 2
    assert run_command_line([*USES_IT, "--plugin", str(plugin), "--plugin", str(plugin)]) == 0
    assert [plugin] == registry.PLUGINS


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, "plugin.missing"), ("1 +", "plugin.failed"), ("import nothing", "plugin.failed")],
)
def test_a_plugin_that_cannot_be_imported_is_one_error(
    plugin: Path, content: str | None, code: str, capsys
) -> None:
    plugin.unlink()
    if content is not None:
        plugin.write_text(content)
    assert run_command_line([*USES_IT, "--plugin", str(plugin)]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error[{code}]: ")
    assert str(plugin) in error
    assert hint.startswith("hint: ")


def test_every_command_that_takes_a_recipe_takes_plugins() -> None:
    def walk(command: Any) -> list[Any]:
        names = getattr(command, "commands", ())
        return [command, *(found for name in names for found in walk(command.get_command(None, name)))]

    for command in walk(root_command()):
        options = {name for parameter in command.params for name in parameter.opts}
        assert "--set" not in options or "--plugin" in options, command.name
