"""The root command, and how errors become one line, one hint and an exit code."""

import importlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from lmkit import __version__
from lmkit.cli.options import DEBUG, Commands, first_sentence
from lmkit.errors import LmkitError, UsageError, system_error
from lmkit.streams import only_results_on_stdout

# The base of Typer's errors about arguments; its newer versions have no public name for it.
_WrongArguments: type[Any] = typer.BadParameter.__base__  # type: ignore[assignment]

_INTERRUPTED = 130
COMMANDS = {
    "run": "run",
    "plan": "plan",
    "train": "model",
    "evaluate": "model",
    "generate": "generate",
    "chat": "chat",
    "export": "model",
    "import": "model",
    "data": "data",
    "tokenizer": "tokenizer",
    "bench": "bench",
    "profile": "profile",
    "recipe": "recipe",
    "rerun": "results",
    "report": "results",
    "compare": "results",
    "verify": "model",
    "env": "plan",
}
"""Name -> module of this package, whose `app` is the group of that name or has the command of that name."""


class _Root(Commands):
    """Imports the module of a command when the command is used: `lmkit --help` takes no longer than Typer itself."""

    def line(self, name: str) -> str:
        """Return the first sentence of a command's help, read from the source of its module."""
        source = (Path(__file__).parent / f"{COMMANDS[name]}.py").read_text("utf-8")
        function = re.search(rf"\ndef {name}_?\(", source)  # `import` is a word of Python
        if function is not None:
            return first_sentence(source[function.end() :].split('"""')[1])
        return first_sentence(re.findall(r'= \w+\(\s*"([^"]+)"', source)[0])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        commands: Commands = importlib.import_module(f"lmkit.cli.{COMMANDS[cmd_name]}").app
        return commands.get_command(ctx, cmd_name) or commands


def _print_version(value: bool) -> None:
    if value:
        print(f"lmkit {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Hold the options of `lmkit` itself."""


@cache
def root_command() -> Any:
    """Return the command `lmkit`."""
    app = typer.Typer(
        name="lmkit",
        cls=_Root,
        help="Build language models from scratch and measure how fast every part is.",
        epilog="Start with: lmkit run quickstart. Help for a command: lmkit COMMAND --help",
        no_args_is_help=True,
        rich_markup_mode=None,
        add_completion=False,
        context_settings={"max_content_width": 100},
    )
    app.callback()(root)
    group = typer.main.get_group(app)
    group.commands = COMMANDS  # type: ignore[assignment]
    return group


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    settings: dict[str, Any] = {}  # filled by --debug, wherever it stands on the line
    with only_results_on_stdout() if {"--json", "--jsonl"} & {*arguments} else nullcontext():
        try:
            try:
                code = root_command().main(
                    args=list(arguments), prog_name="lmkit", obj=settings, standalone_mode=False
                )
            except SystemExit as stop:
                # Commands return. The code is a signal's, click's 1 where stdout is closed, or a plugin's.
                if not isinstance(stop.code, int) or not (stop.code == 1 or stop.code > 128):
                    message = f"{_command_in(arguments)}: ended before its work was done: {stop.code}"
                    hint = "look for sys.exit in the code of plugins"
                    raise LmkitError("command.ended", message, hint=hint) from stop
                code = stop.code
            if code == _INTERRUPTED and os.environ.get("RANK", "0") == "0":
                print(settings.get("interrupted", "interrupted"), file=sys.stderr)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of stdout has left
            return 1
        except _WrongArguments as error:
            text, where = error.format_message(), _command_in(arguments)
            if error.ctx is not None and text == error.ctx.get_help():  # a group without a command
                print(text, file=sys.stderr)
                return UsageError.exit_code
            message = f"{where}: {text[:1].lower()}{text[1:].rstrip('.')}"
            return _refuse(UsageError("command.wrong_arguments", message, hint=f"see {where} --help"))
        except BaseException as error:
            explained = _explained(error)
            if explained is None or settings.get("debug"):
                raise
            return _refuse(explained)
    return code if isinstance(code, int) else 0  # typer.Exit's code, or what the command returned


def _refuse(error: LmkitError) -> int:
    """Print an error and its hint; return its exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from lmkit.cli.ranks import speak_for_ranks

        error = speak_for_ranks(error)
    print(f"error[{error.code}]: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code


def _explained(error: BaseException) -> LmkitError | None:
    """Return the error for users; None for a defect of lmkit, which keeps its traceback."""
    if isinstance(error, LmkitError):
        return error
    if found := system_error(error):
        return found
    from lmkit.plugins import plugin_error

    return plugin_error(error)


def _command_in(arguments: Sequence[str]) -> str:
    """Return the command of a line: `lmkit data synth` of `data synth x.txt --seed`."""
    words, command = ["lmkit"], root_command()
    for word in arguments:
        if word in getattr(command, "commands", ()):
            words.append(word)
            command = command.get_command(None, word)
    return " ".join(words)
