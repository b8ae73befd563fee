"""The tokenizer: text to token ids and back."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import operator
import threading
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmkit.core.bpe import Pair
from lmkit.errors import UsageError
from lmkit.recipe import NUM_BYTES
from lmkit.recipe.run_folder import tokenizer_in
from lmkit.storage.atomic import write_atomic
from lmkit.tokenizer import files
from lmkit.tokenizer.chunks import exact_chunks
from lmkit.tokenizer.engine import CHUNK_BYTES, Encoder, MergeTable, is_utf8, new_encoder
from lmkit.tokenizer.marks import NO_MARKS, Marks, files_of_marks, resolve_marks
from lmkit.tokenizer.pretokenize import SPACE_RUN, AddedToken, SpecialTokens

_log = logging.getLogger("lmkit")
_STREAM_BYTES = 1 << 16
_BYTES = [bytes([byte]) for byte in range(NUM_BYTES)]
_IN_UTF8 = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]


class Tokenizer:
    """Byte-level BPE with GPT-2's pre-tokenization, or that of another model.

    If the vocabulary has all 256 bytes, `decode(encode(text)) == text`, except that `nfc` changes the text, and that
    an `AddedToken` may take the whitespace around it. Characters of other bytes are left out, or become the unknown
    token, as in Hugging Face's library.

    Args:
        vocab: token id -> bytes. A string is not made of bytes: only a special token or `unk_id` uses its id.
        merges: pairs of tokens, first learned first; `vocab` contains the merged tokens.
        special_tokens: never split, never merged across. One with the name that an ordinary token has in
            `tokenizer.json` is that token; one that `vocab` lacks gets the next free id.
        prefix, suffix: ids before and after every text, such as a begin-of-sequence token.
        pattern: finds words: a name of `lmkit.tokenizer.pretokenize.PATTERNS`.
        whole_words: whether a word that is in `vocab` is one token even if no merges make it (Llama 3).
        nfc: whether text is put into Unicode's normal form C first (Qwen2).
        unk_id: the token for a byte that `vocab` lacks; None leaves the byte out.
        fuse_unk: whether a run of such bytes in a word is one token.
        marks: the special tokens that begin and end a text; by default those with a conventional name.

    Raises:
        ValueError: a part of a merge, a merged token or an id is missing in `vocab`, two ids have the same bytes, a
            special token is empty or given twice, or a mark is not a special token.

    >>> vocab = {i: bytes([i]) for i in range(256)} | {256: b"he", 257: b"hel"}
    >>> tokenizer = Tokenizer(vocab=vocab, merges=[(b"h", b"e"), (b"he", b"l")], special_tokens=["<|endoftext|>"])
    >>> tokenizer.encode("hello<|endoftext|>")
    [257, 108, 111, 258]
    >>> tokenizer.decode([257, 108, 111])
    'hello'
    """

    def __init__(
        self,
        *,
        vocab: Mapping[int, bytes | str],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Sequence[str | AddedToken] = (),
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        pattern: str = "gpt2",
        whole_words: bool = False,
        nfc: bool = False,
        unk_id: int | None = None,
        fuse_unk: bool = False,
        marks: Marks = NO_MARKS,
    ) -> None:
        self.added_tokens = tuple(AddedToken(t) if isinstance(t, str) else t for t in special_tokens)
        texts = set(map(operator.attrgetter("text"), self.added_tokens))
        if "" in texts or len(texts) != len(special_tokens):
            raise ValueError("special tokens must be distinct and not empty")
        in_order = sorted(vocab.items())
        ordinary = {token: i for i, token in in_order if isinstance(token, bytes)}
        verbatim = {token: i for i, token in in_order if isinstance(token, str)}
        if len(ordinary) + len(verbatim) < len(vocab):
            raise ValueError("two ids have the same token")
        self.merges = list(merges)
        try:
            table = [(ordinary[left], ordinary[right], ordinary[left + right]) for left, right in merges]
        except KeyError as error:
            raise ValueError(f"the vocabulary lacks {error.args[0]!r}, which a merge uses or makes") from None
        made = {*_BYTES, *itertools.starmap(operator.add, merges)}
        ids: dict[AddedToken, int] = {}
        next_free = max(vocab, default=-1) + 1
        for added in self.added_tokens:
            name, token = files.to_bytes(added.text) or b"", added.text.encode()
            if name in ordinary and (name in made or (whole_words and name != token and is_utf8(name))):
                ids[added] = ordinary[name]
                continue
            if added.text not in verbatim:  # an ordinary token of the same spelling becomes special
                spelled = name if name in ordinary or token in made else token
                verbatim[added.text] = ordinary.pop(spelled, next_free)
                next_free += verbatim[added.text] == next_free
            ids[added] = verbatim[added.text]
        special = set(verbatim.values())
        if not special.isdisjoint(itertools.chain.from_iterable(table)):
            # A special token is never merged, even if the list of merges has it.
            self.merges = [pair for pair in merges if pair[0] in ordinary and pair[1] in ordinary]
            table = [row for row in table if special.isdisjoint(row)]
        self.specials = SpecialTokens(ids)
        self.special_ids = {token.text: i for token, i in self.specials.ids.items() if token.special}
        self.special_tokens = tuple(self.special_ids)
        self.verbatim = frozenset(special)
        """Ids of the tokens that `tokenizer.json` writes as they are, not in the byte alphabet."""
        by_id = dict(zip(ordinary.values(), ordinary, strict=True))
        for text, token_id in verbatim.items():
            by_id[token_id] = text.encode()
        self.vocab = dict(sorted(by_id.items()))
        self.vocab_size = max(self.vocab) + 1
        """One more than the largest id: the rows that an embedding needs."""
        self.prefix, self.suffix = tuple(prefix), tuple(suffix)
        for token_id in (*self.prefix, *self.suffix, *([] if unk_id is None else [unk_id])):
            if token_id not in self.vocab:
                raise ValueError(f"{token_id} is not a token id of this vocabulary")
        self.pattern, self.whole_words, self.nfc = pattern, whole_words, nfc
        self.unk_id, self.fuse_unk = unk_id, fuse_unk
        self.missing_bytes = bytes([byte for byte in _IN_UTF8 if _BYTES[byte] not in ordinary])
        """Bytes of UTF-8 that no token has: text with them loses characters."""
        self._is_silent = bool(self.missing_bytes)
        self.marks = resolve_marks(marks, self.special_ids)
        """The special tokens that begin and end a text, and the ids at which generation stops."""
        self.end_of_text_id = None if self.marks.end is None else self.special_ids[self.marks.end]
        """The id that ends a document; None if the tokenizer has no such token."""
        begin = self.end_of_text_id if self.marks.begin is None else self.special_ids[self.marks.begin]
        self.start_id = (*self.prefix, begin)[0]
        """The id before the first token of a text: the prefix, else the begin-of-text token that the files name, else
        the end-of-text token of the text before. None if the tokenizer has none of them."""
        self._special_sizes = np.zeros(self.vocab_size, np.int64)  # id -> bytes of the token; 0: ordinary
        for text, token_id in self.special_ids.items():
            if token_id != unk_id:  # stands for text
                self._special_sizes[token_id] = len(text.encode())
        missing = -1 if unk_id is None else -2 - unk_id if fuse_unk else unk_id
        self.merge_table = MergeTable(
            [ordinary.get(byte, missing) for byte in _BYTES],
            table,
            pattern=pattern,
            whole=ordinary if whole_words else None,
            nfc=nfc,
        )
        self._lock = threading.Lock()  # an encoder serves one thread at a time
        self._encoder: Encoder | None = None

    @classmethod
    def from_merges(cls, merges: Sequence[Pair], special_tokens: str | Sequence[str] = ()) -> Tokenizer:
        """Return a tokenizer whose ids are the 256 bytes, the merges in order, then the special tokens.

        >>> Tokenizer.from_merges([(b"h", b"e")], "<|endoftext|>").encode("he<|endoftext|>")
        [256, 257]
        """
        tokens = [*_BYTES, *itertools.starmap(operator.add, merges)]
        specials = (special_tokens,) if isinstance(special_tokens, str) else special_tokens
        return cls(vocab=dict(enumerate(tokens)), merges=merges, special_tokens=specials)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the content; locks and compiled encoders are made anew.
        vocab = {i: token.decode() if i in self.verbatim else token for i, token in self.vocab.items()}
        names = ("merges", "prefix", "suffix", "pattern", "whole_words", "nfc", "unk_id", "fuse_unk", "marks")
        kept = {name: getattr(self, name) for name in names}
        return functools.partial(Tokenizer, vocab=vocab, special_tokens=self.added_tokens, **kept), ()

    def with_end_of_text(self, token: str) -> Tokenizer:
        """Return this tokenizer with another special token that ends a text.

        UsageError: `token` is not a special token of this tokenizer ("tokenizer.end_of_text").
        """
        if token not in self.special_ids:
            message = f"{token!r} is not a special token, so that it cannot end a text"
            hint = f"special tokens: {', '.join(self.special_tokens) or 'none'}"
            raise UsageError("tokenizer.end_of_text", message, hint=hint)
        make, _ = self.__reduce__()
        return make(marks=self.marks._replace(end=token, stops=()))

    def for_training(self) -> Tokenizer:
        """Return this tokenizer for a model trained on token files, in which only the prefix begins documents: a
        prompt must not begin with another begin-of-text token."""
        begin = self.marks.begin
        if begin is None or self.special_ids[begin] in self.prefix:
            return self
        make, _ = self.__reduce__()
        return make(marks=self.marks._replace(begin=None))

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the content of `tokenizer.json` as `save` writes it, and of the end-of-text token if it has no
        conventional name: equal tokenizers have equal hashes."""
        content = files.to_json(self)
        if self.marks.end != resolve_marks(NO_MARKS, self.special_ids).end:
            content += f"\0{self.marks.end}"
        return hashlib.sha256(content.encode()).hexdigest()

    def encode(
        self, text: str, *, allowed_special: str | Collection[str] = "all", add_special_tokens: bool = True
    ) -> list[int]:
        """Return the ids of `text`. Warn once, in the log, if characters are lost (see `missing_bytes`).

        Args:
            allowed_special: the special tokens to recognize ("all" or a collection); the others are plain text.
            add_special_tokens: whether to put the prefix and suffix of the tokenizer around the text.

        ValueError: `allowed_special` has an unknown name, or `text` a lone surrogate, which has no UTF-8.
        """
        ids = self._encode_utf8(text.encode(), self.specials.only(allowed_special))
        if self._is_silent and not {*self.missing_bytes}.isdisjoint(text.encode()):
            expected = unicodedata.normalize("NFC", text) if self.nfc else text
            if self.decode_bytes(ids) != expected.encode():
                self._is_silent = False
                _log.warning("the tokenizer has no token for characters of this text: they are lost")
        return [*self.prefix, *ids, *self.suffix] if add_special_tokens else ids

    def encode_batch(self, texts: Iterable[str], **options: Any) -> list[list[int]]:
        """Return the ids of each text; `options` and errors are those of `encode`. TypeError: `texts` is a string."""
        if isinstance(texts, str):
            raise TypeError("texts must be an iterable of strings; encode takes one string")
        return [self.encode(text, **options) for text in texts]

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True, **options: Any
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of `text`, and of each the characters (start, end) that it stands for.

        They are those of Hugging Face's `tokenizers` without `trim_offsets`: a token's own spaces count. A token that
        is a part of a character has that character's; prefix and suffix have (0, 0).

        Args:
            options: those of `encode`, also its errors.

        UsageError: the tokenizer puts this text into another normal form, or loses characters of it
        ("tokenizer.no_offsets").
        """
        data, ids = text.encode(), self.encode(text, add_special_tokens=False, **options)
        changed = self.nfc and not unicodedata.is_normalized("NFC", text)
        if changed or not {*self.missing_bytes}.isdisjoint(data):
            why = "its normalizer is NFC" if changed else "no token has some bytes"
            message = f"no offsets: the tokenizer changes this text first ({why})"
            hint = 'normalize it yourself: unicodedata.normalize("NFC", text); leave such characters out'
            raise UsageError("tokenizer.no_offsets", message, hint=hint)
        # Bytes that begin a character, before each place
        begun = np.cumsum([0, *(np.frombuffer(data, np.uint8) & 0xC0 != 0x80)]).tolist()
        added = {token_id: token for token, token_id in self.specials.ids.items()}
        offsets, end = [], 0
        for token_id, next_id in itertools.pairwise([*ids, -1]):
            start, word, token = end, self.vocab[token_id], added.get(token_id)
            if token is not None and not data.startswith(word, start):
                word = token.text.encode()
            end = data.index(word, start) + len(word)  # spaces may come before it, which it has taken
            follows = added.get(next_id)  # searched for earlier, it has taken the spaces between the two
            is_late = token and token.normalized and follows and follows.lstrip and not follows.normalized
            if token is not None and token.rstrip and not is_late and (spaces := SPACE_RUN.match(data, end)):
                end = spaces.end()
            offsets.append((begun[start + 1] - 1, begun[end]))
        if not add_special_tokens:
            return ids, offsets
        before, after = ([(0, 0)] * len(around) for around in (self.prefix, self.suffix))
        return [*self.prefix, *ids, *self.suffix], [*before, *offsets, *after]

    def encode_iterable(self, texts: Iterable[str]) -> Iterator[int]:
        """Yield the ids of the joined strings, wherever one ends, in constant memory; for example of a text file."""
        blocks = (text.encode() for text in texts)
        yield from self.prefix
        for chunk in exact_chunks(blocks, self.specials, size=_STREAM_BYTES):
            yield from self._encode_utf8(chunk.data, self.specials)
        yield from self.suffix

    def _encode_utf8(self, data: bytes, specials: SpecialTokens) -> list[int]:
        with self._lock:
            encode = self._encoder = self._encoder or new_encoder(self.merge_table)
            if len(data) <= CHUNK_BYTES:
                return encode(data, specials)[0].tolist()
            ids: list[int] = []
            for chunk in exact_chunks([data], specials):
                ids += encode(chunk.data, specials)[0].tolist()
            return ids

    def decode(self, ids: Iterable[int], *, errors: str = "replace") -> str:
        """Return the text of `ids`; by default, parts of characters become U+FFFD.

        ValueError: an id is not in the vocabulary; with errors="strict" also bytes that are not UTF-8.
        """
        return self.decode_bytes(ids).decode("utf-8", errors)

    def decode_batch(self, batch: Iterable[Iterable[int]], *, errors: str = "replace") -> list[str]:
        """Return the text of each list of ids, see `decode`."""
        return [self.decode(ids, errors=errors) for ids in batch]

    def decode_with_offsets(self, ids: Iterable[int]) -> tuple[str, list[int]]:
        """Return the text of `ids`, and of each id the index of the first character that has a byte of it.

        ValueError: an id is not in the vocabulary, or the bytes are not UTF-8.
        """
        tokens = [self.decode_single_token_bytes(token_id) for token_id in ids]
        data = b"".join(tokens)
        begun = np.cumsum([0, *(np.frombuffer(data, np.uint8) & 0xC0 != 0x80)])
        starts = np.cumsum([0, *map(len, tokens)])[:-1]
        return data.decode(), (begun[np.minimum(starts + 1, len(data))] - 1).tolist()

    def decode_single_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id. Raises ValueError as `decode`."""
        return self.decode_bytes([token_id])

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids`, joined. Raises ValueError as `decode`."""
        try:
            return b"".join(map(self.vocab.__getitem__, map(operator.index, ids)))  # an id may be a tensor
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a token id of this vocabulary: {error}") from None

    def specials_in(self, ids: np.ndarray, places: np.ndarray | None = None) -> tuple[np.ndarray, int]:
        """Return the indices of the special tokens among `ids` (n,), and how many bytes they are written with, which
        are no text. `places`: indices of all special tokens, perhaps of others too; None: not known."""
        if places is None:  # most ids are lower than the lowest special one
            places = np.flatnonzero(ids >= min(self.special_ids.values(), default=self.vocab_size))
        written = self._special_sizes[ids[places]]
        return places[written > 0], int(written.sum())

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json` that Hugging Face `tokenizers` loads unchanged and that encodes identically there,
        but for characters that only one of the two libraries' versions of Unicode knows as letters.

        If the names of the special tokens do not tell which one ends a text, `tokenizer_config.json` and
        `generation_config.json` beside it do. UsageError: these are needed, and the file is not called tokenizer.json
        ("tokenizer.marks"), or they are somebody else's ("tokenizer.replaces_marks").
        """
        for file, content in files_of_marks(Path(path), self.marks, self.special_ids).items():
            write_atomic(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        write_atomic(path, files.to_json(self))

    @classmethod
    def load(cls, path: str | Path, *, end_of_text: str | None = None) -> Tokenizer:
        """Read the `tokenizer.json` of a byte-level BPE; the ids are those of Hugging Face's `tokenizers`.

        Post-processors that put tokens around a text become `prefix` and `suffix`. The files beside it name the
        tokens that begin and end a text. Truncation and padding are ignored, with a warning.

        Args:
            path: the file, or a folder with a file of that name.
            end_of_text: the special token that ends a text, whatever the files say.

        Raises:
            UsageError: no such file; `end_of_text` is not a special token ("tokenizer.end_of_text"); a field with a
                value that lmkit does not support ("tokenizer.unsupported").
            LmkitError: the file is damaged ("tokenizer.damaged_file").
        """
        path = tokenizer_in(Path(path))
        try:
            tokenizer = cls(**files.load_json(path))
        except ValueError as error:
            raise files.damaged(path, error) from error
        return tokenizer if end_of_text is None else tokenizer.with_end_of_text(end_of_text)

    def save_gpt2(self, folder: str | Path) -> None:
        """Write GPT-2's `vocab.json` and `merges.txt` into `folder`, without `prefix` and `suffix`, with a warning.

        UsageError: the words are not GPT-2's.
        """
        files.save_gpt2(self, Path(folder))

    @classmethod
    def load_gpt2(cls, vocab_json: str | Path, merges_txt: str | Path) -> Tokenizer:
        """Read GPT-2's two files. A token that is no byte and comes from no merge is a special token. UsageError: no
        such file; LmkitError: a file is damaged."""
        try:
            return cls(**files.load_gpt2(Path(vocab_json), Path(merges_txt)))
        except ValueError as error:
            raise files.damaged(vocab_json, error) from error
