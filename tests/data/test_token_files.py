import json
import os
import pickle
import sys

import numpy as np
import pytest
from raising import raises

from lmkit.data import token_files
from lmkit.data.shards import open_tokens
from lmkit.data.token_files import SIDECAR, TokenFileWriter, TokenMeta
from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.run_folder import save_record
from lmkit.storage.atomic import write_atomic


def write(path, ids, vocab_size=1000):
    with TokenFileWriter(path, vocab_size=vocab_size, tokenizer_sha256="abc") as writer:
        half = len(ids) // 2
        writer.append(np.array(ids[:half], np.int64), documents=[0] if half else [])
        writer.append(np.array(ids[half:], np.int64), documents=[0] if half < len(ids) else [])
        return writer.finish(num_bytes=5, source_sha256="def")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.npy"
    write(path, list(range(1000)) * 3)
    return path


def test_round_trip(path):
    file = open_tokens(path, tokenizer_sha256="abc")
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.dtype == np.uint16
    assert file.tokens.tolist() == list(range(1000)) * 3
    assert file.meta == TokenMeta("abc", 1000, 3000, 2, 5, "def", 2)
    assert file.documents is not None
    assert file.documents.tolist() == [0, 1500]
    assert np.load(path).tolist() == list(range(1000)) * 3  # an ordinary .npy file
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 1


def test_the_bytes_of_the_text_of_documents(tmp_path):
    """They come when a document ends."""
    path = tmp_path / "tokens.npy"
    with TokenFileWriter(path, vocab_size=9, tokenizer_sha256="abc") as writer:
        writer.append(np.arange(4), documents=[0, 3], sizes=[7])
        writer.append(np.arange(2), sizes=[5])
        writer.finish(num_bytes=12, source_sha256="def")
    file = open_tokens(path)
    assert file.documents is not None and file.sizes is not None  # noqa: PT018
    assert (file.documents.tolist(), file.sizes.tolist()) == ([0, 3], [7, 5])
    os.truncate(path.with_suffix(".documents"), 24)
    with raises(LmkitError, "tokens.damaged", "tokens.documents", "24 bytes"):
        open_tokens(path)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_fault_30_ids_are_never_wrapped(tmp_path, vocab_size, dtype):
    ids = [0, 1, vocab_size - 1]
    write(tmp_path / "t.npy", ids, vocab_size)
    tokens = open_tokens(tmp_path / "t.npy").tokens
    assert (tokens.dtype, tokens.tolist()) == (dtype, ids)
    for wrong in (vocab_size, -1):
        with pytest.raises(ValueError, match=f"0 to {vocab_size - 1}"):
            write(tmp_path / "wrong.npy", [wrong, wrong], vocab_size)
    with (
        pytest.raises(ValueError, match="integers in one dimension"),
        TokenFileWriter(tmp_path / "wrong.npy", vocab_size=vocab_size, tokenizer_sha256="abc") as writer,
    ):
        writer.append(np.arange(20) + 0.7)
    assert not (tmp_path / "wrong.npy").exists()


@pytest.mark.parametrize("dtype", [">u2", ">i4", "<i8", ">i8"])
def test_ids_of_any_byte_order(path, dtype):
    with TokenFileWriter(path, vocab_size=300, tokenizer_sha256="a") as writer:
        for wrong in ([300], [256 * 256 - 1], *([] if "u" in dtype else [[-1]])):
            with pytest.raises(ValueError, match="ids must be 0 to 299"):
                writer.append(np.array(wrong, dtype))
        writer.append(np.array([1, 256, 299], dtype), documents=[0])
        writer.finish(num_bytes=3, source_sha256="b")
    assert open_tokens(path).tokens.tolist() == [1, 256, 299]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked to begin to write")
def test_the_disk_is_asked_early_for_every_part_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: asked.append((start, size)))
    monkeypatch.setattr(token_files, "_WRITE_BACK_BYTES", 1000)
    with TokenFileWriter(tmp_path / "t.npy", vocab_size=9, tokenizer_sha256="abc") as writer:
        for _ in range(7):
            writer.append(np.zeros(200, np.int32))
        writer.finish(num_bytes=5, source_sha256="def")
    assert asked == [(0, 1200), (1200, 1200)]


def test_fault_32_another_tokenizer(path):
    with raises(UsageError, "tokens.wrong_tokenizer", "tokens.npy", "abc", "xyz"):
        open_tokens(path, tokenizer_sha256="xyz")


def test_fault_33_cut_file(path):
    whole = path.read_bytes()
    for size in (0, 1, 5, 9, 60, 127, 128, 129, 2000, len(whole) - 1):
        path.write_bytes(whole[:size])
        with raises(LmkitError, "tokens.damaged", "tokens.npy") as error:
            open_tokens(path)
        assert error.value.exit_code == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 2000),
        lambda path: path.write_bytes(b"x" * 128 + path.read_bytes()[128:]),
        lambda path: path.write_bytes(path.read_bytes()[:-2] + b"\xff\xff"),
    ],
    ids=["cut", "header overwritten", "id out of range"],
)
def test_faults_33_37_a_hint_names_the_command_that_makes_the_file_again(damage, tmp_path):
    # The commands can be pasted though the paths have a space.
    own, of_a_run = tmp_path / "my tokens.npy", tmp_path / "my run" / "tokens" / "train.npy"
    of_a_run.parent.mkdir(parents=True)
    save_record(tmp_path / "my run", {"encode": {}})
    commands = {
        own: f"lmkit data encode TEXT '{own}' --tokenizer TOKENIZER.json",
        of_a_run: f"lmkit run '{tmp_path / 'my run' / 'recipe.toml'}'",
    }
    for path, command in commands.items():
        write(path, list(range(1000)) * 3)
        damage(path)
        with raises(LmkitError, "tokens.damaged", path.stem, hint=command) as error:
            open_tokens(path)
        if path == own:  # what the hint says works
            write(own, [1, 2, 3])
    assert str(of_a_run) in error.value.hint


