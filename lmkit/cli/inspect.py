"""`lmkit env`, `verify`, `compare`, `report`: what is here, is it whole, did it change, and what does it say."""

from pathlib import Path
from typing import Annotated

import typer

from lmkit.cli.options import DebugOption, JsonOption, PluginOption, SetOption, examples, refuse_typed
from lmkit.cli.render import show
from lmkit.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the commands to the root."""
    app.command(epilog="Example: lmkit env --json")(env)
    app.command(epilog="Example: lmkit compare before/ after/")(compare)
    app.command(epilog=examples("lmkit report", "lmkit report artifacts/profiles --output write_ups"))(report)
    app.command(epilog=examples("lmkit verify artifacts/runs/quickstart", "lmkit verify resume quickstart"))(
        verify
    )


def env(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Versions, GPUs, and which kernels would run here."""
    from lmkit.commands import env as command

    show(command.run(), as_json=as_json)


def compare(
    before: Annotated[Path, typer.Argument(help="A bench's result folder, or the .jsonl file in it.")],
    after: Annotated[Path, typer.Argument(help="The newer one, likewise.")],
    threshold: Annotated[float, typer.Option(min=0, help="Smallest relative difference that counts.")] = 0.05,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare two results of one bench, row by row.

    Exit code 1 if something is worse or nothing was compared.
    """
    from lmkit.commands import compare as command

    result = command.run(before, after, threshold=threshold)
    show(result, as_json=as_json)
    if not result.is_fine:
        raise typer.Exit(1)


def report(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Where the results of benches and profiles lie, at any depth.  "
            "[default: artifacts/benches and artifacts/profiles]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the write-ups.  [default: `reports` in that folder, or in artifacts/benches]",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing; exit code 1 if a write-up does not say what the rows say."
        ),
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make write-ups of measured results.

    Of profiling, attention, data parallelism and optimizer sharding, as far as there are results.
    """
    from lmkit.commands import report as command

    show(command.run(folder, output, check=check), as_json=as_json)


def verify(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            help="A run folder, checkpoint, token file, tokenizer or recipe; or the word `resume`, then a recipe."
        ),
    ],
    recipe: Annotated[
        str | None, typer.Argument(help="After `resume`: what to train.", show_default=False)
    ] = None,
    set_: SetOption = None,
    plugin: PluginOption = None,
    steps: Annotated[int, typer.Option(min=1, help="After `resume`: N.")] = 5,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check that files are whole, or that resuming is exact.

    `lmkit verify resume RECIPE` trains 2N steps and N + N, which must agree bit for bit. Exit code 1 if something is
    wrong.
    """
    if (target == "resume") != (recipe is not None):
        raise UsageError(
            "lmkit verify: takes a path, or `resume` and a recipe",
            hint="for example: lmkit verify resume quickstart",
        )
    if recipe is None:
        refuse_typed(
            context,
            "set_",
            "steps",
            why="only after `resume`; files are checked as they are",
            hint="leave it out, or: lmkit verify resume RECIPE --steps N",
        )
        from lmkit.training import verify as command

        result = command.verify_path(Path(target))
    else:
        from lmkit.recipe.load import load_recipe

        loaded = load_recipe(recipe, set_ or ())
        from lmkit.training import verify as command

        result = command.verify_resume(loaded, steps=steps)
    show(result, as_json=as_json)
    if not result.ok:
        raise typer.Exit(1)
