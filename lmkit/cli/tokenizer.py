"""`lmkit tokenizer`: train, use, look at, import and export tokenizers."""

import sys
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
    examples,
)
from lmkit.cli.progress import progress_on_stderr
from lmkit.cli.render import show
from lmkit.errors import LmkitError

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Train, use, look at, import and export tokenizers.",
    epilog="Example: lmkit tokenizer train stories.txt tokenizer.json --vocab-size 4096",
)  # fmt: skip

TokenizerArgument = Annotated[Path, typer.Argument(help="A tokenizer.json.")]


@app.command(epilog="Example: lmkit tokenizer train stories.txt tokenizer.json --vocab-size 4096")
def train(
    sources: SourcesArgument,
    output: Annotated[Path, typer.Argument(help="The tokenizer.json to write.")],
    vocab_size: Annotated[int, typer.Option(help="256 bytes + merges + special tokens.")] = 10_000,
    special: Annotated[
        list[str] | None,
        typer.Option(help="A special token; repeatable. Default: <|endoftext|>.", show_default=False),
    ] = None,
    workers: WorkersOption = None,
    errors: ErrorsOption = "strict",
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train byte-level BPE on text files."""
    from lmkit.recipe.load import load_recipe

    flags = {"tokenizer.vocab_size": vocab_size}
    if special is not None:
        flags["tokenizer.special_tokens"] = special  # type: ignore[assignment]
    table = load_recipe(None, flags=flags).tokenizer
    assert table is not None
    from lmkit.commands import tokenizer as command

    with progress_on_stderr() as progress:
        result = command.train(
            sources, output, table, workers=workers or 0, errors=errors, force=force, progress=progress
        )
    show(result, as_json=as_json)


@app.command(
    epilog=examples(
        'lmkit tokenizer encode tokenizer.json "Once upon"',
        "cat stories.txt | lmkit tokenizer encode tokenizer.json",
    )
)
def encode(
    tokenizer: TokenizerArgument,
    text: Annotated[str | None, typer.Argument(help="Left out: stdin is read.", show_default=False)] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print the token ids of a text, or of stdin.

    With --json they are one list, held in memory until the text has ended.
    """
    from lmkit.commands import tokenizer as command

    texts = [text] if text is not None else sys.stdin
    try:
        if as_json:
            show(command.encode(tokenizer, texts), as_json=True)
            return
        for line in command.encode_lines(tokenizer, texts):
            sys.stdout.write(line)
    except UnicodeError:
        raise LmkitError("the text is not UTF-8", hint="convert it first, for example with iconv") from None


@app.command(epilog="Example: lmkit tokenizer decode tokenizer.json 262 1011 13")
def decode(
    tokenizer: TokenizerArgument,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Numbers; left out: stdin is read.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print the text of token ids, with blanks or commas between them.

    In the text of --json, bytes that are not UTF-8 are U+FFFD; otherwise they are printed as they are.
    """
    from lmkit.commands import tokenizer as command

    numbers = " ".join(ids) if ids else sys.stdin.buffer.read().decode("utf-8", "replace")
    data = command.decode(tokenizer, numbers)
    if as_json:
        show(command.Decoded(data.decode("utf-8", "replace")), as_json=True)
        return
    sys.stdout.buffer.write(data)
    if sys.stdout.isatty():  # a file gets the bytes and no more; a prompt does not belong behind the text
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


@app.command(epilog="Example: lmkit tokenizer inspect tokenizer.json --text stories.txt")
def inspect(
    tokenizer: TokenizerArgument,
    text: Annotated[
        Path | None,
        typer.Option(help="Measure bytes per token on this file (.jsonl: as for train).", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Size, longest tokens, and compression on a text."""
    from lmkit.commands import tokenizer as command

    show(command.inspect(tokenizer, text), as_json=as_json)


@app.command("import", epilog="Example: lmkit tokenizer import gpt2-files tokenizer.json")
def import_(
    folder: Annotated[Path, typer.Argument(help="Holds vocab.json and merges.txt.")],
    output: Annotated[Path, typer.Argument(help="The tokenizer.json to write.")],
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a tokenizer.json of GPT-2's two files."""
    from lmkit.commands import tokenizer as command

    show(command.import_gpt2(folder, output, force=force), as_json=as_json)


@app.command(epilog="Example: lmkit tokenizer export tokenizer.json gpt2-files")
def export(
    tokenizer: TokenizerArgument,
    folder: Annotated[Path, typer.Argument(help="Gets vocab.json and merges.txt.")],
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a tokenizer as GPT-2's two files, for other libraries."""
    from lmkit.commands import tokenizer as command

    show(command.export(tokenizer, folder, force=force), as_json=as_json)
