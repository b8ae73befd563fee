"""One error is one line, however many ranks meet it: under --nproc, and under torchrun, where each could print it."""

import json
import re
import sys
from pathlib import Path

import pytest
from programs import run_program
from sessions import TORCHRUN
from tiny import RANDOM_TOKENS, tiny_recipe

from lmkit.cli import ranks
from lmkit.cli.ranks import speak_for_ranks
from lmkit.errors import LmkitError


def test_missing_tokens_are_refused_before_ranks_start_with_file_key_and_command(terminal):
    file = "artifacts/runs/two/tokens/train.npy"
    for words in ("train quickstart", "train quickstart --nproc 2", "verify quickstart --resume"):
        command = f"{words} --set run.name=two"
        refused = terminal.refuses(command, code="data.no_tokens", says=[file, "data.train"])
        assert "lmkit run quickstart --set run.name=two" in refused.hint


@pytest.mark.full
def test_under_torchrun_an_error_of_all_ranks_is_said_once_and_its_summary_has_no_traceback_of_ours(tmp_path):
    command = ["-m", "lmkit", "train", "quickstart", "--set", "run.name=two"]
    result = run_program(sys.executable, *TORCHRUN, *command, cwd=tmp_path)
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error")]
    message = error.partition("]: ")[2]
    # Rank 0's, unless it is late.
    assert re.match(r"rank [01]: artifacts/runs/two/tokens/train\.npy: ", message)
    summary = [line for line in result.stderr.splitlines() if line.startswith("  traceback : ")]
    assert summary[-1] == f"  traceback : {message}"
    assert "lmkit/cli" not in result.stderr


def test_a_rank_names_itself_and_tells_torchrun(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "PATIENCE_S", 0)
    told = tmp_path / "error.json"
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "TORCHELASTIC_ERROR_FILE": str(told)}.items():
        monkeypatch.setenv(name, value)
    assert speak_for_ranks(LmkitError("tokens.missing", "no tokens")).message == "rank 3: no tokens"
    assert json.loads(told.read_text())["message"]["message"] == "rank 3: no tokens"


def test_half_a_place_among_ranks_is_refused(terminal, monkeypatch):
    Path("random.toml").write_text(tiny_recipe(*RANDOM_TOKENS, "train.steps=1"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    for command in ("run quickstart", "train random.toml", "bench all-reduce --sizes-mb 1"):
        terminal.refuses(command, code="parallel.environment", says=["environment"])
    assert [path.name for path in Path().iterdir()] == ["random.toml"]
