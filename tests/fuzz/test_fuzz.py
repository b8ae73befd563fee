"""Damaged files end in a clean error or a right load, for every format that lmkit reads.

Here with a hundred cases a format; `nox -s fuzz` takes 10,000 and keeps the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the modules beside this one, here and in the processes that tests start

import mutations  # noqa: E402

from lmkit.measure.environment import git_state  # noqa: E402

CASES = int(os.environ.get("LMKIT_FUZZ_CASES", "100"))
RECORD = os.environ.get("LMKIT_FUZZ_RECORD")
MOST_MB = 1000
NAMES = (
    "recipe", "tokenizer.json", "gpt2 vocab.json + merges.txt", "token file", "manifest", "checkpoint",
    "forged checkpoint",
    "metrics.jsonl", "bench results", "attention rows", "lm-matrix rows", "model rows", "ddp rows", "all-reduce rows",
    "optimizer rows", "memory rows", "profile_summary.json", "environment.json",
    "chrome trace", "nsys database", "stages.json", "corpus .jsonl and .txt",
    "lmkit verify", "partial download", "finished download", "server answers", "gzip archive",
)  # fmt: skip

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures memory through /proc")


def work(folder: Path, first: int, cases: int, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "worker.py"), str(folder), str(first), str(cases), *names],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "no_proxy": "127.0.0.1"},
        check=False,
    )


@pytest.mark.timeout(0 if CASES > 1000 else 300)
def test_damaged_files_end_in_a_clean_error_or_a_right_load(tmp_path: Path) -> None:
    git = git_state()  # of the code that runs, before the record itself changes the checkout
    summaries: list[dict[str, Any]] = []
    for names in (
        [(name,) for name in NAMES] if CASES > 1000 else [NAMES]
    ):  # one process: torch is imported once
        done = work(tmp_path, 0, CASES, *names)
        hung = tmp_path / "progress"
        assert done.returncode == 0, f"{hung.read_text() if hung.exists() else ''}\n{done.stderr[-5000:]}"
        summaries += [json.loads(line) for line in done.stdout.splitlines()]
    if RECORD:
        Path(RECORD).parent.mkdir(parents=True, exist_ok=True)
        Path(RECORD).write_text("".join(json.dumps({**summary, "git": git}) + "\n" for summary in summaries))
    assert [summary["format"] for summary in summaries] == list(NAMES)
    for summary in summaries:
        name = summary["format"]
        assert summary["failures"] == 0, f"{name}: {json.dumps(summary['examples'], indent=1)}"
        assert summary["clean_errors"] + summary["loads"] == CASES
        assert summary["clean_errors"] > CASES // 20 or name in ("metrics.jsonl", "stages.json"), (
            f"{name}: the damage is hardly ever noticed"  # those two pass over what is damaged
        )
        assert summary["peak_mb"] < MOST_MB, name


MISBEHAVIOUR = {
    "pickle.loads(mutations.PICKLE)": "Forbidden: pickle.find_class",
    "eval('1 + 1')": "Forbidden: exec",
    "__import__('os').system('true')": "Forbidden: os.system",
    "open(folder.parent / 'elsewhere', 'w')": "Forbidden: open",
    "(folder.parent / 'elsewhere').mkdir()": "Forbidden: os.mkdir",
    "bytearray(2_000_000_000)": "MemoryError",
    "[][0]": "IndexError",
    "time.sleep(600)": "Timeout",  # ends the process, so it comes last
}
PROGRAM = """
import pickle, sys, time
sys.path.insert(0, sys.argv[1])
import formats, guard, mutations, worker

class Misbehaving(formats.Format):
    damages = (("file", mutations.damage),)
    def __init__(self, folder, name):
        self.name = name
        super().__init__(folder / "good")
    def make(self, folder):
        guard.SECONDS = 1 if "sleep" in self.name else 300  # what does not hang has time
        return {"file": b"content"}
    def read(self, folder, random):
        exec(compile(self.name, "reader", "exec"))
    def try_undamaged(self, folder):
        pass

formats.FORMATS = {name: lambda folder, name=name: Misbehaving(folder.parent, name) for name in sys.argv[3:]}
worker.main(worker.Path(sys.argv[2]), 0, 1, sys.argv[3:])
"""


def test_the_harness_notices_readers_that_misbehave(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(HERE), str(tmp_path), *MISBEHAVIOUR],
        capture_output=True,
        text=True,
        check=False,
    )
    seen = {summary["format"]: summary for summary in map(json.loads, done.stdout.splitlines())}
    assert list(seen) == list(MISBEHAVIOUR)[:-1], done.stderr
    for reader, summary in seen.items():
        assert summary["failures"] == 1, reader
        assert MISBEHAVIOUR[reader] in json.dumps(summary["examples"])
    assert done.returncode == 1
    assert "Timeout" in (tmp_path / "progress").read_text()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("mutate", "data"),
    [
        (mutations.damage, b"some text, 123 and more"),
        (mutations.damage_json, b'{"a": [1, {"b": "c"}], "d": null}'),
        (mutations.damage_json_lines, b'{"a": 1}\n{"b": [2]}\n'),
        (mutations.damage_toml, b'[model]\nd_model = 64\nname = "x"\n'),
        (mutations.damage_http_head, b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nbody"),
    ],
)
def test_damage_is_repeatable_and_differs_from_case_to_case(
    mutate: Callable[[Random, bytes], bytes], data: bytes
) -> None:
    once, again = ([mutate(Random(case), data) for case in range(100)] for _ in range(2))
    assert once == again
    assert len(set(once)) > 30
    assert sum(changed != data for changed in once) > 80
