"""Mistakes that people make with paths and options: one line, one hint, and nothing of theirs is lost."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Lmkit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("one fish two fish red fish blue fish\n" * 50)
    return path


def refused(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == ["error", "hint"]
    for word in words:
        assert word in lines[-2]


def test_a_forgotten_output_does_not_replace_the_corpus(lmkit: Lmkit, text: Path) -> None:
    before = text.read_bytes()
    refused(lmkit("tokenizer", "train", text, text, "--force", "--vocab-size", "300"), 2, "ends in .json")
    assert text.read_bytes() == before


def test_only_regular_files_are_replaced(lmkit: Lmkit, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"  # stands for a device, which a failing test must not destroy
    os.mkfifo(pipe)
    refused(lmkit("data", "synth", pipe, "--size-mb", "0.01", "--force"), 2, "not a regular file")
    assert pipe.is_fifo()


def test_a_path_that_cannot_be_written_is_one_line(lmkit: Lmkit, text: Path) -> None:
    refused(lmkit("data", "synth", text / "inside.txt", "--size-mb", "0.01"), 1, "text.txt")


def test_sizes_are_finite(lmkit: Lmkit) -> None:
    for size in ("nan", "inf"):
        result = lmkit("data", "synth", "x.txt", "--size-mb", size)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


def test_text_that_is_not_utf8(lmkit: Lmkit, text: Path) -> None:
    assert lmkit("tokenizer", "train", text, "t.json", "--vocab-size", "260").returncode == 0
    refused(lmkit("tokenizer", "encode", "t.json", "\udcff"), 1, "not UTF-8")


def test_compare_refuses_what_is_no_result(lmkit: Lmkit, tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("binary", b"\xff\xfe"), ("list", b"[1]\n"), ("words", b"hello\n")):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(content)
        refused(lmkit("compare", path, path), 2 if name == "empty" else 1, path.name)


def test_compare_finds_what_became_slower(lmkit: Lmkit, tmp_path: Path) -> None:
    for name, ms in (("before", 1.0), ("after", 2.0)):
        row = {
            "kernel": "k",
            "status": "ok",
            "median_ms": ms,
            "samples_ms": [ms + 0.001 * i for i in range(9)],
        }
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    same = lmkit("compare", "before.jsonl", "before.jsonl")
    assert (same.returncode, "nothing became worse" in same.stdout) == (0, True)
    slower = lmkit("compare", "before.jsonl", "after.jsonl")
    assert (slower.returncode, "slower" in slower.stdout) == (1, True)


def test_errors_name_options_where_options_were_given(lmkit: Lmkit) -> None:
    refused(
        lmkit("recipe", "show", "quickstart", "--set", "model.d_model=abc"), 2, "quickstart with your options"
    )
    refused(lmkit("tokenizer", "train", "a", "b.json", "--vocab-size", "9"), 2, "your options: tokenizer")


def test_a_trained_model_keeps_its_tables(lmkit: Lmkit) -> None:
    refused(lmkit("generate", "run", "--set", "model.d_model=64"), 2, "only [generate]")
