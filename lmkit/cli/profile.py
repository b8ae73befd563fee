"""`lmkit profile`: find out why it is slow."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from lmkit.cli.options import (
    DebugOption,
    ForceOption,
    Group,
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
    cls=Group, no_args_is_help=True, rich_markup_mode=None, help="Find out where time and memory go.",
    epilog="Example: lmkit profile kineto quickstart",
)  # fmt: skip

# Options that apply to recipes only.
OF_RECIPES = ("set_", "engine", "mode", "steps")
WITHOUT_RECIPE = "leave it out, or record a recipe: lmkit profile kineto RECIPE"

RECORDINGS = (".sqlite", ".nsys-rep", ".json", ".json.gz")


class _TakesCommand(TyperCommand):
    """Keep the words after `--` apart; the parser joins them with the words before it."""

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

    An existing recording (.sqlite, .nsys-rep) is summarised.
    """
    arguments = context.meta[__name__]
    if len(target) > 1 and target != arguments:
        raise UsageError(
            "profile.too_many_targets",
            f"{' '.join(target)}: more than a recipe or a recording",
            hint="put a command after `--`: lmkit profile nsys -- COMMAND",
        )
    folder = _folder(output, "nsys", force=force)
    if not arguments and not _is_recording(target[0]):
        from lmkit.recipe.load import load_recipe

        recipe = load_recipe(target[0], set_ or ())
        from lmkit.profile import run as profile

        show(profile.run_steps(recipe, folder, engine=engine, mode=mode, steps=steps), as_json=as_json)
        return
    from lmkit.profile import run as profile

    what = "is a command" if arguments else "is a recording"
    refuse_typed(context, *OF_RECIPES, why=f"needs a recipe; {target[0]} {what}", hint=WITHOUT_RECIPE)
    if arguments:
        show(profile.run_command(arguments, folder), as_json=as_json)
    else:
        show(profile.run_recording(Path(target[0]), folder), as_json=as_json)


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

    An existing recording (.json, .json.gz) is summarised.
    """
    folder = _folder(output, "kineto", force=force)
    if _is_recording(target):
        why = f"needs a recipe; {target} is a recording"
        refuse_typed(context, *OF_RECIPES, why=why, hint=WITHOUT_RECIPE)
        from lmkit.profile import run as profile

        show(profile.run_recording(Path(target), folder), as_json=as_json)
        return
    from lmkit.recipe.load import load_recipe

    recipe = load_recipe(target, set_ or ())
    from lmkit.profile import run as profile

    show(profile.run_steps(recipe, folder, engine="kineto", mode=mode, steps=steps), as_json=as_json)


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

    Writes a picture and a snapshot for pytorch.org/memory_viz.
    """
    folder = _folder(output, "memory", force=force)
    from lmkit.recipe.load import load_recipe

    loaded = load_recipe(recipe, set_ or ())
    from lmkit.profile import run as profile

    show(profile.run_memory(loaded, folder, mode=mode, steps=steps), as_json=as_json)


def _folder(output: Path | None, command: str, *, force: bool) -> Path:
    """Return the output folder.

    Raises:
        UsageError: the folder is not writable, or it was named and holds a profile already.
    """
    from lmkit.storage.outputs import refuse_unwritable

    if output is None:
        output = Path("artifacts/profiles") / command
        refuse_unwritable(output)
        return output
    reports = (output / "profile_report.md", output / "memory_report.md")
    if any(report.exists() for report in reports) and not force:
        raise UsageError(
            "output.exists", f"{output}: holds a profile already", hint="name another folder, or add --force"
        )
    refuse_unwritable(output)
    return output


def _is_recording(target: str) -> bool:
    """Whether the target's ending names a recording; everything else is a recipe.

    Raises:
        UsageError: the file is neither.
    """
    if target.endswith(RECORDINGS):
        return True
    if Path(target).is_file() and not target.endswith(".toml"):
        raise UsageError(
            "trace.wrong_kind",
            f"{target}: neither a recipe (.toml) nor a recording ({', '.join(RECORDINGS)})",
            hint="torch.profiler writes .json[.gz], Nsight Systems .nsys-rep and .sqlite; "
            "a command is profiled with: lmkit profile nsys -- COMMAND",
        )
    return False
