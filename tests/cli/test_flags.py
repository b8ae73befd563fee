"""Texts and files that commands take by a flag."""

import io
import json
import sys
from pathlib import Path

import pytest


def test_evaluate_reads_a_text(run, terminal):
    terminal(f"data encode corpus.txt all.npy --tokenizer {run}/tokenizer.json")
    of_tokens = json.loads(terminal(f"evaluate {run} --tokens all.npy --json"))
    of_text = json.loads(terminal(f"evaluate {run} --text corpus.txt --json"))
    assert of_text == of_tokens | {"tokens_file": "corpus.txt"}
    terminal.refuses(f"evaluate {run} --text corpus.txt --tokens all.npy", code="evaluate.two_files")
    terminal.refuses(f"evaluate {run} --text nowhere.txt", code="text.unreadable", says=["nowhere.txt"])


def samples_of(terminal, command: str) -> list[dict[str, object]]:
    return json.loads(terminal(f"{command} --json"))["samples"]


def test_prompts_come_from_files_and_stdin(run, terminal, monkeypatch):
    Path("prompts.txt").write_text("\ufeffone\r\n\n-\u2028-\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    found = samples_of(terminal, f"generate {run} -p - --prompts-file prompts.txt --samples 2")
    prompts = ["two\nlines", "one", "-\u2028-"]
    assert [sample["prompt"] for sample in found] == [prompt for prompt in prompts for _ in range(2)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two\n\xff\n")))
    terminal.refuses(f"generate {run} -p -", code="text.not_utf8", says=["stdin", "byte 4"], exit_code=1)
    Path("bad.txt").write_bytes(b"one\n\xff")
    Path("blank.txt").write_text("\n")
    for name, why in (("bad.txt", "byte 4"), ("blank.txt", "no prompt"), ("none.txt", "no such file")):
        words = f"generate {run} --prompts-file {name}"
        terminal.refuses(words, code="generate.prompts_file", says=[name, why])


def test_samples_differ_by_their_seeds(run, terminal):
    command = f"generate {run} -p fish --max-new-tokens 6 --temperature 1"
    found = samples_of(terminal, f"{command} --samples 5 --seed 3")
    for number, sample in enumerate(found):
        assert sample == samples_of(terminal, f"{command} --seed {3 + number}")[0] | {"number": number}
    assert samples_of(terminal, f"{command} --samples 5 --seed 3 --batch-size 2") == found


def test_seeds_make_runs_side_by_side(run, terminal):
    terminal.refuses("run fish.toml --seeds 2", code="run.seeds_in_a_run", says=[str(run)])
    terminal("run fish.toml --seeds 2 --set run.name=school --set run.seed=4")
    paths = [run.parent / "school" / name / "training.json" for name in ("seed-4", "seed-5")]
    found = [json.loads(path.read_text()) for path in paths]
    assert found[0]["evaluation"]["loss"] != found[1]["evaluation"]["loss"]
    compared = json.loads(terminal(f"compare {run} {run.parent}/school --json"))
    assert compared["runs"] == [1, 2]
    judged = json.loads((run / "training.json").read_text())["evaluation"]
    assert compared["rows"][-1]["before"] == pytest.approx(judged["bits_per_byte"])
