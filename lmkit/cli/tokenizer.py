"""`lmkit tokenizer`: train, use, inspect, import and export tokenizers."""

from __future__ import annotations

import io
import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmkit.cli.console import Result, progress_on_stderr, show, write
from lmkit.cli.options import Commands, Errors
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.tables import enumeration, statement
from lmkit.storage.outputs import refuse_existing, refuse_replacing, refuse_unwritable
from lmkit.streams import results

if TYPE_CHECKING:
    from lmkit.tokenizer import Tokenizer

GPT2_FILES = ("vocab.json", "merges.txt")
IDS_PER_LINE = 1024

app = Commands(
    "Train, use, inspect, import and export tokenizers.",
    example="lmkit tokenizer train stories.txt tokenizer.json --vocab-size 4096",
)

TokenizerArgument = Annotated[Path, typer.Argument(help="A tokenizer.json.")]


@app.add("lmkit tokenizer train stories.txt tokenizer.json --vocab-size 4096")
def train(
    sources: list[Path],
    output: Path,
    vocab_size: int = 10_000,
    special: list[str] | None = None,
    max_token_bytes: int | None = None,
    workers: int | None = None,
    errors: Errors = "strict",
    field: str | None = None,
    force: bool = False,
) -> Result:
    """Train byte-level BPE on text files.

    Args:
        output: The tokenizer.json to write.
        vocab_size: 256 bytes + merges + special tokens.
        special: A special token; repeatable. Default: <|endoftext|>.
        max_token_bytes: No merge makes a longer token. Default: 256.
    """
    from lmkit.recipe.load import load_recipe

    typed = {"vocab_size": vocab_size, "special_tokens": special, "max_token_bytes": max_token_bytes}
    table = load_recipe(None, flags={f"tokenizer.{key}": value for key, value in typed.items()}).tokenizer
    assert table is not None
    _check_output(output, force=force)
    refuse_replacing([output], sources)
    from lmkit.data.corpora import plain_text_files
    from lmkit.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer
    from lmkit.tokenizer.marks import files_of_marks

    # Refuse before training what `save` would refuse.
    untrained = Tokenizer.from_merges([], table.special_tokens)
    files_of_marks(output, untrained.marks, untrained.special_ids)
    mark = next(iter(table.special_tokens), END_OF_TEXT)  # between documents nothing is merged
    with (
        progress_on_stderr() as progress,
        plain_text_files(
            sources, output.parent, errors=errors, field=field, mark=mark, progress=progress
        ) as texts,
    ):
        tokenizer = train_tokenizer(
            texts,
            vocab_size=table.vocab_size,
            special_tokens=table.special_tokens,
            separator=mark,
            max_token_bytes=table.max_token_bytes,
            workers=workers or 0,
            errors=errors,
            progress=progress,
        )
    return _save(tokenizer, output)


@app.add(
    'lmkit tokenizer encode tokenizer.json "Once upon"',
    "cat stories.txt | lmkit tokenizer encode tokenizer.json",
)
def encode(
    tokenizer: TokenizerArgument,
    text: Annotated[str | None, typer.Argument(show_default=False)] = None,
    as_json: bool = False,
) -> None:
    """Print the token ids of a text, or of stdin.

    With --json the ids are one list, held in memory until the text has ended.

    Args:
        text: Default: read stdin.
    """
    from lmkit.tokenizer import Tokenizer

    # A text is UTF-8, whatever the locale says of the terminal.
    texts = [text] if text is not None else io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig", newline="\n")
    ids = Tokenizer.load(tokenizer).encode_iterable(texts)
    try:
        if as_json:
            show(Result("", {"ids": list(ids)}), as_json=True)
            return
        while line := list(itertools.islice(ids, IDS_PER_LINE)):
            results().write(" ".join(map(str, line)) + "\n")
    except UnicodeError:
        hint = "convert it first, for example with iconv"
        raise LmkitError("text.not_utf8", "the text is not UTF-8", hint=hint) from None


