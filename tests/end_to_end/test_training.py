"""`lmkit train` as a user starts it: alone, with --nproc, under torchrun; what it says, and how it ends."""

import json
import signal
import sys
from pathlib import Path

import pytest
from programs import run_program
from sessions import PATIENCE_S, TORCHRUN, losses, start, write_tokens
from tiny import tiny_recipe

from lmkit.training.checkpoint import newest_valid, open_checkpoint, saved_steps

RECIPE = tiny_recipe(
    *('data.train="train.npy"', 'data.valid="valid.npy"', "train.steps=10", "train.batch_size=8"),
    *("train.accumulation=2", "train.log_interval=1", "train.eval_interval=5"),
)


@pytest.fixture(autouse=True)
def _tokens(tmp_path: Path) -> None:
    write_tokens(tmp_path)


def weights(run: Path) -> bytes:
    choice = newest_valid(run / "checkpoints")
    assert choice.path is not None
    return (choice.path / "model.safetensors").read_bytes()


def test_fault_54_stopping_and_going_on_is_the_same_run(terminal, recipe, tmp_path):
    runs = tmp_path / "runs"
    result = json.loads(terminal("train tiny.toml --name whole --json"))
    assert (result["status"], result["step"]) == ("finished", 10)
    assert result["folder"] == "runs/whole"
    assert "\x1b" not in terminal.err
    assert "tok/s" in terminal.err

    first = json.loads(terminal("train tiny.toml --name parts --stop-at-step 5 --json"))
    assert (first["status"], first["step"]) == ("stopped early", 5)
    second = json.loads(terminal("train tiny.toml --name parts --json"))
    assert (second["resumed_from"], second["step"]) == (5, 10)
    assert losses(runs / "whole") == losses(runs / "parts")
    assert weights(runs / "whole") == weights(runs / "parts")

    # fault 65, and nothing that was written names this machine
    assert json.loads(terminal("train tiny.toml --name parts --json"))["status"] == "nothing to do"
    for path in (runs / "whole").rglob("*"):
        if path.suffix in (".json", ".jsonl", ".toml"):
            assert str(tmp_path) not in path.read_text()

    # One rank, one thread, the same windows: the same number.
    assert json.loads(terminal("evaluate runs/whole --json"))["loss"] == result["evaluation"]["loss"]


@pytest.mark.full
def test_two_ranks_by_nproc_and_by_torchrun_are_the_same_run(lmkit, recipe, tmp_path):
    own = lmkit("train", recipe, "--name", "own", "--nproc", "2", "--json")
    assert own.returncode == 0, own.stderr
    assert json.loads(own.stdout)["step"] == 10
    command = ("-m", "lmkit", "train", recipe, "--name", "elastic", "--json")
    elastic = run_program(sys.executable, *TORCHRUN, *command, cwd=tmp_path)
    assert elastic.returncode == 0, elastic.stderr
    assert json.loads(elastic.stdout)["step"] == 10  # rank 0 alone speaks
    assert losses(tmp_path / "runs" / "own") == losses(tmp_path / "runs" / "elastic")
    assert weights(tmp_path / "runs" / "own") == weights(tmp_path / "runs" / "elastic")


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code", "launcher", "arguments"),
    [
        *((signal.SIGTERM, 143, (), ()), (signal.SIGINT, 130, (), ())),
        (signal.SIGTERM, 143, (), ("--nproc", "2")),
        (signal.SIGTERM, 1, TORCHRUN, ()),  # torchrun's own code, whatever its ranks return
    ],
)
def test_fault_69_a_signal_saves_once_and_gives_the_exit_code(
    number, code, launcher, arguments, recipe, lmkit
):
    arguments = ("--set", "parallel.strategy=zero1", *arguments)
    words = ("train", str(recipe), "--steps", "100000", *arguments)
    process = start(*launcher, "-m", "lmkit", *words, cwd=recipe.parent)
    try:
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()  # it would train for long, beside the other tests
    assert process.returncode == code, err
    assert out == ""
    assert "Traceback" not in err or launcher
    (only,) = saved_steps(recipe.parent / "runs" / "run" / "checkpoints")
    assert err.count(f"step {only.step} is saved") == 1
    state, ranks = open_checkpoint(only.path).state, 2 if launcher or "--nproc" in arguments else 1
    assert (state.world_size, state.optimizer_shards) == (ranks, ranks)
    words = ("--steps", "100000", "--stop-at-step", str(only.step + 1), "--nproc", str(ranks))
    resumed = lmkit("train", recipe, *arguments, *words)
    assert resumed.returncode == 0, resumed.stderr
    assert f"(resumed at step {only.step})" in resumed.stdout
