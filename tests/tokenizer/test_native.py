from __future__ import annotations

import ctypes
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lmkit.tokenizer import Tokenizer, native
from lmkit.tokenizer.bpe import MergeTable
from lmkit.tokenizer.chunk_encoder import NumpyEncoder
from lmkit.tokenizer.special_tokens import SpecialTokens
from lmkit.tokenizer.word_counter import NumpyCounter

NO_SPECIALS = SpecialTokens({})


@pytest.fixture
def code() -> ctypes.CDLL:
    compiled = native.library()
    if compiled is None:
        pytest.skip("no C compiler on this machine")
    return compiled


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine on which nothing was compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


def test_equal_to_numpy_on_a_megabyte_of_random_words(
    code: ctypes.CDLL, trained: Tokenizer, real_text: str
) -> None:
    rng = random.Random(0)
    pieces = [real_text[i : i + rng.randint(1, 40)] for i in rng.choices(range(len(real_text)), k=50_000)]
    data = "".join(pieces).encode()
    fast, slow = native.NativeEncoder(code, trained.merge_table), NumpyEncoder(trained.merge_table)
    expected = slow.encode(data, trained.specials)
    np.testing.assert_array_equal(fast.encode(data, trained.specials), expected)


def test_long_words_are_merged_in_order_of_rank(
    code: ctypes.CDLL, trained: Tokenizer, real_text: str, oracle_encode: Callable
) -> None:
    """Beyond 64 bytes a heap finds the best pair, and what it holds of pairs that are gone must be passed over."""
    letters = "".join(character for character in real_text if character.isascii() and character.isalpha())
    encoder = native.NativeEncoder(code, trained.merge_table)
    for start in range(0, 4000, 200):
        word = letters[start : start + 200]
        expected = oracle_encode(word, trained.vocab, trained.merges, trained.special_tokens)
        assert encoder.encode(word.encode(), NO_SPECIALS).tolist() == expected


def test_a_pair_that_is_listed_twice_keeps_its_first_rank(code: ctypes.CDLL) -> None:
    a, b, c = b"abc"
    merges = MergeTable(range(256), [(a, b, 256), (b, c, 257), (a, b, 256)])
    assert native.NativeEncoder(code, merges).encode(b"abc", NO_SPECIALS).tolist() == [256, c]


