"""What commands print: results that fit a terminal, strict JSON, the log above the bars of progress."""

import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest
import torch

from lmkit.bench.harness import BenchStored
from lmkit.cli.console import Result, log_to_stderr, progress_on_stderr, show, write
from lmkit.cli.env import _features
from lmkit.measure.tables import TERMINAL_WIDTH
from lmkit.training.evaluation import EvaluateResult
from lmkit.training.metrics import BarConsole

LONG = "a-folder-for-all-experiments/of-the-second-year/with-stories-of-many-kinds"
FILES = tuple(f"attention_sweep_results-{number}.jsonl" for number in range(9))
NUMBER = 123_456_789_012


def test_results_with_long_names_fit(terminal):
    Path(LONG).mkdir(parents=True)
    for command in (
        f"data synth {LONG}/stories.txt --size-mb 0.01",
        f"tokenizer train {LONG}/stories.txt {LONG}/tok.json --vocab-size 300",
        f"tokenizer inspect {LONG}/tok.json --text {LONG}/stories.txt",
        f"data encode {LONG}/stories.txt {LONG}/tokens.npy --tokenizer {LONG}/tok.json",
        f"data inspect {LONG}/tokens.npy --tokenizer {LONG}/tok.json",
        f"recipe copy quickstart {LONG}/mine.toml",
        f"recipe validate {LONG}/mine.toml",
        "recipe list",
        "env",
    ):
        lines = terminal(command).splitlines()
        assert max(map(len, lines)) <= TERMINAL_WIDTH, command
        assert LONG not in command or LONG in lines[0]  # in one piece, to be copied


@pytest.mark.parametrize(
    "result",
    [
        BenchStored("attention", LONG, FILES, [], "table", measured=True),
        EvaluateResult(LONG, 850, f"{LONG[:40]}/valid.npy", 1.25, 1234.5, 12.5, NUMBER),
    ],
    ids=lambda result: type(result).__name__,
)
def test_results_with_long_names_and_numbers_fit(result):
    assert max(map(len, str(result).splitlines())) <= TERMINAL_WIDTH
    assert LONG in str(result)
    if isinstance(result, BenchStored):
        assert all(f" {name}" in str(result) for name in FILES)  # no name is broken


def test_env_says_why_a_kernel_does_not_take_its_fastest_implementation():
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    if torch.cuda.is_available():
        pytest.skip("a GPU may have the fastest")
    kernels = _features(has_gpu=True)["flash_triton"]
    assert kernels == "portable kernels: the tensors are not on a CUDA device"


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
@pytest.mark.parametrize("as_json", [False, True])
def test_one_of_torchrun_s_processes_prints_the_result(environment, speaks, as_json, monkeypatch, capsys):
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    show(Result("mine.toml", {"file": "mine.toml"}), as_json=as_json)
    assert ("mine.toml" in capsys.readouterr().out) == speaks


@pytest.mark.parametrize(
    ("on_terminal", "shown"),
    [
        (True, "a\tb\r\nc\ufffd[2J\ufffd]0;title\ufffd\ufffd d\u3000é\U0001f98a\n"),
        (False, "a\tb\r\nc\x1b[2J\x1b]0;title\x07\x9b d\u3000é\U0001f98a\n"),
    ],
)
def test_text_that_a_model_wrote_cannot_drive_a_terminal(on_terminal, shown, monkeypatch):
    stdout = io.StringIO()
    monkeypatch.setattr(stdout, "isatty", lambda: on_terminal)
    monkeypatch.setattr("sys.stdout", stdout)
    write("a\tb\r\nc\x1b[2J\x1b]0;title\x07\x9b d\u3000é\U0001f98a\n")
    assert stdout.getvalue() == shown


def test_the_log_is_printed_above_the_one_bar(as_terminal, terminal):
    stderr = as_terminal()
    log_to_stderr()  # before there is a bar, as in a command; the fixture `terminal` puts the log back
    with progress_on_stderr() as report:
        report("stories", 1, 2)
        logging.getLogger("lmkit").info("half of it")
        report("timing", 1, 2)
        sys.stderr.write("from here\n")
        report("timing", 1, 2)
    assert re.search(r"(\n|\x1b\[2K)half of it\n", stderr.getvalue())
    after = stderr.getvalue().partition("from here")[2]
    assert "timing" in after
    assert "stories" not in after


def test_a_stage_that_is_done_leaves_the_terminal_to_the_bar_of_training(as_terminal):
    stderr = as_terminal()
    with progress_on_stderr() as report:
        report("encode", 1, 2)
        report("encode", 2, 2)
        assert stderr.getvalue().endswith("\x1b[2K")  # erased, and no thread draws it again
        bar = BarConsole(10, first_step=5)
        bar.note("a line above")
        bar.close()
        before, _, after = stderr.getvalue().partition("step 5/10")
        assert before
        assert "encode" not in after
        report("stories", 1, 2)  # another stage may begin
    assert "stories" in stderr.getvalue().partition("step 5/10")[2]
