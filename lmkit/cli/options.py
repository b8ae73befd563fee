"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from lmkit.errors import UsageError


class Group(TyperGroup):
    """A group of commands: `typer.Typer(cls=Group, ...)`."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return `--help` with a default of False: Typer 0.29 imports pydantic to convert the default None."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


def _prepare(context: typer.Context, value: bool) -> None:
    """Turn on tracebacks and the log; called when the options of a command are parsed, so not for `--help`."""
    if value:
        context.find_root().ensure_object(dict)["debug"] = True
    if context.parent is not None:  # a command that is about to run, not the root
        from lmkit.cli.log import log_to_stderr

        log_to_stderr()


def _load_plugins(paths: list[Path] | None) -> list[Path] | None:
    """Import plugins; called before the body of the command, so before a recipe is validated."""
    from lmkit.registry import load_plugin

    for path in paths or ():
        load_plugin(path)
    return paths


RecipeArgument = Annotated[
    str, typer.Argument(help="A .toml file, or the name of a shipped recipe (see `lmkit recipe list`).")
]
SourcesArgument = Annotated[
    list[Path],
    typer.Argument(
        help='Text files, one or more; of a .jsonl file, the documents under "text" in its lines.'
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="Set one key of the recipe; repeatable. The value is TOML; a bare word is a string.",
        show_default=False,
    ),
]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        callback=_load_plugins,
        expose_value=False,
        help="Import a Python file that registers kernels, strategies, ...; repeatable.",
        show_default=False,
    ),
]
"""Belongs to every command that takes a recipe: `plugin: PluginOption = None`, and nothing else."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
PrintRecipeOption = Annotated[
    bool, typer.Option("--print-recipe", help="Print the resolved recipe and stop.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print what would happen, and stop.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite existing output.")]
DebugOption = Annotated[
    bool,
    typer.Option("--debug", callback=_prepare, expose_value=False, help="Show the traceback of errors."),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=0, max=1024, help="Worker threads; 0: one per CPU (default).", show_default=False),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="`auto`: CUDA if there is a GPU, else the CPU.")
]
NprocOption = Annotated[
    int,
    typer.Option(
        min=1, max=64, help="Number of ranks (processes) to start on this machine; not with torchrun."
    ),
]
ErrorsOption = Annotated[
    Literal["strict", "replace"],
    typer.Option(help="At bytes that are not UTF-8: stop, or read them as U+FFFD."),
]

# Options of the benches
ResultsOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        help="Folder for the results.  [default: artifacts/benches/<run.name>/<bench>, overwritten by each run]",
        show_default=False,
    ),
]
SEVERAL = "comma-separated, or repeat the option"
KernelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--kernels", help=f"Attention kernels that `lmkit env` lists ({SEVERAL}).", show_default=False
    ),
]

# Options of the profiles
RecordingOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        help="Folder for the recording and its summary.  [default: artifacts/profiles/<command>, overwritten]",
        show_default=False,
    ),
]
RecordedStepsOption = Annotated[
    int, typer.Option("--steps", min=1, max=1000, help="Training steps to record.")
]
ModeOption = Annotated[
    Literal["forward", "fwd+bwd", "step"],
    typer.Option(help="What to record of a recipe: whole steps, or only forward (and backward) passes."),
]


def examples(*lines: str) -> str:
    """Return the epilog of a command's help: one example per line."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def split(values: list[str] | None) -> list[str] | None:
    """Return the values of a repeatable option that also takes commas; None if it was not typed."""
    return values and [part.strip() for value in values for part in value.split(",")]


def refuse_typed(context: typer.Context, *parameters: str, why: str, hint: str) -> None:
    """Refuse options that the user typed and the command would ignore. Defaults do not count.

    Args:
        parameters: their names in the function of the command.

    Raises:
        UsageError: names every such option.
    """
    typed = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in parameters and _is_typed(context, parameter.name)
    ]
    if typed:
        raise UsageError("command.unused_option", f"{', '.join(typed)}: {why}", hint=hint)


def _is_typed(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def given(**flags: Any) -> dict[str, Any]:
    """Return typed flags as recipe keys: `train__steps=5` -> {"train.steps": 5}.

    A flag that was left out is None and never overrides the recipe.
    """
    return {name.replace("__", "."): value for name, value in flags.items() if value is not None}
