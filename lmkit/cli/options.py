"""Groups of commands, and the arguments and options that several commands share."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperGroup

Function = TypeVar("Function", bound=Callable[..., Any])


def option(text: str, *names: str, **settings: Any) -> Any:
    """Return a Typer option whose help does not show the default."""
    return typer.Option(*names, help=text, show_default=False, **settings)


def _turn_on_log(context: typer.Context, debug: bool) -> None:
    """Callback of `--debug`: runs when the options of a command are parsed, so not for `--help`."""
    if debug:
        context.find_root().ensure_object(dict)["debug"] = True
    if context.parent is not None:  # a command that is about to run, not the root
        from lmkit.cli.console import log_to_stderr

        log_to_stderr()


MOST_RANKS = 64
"""The largest number of ranks that a command starts."""
Errors = Literal["strict", "replace"]
DEBUG = typer.Option(
    "--debug", callback=_turn_on_log, expose_value=False, help="Show the traceback of errors."
)
SHARED: dict[str, Any] = {
    "set_": Annotated[
        list[str] | None,
        option(
            "Set one key of the recipe; repeatable. The value is TOML; a bare word is a string.",
            "--set",
            metavar="TABLE.KEY=VALUE",
        ),
    ],
    "plugin": Annotated[
        list[Path] | None,
        option(
            "Import a Python file that registers kernels, strategies, ...; repeatable.",
            "--plugin",
            metavar="FILE",
        ),
    ],
    "as_json": Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")],
    "debug": Annotated[bool, DEBUG],
    "device": Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="`auto`: CUDA if there is a GPU, else the CPU.")
    ],
    "nproc": Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="Number of ranks (processes) to start on this machine; not with torchrun.",
        ),
    ],
    "workers": Annotated[int | None, option("Worker threads; 0: one per CPU (default).", min=0, max=1024)],
}
"""Parameter of a command -> what it is, unless the command's docstring explains it."""
HELP = {
    "recipe": "A .toml file, or the name of a shipped recipe (see `lmkit recipe list`).",
    "run": "A run folder, a checkpoint, or a Hugging Face folder.",
    "force": "Overwrite existing output.",
    "print_recipe": "Print the resolved recipe and stop.",
    "dry_run": "Check everything, print what would happen, and stop.",
    "sources": "Text files or pipes, one or more, compressed if they end in .gz or .zst; "
    "each JSON object of a .jsonl, .ndjson or .json file, or row of a .parquet file, has a document under --field.",
    "field": 'Key of a JSON object, or column of a Parquet file, that holds the text, if not "text".',
    "errors": "At bytes that are not UTF-8: stop, or read them as U+FFFD.",
}
"""Parameter of a command -> its help, unless the command's docstring has another one."""


def first_sentence(text: str) -> str:
    """Return the line of a command in the help of its group."""
    return text.strip().partition("\n")[0].partition(". ")[0].rstrip(".") + "."


