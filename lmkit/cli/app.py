"""The root command, and how errors become one line, one hint and an exit code."""

import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from lmkit import __version__
from lmkit.cli import bench, data, generate, inspect, profile, recipe, run, tokenizer, train
from lmkit.cli.options import DebugOption
from lmkit.errors import LmkitError

app = typer.Typer(
    name="lmkit",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    epilog="Begin with: lmkit run quickstart",
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
    """Build language models from the bottom up, and find out how fast each part is."""


run.register(app)
train.register(app)
generate.register(app)
app.add_typer(data.app, name="data")
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(bench.app, name="bench")
app.add_typer(profile.app, name="profile")
app.add_typer(recipe.app, name="recipe")
inspect.register(app)


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    settings: dict[str, bool] = {}  # filled by --debug, wherever it stands on the line
    try:
        typer.main.get_command(app)(args=list(arguments), prog_name="lmkit", obj=settings)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except LmkitError as error:
        if settings.get("debug"):
            raise
        _print_error(error)
        return error.exit_code
    except OSError as error:  # a path that cannot be written or read, a full disk: the user's to mend
        if settings.get("debug"):
            raise
        where = f"{error.filename}: " if error.filename else ""
        reason = (error.strerror or str(error)).lower()
        _print_error(LmkitError(f"{where}{reason}", hint="check the path, its permissions and the disk"))
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _print_error(error: LmkitError) -> None:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
