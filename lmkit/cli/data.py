"""`lmkit data`: generate, download, encode and inspect data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lmkit.cli.options import (
    DebugOption,
    ErrorsOption,
    ForceOption,
    Group,
    JsonOption,
    PluginOption,
    SourcesArgument,
    WorkersOption,
)
from lmkit.cli.progress import progress_on_stderr
from lmkit.cli.render import show
from lmkit.measure.tables import enumeration, megabytes, statement

PREVIEW_TOKENS = 64

app = typer.Typer(
    cls=Group, no_args_is_help=True, rich_markup_mode=None, help="Generate, download, encode and inspect data.",
    epilog="Example: lmkit data synth stories.txt --size-mb 5",
)  # fmt: skip


@dataclass(frozen=True)
class Synthesised:
    """Result of `lmkit data synth`."""

    output: str
    num_bytes: int

    def __str__(self) -> str:
        return statement(f"wrote {self.output}", f"{megabytes(self.num_bytes)} of stories")


@app.command(epilog="Example: lmkit data synth stories.txt --size-mb 20 --seed 1")
def synth(
    output: Annotated[Path, typer.Argument(help="The text file to write.")],
    size_mb: Annotated[float, typer.Option(min=0.001, help="Size in 10^6 bytes.")] = 20.0,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other stories.")] = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Generate short stories in simple English."""
    from lmkit.data.synth import write_stories

    with progress_on_stderr() as progress:
        write_stories(output, size_mb=size_mb, seed=seed, force=force, progress=progress)
    show(Synthesised(str(output), output.stat().st_size), as_json=as_json)


@dataclass(frozen=True)
class Downloaded:
    """Result of `lmkit data download`."""

    files: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.files)


@app.command(epilog="Example: lmkit data download tinystories")
def download(
    dataset: Annotated[
        str,
        typer.Argument(
            help="tinystories, owt (a sample of OpenWebText), or a dataset that a plugin registers."
        ),
    ],
    folder: Annotated[Path, typer.Option(help="Where to keep it.")] = Path("artifacts/data"),
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Download a dataset.

    Run again, it resumes an interrupted download.
    """
    from lmkit.data.download import download_dataset

    with progress_on_stderr() as progress:
        paths = download_dataset(dataset, folder, progress=progress)
    show(Downloaded(tuple(map(str, paths))), as_json=as_json)


@dataclass(frozen=True)
class Encoded:
    """Result of `lmkit data encode`."""

    output: str
    num_tokens: int
    num_documents: int
    num_bytes: int

    def __str__(self) -> str:
        return statement(f"wrote {self.output}", _size(self.num_tokens, self.num_documents, self.num_bytes))


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
    """Encode text files into a token file."""
    from lmkit.data.encoding import encode_corpus
    from lmkit.tokenizer import Tokenizer

    with progress_on_stderr() as progress:
        meta = encode_corpus(
            sources,
            output,
            Tokenizer.load(tokenizer),
            workers=workers or 0,
            errors=errors,
            force=force,
            progress=progress,
        )
    show(Encoded(str(output), meta.num_tokens, meta.num_documents, meta.num_bytes), as_json=as_json)


@dataclass(frozen=True)
class TokenFileFacts:
    """Result of `lmkit data inspect`."""

    path: str
    dtype: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    vocab_size: int
    tokenizer_sha256: str
    preview: str

    def __str__(self) -> str:
        size = _size(self.num_tokens, self.num_documents, self.num_bytes, self.dtype)
        lines = [
            statement(self.path, size),
            f"vocabulary {self.vocab_size:,}, tokenizer {self.tokenizer_sha256[:12]}",
            enumeration("begins", [self.preview]),
        ]
        return "\n".join(lines)


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
    from lmkit.data.token_files import open_tokens
    from lmkit.tokenizer import Tokenizer

    loaded = None if tokenizer is None else Tokenizer.load(tokenizer)
    file = open_tokens(path, tokenizer_sha256=None if loaded is None else loaded.sha256)
    head = file.tokens[:PREVIEW_TOKENS].tolist()
    facts = TokenFileFacts(
        path=str(path),
        dtype=str(file.tokens.dtype),
        num_tokens=file.meta.num_tokens,
        num_documents=file.meta.num_documents,
        num_bytes=file.meta.num_bytes,
        vocab_size=file.meta.vocab_size,
        tokenizer_sha256=file.meta.tokenizer_sha256,
        preview=" ".join(map(str, head)) if loaded is None else repr(loaded.decode(head)),
    )
    show(facts, as_json=as_json)


def _size(num_tokens: int, num_documents: int, num_bytes: int, dtype: str = "") -> str:
    tokens = f"{num_tokens:,} tokens" + (f" ({dtype})" if dtype else "")
    return f"{tokens}, {num_documents:,} documents, {num_bytes / max(num_tokens, 1):.2f} bytes per token"
