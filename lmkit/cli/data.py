"""`lmkit data`: make, fetch, encode and look at data."""

from pathlib import Path
from typing import Annotated

import typer

from lmkit.cli.options import (
    DebugOption,
    ErrorsOption,
    ForceOption,
    JsonOption,
    SourcesArgument,
    WorkersOption,
)
from lmkit.cli.progress import progress_on_stderr
from lmkit.cli.render import show

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Make, fetch, encode and look at data.",
    epilog="Example: lmkit data synth stories.txt --size-mb 5",
)  # fmt: skip


@app.command(epilog="Example: lmkit data synth stories.txt --size-mb 20 --seed 1")
def synth(
    output: Annotated[Path, typer.Argument(help="The text file to write.")],
    size_mb: Annotated[float, typer.Option(min=0.001, help="Size in 10^6 bytes.")] = 20.0,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other stories.")] = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Generate short stories in simple English, as many as you want."""
    from lmkit.commands import data as command

    with progress_on_stderr() as progress:
        result = command.synth(output, size_mb=size_mb, seed=seed, force=force, progress=progress)
    show(result, as_json=as_json)


@app.command(epilog="Example: lmkit data download tinystories")
def download(
    dataset: Annotated[str, typer.Argument(help="tinystories, or owt (a sample of OpenWebText).")],
    folder: Annotated[Path, typer.Option(help="Where to keep it.")] = Path("artifacts/data"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Download a dataset.

    Started again, it goes on where it was interrupted.
    """
    from lmkit.commands import data as command

    with progress_on_stderr() as progress:
        result = command.download(dataset, folder, progress=progress)
    show(result, as_json=as_json)


@app.command(epilog="Example: lmkit data encode stories.txt tokens.npy --tokenizer tokenizer.json")
def encode(
    sources: SourcesArgument,
    output: Annotated[Path, typer.Argument(help="The token file (.npy) to write.")],
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json: lmkit tokenizer train makes one.")],
    workers: WorkersOption = None,
    errors: ErrorsOption = "strict",
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Turn text files into a token file."""
    from lmkit.commands import data as command

    with progress_on_stderr() as progress:
        result = command.encode(
            sources, output, tokenizer, workers=workers or 0, errors=errors, force=force, progress=progress
        )
    show(result, as_json=as_json)


@app.command(epilog="Example: lmkit data inspect artifacts/runs/quickstart/tokens/train.npy")
def inspect(
    path: Annotated[Path, typer.Argument(help="A token file (.npy).")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, to show the text.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a token file and show what is in it."""
    from lmkit.commands import data as command

    show(command.inspect(path, tokenizer), as_json=as_json)
