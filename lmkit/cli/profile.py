"""`lmkit profile`: find out why it is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lmkit.cli.options import DebugOption, JsonOption, SetOption
from lmkit.cli.render import show

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Find out why it is slow.",
    epilog="Example: lmkit profile kineto quickstart",
)  # fmt: skip

OutputOption = Annotated[Path, typer.Option(help="Folder for the recording and its summary.")]


@app.command(
    epilog="Examples: lmkit profile nsys -- lmkit train quickstart --stop-at-step 20; lmkit profile nsys old.sqlite"
)
def nsys(
    target: Annotated[
        list[str], typer.Argument(help="A .sqlite or .nsys-rep file, or `--` and a command to run.")
    ],
    output: OutputOption = Path("artifacts/profiles/nsys"),
    engine: Annotated[
        Literal["auto", "nsys"],
        typer.Option(help="auto: `lmkit train RECIPE` is profiled with kineto where nsys is missing."),
    ] = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run a command under Nsight Systems and summarise it, or summarise a recording."""
    from lmkit.commands import profile as commands

    show(commands.nsys(target, output, engine=engine), as_json=as_json)


@app.command(epilog="Example: lmkit profile kineto quickstart --steps 5")
def kineto(
    target: Annotated[str, typer.Argument(help="A recipe, or a .json[.gz] trace of torch.profiler.")],
    set_: SetOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to record.")] = 5,
    output: OutputOption = Path("artifacts/profiles/kineto"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Record training steps with torch.profiler, on a CPU too, and summarise them."""
    from lmkit.recipe.load import load_recipe

    if target.endswith((".json", ".json.gz")):
        from lmkit.commands import profile as commands

        show(commands.trace(Path(target), output), as_json=as_json)
        return
    recipe = load_recipe(target, set_ or ())
    from lmkit.commands import profile as commands

    show(commands.kineto(recipe, output, steps=steps), as_json=as_json)
