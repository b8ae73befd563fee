"""Both encoders of chunks, numpy's and the compiled one, against the textbook."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkit.tokenizer import Tokenizer, chunk_encoder, native
from lmkit.tokenizer.chunk_encoder import ChunkEncoder, NumpyEncoder

PIECES = [
    *" \n\t'aestdé日😀1.", "  ", "'s", "'ll", " the", " return", "self.", "    ", "\u3000", "\u0301",
    "<|endoftext|>", "<|pad|>", "<|two words|>", "<|", "endoftext|>", "a" * 70, " b" * 20, "=" * 17,
]  # fmt: skip


@pytest.fixture(params=["numpy", "numpy, short texts", "native"])
def make_encoder(
    request: pytest.FixtureRequest, trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], ChunkEncoder]]:
    if request.param != "native":
        if request.param == "numpy":
            monkeypatch.setattr(chunk_encoder, "_SHORT_TEXT", 0)  # array operations even for the smallest
        yield lambda: NumpyEncoder(trained.merge_table)
        return
    code = native.library()
    if code is None:
        pytest.skip("no C compiler on this machine")
    yield lambda: native.NativeEncoder(code, trained.merge_table)


def encode(encoder: ChunkEncoder, tokenizer: Tokenizer, text: str) -> list[int]:
    return encoder.encode(text.encode(), tokenizer.specials).tolist()


def test_fuzzed_text(make_encoder: Callable, trained: Tokenizer, oracle_encode: Callable) -> None:
    encoder = make_encoder()  # one for all examples: what it remembers must not spoil the next

    @settings(max_examples=400, deadline=None)
    @given(st.one_of(st.lists(st.sampled_from(PIECES), max_size=60).map("".join), st.text()))
    def check(text: str) -> None:
        expected = oracle_encode(text, trained.vocab, trained.merges, trained.special_tokens)
        assert encode(encoder, trained, text) == expected

    check()


def test_real_text(
    make_encoder: Callable, trained: Tokenizer, oracle_encode: Callable, real_text: str
) -> None:
    text = real_text[-12_000:]
    expected = oracle_encode(text, trained.vocab, trained.merges, trained.special_tokens)
    encoder = make_encoder()
    assert encode(encoder, trained, text) == expected
    assert encode(encoder, trained, text) == expected  # now from memory


def test_nothing_is_lost_when_memory_is_full(
    make_encoder: Callable, trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_encoder, "_MOST_WORDS", 100)
    rng = random.Random(0)
    encoder = make_encoder()
    for _ in range(50):
        text = " ".join("".join(rng.choices("abcdefé", k=rng.randint(1, 40))) for _ in range(60))
        assert trained.decode(encode(encoder, trained, text)) == text


@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 1_000_000, "\n" * 1_000_000, "👩‍👩‍👧‍👦" * 40_000])
def test_pathological_words_take_n_log_n(make_encoder: Callable, trained: Tokenizer, text: str) -> None:
    start = time.process_time()
    assert trained.decode(encode(make_encoder(), trained, text)) == text
    assert time.process_time() - start < 60  # quadratic: hours


def test_empty_text(make_encoder: Callable, trained: Tokenizer) -> None:
    encoder = make_encoder()
    assert encode(encoder, trained, "") == []
    assert encode(encoder, trained, "<|pad|><|endoftext|>") == [
        trained.special_ids["<|pad|>"],
        trained.special_ids["<|endoftext|>"],
    ]


def test_ids_stay_when_more_is_encoded(make_encoder: Callable, trained: Tokenizer) -> None:
    encoder = make_encoder()
    first = encoder.encode(b"the first of two texts", trained.specials)
    kept = first.tolist()
    encoder.encode(b"another one, longer than the first", trained.specials)
    assert first.tolist() == kept
