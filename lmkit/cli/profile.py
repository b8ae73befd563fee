"""`lmkit profile`: find out why it is slow."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from lmkit.cli.options import (
    DebugOption,
    ForceOption,
    JsonOption,
    ModeOption,
    PluginOption,
    RecipeArgument,
    RecordedStepsOption,
    RecordingOption,
    SetOption,
    examples,
    refuse_typed,
)
from lmkit.cli.render import show
from lmkit.errors import UsageError

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Find out where time and memory go.",
    epilog="Example: lmkit profile kineto quickstart",
)  # fmt: skip

# Options that say how a recipe is recorded, and what to do where there is none.
OF_RECIPES = ("set_", "engine", "mode", "steps")
WITHOUT_RECIPE = "leave it out, or record a recipe: lmkit profile kineto RECIPE"

RECORDINGS = (".sqlite", ".nsys-rep", ".json", ".json.gz")


class _TakesCommand(TyperCommand):
    """Notes the words behind `--`, which the parser joins with those before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[__name__] = args[args.index("--") + 1 :] if "--" in args else []
        return super().parse_args(ctx, args)


@app.command(
    cls=_TakesCommand,
    epilog=examples(
        "lmkit profile nsys quickstart",
        "lmkit profile nsys old.sqlite",
        "lmkit profile nsys -- lmkit train quickstart --stop-at-step 20",
    ),
)
def nsys(
    context: typer.Context,
    target: Annotated[
        list[str],
        typer.Argument(
            help="A recipe, a .sqlite or .nsys-rep file, or `--` and a command with its arguments."
        ),
    ],
    set_: SetOption = None,
    plugin: PluginOption = None,
    engine: Annotated[
        Literal["auto", "nsys", "kineto"],
        typer.Option(help="auto: a recipe is profiled with kineto where nsys is missing."),
    ] = "auto",
    mode: ModeOption = "step",
    steps: RecordedStepsOption = 5,
    output: RecordingOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time of training steps, or of any command, with Nsight Systems.

    A recording that you have already (.sqlite, .nsys-rep) is summarised.
    """
    arguments = context.meta[__name__]
    if len(target) > 1 and target != arguments:
        raise UsageError(
            f"{' '.join(target)}: more than a recipe or a recording",
            hint="a command stands behind `--`, with nothing but options before: lmkit profile nsys -- COMMAND",
        )
    folder = _folder(output, "nsys", force=force)
    if not arguments and not _is_recording(target[0]):
        from lmkit.recipe.load import load_recipe

        recipe = load_recipe(target[0], set_ or ())
        from lmkit.commands import profile as commands

        show(commands.steps(recipe, folder, engine=engine, mode=mode, number=steps), as_json=as_json)
        return
    from lmkit.commands import profile as commands

    what = "is a command" if arguments else "is recorded already"
    refuse_typed(context, *OF_RECIPES, why=f"only with a recipe; {target[0]} {what}", hint=WITHOUT_RECIPE)
    if arguments:
        show(commands.command(arguments, folder), as_json=as_json)
    else:
        show(commands.recording(Path(target[0]), folder), as_json=as_json)


@app.command(epilog="Example: lmkit profile kineto quickstart --steps 5")
def kineto(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="A recipe, or a .json[.gz] trace of torch.profiler.")],
    set_: SetOption = None,
    plugin: PluginOption = None,
    mode: ModeOption = "step",
    steps: RecordedStepsOption = 5,
    output: RecordingOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time of training steps with torch.profiler, on a CPU too.

    A recording that you have already (.json, .json.gz) is summarised.
    """
    folder = _folder(output, "kineto", force=force)
    if _is_recording(target):
        why = f"only with a recipe; {target} is recorded already"
        refuse_typed(context, *OF_RECIPES, why=why, hint=WITHOUT_RECIPE)
        from lmkit.commands import profile as commands

        show(commands.recording(Path(target), folder), as_json=as_json)
        return
    from lmkit.recipe.load import load_recipe

    recipe = load_recipe(target, set_ or ())
    from lmkit.commands import profile as commands

    show(commands.steps(recipe, folder, engine="kineto", mode=mode, number=steps), as_json=as_json)


@app.command(epilog="Example: lmkit profile memory quickstart")
def memory(
    recipe: RecipeArgument,
    set_: SetOption = None,
    plugin: PluginOption = None,
    mode: ModeOption = "step",
    steps: RecordedStepsOption = 2,
    output: RecordingOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Peak memory of training steps by phase and category.

    Draws a picture, and keeps a snapshot for pytorch.org/memory_viz.
    """
    folder = _folder(output, "memory", force=force)
    from lmkit.recipe.load import load_recipe

    loaded = load_recipe(recipe, set_ or ())
    from lmkit.commands import profile as commands

    show(commands.memory(loaded, folder, mode=mode, number=steps), as_json=as_json)


def _folder(output: Path | None, command: str, *, force: bool) -> Path:
    """Where the profile goes.

    Raises:
        UsageError: nothing can be written there, or a folder was asked for and has a profile already.
    """
    from lmkit.storage.outputs import refuse_unwritable

    if output is None:
        output = Path("artifacts/profiles") / command
        refuse_unwritable(output)
        return output
    reports = (output / "profile_report.md", output / "memory_report.md")
    if any(report.exists() for report in reports) and not force:
        raise UsageError(f"{output}: holds a profile already", hint="name another folder, or add --force")
    refuse_unwritable(output)
    return output


def _is_recording(target: str) -> bool:
    """Whether it names a recording by its ending; else it is taken for a recipe.

    Raises:
        UsageError: it is a file of another kind.
    """
    if target.endswith(RECORDINGS):
        return True
    if Path(target).is_file() and not target.endswith(".toml"):
        raise UsageError(
            f"{target}: neither a recipe (.toml) nor a recording ({', '.join(RECORDINGS)})",
            hint="torch.profiler writes .json[.gz], Nsight Systems .nsys-rep and .sqlite; "
            "a command is profiled with: lmkit profile nsys -- COMMAND",
        )
    return False
