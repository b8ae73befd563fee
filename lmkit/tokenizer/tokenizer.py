"""The tokenizer: text to token ids and back."""

from __future__ import annotations

import functools
import hashlib
import operator
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lmkit.errors import LmkitError
from lmkit.recipe.vocabulary import END_OF_TEXT
from lmkit.tokenizer import files
from lmkit.tokenizer.bpe import MergeTable
from lmkit.tokenizer.chunk_encoder import ChunkEncoder
from lmkit.tokenizer.chunks import exact_chunks
from lmkit.tokenizer.native import chunk_bytes, chunk_encoder, is_utf8
from lmkit.tokenizer.pattern import split_words
from lmkit.tokenizer.special_tokens import SpecialTokens

_STREAM_BYTES = 1 << 16

AllowedSpecial = Literal["all"] | frozenset[str]


class Tokenizer:
    """Byte-level BPE with GPT-2's pre-tokenisation.

    Every string has ids and every list of ids has bytes: `decode(encode(text)) == text`.

    Args:
        vocab: token id -> bytes; holds all 256 single bytes.
        merges: pairs of tokens in order of learning; what they make is in `vocab`.
        special_tokens: never split, never merged across; one that `vocab` lacks gets the next free id.

    Raises:
        ValueError: a byte or a merge is missing in `vocab`, or a special token is empty or named twice.

    >>> vocab = {i: bytes([i]) for i in range(256)} | {256: b"he", 257: b"hel"}
    >>> tokenizer = Tokenizer(vocab=vocab, merges=[(b"h", b"e"), (b"he", b"l")], special_tokens=("<|endoftext|>",))
    >>> tokenizer.encode("hello<|endoftext|>")
    [257, 108, 111, 258]
    """

    def __init__(
        self,
        *,
        vocab: Mapping[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Sequence[str] = (),
    ) -> None:
        if "" in special_tokens or len(set(special_tokens)) != len(special_tokens):
            raise ValueError("special tokens must be distinct and not empty")
        self.vocab = dict(sorted(vocab.items()))
        self.merges = list(merges)
        self.special_tokens = tuple(special_tokens)
        ordinary = _ordinary_ids(self.vocab, self.merges)
        self.special_ids = _special_ids(self.vocab, ordinary, self.special_tokens)
        for text, token_id in self.special_ids.items():
            self.vocab[token_id] = text.encode()
        self.vocab_size = max(self.vocab) + 1
        """One more than the largest id: the rows that an embedding needs."""
        self._specials = SpecialTokens(self.special_ids)
        self.merge_table = MergeTable(
            [ordinary[bytes([byte])] for byte in range(256)],
            [(ordinary[left], ordinary[right], ordinary[left + right]) for left, right in self.merges],
        )
        self._chunk_encoder_lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # For pickle: a new one from the same content. Locks and compiled encoders stay behind.
        return functools.partial(
            Tokenizer, vocab=self.vocab, merges=self.merges, special_tokens=self.special_tokens
        ), ()

    @property
    def end_of_text_id(self) -> int | None:
        return self.special_ids.get(END_OF_TEXT)

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the content of `tokenizer.json` as `save` writes it: equal tokenizers have equal hashes."""
        return hashlib.sha256(files.to_json(self).encode()).hexdigest()

    # ---- encoding

    def encode(self, text: str, *, allowed_special: AllowedSpecial = "all") -> list[int]:
        """Return the ids of `text`.

        Args:
            allowed_special: the special tokens that are recognised; the others are encoded as plain text.

        Raises:
            ValueError: `allowed_special` names something that is not a special token of this tokenizer, or `text`
                holds a lone surrogate, which has no UTF-8.
        """
        return self._encode_utf8(text.encode(), self._allowed(allowed_special))

    def encode_bytes(self, data: bytes, *, allowed_special: AllowedSpecial = "all") -> list[int]:
        """Return the ids of any bytes. Where they are not UTF-8, each invalid byte counts as a punctuation mark.

        Raises:
            ValueError: as `encode`.
        """
        specials = self._allowed(allowed_special)
        if is_utf8(data):
            return self._encode_utf8(data, specials)
        ids: list[int] = []
        end = 0
        for span in specials.find(data):
            ids += self._encode_escaped(data[end : span.start])
            ids.append(span.token_id)
            end = span.end
        return ids + self._encode_escaped(data[end:])

    def encode_iterable(self, texts: Iterable[str]) -> Iterator[int]:
        """Yield the ids of the strings' concatenation, in constant memory; for example of an open text file.

        Where one string ends and the next begins leaves no trace: words and special tokens may reach across.
        """
        blocks = (text.encode() for text in texts)
        for chunk in exact_chunks(blocks, self._specials, size=_STREAM_BYTES):
            yield from self._encode_utf8(chunk.data, self._specials)

    def chunk_encoder(self) -> ChunkEncoder:
        """Return a new encoder of large pieces of bytes, for one thread."""
        return chunk_encoder(self.merge_table)

    @property
    def specials(self) -> SpecialTokens:
        """Finds the special tokens in bytes."""
        return self._specials

    def _allowed(self, allowed: AllowedSpecial) -> SpecialTokens:
        return self._specials if allowed == "all" else self._specials.only(allowed)

    def _encode_utf8(self, data: bytes, specials: SpecialTokens) -> list[int]:
        with self._chunk_encoder_lock:
            if len(data) <= chunk_bytes():
                return self._chunk_encoder.encode(data, specials).tolist()
            ids: list[int] = []
            for chunk in exact_chunks([data], specials):
                ids += self._chunk_encoder.encode(chunk.data, specials).tolist()
            return ids

    @functools.cached_property
    def _chunk_encoder(self) -> ChunkEncoder:
        return self.chunk_encoder()

    def _encode_escaped(self, data: bytes) -> list[int]:
        ids: list[int] = []
        for word in split_words(data.decode("utf-8", "surrogateescape")):
            ids += self.merge_table.merge_word(word.encode("utf-8", "surrogateescape"))
        return ids

    # ---- decoding

    def decode(self, ids: Iterable[int], *, errors: str = "replace") -> str:
        """Return the text of `ids`.

        A token may hold part of a character: by default, what is not UTF-8 becomes U+FFFD.

        Raises:
            ValueError: an id that is not in the vocabulary; with errors="strict" also bytes that are not UTF-8.
        """
        return self.decode_bytes(ids).decode("utf-8", errors)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids`, joined.

        Raises:
            ValueError: an id that is not in the vocabulary.
        """
        ids = ids if isinstance(ids, (list, tuple)) else list(ids)
        try:
            return b"".join([self.vocab[token_id] for token_id in ids])
        except KeyError:  # one is no id, or an id as a tensor, which equals no other key
            return b"".join([self._token(token_id) for token_id in ids])

    def _token(self, token_id: int) -> bytes:
        try:
            return self.vocab[operator.index(token_id)]
        except (KeyError, TypeError):
            raise ValueError(f"{token_id} is not a token id of this vocabulary") from None

    # ---- files

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json` that Hugging Face `tokenizers` loads and encodes with to the same ids.

        But for characters that one Unicode version assigns and the other does not: whether they are letters decides
        where words end, and `regex` and `tokenizers` each bring their own.
        """
        files.save_json(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json` of ours, or another one of a byte-level BPE with GPT-2's pre-tokenisation.

        Raises:
            UsageError: no such file, or another kind of tokenizer.
            LmkitError: the file is damaged.
        """
        return cls._from_file(files.load_json(Path(path)), path)

    def save_gpt2(self, folder: str | Path) -> None:
        """Write `vocab.json` and `merges.txt`, as GPT-2 has them, into `folder`."""
        files.save_gpt2(self, Path(folder))

    @classmethod
    def load_gpt2(cls, vocab_json: str | Path, merges_txt: str | Path) -> Tokenizer:
        """Read GPT-2's two files. What neither is a byte nor comes from a merge is a special token.

        Raises:
            UsageError: no such file. LmkitError: a file is damaged.
        """
        return cls._from_file(files.load_gpt2(Path(vocab_json), Path(merges_txt)), vocab_json)

    @classmethod
    def _from_file(cls, content: dict[str, Any], path: str | Path) -> Tokenizer:
        try:
            return cls(**content)
        except ValueError as error:
            raise LmkitError(f"{path}: {error}", hint=files.DAMAGED) from error


def _ordinary_ids(vocab: Mapping[int, bytes], merges: Sequence[tuple[bytes, bytes]]) -> dict[bytes, int]:
    """Return the ids of the bytes and of what the merges make; the lowest, where a special token reads the same."""
    lowest: dict[bytes, int] = {}
    for token_id, token in vocab.items():
        lowest.setdefault(token, token_id)
    needed = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    try:
        ordinary = {token: lowest[token] for token in needed}
    except KeyError as error:
        raise ValueError(f"the vocabulary lacks {error.args[0]!r}") from None
    for pair in merges:
        for token in pair:
            if token not in ordinary:
                raise ValueError(f"the merges use {token!r} but do not make it")
    return ordinary


def _special_ids(
    vocab: Mapping[int, bytes], ordinary: Mapping[bytes, int], special_tokens: Sequence[str]
) -> dict[str, int]:
    highest = {token: token_id for token_id, token in vocab.items() if ordinary.get(token) != token_id}
    next_free = max(vocab) + 1
    ids = {}
    for text in special_tokens:
        token_id = highest.get(text.encode())
        if token_id is None:
            token_id, next_free = next_free, next_free + 1
        ids[text] = token_id
    return ids
