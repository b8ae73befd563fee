"""What `lmkit generate` prints: lines of JSON, and what there is when Ctrl-C comes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmkit.generation import Decoder


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_lines_of_json_come_as_texts_end(run, terminal):
    settings = "--max-new-tokens 4 --temperature 2 --logprobs --batch-size 3"
    command = f"generate {run} -p fish -p one --samples 2 {settings}"
    listed = json.loads(terminal(f"{command} --json"))["samples"]
    lines = lines_of(terminal(f"{command} --jsonl"))
    assert sorted(lines, key=lambda line: line["number"]) == listed
    assert [sample["number"] for sample in listed] == [0, 1, 2, 3]
    for sample in listed:
        assert len(sample["logprobs"]) == sample["num_tokens"]
        assert all(value <= 0 for value in sample["logprobs"])
    terminal.refuses(f"{command} --json --jsonl", code="generate.two_formats", says=["--jsonl"])


@pytest.fixture
def interrupted(run: Path, terminal, monkeypatch: pytest.MonkeyPatch):
    """interrupted(steps, arguments) -> what `lmkit generate` prints when Ctrl-C comes after so many steps."""

    def go(steps: int, arguments: str) -> str:
        left = iter(range(steps))

        def step(decoder, longest, step=Decoder.step):
            if next(left, None) is None:
                raise KeyboardInterrupt
            step(decoder, longest)

        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "step", step)
            command = f"generate {run} --max-new-tokens 4 --no-stop-at-end --temperature 0"
            out = terminal(f"{command} {arguments}", exit_code=130)
        (said,) = terminal.err.splitlines()
        assert said.startswith("interrupted")
        return out

    return go


@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_prints_what_there_is(run, terminal, interrupted, monkeypatch, late):
    """One text is streamed; of three texts two at a time, the first two are complete after four steps."""
    if late:  # as a GPU's tokens come
        event, newest = SimpleNamespace(query=lambda: False, synchronize=lambda: None), Decoder.newest
        monkeypatch.setattr(Decoder, "newest", lambda decoder: (newest(decoder)[0], event))
    command = f"generate {run} --max-new-tokens 4 --no-stop-at-end --temperature 0"
    (whole,) = json.loads(terminal(f"{command} -p fish --json"))["samples"]
    begun = interrupted(2, "-p fish")
    assert begun[-1] == "\n"
    text = begun[:-1].removesuffix("\ufffd")
    assert "fish" + whole["text"] != text
    assert ("fish" + whole["text"]).startswith(text)
    assert interrupted(0, "-p fish") == ""
    three = "-p fish -p one -p two --batch-size 2"
    listed = json.loads(terminal(f"{command} {three} --json"))["samples"]
    for flag in ("--json", "--jsonl"):
        out = interrupted(5, f"{three} {flag}")
        found = json.loads(out)["samples"] if flag == "--json" else lines_of(out)
        assert found[:2] == listed[:2]
        assert [sample["num_tokens"] for sample in found] == [4, 4, 1]
    assert interrupted(5, three).startswith(f"fish{listed[0]['text']}".rstrip("\n"))
    assert interrupted(5, three).count("\n---\n") == 2
