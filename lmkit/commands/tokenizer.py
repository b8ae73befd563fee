"""`lmkit tokenizer train|encode|decode|inspect|import|export`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmkit.commands.numbers import count
from lmkit.errors import UsageError
from lmkit.measure.tables import enumeration, statement
from lmkit.recipe.tables import TokenizerConfig
from lmkit.storage.outputs import refuse_existing
from lmkit.tokenizer import Tokenizer, train_tokenizer

LONGEST_TOKENS = 10
IDS_PER_LINE = 1024
GPT2_FILES = ("vocab.json", "merges.txt")


@dataclass(frozen=True)
class TokenizerWritten:
    output: str
    vocab_size: int
    sha256: str

    def __str__(self) -> str:
        return statement(
            f"wrote {self.output}", f"vocabulary {count(self.vocab_size)}, sha256 {self.sha256[:12]}"
        )


def train(
    sources: Sequence[Path],
    output: Path,
    table: TokenizerConfig,
    *,
    workers: int,
    errors: Literal["strict", "replace"],
    force: bool,
    progress: Callable[[str, int, int], None],
) -> TokenizerWritten:
    """Train a tokenizer on text files, or the documents of .jsonl files, and save it.

    Raises:
        UsageError: the output is not named *.json (a forgotten output must not replace the last source).
    """
    from lmkit.data.corpora import plain_text_files

    _check_output(output, force=force)
    with plain_text_files(sources, output.parent, errors=errors, progress=progress) as texts:
        tokenizer = train_tokenizer(
            texts,
            vocab_size=table.vocab_size,
            special_tokens=table.special_tokens,
            workers=workers,
            errors=errors,
            progress=progress,
        )
    tokenizer.save(output)
    return TokenizerWritten(str(output), tokenizer.vocab_size, tokenizer.sha256)


def _check_output(output: Path, *, force: bool) -> None:
    if output.suffix != ".json":
        raise UsageError(
            f"{output}: a tokenizer file ends in .json",
            hint="name the output last, for example tokenizer.json",
        )
    refuse_existing(output, force=force)


@dataclass(frozen=True)
class Encoded:
    """For JSON: all ids at once."""

    ids: tuple[int, ...]


def encode(path: Path, texts: Iterable[str]) -> Encoded:
    """The ids of a stream of text."""
    return Encoded(tuple(Tokenizer.load(path).encode_iterable(texts)))


def encode_lines(path: Path, texts: Iterable[str]) -> Iterator[str]:
    """Yield the ids of a stream of text as lines of numbers, in constant memory."""
    ids = Tokenizer.load(path).encode_iterable(texts)
    while line := list(itertools.islice(ids, IDS_PER_LINE)):
        yield " ".join(map(str, line)) + "\n"


@dataclass(frozen=True)
class Decoded:
    """For JSON, which holds no bytes: those that are not UTF-8 are U+FFFD."""

    text: str


def decode(path: Path, numbers: str) -> bytes:
    """Turn ids written as text into the bytes they stand for.

    Raises:
        UsageError: something that is not an id of this vocabulary.
    """
    tokenizer = Tokenizer.load(path)
    ids = []
    for word in numbers.replace(",", " ").split():
        # A length limit first: Python refuses to read numbers of thousands of digits.
        if not word.isdecimal() or len(word) > 20 or int(word) not in tokenizer.vocab:
            raise UsageError(
                f"{word[:20]!r} is not a token id of {path}", hint=f"ids are 0 to {tokenizer.vocab_size - 1}"
            )
        ids.append(int(word))
    return tokenizer.decode_bytes(ids)


@dataclass(frozen=True)
class TokenizerFacts:
    path: str
    vocab_size: int
    num_merges: int
    special_tokens: tuple[str, ...]
    longest_tokens: tuple[str, ...]
    sha256: str
    bytes_per_token: float | None

    def __str__(self) -> str:
        lines = [
            statement(self.path, f"vocabulary {count(self.vocab_size)}, {count(self.num_merges)} merges"),
            enumeration("special tokens", self.special_tokens or ["none"]),
            f"sha256 {self.sha256}",
            enumeration("longest tokens", [repr(token) for token in self.longest_tokens]),
        ]
        if self.bytes_per_token is not None:
            lines.append(f"compression: {self.bytes_per_token:.3f} bytes per token")
        return "\n".join(lines)


def inspect(path: Path, text: Path | None) -> TokenizerFacts:
    """Describe a tokenizer; with a text, measure how far it compresses it."""
    from lmkit.data.corpora import plain_text_files
    from lmkit.tokenizer.inspection import describe

    tokenizer = Tokenizer.load(path)
    with plain_text_files([] if text is None else [text], errors="replace") as texts:
        facts = describe(tokenizer, text=next(iter(texts), None), longest=LONGEST_TOKENS)
    return TokenizerFacts(
        path=str(path),
        vocab_size=facts.vocab_size,
        num_merges=facts.num_merges,
        special_tokens=facts.special_tokens,
        longest_tokens=tuple(token.decode("utf-8", "replace") for token in facts.longest_tokens),
        sha256=facts.sha256,
        bytes_per_token=facts.bytes_per_token,
    )


@dataclass(frozen=True)
class TokenizerExported:
    files: tuple[str, ...]

    def __str__(self) -> str:
        return "wrote " + " and ".join(self.files)


def export(path: Path, folder: Path, *, force: bool) -> TokenizerExported:
    """Write GPT-2's two files."""
    files = tuple(folder / name for name in GPT2_FILES)
    for file in files:
        refuse_existing(file, force=force)
    Tokenizer.load(path).save_gpt2(folder)
    return TokenizerExported(tuple(map(str, files)))


def import_gpt2(folder: Path, output: Path, *, force: bool) -> TokenizerWritten:
    """Make one tokenizer.json of GPT-2's two files.

    Raises:
        UsageError: a file is missing, or the output is not named *.json. LmkitError: a file is damaged.
    """
    _check_output(output, force=force)
    tokenizer = Tokenizer.load_gpt2(*(folder / name for name in GPT2_FILES))
    tokenizer.save(output)
    return TokenizerWritten(str(output), tokenizer.vocab_size, tokenizer.sha256)
