"""What commands print: results that fit a terminal, strict JSON, the log above the bars of progress."""

import json
from pathlib import Path

import pytest
from marking import full_except
from tiny import RANDOM_TOKENS, tiny_recipe

from lmkit.cli.console import Result, show
from lmkit.tokenizer import Tokenizer


def test_json_is_strict(capsys):
    show(Result("", {"path": Path("a"), "loss": float("nan"), 1: (float("inf"), None)}), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"path": "a", "loss": None, "1": [None, None]}


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [
        ({}, True),
        ({"RANK": "1"}, True),  # somebody's leftover, not torchrun
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, True),
        ({"RANK": "1", "TORCHELASTIC_RUN_ID": "none"}, False),
    ],
)
def test_one_of_torchrun_s_processes_prints_the_result(environment, speaks, monkeypatch, capsys):
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    show(Result("mine.toml", {}), as_json=False)
    assert ("mine.toml" in capsys.readouterr().out) == speaks


NOISY = """
import os, sys
print("imported")
os.write(1, b"as a C library writes\\n")
os.system("echo a program")
from lmkit.registry import ATTENTION

@ATTENTION.register("noisy")
def noisy(q, k, v, *, causal, scale=None):
    print("called", file=sys.__stdout__, flush=True)
    from lmkit.attention import sdpa
    return sdpa(q, k, v, causal=causal, scale=scale)
"""


@pytest.mark.parametrize("option", full_except("--dry-run", "--nproc 2"))
def test_stdout_has_one_object_whatever_a_plugin_prints(option, lmkit, tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    settings = (*RANDOM_TOKENS, "train.steps=1", "train.batch_size=2", "model.attention='noisy'")
    (tmp_path / "noisy.toml").write_text(tiny_recipe(*settings))
    ended = lmkit("train", "noisy.toml", "--json", *option.split(), "--plugin", "noisy.py")
    assert isinstance(json.loads(ended.stdout), dict), ended.stderr
    for said in ("imported", "as a C library writes", "a program"):
        assert said in ended.stderr


def test_lines_of_json_have_stdout_for_themselves(run, lmkit, tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    texts = lmkit("generate", run, "--jsonl", "--samples", "2", "--plugin", "noisy.py")
    assert [json.loads(line)["number"] for line in texts.stdout.splitlines()] == [0, 1], texts.stderr


def test_no_tokenizer_is_replaced_by_what_is_made_with_it(terminal):
    Path("text.txt").write_text("one fish")
    Tokenizer.from_merges([(b"f", b"i")], ["<|endoftext|>"]).save(Path("tokenizer.json"))
    terminal("tokenizer export tokenizer.json gpt2")
    content = Path("tokenizer.json").read_bytes()
    whole = dict.fromkeys(("t.npy", "t.documents", "gpt2/merges.txt"), content)
    whole["gpt2/vocab.json"] = Path("gpt2/vocab.json").read_bytes()
    for name, content in whole.items():
        Path(name).write_bytes(content)
    for command in (
        *(f"data encode text.txt t.npy --tokenizer {name}" for name in ("t.npy", "t.documents")),
        "tokenizer import gpt2 gpt2/vocab.json",
        "tokenizer export gpt2/merges.txt gpt2",
    ):
        terminal.refuses(f"{command} --force", code="output.replaces_source")
    assert {name: Path(name).read_bytes() for name in whole} == whole
