"""Tokenizers on strings in memory, beside `tokenizers` and `tiktoken`."""

import random
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from raising import raises

from lmkit.errors import UsageError
from lmkit.tokenizer import PATTERN, Tokenizer, train_tokenizer
from lmkit.tokenizer.pretokenize import AddedToken

END = "<|endoftext|>"
DOCUMENTS = [
    "The cat sat on the café's mat, naïve and happy.\n\n\tIt's 1234!", "Ελληνικά и русский текст",
    "日本語のテキスト 한국어", "👩‍👩‍👧 🙂🙂 e\u0301", "", "   many   spaces   ", "the the then them other mat",
]  # fmt: skip
WORDS = [*DOCUMENTS, " ", "\n", "é", "語", "🙂", "\u3000", "<|", "x", " the", "\x00", END]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(texts=DOCUMENTS * 3, vocab_size=320)


def random_texts(seed: int, words: list[str] = WORDS) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(words, k=length)) for length in (*range(12), 300)]


def theirs(tokenizer: Tokenizer, folder: Path) -> tokenizers.Tokenizer:
    tokenizer.save(folder / "tokenizer.json")
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(("special", "workers"), [(END, 1), (None, 3)])
def test_training_on_texts_gives_the_file_of_training_on_files(
    tmp_path: Path, special: str | None, workers: int
):
    long = " ".join(random_texts(0, DOCUMENTS) * 200)  # more than one chunk
    texts = [*DOCUMENTS, long, *DOCUMENTS * 50]
    paths = []
    for i, text in enumerate(texts):
        paths.append(tmp_path / f"{i}.txt")
        paths[-1].write_bytes(text.encode())
    options: dict[str, Any] = {"vocab_size": 330, "special_tokens": special, "workers": workers}
    progress: list[tuple[str, int, int]] = []
    mine = train_tokenizer(texts=iter(texts), progress=lambda *what: progress.append(what), **options)
    if special is None:
        right = train_tokenizer(paths, **options)
    else:
        paths[0].write_bytes(END.join(texts).encode())
        right = train_tokenizer(paths[0], **options)
    for tokenizer, name in ((mine, "mine.json"), (right, "right.json")):
        tokenizer.save(tmp_path / name)
    assert (tmp_path / "mine.json").read_bytes() == (tmp_path / "right.json").read_bytes()
    counted = [done for what, done, _ in progress if what == "count words"]
    assert counted[-1] == sum(len(text.encode()) for text in texts)


def test_nothing_is_merged_across_texts():
    assert train_tokenizer(texts=["a", "b"] * 9, vocab_size=258, special_tokens=None).merges == []
    assert train_tokenizer(texts=["ab"], vocab_size=257, special_tokens=None).merges == [(b"a", b"b")]


def test_texts_that_are_none_are_refused():
    for wrong in ("one string", [b"bytes"], [1]):
        with pytest.raises(TypeError):
            train_tokenizer(texts=wrong, vocab_size=300)  # type: ignore[arg-type]
    with pytest.raises(ValueError):  # noqa: PT011 - both, or neither
        train_tokenizer("corpus.txt", texts=[], vocab_size=300)
    with raises(UsageError, "text.empty"):
        train_tokenizer(texts=["", ""], vocab_size=300)


def test_batches_of_texts_as_in_both_libraries(trained: Tokenizer, tmp_path: Path):
    texts = random_texts(1)
    ids = trained.encode_batch(texts)
    other = theirs(trained, tmp_path)
    assert ids == [encoding.ids for encoding in other.encode_batch(texts)]
    assert trained.decode_batch(ids) == texts == other.decode_batch(ids, skip_special_tokens=False)
    assert trained.encode_batch(texts, allowed_special=()) != ids
    with pytest.raises(TypeError):
        trained.encode_batch("one string")


def changed(trained: Tokenizer, **options: Any) -> Tokenizer:
    make, _ = trained.__reduce__()
    return make(**options)


@pytest.mark.parametrize("kind", ["trained", "prefix", "whitespace"])
def test_offsets_are_those_of_tokenizers(trained: Tokenizer, tmp_path: Path, kind: str):
    end = trained.special_ids[END]
    mark = (
        AddedToken("<m>", lstrip=True),
        AddedToken("<r>", special=False, rstrip=True),
        AddedToken("<b>", True, False, True, True),
        AddedToken("<n>", False, True, False, True),
    )
    tokenizer = {
        "trained": trained,
        "prefix": changed(trained, prefix=(end,), suffix=(end, end)),
        "whitespace": changed(trained, special_tokens=(AddedToken(END), *mark)),
    }[kind]
    other = theirs(tokenizer, tmp_path)
    for text in ["x<n>  <m>y", *random_texts(2, [*WORDS, "<m>", "<r>", "<b>", "<n>"])]:
        for around in (True, False):
            encoding = other.encode(text, add_special_tokens=around)
            found = tokenizer.encode_with_offsets(text, add_special_tokens=around)
            assert found == (encoding.ids, encoding.offsets)


def test_offsets_of_a_text_that_the_tokenizer_changes_are_refused(trained: Tokenizer, tmp_path: Path):
    composing = changed(trained, nfc=True)
    with raises(UsageError, "tokenizer.no_offsets", "normalizer"):
        composing.encode_with_offsets("e\u0301")
    encoding = theirs(composing, tmp_path).encode("日本 é")
    assert composing.encode_with_offsets("日本 é") == (encoding.ids, encoding.offsets)
    ascii_only = Tokenizer(vocab={i: bytes([i]) for i in range(128)}, merges=[])
    assert ascii_only.encode_with_offsets("ab")[1] == [(0, 1), (1, 2)]
    with raises(UsageError, "tokenizer.no_offsets"):
        ascii_only.encode_with_offsets("aé")


def test_decoding_with_offsets_and_bytes_of_an_id_as_in_tiktoken(trained: Tokenizer):
    ranks = {token: i for i, token in trained.vocab.items() if i not in trained.verbatim}
    other = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=trained.special_ids)
    for ids in trained.encode_batch(random_texts(3)):
        assert trained.decode_with_offsets(ids) == other.decode_with_offsets(ids)
    for i in trained.vocab:
        assert trained.decode_single_token_bytes(i) == other.decode_single_token_bytes(i)
    with pytest.raises(ValueError, match="999"):
        trained.decode_single_token_bytes(999)
    smile = trained.encode("🙃")
    with pytest.raises(UnicodeDecodeError):
        trained.decode_with_offsets(smile[:1])
    assert (trained.decode(smile[:1]), trained.decode(smile[:1], errors="ignore")) == ("\ufffd", "")