def test_starts_over_when_it_knows_too_many_words(code: ctypes.CDLL, trained: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    encoder = native.NativeEncoder(code, trained.merge_table)
    for _ in range(4):  # 240,000 words each; 349,525 are the most it keeps
        letters = rng.integers(97, 123, (240_000, 7), np.uint8)
        letters[:, 0] = ord(" ")
        data = letters.tobytes()
        assert trained.decode_bytes(encoder.encode(data, NO_SPECIALS).tolist()) == data


def test_words_with_equal_hashes_are_told_apart(code: ctypes.CDLL, trained: Tokenizer) -> None:
    """Words of 16 bytes with the hash of one another, forged by running `mix` of words.c on their first halves."""

    def mix(x: np.ndarray) -> np.ndarray:
        product = x * np.uint64(0x9E3779B97F4A7C15)
        return product ^ product >> np.uint64(32)

    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", np.uint8)
    first_halves = letters[np.random.default_rng(0).integers(0, 52, (3_000_000, 8))].view(np.uint64)[:, 0]
    word = np.frombuffer(b"abcdefghijklmnop", np.uint64)
    second_halves = mix(first_halves) ^ mix(word[:1]) ^ word[1]
    is_letter = np.isin(second_halves.view(np.uint8).reshape(-1, 8), letters).all(axis=1)
    forged = np.stack((first_halves, second_halves), axis=1)[is_letter]
    assert len(forged) > 0
    text = word.tobytes() + b"".join(b"." + pair.tobytes() for pair in forged)
    encoder = native.NativeEncoder(code, trained.merge_table)
    assert trained.decode_bytes(encoder.encode(text, NO_SPECIALS).tolist()) == text


def test_more_words_than_an_encoder_remembers(code: ctypes.CDLL, trained: Tokenizer) -> None:
    """It forgets them all in the middle of a text; encoders that see few words each say what is right."""
    thirds = [b"".join(b" %d" % i for i in range(start, start + 150_000)) for start in (0, 150_000, 300_000)]
    encoder = native.NativeEncoder(code, trained.merge_table)
    expected = np.concatenate(
        [native.NativeEncoder(code, trained.merge_table).encode(third, trained.specials) for third in thirds]
    )
    for _ in range(2):
        np.testing.assert_array_equal(encoder.encode(b"".join(thirds), trained.specials), expected)


def test_encoders_in_threads_do_not_meet(code: ctypes.CDLL, trained: Tokenizer, real_text: str) -> None:
    data = real_text.encode()

    def encode() -> bytes:
        return native.NativeEncoder(code, trained.merge_table).encode(data, trained.specials).tobytes()

    with ThreadPoolExecutor(4) as pool:
        assert len({job.result() for job in [pool.submit(encode) for _ in range(8)]}) == 1


def test_compiled_once_and_kept(code: ctypes.CDLL, uncached: Path) -> None:
    assert native.library() is not None
    kept = list((uncached / "lmkit").iterdir())
    assert len(kept) == 1
    written = kept[0].stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library() is not None
    assert [path.stat().st_mtime_ns for path in (uncached / "lmkit").iterdir()] == [written]


def test_without_a_cache_it_is_compiled_for_the_process(
    code: ctypes.CDLL, uncached: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = uncached / "file"
    in_the_way.touch()
    (uncached / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    monkeypatch.setattr(tempfile, "tempdir", str(uncached / "temporary"))
    with caplog.at_level(logging.WARNING, "lmkit"):
        assert native.is_utf8("é".encode())
    assert native.library() is not None
    assert [record.getMessage() for record in caplog.records] == [
        f"{in_the_way}/lmkit: not a directory: the tokenizer's C code is compiled again for each process"
    ]
    assert list((uncached / "temporary").iterdir()) == []


def test_a_cache_that_cannot_be_loaded_is_passed_over(
    code: ctypes.CDLL, uncached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.library() is not None
    (kept,) = (uncached / "lmkit").iterdir()
    cut = (
        uncached / "other" / "lmkit" / kept.name
    )  # in place it would be found among what the process has loaded
    cut.parent.mkdir(parents=True)
    cut.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(uncached / "other"))
    native.library.cache_clear()
    assert native.library() is not None


def test_nobody_knows_where_home_is(
    code: ctypes.CDLL, uncached: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", unknown)
    with caplog.at_level(logging.WARNING, "lmkit"):
        assert native.library() is not None
    assert "home directory" in caplog.text


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_numpy_encodes_and_says_so(
    uncached: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trained: Tokenizer,
    compiler: str,
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING, "lmkit"):
        first = native.chunk_encoder(trained.merge_table)
        second = native.chunk_encoder(trained.merge_table)
    assert isinstance(first, NumpyEncoder)
    assert isinstance(second, NumpyEncoder)
    assert isinstance(native.word_counter(trained.specials), NumpyCounter)
    assert len(caplog.records) == 1
    assert "encodes and counts in numpy" in caplog.text
    assert list((uncached / "lmkit").iterdir()) == []


def _is_utf8_to_python(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_utf8_is_what_python_says(code: ctypes.CDLL) -> None:
    """Every pair of bytes, alone and inside text; the borders of table 3-7; and damaged real characters."""
    tails = [b"", b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf", b"\x80\x80\x80", b"a"]
    for first in range(256):
        for second in range(256):
            head = bytes((first, second))
            for data in (head, *(head + tail for tail in tails)) if first >= 0xC0 else (head,):
                assert native.is_utf8(data) == _is_utf8_to_python(data), data
                data = b"some text." + data + b" and more text"
                assert native.is_utf8(data) == _is_utf8_to_python(data), data
    rng = random.Random(0)
    text = "".join(chr(rng.choice([65, 0xE9, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]))
                   for _ in range(60)).encode()  # fmt: skip
    verdicts = set()
    for _ in range(3000):
        data = bytearray(text)
        data[rng.randrange(len(data))] = rng.randrange(256)
        verdicts.add(native.is_utf8(bytes(data)))
        assert native.is_utf8(bytes(data)) == _is_utf8_to_python(bytes(data))
    assert verdicts == {True, False}
    assert native.is_utf8(b"")
    assert native.is_utf8(text)
