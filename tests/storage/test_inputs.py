"""Whatever a file holds, it is an object or a ValueError of a few words."""

import os

import pytest

from lmkit.storage.inputs import open_input, read_object


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((b"", "not JSON"), (b'{"a": 1', "not JSON"), (b"[1]", "not a JSON object")),
        *((b'{"a": \xff}', "byte 6"), (b"[" * 100_000, "nested")),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": "' + b" " * 200_000 + b'"}', "larger than 200,000 bytes"),
    ],
    ids=["empty", "cut", "a list", "no text", "deep", "a long number", "large"],
)
def test_other_content_is_a_value_error(content, words, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_object(path, most_bytes=200_000)


def test_an_object_is_read_also_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_object(path) == {"a": 1}
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "none.json")


def test_a_named_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # without one, opening the pipe would wait
    with pytest.raises(PermissionError, match="not a regular file"):
        open_input(tmp_path / "pipe")
    os.close(writer)
