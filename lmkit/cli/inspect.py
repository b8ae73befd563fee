"""`lmkit env`: what is here, and what works with it."""

from __future__ import annotations

import typer

from lmkit.cli.options import DebugOption, JsonOption
from lmkit.cli.render import show


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command(epilog="Example: lmkit env --json")(env)


def env(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Versions, GPUs, and which kernels would run here."""
    from lmkit.commands import env as command

    show(command.run(), as_json=as_json)
