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
from lmkit.cli.options import DebugOption, Group
from lmkit.errors import LmkitError, UsageError, limit_reached, reason
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
    "chat": "generate",
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


def _help_line(name: str) -> str:
    """Return the first sentence of a command's help, read from the source of its module."""
    source = (Path(__file__).parent / f"{COMMANDS[name]}.py").read_text("utf-8")
    function = re.search(rf"\ndef {name}_?\(", source)  # `import` is a word of Python
    if function is not None:
        docstring = source.index('"""', function.end()) + len('"""')
        line = source[docstring:].splitlines()[0].removesuffix('"""')
    else:
        (line,) = re.findall(r'= Commands\(\s*"([^"]+)"', source)
    return line.partition(". ")[0].rstrip(".") + "."


class _Root(Group):
    """Imports the module of a command when the command is used: `lmkit --help` takes no longer than Typer itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            group = typer.main.get_group(importlib.import_module(f"lmkit.cli.{COMMANDS[cmd_name]}").app)
            self.commands[cmd_name] = group.commands.get(cmd_name, group)
        return self.commands.get(cmd_name)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; keep the message of an interrupted one, which Typer would drop."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            ctx.obj["interrupted"] = str(stop) or "interrupted"
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _help_line(name)) for name in COMMANDS])


app = typer.Typer(
    name="lmkit",
    cls=_Root,
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"max_content_width": 100},
    epilog="Start with: lmkit run quickstart. Help for a command: lmkit COMMAND --help",
)


def _print_version(value: bool) -> None:
    if value:
        print(f"lmkit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Build language models from scratch and measure how fast every part is."""


@cache
def root_command() -> Any:
    """Return the command `lmkit`."""
    return typer.main.get_command(app)


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
                if not stop.code:  # commands return: this is a plugin's
                    line, hint = "ended before its work was done", "look for sys.exit in the code of plugins"
                    where = _command_in(arguments)
                    raise LmkitError("command.ended", f"{where}: {line}", hint=hint) from stop
                code = stop.code if isinstance(stop.code, int) else 1
            except _WrongArguments as error:
                code = _refuse_arguments(error, arguments)
            if code == _INTERRUPTED and os.environ.get("RANK", "0") == "0":
                print(settings.get("interrupted", "interrupted"), file=sys.stderr)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader of stdout has left
            return 1
        except BaseException as error:
            explained = _explained(error)
            if explained is None or settings.get("debug"):
                raise
            _print_error(explained)
            return explained.exit_code
    return code if isinstance(code, int) else 0  # typer.Exit's code, or what the command returned


def _explained(error: BaseException) -> LmkitError | None:
    """Return the error for users; None for a defect of lmkit, which keeps its traceback."""
    if isinstance(error, LmkitError):
        return error
    is_of_system = isinstance(error, OSError | MemoryError | RuntimeError | ImportError)
    if is_of_system and (limited := limit_reached(error)):
        return limited
    if not isinstance(error, OSError):
        from lmkit.plugins import plugin_error

        return plugin_error(error)
    from lmkit.storage.atomic import PARTIAL_SUFFIX

    # Files are written under a partial name first, which the user did not give.
    where = f"{str(error.filename).removesuffix(PARTIAL_SUFFIX)}: " if error.filename else ""
    hint = "check the path, its permissions and the disk"
    return LmkitError("file.failed", f"{where}{reason(error)}", hint=hint)


def _refuse_arguments(error: Any, arguments: Sequence[str]) -> int:
    """Print what is wrong with the arguments; the hint is how the command is used."""
    text, context = error.format_message(), error.ctx
    if context is not None and text == context.get_help():  # a group without a command
        print(text, file=sys.stderr)
        return UsageError.exit_code
    where, usage = _command_in(arguments), ""
    if context is not None:
        where = context.command_path
        usage = " ".join(context.get_usage().split()).replace("Usage:", "usage:") + "; "
    message = f"{where}: {text[:1].lower()}{text[1:].rstrip('.')}"
    _print_error(UsageError("command.wrong_arguments", message, hint=f"{usage}more with {where} --help"))
    return UsageError.exit_code


def _command_in(arguments: Sequence[str]) -> str:
    """Return the command of a line: `lmkit data synth` of `data synth x.txt --seed`."""
    words: list[str] = ["lmkit"]
    command = root_command()
    for word in arguments:
        if word in getattr(command, "commands", ()):
            words.append(word)
            command = command.get_command(None, word)
    return " ".join(words)


def _print_error(error: LmkitError) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from lmkit.cli.ranks import speak_for_ranks

        error = speak_for_ranks(error)
    print(f"error[{error.code}]: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
