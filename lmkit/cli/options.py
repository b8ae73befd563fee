"""Groups of commands, and the arguments and options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer
from typer.core import TyperGroup

from lmkit.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])


def option(text: str, *names: str, **settings: Any) -> Any:
    """Return a Typer option whose help does not show the default."""
    return typer.Option(*names, help=text, show_default=False, **settings)


def _key_option(key: str) -> Any:
    """Return the type of the option that sets a key of the recipe, such as `generate.seed`; its help is the key's
    docstring."""
    from lmkit.recipe.keys import of_table

    table, _, name = key.partition(".")
    annotation, text = of_table(table)[name]
    kind = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    return Annotated[kind | None, option(f"{text.rstrip('.')} ({key}).")]


def _turn_on_log(context: typer.Context, debug: bool) -> None:
    """Callback of `--debug`: runs when the options of a command are parsed, so not for `--help`."""
    if debug:
        context.find_root().ensure_object(dict)["debug"] = True
    if context.parent is not None:  # a command that is about to run, not the root
        from lmkit.cli.console import log_to_stderr

        log_to_stderr()


def _load_plugins(paths: list[Path] | None) -> list[Path] | None:
    """Callback of `--plugin`: runs before the body of the command, so before a recipe is validated."""
    from lmkit.plugins import load_plugin

    for path in paths or ():
        load_plugin(path)
    return paths


RecipeArgument = Annotated[
    str, typer.Argument(help="A .toml file, or the name of a shipped recipe (see `lmkit recipe list`).")
]
SetOption = Annotated[
    list[str] | None,
    option(
        "Set one key of the recipe; repeatable. The value is TOML; a bare word is a string.",
        "--set",
        metavar="TABLE.KEY=VALUE",
    ),
]
PluginOption = Annotated[
    list[Path] | None,
    option(
        "Import a Python file that registers kernels, strategies, ...; repeatable.",
        "--plugin",
        metavar="FILE",
        callback=_load_plugins,
        expose_value=False,
    ),
]
DebugOption = Annotated[
    bool,
    typer.Option("--debug", callback=_turn_on_log, expose_value=False, help="Show the traceback of errors."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite existing output.")]
PrintRecipeOption = Annotated[
    bool, typer.Option("--print-recipe", help="Print the resolved recipe and stop.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print what would happen, and stop.")
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="`auto`: CUDA if there is a GPU, else the CPU.")
]
MOST_RANKS = 64
"""The largest number of ranks that a command starts."""
NprocOption = Annotated[
    int,
    typer.Option(
        min=1, max=MOST_RANKS, help="Number of ranks (processes) to start on this machine; not with torchrun."
    ),
]
SourcesArgument = Annotated[
    list[Path],
    typer.Argument(
        help="Text files or pipes, one or more, compressed if they end in .gz; "
        "each JSON object of a .jsonl, .ndjson or .json file has a document under --field."
    ),
]
WorkersOption = Annotated[int | None, option("Worker threads; 0: one per CPU (default).", min=0, max=1024)]
ErrorsOption = Annotated[
    Literal["strict", "replace"],
    typer.Option(help="At bytes that are not UTF-8: stop, or read them as U+FFFD."),
]


FieldOption = Annotated[
    str | None, typer.Option(help='Key of a JSON object that holds the text, if not "text".')
]


class Group(TyperGroup):
    """The class of every group of commands."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return `--help` with a default of False: Typer 0.29 imports pydantic to convert the default None."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


class Commands(typer.Typer):
    """The commands of one file.

    `add` registers a function as a command. Its result is printed as text, or with `--json` as JSON; if it has an
    attribute `is_fine` that is false, the exit code is 1. A function that prints by itself declares `as_json` and
    returns None.
    """

    def __init__(self, text: str | None = None, *, example: str = "", cls: type[Group] = Group) -> None:
        super().__init__(
            cls=cls,
            help=text,
            epilog=f"Example: {example}",
            no_args_is_help=True,
            rich_markup_mode=None,
            add_completion=False,
        )

    def add(
        self, *examples: str, name: str | None = None, keys: Sequence[str] = (), **settings: Any
    ) -> Callable[[Function], Function]:
        """Register the decorated function as a command with `--json`, `--debug`, and `--plugin` if it has `--set`.

        Args:
            examples: command lines for the help.
            name: the command's name if it is not the function's.
            keys: keys of the recipe, such as "generate.seed", that have an option. The function gets what was typed
                as its argument `flags`, key -> value; None where an option was left out.
            settings: of `typer.Typer.command`.
        """
        epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
        if len(examples) == 1:
            epilog = f"Example: {examples[0]}"

        def register(function: Function) -> Function:
            self.command(name, epilog=epilog, **settings)(_with_shared_options(function, keys))
            return function

        return register


def _with_shared_options(function: Callable[..., Any], keys: Sequence[str]) -> Callable[..., None]:
    """Return the function with the shared options it lacks, and those of keys, which prints the function's result."""
    signature = inspect.signature(function, eval_str=True)
    own = signature.parameters
    flags = {key.partition(".")[2]: key for key in keys}
    shared: dict[str, tuple[Any, Any]] = {name: (_key_option(key), None) for name, key in flags.items()}
    shared |= {"plugin": (PluginOption, None)} if "set_" in own else {}
    shared |= {"as_json": (JsonOption, False), "debug": (DebugOption, False)}

    @functools.wraps(function)
    def command(**values: Any) -> None:
        values["flags"] = {key: values[name] for name, key in flags.items()}
        result = function(**{name: _in_home(values[name]) for name in own})
        if result is not None:
            from lmkit.cli.console import show

            show(result, as_json=values["as_json"])
            if not getattr(result, "is_fine", True):
                raise typer.Exit(1)

    parameters = [parameter for name, parameter in own.items() if name != "flags"]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (kind, default) in shared.items()
        if name not in own
    ]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _in_home(value: Any) -> Any:
    """Return an argument with the home folder in place of `~`: a shell leaves `--output=~/new` as it is."""
    if isinstance(value, list):
        return [_in_home(item) for item in value]
    if not isinstance(value, Path):
        return value
    from lmkit.storage.inputs import in_home  # not for --help

    return in_home(value)


def refuse_typed(context: typer.Context, *parameters: str, why: str, hint: str) -> None:
    """Refuse options that the user typed and the command would ignore. Defaults do not count.

    Args:
        parameters: their names in the function of the command.

    Raises:
        UsageError: names every such option.
    """

    def is_typed(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    named = [parameter for parameter in context.command.params if parameter.name in parameters]
    typed = [parameter.opts[0] for parameter in named if is_typed(str(parameter.name))]
    if typed:
        raise UsageError("command.unused_option", f"{', '.join(typed)}: {why}", hint=hint)
