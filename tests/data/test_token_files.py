from __future__ import annotations

import dataclasses
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from lmkit.data.token_files import TokenFileWriter, TokenMeta, open_tokens, sidecar_path
from lmkit.errors import LmkitError, UsageError


def write(path: Path, ids: list[int], vocab_size: int = 1000) -> TokenMeta:
    with TokenFileWriter(path, vocab_size=vocab_size, tokenizer_sha256="abc") as writer:
        writer.append(np.array(ids[: len(ids) // 2], np.int64))
        writer.append(np.array(ids[len(ids) // 2 :], np.int64))
        return writer.finish(num_documents=1, num_bytes=5, source_sha256="def")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.npy"
    write(path, list(range(1000)) * 3)
    return path


def test_round_trip(path: Path) -> None:
    file = open_tokens(path, tokenizer_sha256="abc")
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.dtype == np.uint16
    assert file.tokens.tolist() == list(range(1000)) * 3
    assert file.meta == TokenMeta("abc", 1000, 3000, 1, 5, "def", 1)
    assert np.load(path).tolist() == list(range(1000)) * 3  # an ordinary .npy file
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 1


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_fault_30_ids_are_never_wrapped(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    ids = [0, 1, vocab_size - 1]
    write(tmp_path / "t.npy", ids, vocab_size)
    tokens = open_tokens(tmp_path / "t.npy").tokens
    assert (tokens.dtype, tokens.tolist()) == (dtype, ids)
    for wrong in (vocab_size, -1):
        with pytest.raises(ValueError, match=f"0 to {vocab_size - 1}"):
            write(tmp_path / "wrong.npy", [wrong, wrong], vocab_size)
    assert not (tmp_path / "wrong.npy").exists()


def test_fault_32_another_tokenizer(path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer abc, not with xyz") as error:
        open_tokens(path, tokenizer_sha256="xyz")
    assert error.value.exit_code == 2


def test_fault_33_cut_file(path: Path) -> None:
    whole = path.read_bytes()
    for size in (0, 1, 5, 9, 60, 127, 128, 129, 2000, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(LmkitError, match=r"tokens\.npy") as error:
            open_tokens(path)
        assert error.value.exit_code == 1


def test_fault_34_wrong_size(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0\0")
    with pytest.raises(
        LmkitError, match="3001 tokens in the file, 3000 in its header, 3000 in its description"
    ):
        open_tokens(path)


def test_fault_34_a_description_of_another_file(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "other.npy", [1, 2, 3])
    sidecar_path(tmp_path / "other.npy").replace(sidecar_path(path))
    with pytest.raises(LmkitError, match="3 in its description"):
        open_tokens(path)


def test_fault_35_empty_token_file(tmp_path: Path) -> None:
    write(tmp_path / "empty.npy", [])
    with pytest.raises(LmkitError, match="no tokens"):
        open_tokens(tmp_path / "empty.npy")


class _Trap:
    """Unpickling it writes a file."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.sentinel),))


def test_fault_36_an_array_of_objects_is_refused_and_its_pickle_not_run(path: Path, tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    np.save(path, np.array([_Trap(sentinel)] * 3000, object), allow_pickle=True)
    with pytest.raises(LmkitError, match=r"holds \|O, not <u2"):
        open_tokens(path)
    assert not sentinel.exists()
    pickle.loads(pickle.dumps(_Trap(sentinel)))  # the trap itself works
    assert sentinel.exists()


def test_fault_37_id_beyond_the_vocabulary_with_its_position(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-2 * 7, os.SEEK_END)
        file.write(np.uint16(1000).tobytes())
    with pytest.raises(LmkitError, match="token 1000 at position 2993, but the vocabulary has 1000"):
        open_tokens(path)
    assert open_tokens(path, check_ids=False).tokens[2993] == 1000


@pytest.mark.parametrize(
    "change", [{"num_tokens": "3000"}, {"format": True}, {"extra": 1}, {"num_tokens": None}]
)
def test_a_damaged_description(path: Path, change: dict) -> None:
    content = json.loads(sidecar_path(path).read_text()) | change
    sidecar_path(path).write_text(json.dumps(content))
    with pytest.raises(LmkitError, match=r"tokens\.json"):
        open_tokens(path)


def test_a_description_cut_at_any_byte(path: Path) -> None:
    whole = sidecar_path(path).read_bytes()
    for size in range(len(whole) - 2):  # without the last newline it is still whole
        sidecar_path(path).write_bytes(whole[:size])
        with pytest.raises(LmkitError, match=r"tokens\.json"):
            open_tokens(path)


def test_newer_format_and_missing_files(path: Path, tmp_path: Path) -> None:
    meta = open_tokens(path).meta
    sidecar_path(path).write_text(json.dumps(dataclasses.asdict(meta) | {"format": 2}))
    with pytest.raises(LmkitError, match="format 2") as error:
        open_tokens(path)
    assert "upgrade" in error.value.hint
    sidecar_path(path).unlink()
    with pytest.raises(LmkitError, match="missing"):
        open_tokens(path)
    with pytest.raises(UsageError, match=r"none\.npy"):
        open_tokens(tmp_path / "none.npy")


def test_an_unfinished_file_leaves_nothing(tmp_path: Path) -> None:
    def break_off(error: Exception | None) -> None:
        with TokenFileWriter(tmp_path / "t.npy", vocab_size=10, tokenizer_sha256="") as writer:
            writer.append(np.arange(5))
            if error is not None:
                raise error

    with pytest.raises(OSError, match="disk"):
        break_off(OSError("disk"))
    with pytest.raises(RuntimeError, match="not finished"):
        break_off(None)
    assert list(tmp_path.iterdir()) == []


def test_the_name_must_end_in_npy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.npy"):
        TokenFileWriter(tmp_path / "tokens.bin", vocab_size=10, tokenizer_sha256="")