def test_a_description_of_another_file(path, tmp_path):
    write(tmp_path / "other.npy", [1, 2, 3])
    (tmp_path / "other.npy").with_suffix(SIDECAR).replace(path.with_suffix(SIDECAR))
    with raises(LmkitError, "tokens.damaged", "tokens.npy", "3"):
        open_tokens(path)


def test_empty_token_file(tmp_path):
    write(tmp_path / "empty.npy", [])
    with raises(LmkitError, "tokens.empty", "empty.npy"):
        open_tokens(tmp_path / "empty.npy")


class _Trap:
    """Unpickling it writes a file."""

    def __init__(self, sentinel):
        self.sentinel = sentinel

    def __reduce__(self):
        return (os.mkdir, (str(self.sentinel),))


def test_fault_36_an_array_of_objects_is_refused_and_its_pickle_not_run(path, tmp_path):
    sentinel = tmp_path / "sentinel"
    np.save(path, np.array([_Trap(sentinel)] * 3000, object), allow_pickle=True)
    with raises(LmkitError, "tokens.damaged", "tokens.npy", "|O"):
        open_tokens(path)
    assert not sentinel.exists()
    pickle.loads(pickle.dumps(_Trap(sentinel)))  # the trap itself works
    assert sentinel.exists()


@pytest.mark.parametrize("piece", [100, 3000, 10_000])
def test_fault_37_id_beyond_the_vocabulary_with_its_position(path, piece, monkeypatch):
    """In a file that is checked piece by piece."""
    monkeypatch.setattr(token_files, "_CHECK_TOKENS", piece)
    open_tokens(path)
    with open(path, "r+b") as file:
        file.seek(-2 * 7, os.SEEK_END)
        file.write(np.array([999, 1000, 60_000], np.uint16).tobytes())
    with raises(LmkitError, "tokens.damaged", "tokens.npy", "token 1000", "position 2994"):
        open_tokens(path)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        *(({"num_tokens": value}, "tokens.damaged", "num_tokens") for value in ("3000", None)),
        *(({"vocab_size": value}, "tokens.damaged", "vocab_size") for value in (0, 2**32 + 1)),
        *(({name: -1}, "tokens.damaged", name) for name in ("num_documents", "num_bytes")),
        ({"extra": 1}, "tokens.damaged", "extra"),
        *(({"format": value}, "tokens.other_format", f"format {value}") for value in (1, 3)),
    ],
    ids=str,
)
def test_a_damaged_description(path, change, code, said):
    content = json.loads(path.with_suffix(SIDECAR).read_text()) | change
    path.with_suffix(SIDECAR).write_text(json.dumps(content))
    with raises(LmkitError, code, "tokens.json", said):
        open_tokens(path)


def test_missing_files_and_others_in_place_of_a_token_file(path, tmp_path):
    for missing in (tmp_path / "none.npy", tmp_path):
        with raises(UsageError, "tokens.missing", str(missing)):
            open_tokens(missing)
    other = tmp_path / "tokens.dat"
    other.write_bytes(path.read_bytes())
    with raises(UsageError, "tokens.name", "tokens.dat"):
        open_tokens(other)
    path.with_suffix(SIDECAR).unlink()
    with raises(UsageError, "tokens.not_described", "tokens.json"):
        open_tokens(path)
    path.with_suffix(SIDECAR).mkdir()
    with raises(LmkitError, "tokens.damaged", "tokens.json"):
        open_tokens(path)


def test_a_description_replaces_its_like_and_nothing_else(tmp_path):
    write(tmp_path / "tokens.npy", [1, 2, 3])
    write(tmp_path / "tokens.npy", [4, 5])
    assert open_tokens(tmp_path / "tokens.npy").tokens.tolist() == [4, 5]
    for precious in ('{"precious": 1}', '{"text": "a"}\n{"text": "b"}\n', '["a"]', "no JSON at all"):
        (tmp_path / "notes.json").write_text(precious)
        with raises(UsageError, "tokens.replaces_json", "notes.json"):
            write(tmp_path / "notes.npy", [1])
        assert (tmp_path / "notes.json").read_text() == precious
        assert not (tmp_path / "notes.npy").exists()


@pytest.mark.parametrize("described", [True, False])
def test_an_old_file_never_stands_beside_a_new_description(path, described, monkeypatch):
    """Whatever happens between the two, nobody reads the old ids by the new description, and no part is left."""

    def fail(*arguments):
        if described:
            write_atomic(*arguments)  # type: ignore[arg-type]
        raise OSError("the disk is full")

    monkeypatch.setattr(token_files, "write_atomic", fail)
    with pytest.raises(OSError, match="full"):
        write(path, [7] * 3000, vocab_size=8)
    assert json.loads(path.with_suffix(SIDECAR).read_text())["vocab_size"] == (8 if described else 1000)
    assert list(path.parent.iterdir()) == [path.with_suffix(SIDECAR)]


def test_an_unfinished_file_leaves_nothing(tmp_path):
    def break_off(error):
        with TokenFileWriter(tmp_path / "t.npy", vocab_size=10, tokenizer_sha256="") as writer:
            writer.append(np.arange(5))
            if error is not None:
                raise error

    with pytest.raises(OSError, match="disk"):
        break_off(OSError("disk"))
    with pytest.raises(RuntimeError, match="not finished"):
        break_off(None)
    assert list(tmp_path.iterdir()) == []
