"""`lmkit data`: generate, download, encode and inspect data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lmkit.cli.console import Result, progress_on_stderr
from lmkit.cli.options import Commands, Errors
from lmkit.measure.tables import enumeration, size_of, statement

if TYPE_CHECKING:
    from lmkit.data.token_files import TokenMeta

PREVIEW_TOKENS = 64

app = Commands(
    "Generate, download, encode and inspect data.", example="lmkit data synth stories.txt --size-mb 5"
)


@app.add("lmkit data synth stories.txt --size-mb 20 --seed 1")
def synth(
    output: Path,
    size_mb: Annotated[float, typer.Option(min=0.001)] = 20.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    force: bool = False,
) -> Result:
    """Generate short stories in simple English.

    Args:
        output: The text file to write.
        size_mb: Size in 10^6 bytes.
        seed: Another seed gives other stories.
    """
    from lmkit.data.synth import write_stories

    with progress_on_stderr() as progress:
        write_stories(output, size_mb=size_mb, seed=seed, force=force, progress=progress)
    size = output.stat().st_size
    text = statement(f"wrote {output}", f"{size_of(size)} of stories")
    return Result(text, {"output": output, "num_bytes": size})


@app.add("lmkit data download tinystories", "lmkit data download climbmix --shards 8")
def download(
    dataset: str,
    folder: Path = Path("artifacts/data"),
    shards: Annotated[int | None, typer.Option(min=1)] = None,
    plugin: list[Path] | None = None,
) -> Result:
    """Download a dataset.

    Run again, it resumes an interrupted download, and keeps finished files.

    Args:
        dataset: tinystories, owt (a sample of OpenWebText), fineweb_edu (1,822 Parquet shards of 0.1 GB), climbmix
            (6,542), fineweb10b (103 token files of GPT-2's tokenizer, 0.2 GB each), or a dataset of a plugin.
        folder: Where to keep it.
        shards: The first so many training shards of a dataset that has several; default: one.
    """
    from lmkit.data.download import download_dataset

    with progress_on_stderr() as progress:
        files = [str(path) for path in download_dataset(dataset, folder, shards=shards, progress=progress)]
    return Result("\n".join(files), {"files": files})


@app.add("lmkit data encode stories.txt tokens.npy --tokenizer tokenizer.json")
def encode(
    sources: list[Path],
    output: Path,
    tokenizer: Annotated[Path, typer.Option()],
    workers: int | None = None,
    errors: Errors = "strict",
    field: str | None = None,
    separator: str | None = None,
    end_of_text: str | None = None,
    format: Literal["npy", "bin"] = "npy",  # noqa: A002  the option's name
    shard_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    force: bool = False,
) -> Result:
    """Encode text files into a token file.

    Args:
        output: The token file (.npy) to write; of .bin shards, NAME in NAME_000000.bin, or a folder.
        format: npy: one file with its description; bin: shards as llm.c and modded-nanogpt read them.
        shard_tokens: Tokens of each .bin shard but the last; default: 100,000,000.
        separator: What ends a document in text files (the text of a JSON object or a row is one document);
            default: the end-of-text token, as the tokenizer writes it.
        end_of_text: Special token that ends every document; default: what the tokenizer's files say.
        tokenizer: A tokenizer.json: lmkit tokenizer train makes one.
    """
    from lmkit.data.bin_files import bin_name, written
    from lmkit.data.encoding import SHARD_TOKENS, encode_corpus
    from lmkit.data.overlap import OVERLAP
    from lmkit.data.token_files import PARTS
    from lmkit.errors import UsageError, some_of
    from lmkit.storage.outputs import refuse_replacing
    from lmkit.tokenizer import Tokenizer

    if shard_tokens is not None and format != "bin":
        message = "--shard-tokens: a .npy file has no shards"
        raise UsageError("encode.shard_tokens", message, hint="leave it out, or add --format bin")
    refuse_replacing([output.parent / f"{output.stem}{part}" for part in (*PARTS, OVERLAP)], [tokenizer])
    with progress_on_stderr() as progress:
        meta = encode_corpus(
            sources,
            output,
            Tokenizer.load(tokenizer, end_of_text=end_of_text),
            workers=workers or 0,
            errors=errors,
            field=field,
            separator=separator,
            format=format,
            shard_tokens=shard_tokens or SHARD_TOKENS,
            force=force,
            progress=progress,
        )
    shards = written(bin_name(output)) if format == "bin" else [output]
    fields = {"output": shards[0] if format == "npy" else shards, **_counts(meta)}
    return Result(statement(f"wrote {some_of(shards)}", _size(meta)), fields)


@app.add("lmkit data inspect artifacts/runs/quickstart/tokens/train.npy")
def inspect(paths: list[Path], tokenizer: Path | None = None) -> Result:
    """Check a token file, or several as one, and show what is in it.

    Args:
        paths: A token file (.npy or .bin), or several in this order; a glob names them sorted.
        tokenizer: A tokenizer.json, to show the text.
    """
    from lmkit.data.shards import name_of, open_tokens, with_num_bytes
    from lmkit.tokenizer import Tokenizer

    loaded = None if tokenizer is None else Tokenizer.load(tokenizer)
    file = with_num_bytes(open_tokens(paths, tokenizer=loaded), loaded)
    meta, dtype, head = file.meta, str(file.tokens.dtype), file.tokens[:PREVIEW_TOKENS].tolist()
    preview = " ".join(map(str, head)) if loaded is None else repr(loaded.decode(head))
    lines = [
        statement(name_of(paths), _size(meta, dtype)),
        f"vocabulary {meta.vocab_size:,}, tokenizer {meta.tokenizer_sha256[:12] or 'not known'}",
        enumeration("begins", [preview]),
    ]
    identity = {"vocab_size": meta.vocab_size, "tokenizer_sha256": meta.tokenizer_sha256}
    fields = {"path": name_of(paths), "dtype": dtype, **_counts(meta), **identity, "preview": preview}
    return Result("\n".join(lines), fields)


def _counts(meta: TokenMeta) -> dict[str, int | None]:
    return {key: getattr(meta, key) for key in ("num_tokens", "num_documents", "num_bytes", "counted_tokens")}


def _size(meta: TokenMeta, dtype: str = "") -> str:
    tokens = f"{meta.num_tokens:,} tokens" + (f" ({dtype})" if dtype else "")
    if meta.counted_tokens is not None:
        tokens += f", of which {meta.counted_tokens:,} count"
    ratio = f", {meta.num_bytes / max(meta.num_tokens, 1):.2f} bytes per token" if meta.num_bytes else ""
    return f"{tokens}, {meta.num_documents:,} documents{ratio}"