class Commands(TyperGroup):
    """The commands of one file, which may be a group; each is made when it is used.

    `add` registers a function as a command. Its result is printed as text, or with `--json` as JSON; if it has an
    attribute `is_fine` that is false, the exit code is 1. A function that prints by itself declares `as_json` and
    returns None.
    """

    commands: dict[str, Any]
    """Name -> function, keys of the recipe, and settings."""

    def __init__(self, help: str = "", *, example: str = "", **settings: Any) -> None:  # noqa: A002  Typer's name
        usual: Any = {"epilog": f"Example: {example}", "rich_markup_mode": None, "no_args_is_help": True}
        super().__init__(help=help, **usual | settings)

    def add(
        self, *examples: str, name: str | None = None, keys: Sequence[str] = (), **settings: Any
    ) -> Callable[[Function], Function]:
        """Register the decorated function as a command with `--json`, `--debug`, and `--plugin` if it has `--set`.

        Args:
            examples: command lines for the help.
            name: the command's name if it is not the function's.
            keys: keys of the recipe, such as "generate.seed", or "generate.*", that have an option; its help is the
                key's docstring. The function gets what was typed as its argument `flags`, key -> value; None where an
                option was left out.
            settings: of `typer.Typer.command`.
        """
        head = "Example: " if len(examples) == 1 else "\b\nExamples:\n  "
        settings["epilog"] = head + "\n  ".join(examples)

        def register(function: Function) -> Function:
            self.commands[name or function.__name__] = function, keys, settings
            return function

        return register

    def line(self, name: str) -> str:
        """Return the line of a command in the help of the group."""
        return first_sentence(self.commands[name][0].__doc__ or "")

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Make one command; None if there is none of this name."""
        if cmd_name not in self.commands:
            return None
        function, keys, settings = self.commands[cmd_name]
        flags: dict[str, tuple[Any, Any]] = {}
        for path in keys:
            from lmkit.recipe.keys import of_table  # not for other commands

            table, _, wanted = path.partition(".")
            for key, (annotation, text) in of_table(table).items():
                kind = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
                if key == wanted or (wanted == "*" and get_origin(kind) is not tuple):
                    help_ = f"{text.rstrip('.')} ({table}.{key})."
                    flags[f"{table}.{key}"] = Annotated[kind | None, option(help_)], None
        return command_of(cmd_name, function, flags, **settings)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.line(name)) for name in self.commands])

    def get_help_option(self, ctx: Any) -> Any:
        """Return `--help` with a default of False: Typer 0.29 imports pydantic to convert the default None."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option

    def invoke(self, ctx: Any) -> Any:
        """Run the command; keep the message of an interrupted one, which Typer would drop."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            ctx.obj["interrupted"] = str(stop) or "interrupted"
            raise


def command_of(
    name: str, function: Callable[..., Any], flags: Mapping[str, tuple[Any, Any]], **settings: Any
) -> Any:
    """Return a command that calls the function, and prints its result.

    It has the options that all commands share, unless the function has them. The function's docstring has the help,
    and below `Args:` that of its parameters; others are known by their names (`SHARED`, `HELP`). `flags`: key
    (`generate.seed` has the option `--seed`) -> annotation and default; the function gets key -> what was typed.
    """
    signature = inspect.signature(function, eval_str=True)
    own = signature.parameters
    names = {key.rpartition(".")[2]: key for key in flags}  # of options -> key
    shared = {option_name: flags[key] for option_name, key in names.items()}
    if "set_" in own:
        shared["plugin"] = SHARED["plugin"], None
    shared["as_json"], shared["debug"] = (SHARED["as_json"], False), (SHARED["debug"], False)

    @functools.wraps(function)
    def command(**values: Any) -> None:
        from lmkit.storage.inputs import in_home  # not for --help

        for plugin in values.get("plugin") or ():  # before a recipe is validated
            from lmkit.plugins import load_plugin

            load_plugin(plugin)
        for name, value in values.items():  # a shell leaves `~` in `--output=~/new` as it is
            if isinstance(value, Path):
                values[name] = in_home(value)
            elif isinstance(value, list) and value and isinstance(value[0], Path):
                values[name] = list(map(in_home, value))
        values["flags"] = {key: values.get(option_name) for option_name, key in names.items()}
        result = function(**{own_name: values.get(own_name) for own_name in own})
        if result is not None:
            from lmkit.cli.console import show

            show(result, as_json=values["as_json"])
            if not getattr(result, "is_fine", True):
                raise typer.Exit(1)

    text, _, told = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:\n")
    helps = HELP | dict(re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", told, re.MULTILINE))
    parameters = [_explained(it, helps.get(it.name)) for it in own.values() if it.name != "flags"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    for option_name, (kind, default) in shared.items():
        if option_name not in own:
            parameters.append(inspect.Parameter(option_name, keyword, annotation=kind, default=default))
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {it.name: it.annotation for it in parameters}
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(name, help=text, **settings)(command)
    return typer.main.get_command(app)


def _explained(parameter: inspect.Parameter, text: str | None) -> inspect.Parameter:
    """Return the parameter of a command with its help from the docstring; one without a default is an argument."""
    if text is None:
        return parameter.replace(annotation=SHARED.get(parameter.name, parameter.annotation))
    kind, default = parameter.annotation, parameter.default
    made: Any = typer.Option(*[f"--{parameter.name.replace('_', '-')}"] if default is False else [])
    if default is inspect.Parameter.empty:
        made = typer.Argument()
    if hasattr(kind, "__metadata__"):
        made, kind = copy.copy(kind.__metadata__[0]), get_args(kind)[0]
    made.help = " ".join(text.split())
    return parameter.replace(annotation=Annotated[kind, made])
