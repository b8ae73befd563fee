"""`lmkit tokenizer`: train, use, inspect, import and export tokenizers."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmkit.cli.options import (
    DebugOption,
    ErrorsOption,
    ForceOption,
    Group,
    JsonOption,
    SourcesArgument,
    WorkersOption,
    examples,
)
from lmkit.cli.progress import progress_on_stderr
from lmkit.cli.render import show, write
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.tables import enumeration, statement
from lmkit.storage.outputs import refuse_existing

if TYPE_CHECKING:
    from lmkit.tokenizer import Tokenizer
    from lmkit.tokenizer.tokenizer import TokenizerFacts

GPT2_FILES = ("vocab.json", "merges.txt")
IDS_PER_LINE = 1024

app = typer.Typer(
    cls=Group, no_args_is_help=True, rich_markup_mode=None, help="Train, use, inspect, import and export tokenizers.",
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

    flags: dict[str, object] = {"tokenizer.vocab_size": vocab_size}
    if special is not None:
        flags["tokenizer.special_tokens"] = special
    table = load_recipe(None, flags=flags).tokenizer
    assert table is not None
    _check_output(output, force=force)
    from lmkit.data.corpora import plain_text_files
    from lmkit.tokenizer import train_tokenizer

    with (
        progress_on_stderr() as progress,
        plain_text_files(sources, output.parent, errors=errors, progress=progress) as texts,
    ):
        tokenizer = train_tokenizer(
            texts,
            vocab_size=table.vocab_size,
            special_tokens=table.special_tokens,
            workers=workers or 0,
            errors=errors,
            progress=progress,
        )
    show(_save(tokenizer, output), as_json=as_json)


@app.command(
    epilog=examples(
        'lmkit tokenizer encode tokenizer.json "Once upon"',
        "cat stories.txt | lmkit tokenizer encode tokenizer.json",
    )
)
def encode(
    tokenizer: TokenizerArgument,
    text: Annotated[str | None, typer.Argument(help="Default: read stdin.", show_default=False)] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print the token ids of a text, or of stdin.

    With --json the ids are one list, held in memory until the text has ended.
    """
    from lmkit.tokenizer import Tokenizer

    ids = Tokenizer.load(tokenizer).encode_iterable([text] if text is not None else sys.stdin)
    try:
        if as_json:
            show(Encoded(tuple(ids)), as_json=True)
            return
        while line := list(itertools.islice(ids, IDS_PER_LINE)):
            sys.stdout.write(" ".join(map(str, line)) + "\n")
    except UnicodeError:
        raise LmkitError(
            "text.not_utf8", "the text is not UTF-8", hint="convert it first, for example with iconv"
        ) from None


@app.command(epilog="Example: lmkit tokenizer decode tokenizer.json 262 1011 13")
def decode(
    tokenizer: TokenizerArgument,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Token ids. Default: read stdin.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Print the text of token ids, separated by blanks or commas.

    With --json, bytes that are not UTF-8 become U+FFFD; otherwise the bytes are printed unchanged.
    """
    from lmkit.tokenizer import Tokenizer

    numbers = " ".join(ids) if ids else sys.stdin.buffer.read().decode("utf-8", "replace")
    loaded = Tokenizer.load(tokenizer)
    data = loaded.decode_bytes(_parsed_ids(numbers, loaded, tokenizer))
    if as_json:
        show(Decoded(data.decode("utf-8", "replace")), as_json=True)
        return
    sys.stdout.buffer.write(data)
    if sys.stdout.isatty():  # start the shell's prompt on a new line; a file gets the bytes alone
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
    """Show the size, the longest tokens, and the compression of a text."""
    from lmkit.data.corpora import plain_text_files
    from lmkit.tokenizer import inspect_tokenizer

    with plain_text_files([] if text is None else [text], errors="replace") as texts:
        facts = inspect_tokenizer(tokenizer, text=next(iter(texts), None))
    if as_json:
        show(facts, as_json=True)
    else:
        write(facts_text(facts) + "\n")


@app.command("import", epilog="Example: lmkit tokenizer import gpt2-files tokenizer.json")
def import_(
    folder: Annotated[Path, typer.Argument(help="A folder with vocab.json and merges.txt.")],
    output: Annotated[Path, typer.Argument(help="The tokenizer.json to write.")],
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a tokenizer.json from GPT-2's two files."""
    from lmkit.tokenizer import Tokenizer

    _check_output(output, force=force)
    tokenizer = Tokenizer.load_gpt2(*(folder / name for name in GPT2_FILES))
    show(_save(tokenizer, output), as_json=as_json)


@app.command(epilog="Example: lmkit tokenizer export tokenizer.json gpt2-files")
def export(
    tokenizer: TokenizerArgument,
    folder: Annotated[Path, typer.Argument(help="The folder for vocab.json and merges.txt.")],
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a tokenizer as GPT-2's two files, for other libraries."""
    from lmkit.tokenizer import Tokenizer

    files = tuple(folder / name for name in GPT2_FILES)
    for file in files:
        refuse_existing(file, force=force)
    Tokenizer.load(tokenizer).save_gpt2(folder)
    show(TokenizerExported(tuple(map(str, files))), as_json=as_json)


def _check_output(output: Path, *, force: bool) -> None:
    """Refuse an output that exists or is not named *.json (a forgotten output must not replace the last source)."""
    if output.suffix != ".json":
        raise UsageError(
            "tokenizer.output_name",
            f"{output}: a tokenizer file ends in .json",
            hint="name the output last, for example tokenizer.json",
        )
    refuse_existing(output, force=force)


def _save(tokenizer: Tokenizer, output: Path) -> TokenizerWritten:
    tokenizer.save(output)
    return TokenizerWritten(str(output), tokenizer.vocab_size, tokenizer.sha256)


def _parsed_ids(numbers: str, tokenizer: Tokenizer, path: Path) -> list[int]:
    ids = []
    for word in numbers.replace(",", " ").split():
        # Check the length first: Python refuses to read numbers of thousands of digits.
        if not word.isdecimal() or len(word) > 20 or int(word) not in tokenizer.vocab:
            raise UsageError(
                "tokenizer.unknown_id",
                f"{word[:20]!r} is not a token id of {path}",
                hint=f"ids are 0 to {tokenizer.vocab_size - 1}",
            )
        ids.append(int(word))
    return ids


# ---- results


@dataclass(frozen=True)
class TokenizerWritten:
    output: str
    vocab_size: int
    sha256: str

    def __str__(self) -> str:
        return statement(f"wrote {self.output}", f"vocabulary {self.vocab_size:,}, sha256 {self.sha256[:12]}")


@dataclass(frozen=True)
class Encoded:
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Decoded:
    text: str


@dataclass(frozen=True)
class TokenizerExported:
    files: tuple[str, ...]

    def __str__(self) -> str:
        return "wrote " + " and ".join(self.files)


def facts_text(facts: TokenizerFacts) -> str:
    lines = [
        statement(facts.path, f"vocabulary {facts.vocab_size:,}, {facts.num_merges:,} merges"),
        enumeration("special tokens", facts.special_tokens or ["none"]),
        f"sha256 {facts.sha256}",
        enumeration("longest tokens", [repr(token) for token in facts.longest_tokens]),
    ]
    if facts.bytes_per_token is not None:
        lines.append(f"compression: {facts.bytes_per_token:.3f} bytes per token")
    return "\n".join(lines)
