"""`lmkit run` and `lmkit evaluate` say how much of the held-out text was learned; `--strict` refuses."""

import json
import random
import shutil
from pathlib import Path

from lmkit.cli.app import run_command_line


def words(seed: int, count: int = 400) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(10**6)}" for _ in range(count))


def lines(name: str, records: list[dict]) -> str:
    Path(name).write_text("\n".join(map(json.dumps, records)))
    return name


def test_a_run_that_learns_what_it_holds_out_says_so_and_strict_stops_it(run, terminal):
    """Every document of the corpus is the same."""
    overlap = json.loads(terminal("run fish.toml --json"))["overlap"]
    assert (overlap["kind"], overlap["documents"], overlap["exact"]) == ("documents", 1, 1)
    shutil.rmtree(run / "checkpoints")
    terminal("run fish.toml --strict", exit_code=1)
    assert not (run / "checkpoints").exists()  # before hours of training


def test_evaluations_count_what_was_learned(run, terminal):
    found = json.loads(terminal(f"evaluate {run} --json"))["overlap"]
    assert (found["documents"], found["exact"]) == (1, 1)
    terminal(f"evaluate {run} --strict", exit_code=1)
    texts = lines("other.jsonl", [{"text": words(1)}, {"text": "one fish two fish red fish blue fish"}])
    found = json.loads(terminal(f"evaluate {run} --text {texts} --json"))["overlap"]
    assert (found["documents"], found["exact"]) == (2, 1)
    texts = lines("clean.jsonl", [{"text": words(1)}])
    found = json.loads(terminal(f"evaluate {run} --text {texts} --strict --by-document --json"))["overlap"]
    assert (found["exact"], found["shared"], found["ngrams"] > 0) == (0, 0, True)
    learned = {"question": "one fish two fish red fish blue", "choices": ["fish", "none"], "answer": 0}
    other = {"question": "none", "choices": ["fish", "none"], "answer": 1}
    questions = lines("questions.jsonl", [learned, other])
    found = json.loads(terminal(f"evaluate {run} --choices {questions} --json"))["overlap"]
    assert (found["kind"], found["documents"], found["exact"]) == ("questions", 2, 1)
    terminal(f"evaluate {run} --choices {questions} --strict", exit_code=1)
    assert "overlap " in terminal(f"evaluate {run} --choices {questions}")


def test_without_a_sketch_nothing_is_said_and_strict_refuses(run, terminal):
    (run / "tokens" / "train.overlap").unlink()
    assert json.loads(terminal(f"evaluate {run} --json"))["overlap"] is None
    terminal(f"evaluate {run} --strict", exit_code=2)
    terminal(f"evaluate {run} --strict --harness arc_easy", exit_code=2)
    assert json.loads(terminal("run fish.toml --json"))["overlap"]["exact"] == 1  # the stage runs again
    assert run_command_line(["evaluate", str(run), "--strict"]) == 1
