"""The root command, and how errors become one line, one hint and an exit code."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lmkit import __version__
from lmkit.cli import bench, data, env, generate, profile, recipe, results, run, tokenizer, train, verify
from lmkit.cli.options import DebugOption
from lmkit.cli.ranks import speak_for_ranks
from lmkit.errors import LmkitError, UsageError, out_of_memory, reason
from lmkit.storage.atomic import PARTIAL_SUFFIX

# The base of Typer's errors about arguments; its newer versions have no public name for it.
_WrongArguments: type[Any] = typer.BadParameter.__base__  # type: ignore[assignment]

app = typer.Typer(
    name="lmkit",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
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


run.register(app)
train.register(app)
generate.register(app)
app.add_typer(data.app, name="data")
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(bench.app, name="bench")
app.add_typer(profile.app, name="profile")
app.add_typer(recipe.app, name="recipe")
env.register(app)
results.register(app)
verify.register(app)


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    settings: dict[str, bool] = {}  # filled by --debug, wherever it stands on the line
    try:
        code = typer.main.get_command(app).main(
            args=list(arguments), prog_name="lmkit", obj=settings, standalone_mode=False
        )
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except _WrongArguments as error:
        return _explain(error, arguments)
    except LmkitError as error:
        if settings.get("debug"):
            raise
        _print_error(error)
        return error.exit_code
    except OSError as error:  # a path that cannot be written or read, a full disk: the user's to mend
        if settings.get("debug"):
            raise
        # Files are written under another name first, which nobody gave.
        where = f"{str(error.filename).removesuffix(PARTIAL_SUFFIX)}: " if error.filename else ""
        _print_error(
            LmkitError(
                "file.failed", f"{where}{reason(error)}", hint="check the path, its permissions and the disk"
            )
        )
        return 1
    except (MemoryError, RuntimeError) as error:
        explained = out_of_memory(error)
        if explained is None or settings.get("debug"):
            raise
        _print_error(explained)
        return explained.exit_code
    return code if isinstance(code, int) else 0  # typer.Exit's code, or what the command returned


def _explain(error: Any, arguments: Sequence[str]) -> int:
    """What is wrong with the arguments, and as the hint how the command is used."""
    text, context = error.format_message(), error.ctx
    if context is not None and text == context.get_help():  # a group without a command
        print(text, file=sys.stderr)
        return UsageError.exit_code
    where = _command_in(arguments) if context is None else context.command_path
    usage = (
        "" if context is None else " ".join(context.get_usage().split()).replace("Usage:", "usage:") + "; "
    )
    wrong = UsageError(
        "command.wrong_arguments",
        f"{where}: {text[:1].lower()}{text[1:].rstrip('.')}",
        hint=f"{usage}more with {where} --help",
    )
    _print_error(wrong)
    return wrong.exit_code


def _command_in(arguments: Sequence[str]) -> str:
    """The command that is meant, where the parser does not say: `lmkit data synth` of `data synth x.txt --seed`."""
    words, commands = ["lmkit"], typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for word in arguments:
        if word in commands:
            words.append(word)
            commands = getattr(commands[word], "commands", {})
    return " ".join(words)


def _print_error(error: LmkitError) -> None:
    error = speak_for_ranks(error)
    code = "" if error.code == "error" else f"[{error.code}]"
    print(f"error{code}: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