@app.add("lmkit tokenizer decode tokenizer.json 262 1011 13")
def decode(
    tokenizer: TokenizerArgument,
    ids: Annotated[list[str] | None, typer.Argument(show_default=False)] = None,
    as_json: bool = False,
) -> None:
    """Print the text of token ids, separated by blanks or commas.

    A file or a pipe gets the bytes unchanged. A terminal gets U+FFFD for control characters and for bytes that are
    not UTF-8; --json replaces only the latter.

    Args:
        ids: Token ids. Default: read stdin.
    """
    from lmkit.tokenizer import Tokenizer

    numbers = " ".join(ids) if ids else sys.stdin.buffer.read().decode("utf-8", "replace")
    loaded = Tokenizer.load(tokenizer)
    parsed = []
    for word in numbers.replace(",", " ").split():
        # Check the length first: Python refuses to read numbers of thousands of digits.
        if not word.isdecimal() or len(word) > 20 or int(word) not in loaded.vocab:
            message = f"{word[:20]!r} is not a token id of {tokenizer}"
            raise UsageError("tokenizer.unknown_id", message, hint=f"ids are 0 to {loaded.vocab_size - 1}")
        parsed.append(int(word))
    data = loaded.decode_bytes(parsed)
    if as_json:
        show(Result("", {"text": data.decode("utf-8", "replace")}), as_json=True)
        return
    if results().isatty():
        write(data.decode("utf-8", "replace") + "\n")  # the shell's prompt starts on a new line
        return
    results().buffer.write(data)
    results().buffer.flush()


@app.add("lmkit tokenizer inspect tokenizer.json --text stories.txt")
def inspect(tokenizer: TokenizerArgument, text: Path | None = None) -> Result:
    """Show the size, the longest tokens, and the compression of a text.

    Args:
        text: Measure bytes per token on this file (.jsonl: as for train).
    """
    from lmkit.data.corpora import plain_text_files
    from lmkit.tokenizer import END_OF_TEXT, Tokenizer, inspect_tokenizer

    mark = END_OF_TEXT if text is None else Tokenizer.load(tokenizer).marks.end or END_OF_TEXT
    with plain_text_files([] if text is None else [text], errors="replace", mark=mark) as texts:
        facts = inspect_tokenizer(tokenizer, text=next(iter(texts), None))
    lines = [
        statement(facts.path, f"vocabulary {facts.vocab_size:,}, {facts.num_merges:,} merges"),
        enumeration("special tokens", facts.special_tokens or ["none"]),
        f"sha256 {facts.sha256}",
        enumeration("longest tokens", [repr(token) for token in facts.longest_tokens]),
    ]
    if facts.bytes_per_token is not None:
        lines.append(f"compression: {facts.bytes_per_token:.3f} bytes per token")
    return Result("\n".join(lines), asdict(facts))


@app.add("lmkit tokenizer import gpt2-files tokenizer.json", name="import")
def import_(folder: Path, output: Path, force: bool = False) -> Result:
    """Make a tokenizer.json from GPT-2's two files.

    Args:
        folder: A folder with vocab.json and merges.txt.
        output: The tokenizer.json to write.
    """
    from lmkit.tokenizer import Tokenizer

    _check_output(output, force=force)
    files = [folder / name for name in GPT2_FILES]
    refuse_replacing([output], files)
    return _save(Tokenizer.load_gpt2(*files), output)


@app.add("lmkit tokenizer export tokenizer.json gpt2-files")
def export(tokenizer: TokenizerArgument, folder: Path, force: bool = False) -> Result:
    """Write a tokenizer as GPT-2's two files, for other libraries.

    Args:
        folder: The folder for vocab.json and merges.txt.
    """
    from lmkit.tokenizer import Tokenizer

    refuse_unwritable(folder, option="the argument FOLDER")
    files = [folder / name for name in GPT2_FILES]
    for file in files:
        refuse_existing(file, force=force)
    refuse_replacing(files, [tokenizer])
    Tokenizer.load(tokenizer).save_gpt2(folder)
    return Result("wrote " + " and ".join(map(str, files)), {"files": files})


def _check_output(output: Path, *, force: bool) -> None:
    """Refuse an output that exists or is not named *.json (a forgotten output must not replace the last source)."""
    if output.suffix != ".json":
        hint = "name the output last, for example tokenizer.json"
        raise UsageError("tokenizer.output_name", f"{output}: a tokenizer file ends in .json", hint=hint)
    refuse_existing(output, force=force)


def _save(tokenizer: Tokenizer, output: Path) -> Result:
    tokenizer.save(output)
    facts = f"vocabulary {tokenizer.vocab_size:,}, sha256 {tokenizer.sha256[:12]}"
    fields = {"output": output, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.sha256}
    return Result(statement(f"wrote {output}", facts), fields)
