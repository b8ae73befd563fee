"""`lmkit data synth|download|encode|inspect`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmkit.commands.numbers import count, megabytes
from lmkit.errors import UsageError
from lmkit.measure.progress import Progress
from lmkit.measure.tables import enumeration, statement
from lmkit.storage.outputs import refuse_existing

ErrorMode = Literal["strict", "replace"]

PREVIEW_TOKENS = 64


@dataclass(frozen=True)
class Synthesised:
    output: str
    num_bytes: int

    def __str__(self) -> str:
        return statement(f"wrote {self.output}", f"{megabytes(self.num_bytes)} of stories")


def synth(output: Path, *, size_mb: float, seed: int, force: bool, progress: Progress) -> Synthesised:
    """Generate a corpus of short stories."""
    from lmkit.data.synth import write_stories

    if not math.isfinite(size_mb):
        raise UsageError(f"--size-mb: {size_mb} is not a size", hint="for example --size-mb 20")
    refuse_existing(output, force=force)
    write_stories(output, size_mb=size_mb, seed=seed, progress=progress)
    return Synthesised(str(output), output.stat().st_size)


@dataclass(frozen=True)
class Downloaded:
    files: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.files)


def download(dataset: str, folder: Path, *, progress: Progress) -> Downloaded:
    """Fetch a known dataset into `folder`, resuming what is there."""
    from lmkit.data.download import DATASETS
    from lmkit.data.download import download as fetch

    if dataset not in DATASETS:
        raise UsageError(f"{dataset}: no such dataset", hint="known: " + ", ".join(DATASETS))
    return Downloaded(tuple(str(path) for path in fetch(DATASETS[dataset], folder, progress=progress)))


@dataclass(frozen=True)
class Encoded:
    output: str
    num_tokens: int
    num_documents: int
    num_bytes: int

    def __str__(self) -> str:
        ratio = self.num_bytes / max(self.num_tokens, 1)
        return statement(
            f"wrote {self.output}",
            f"{count(self.num_tokens)} tokens, {count(self.num_documents)} documents, "
            f"{ratio:.2f} bytes per token",
        )


def encode(
    sources: Sequence[Path],
    output: Path,
    tokenizer: Path,
    *,
    workers: int,
    errors: ErrorMode,
    force: bool,
    progress: Progress,
) -> Encoded:
    """Encode text files, or the documents of .jsonl files, into one token file."""
    from lmkit.data.corpora import plain_text_files
    from lmkit.data.encoding import check_output, encode_corpus
    from lmkit.tokenizer import Tokenizer

    loaded = Tokenizer.load(tokenizer)
    check_output(output, sources, force=force)
    with plain_text_files(sources, output.parent, errors=errors, progress=progress) as texts:
        meta = encode_corpus(
            texts, output, loaded, workers=workers, errors=errors, force=force, progress=progress
        )
    return Encoded(str(output), meta.num_tokens, meta.num_documents, meta.num_bytes)


@dataclass(frozen=True)
class TokenFileFacts:
    path: str
    dtype: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    vocab_size: int
    tokenizer_sha256: str
    preview: str

    def __str__(self) -> str:
        ratio = self.num_bytes / max(self.num_tokens, 1)
        lines = [
            statement(
                self.path,
                f"{count(self.num_tokens)} tokens ({self.dtype}), {count(self.num_documents)} documents, "
                f"{ratio:.2f} bytes per token",
            ),
            f"vocabulary {count(self.vocab_size)}, tokenizer {self.tokenizer_sha256[:12]}",
            enumeration("begins", [self.preview]),
        ]
        return "\n".join(lines)


def inspect(path: Path, tokenizer_path: Path | None) -> TokenFileFacts:
    """Check a token file and describe it; with a tokenizer, show how its text begins."""
    from lmkit.data.token_files import open_tokens
    from lmkit.tokenizer import Tokenizer

    tokenizer = None if tokenizer_path is None else Tokenizer.load(tokenizer_path)
    file = open_tokens(path, tokenizer_sha256=None if tokenizer is None else tokenizer.sha256)
    head = [int(token) for token in file.tokens[:PREVIEW_TOKENS]]
    preview = " ".join(map(str, head)) if tokenizer is None else repr(tokenizer.decode(head))
    meta = file.meta
    return TokenFileFacts(
        path=str(path),
        dtype=str(file.tokens.dtype),
        num_tokens=meta.num_tokens,
        num_documents=meta.num_documents,
        num_bytes=meta.num_bytes,
        vocab_size=meta.vocab_size,
        tokenizer_sha256=meta.tokenizer_sha256,
        preview=preview,
    )
