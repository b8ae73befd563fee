"""The harness: folders, journals, ranks, restarts, and benches from outside."""

import json
import math
import os
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises

from lmkit.bench import harness
from lmkit.bench.context import Context, Journal
from lmkit.bench.failures import RankGaveUp
from lmkit.bench.harness import add_figures, believed, check_place, run_bench
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.limits import Limits
from lmkit.recipe.load import load_recipe
from lmkit.recipe.tables import PositiveInt, Table
from lmkit.registry import BENCHES
from lmkit.storage.atomic import FolderLock

# What the bench of this file does.
WORK: list[Any] = []


class Options(Table):
    """`[bench.planted]`."""

    number: PositiveInt = 3
    """Rows to make."""


@pytest.fixture
def planted(tmp_path: Path):
    """A bench that calls what is in `WORK`."""

    @BENCHES.register("planted", help="Does what a test says.", row_keys=("planted",))
    def bench(context: Context) -> list[dict[str, Any]]:
        for work in WORK:
            work(context)
        return [{"planted": number, "ms": 1.5} for number in range(context.options.number)]

    yield lambda *overrides: run_bench(
        "planted", load_recipe(None, ["run.device=cpu", *overrides]), tmp_path, progress=lambda *_: None
    )
    WORK.clear()


def test_a_bench_from_outside_has_a_table_flags_files_and_a_report(planted, terminal, tmp_path):
    command = "bench planted --output out --set run.device=cpu"
    terminal(f"{command} --number 2")
    names = {*(f"planted_{name}" for name in ("results.jsonl", "results.csv", "report.md"))}
    found = {name for name in os.listdir(tmp_path / "out") if not name.startswith(".")}  # and a lock
    assert found == names | {"environment.json", "recipe.toml"}
    assert "Rows to make." in terminal("bench planted --help")
    assert "Does what a test says." in terminal("bench --help")
    printed = terminal(f"{command} --number=4 --force")
    assert [line.split()[0] for line in printed.splitlines()[2:6]] == ["0", "1", "2", "3"]
    terminal.refuses(f"{command} --number 0", code="recipe.wrong_value", says=["bench.planted.number"])


@pytest.mark.parametrize(("error", "said"), [(RuntimeError, "late"), (KeyboardInterrupt, harness.JOURNAL)])
def test_a_bench_that_raises_or_is_interrupted_says_where_its_rows_are(
    planted, tmp_path, caplog, error, said
):
    (tmp_path / harness.JOURNAL).write_text('{"of": "a run that was killed before"}')

    def fails(context: Context) -> None:
        context.keep([{"planted": 0}])
        raise error("late")

    WORK.append(fails)
    with pytest.raises(error, match=said):
        planted()
    expected = [True] if error is RuntimeError else []
    assert [str(tmp_path / harness.JOURNAL) in line for line in caplog.messages] == expected
    assert Journal(tmp_path / harness.JOURNAL).rows() == [{"planted": 0}]


def test_values_that_json_lacks_are_converted_or_fail_their_row_alone(planted, tmp_path, monkeypatch):
    rows = [
        {"planted": torch.tensor(1.5), "p": Path("a"), "n": torch.tensor(math.inf)},
        {"planted": 2, "odd": object(), "status": "ok"},
        {"planted": 3, "ms": 1.0, 1: 2},
        {"planted": 4, "odd": "\ud800", "status": "ok"},
    ]
    WORK.append(lambda context: context.keep(rows))
    monkeypatch.setattr(BENCHES, "load", lambda name, load=BENCHES.load: only_rows(rows, load(name)))
    stored = planted()
    assert not stored.is_fine
    first, second, third, fourth = stored.rows
    assert (first["status"], first["p"]) == ("wrong result", "a")  # infinite
    assert third == {"planted": 3, "ms": 1.0, "1": 2}
    for number, row in ((2, second), (4, fourth)):
        assert (row["planted"], row["status"], row["detail"][:4]) == (number, "failed", "odd:")
    lines = (tmp_path / "planted_results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == stored.rows


def test_of_several_ranks_under_torchrun_the_first_holds_the_folder(planted, tmp_path, monkeypatch):
    (tmp_path / harness.JOURNAL).write_text('{"of": "the first rank, which is at work"}')
    monkeypatch.setattr(harness, "_on_rank", lambda *arguments: None)
    monkeypatch.setenv("RANK", "1")
    with FolderLock(tmp_path):
        assert planted() is None
    assert (tmp_path / harness.JOURNAL).exists()


def test_a_second_bench_in_one_folder_is_refused_until_the_first_is_stored(planted, tmp_path, monkeypatch):
    refused = []

    def begin_another(*_: object) -> None:
        with pytest.raises(LmkitError) as error:
            run_bench("planted", load_recipe(None), tmp_path, progress=lambda *_: None)
        refused.append(str(tmp_path) in error.value.message)

    WORK.append(begin_another)
    monkeypatch.setattr(harness, "write_atomic", begin_another)
    planted()
    assert refused == [True] * 6  # while it measured, and at each of five files


@pytest.mark.parametrize("mine", ["recipe.toml", "environment.json", "report.md", "times.png"])
def test_fault_134_results_are_replaced_only_by_force_and_a_folder_is_tried_before_measuring(tmp_path, mine):
    recipe = load_recipe(None)
    (tmp_path / mine).touch()
    (tmp_path / "file").touch()
    if mine in ("recipe.toml", "environment.json"):
        with raises(UsageError, "output.exists", mine):
            check_place(recipe, tmp_path, force=True)
        (tmp_path / "environment.json").write_text('{"lmkit": "0.2.0", "packages": {}}')  # as a bench left it
    check_place(recipe, tmp_path, force=True)
    check_place(recipe, tmp_path / "new", force=False)
    below = tmp_path / "file" / "below"
    for folder, force, code in ((tmp_path, False, "output.exists"), (below, True, "output.unwritable")):
        with raises(UsageError, code, folder):
            check_place(recipe, folder, force=force)


def test_ranks_start_again_while_a_restart_can_learn_something(monkeypatch, tmp_path):
    journal = Journal(tmp_path / "rows")
    starts = []

    def spawn(nproc: int, target: object, arguments: object) -> str:
        starts.append(nproc)
        if len(starts) < 3:
            journal.add([{"start": len(starts)}])
            raise RankGaveUp("bench.rank_failed", "full")
        return "measured"

    monkeypatch.setattr("lmkit.parallel.launch.spawn_ranks", spawn)
    arguments: Any = ("planted", load_recipe(None), journal, lambda *_: None, 2)
    assert harness._on_several_ranks(*arguments) == "measured"
    assert starts == [2, 2, 2]
    monkeypatch.setattr(Journal, "add", lambda self, rows: None)
    starts.clear()
    with pytest.raises(RankGaveUp):
        harness._on_several_ranks(*arguments)
    assert starts == [2]


@pytest.mark.parametrize(("kernels", "code"), [("flash_triton:hopper", 1), ("sdpa", 0)])
def test_a_bench_that_could_measure_nothing_fails_and_says_why(tmp_path, terminal, kernels, code):
    tiny = "--tiers 16 --iters 1 --no-backward --set bench.attention.grid_lengths=[]"
    command = f"bench attention bench_attention_cpu {tiny} --kernels {kernels} --output out"
    assert ("unsupported: " in terminal(command, exit_code=code)) == (code == 1)
    assert (tmp_path / "out" / "attention_sweep_report.md").is_file()


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"ms": math.nan}, "wrong result", "ms is not finite"),
        ({"samples_ms": [1.0, math.inf]}, "wrong result", "samples_ms"),
        ({"class_ms": {"matmul": -math.inf}}, "wrong result", "class_ms"),
        ({"mfu": 3.009, "mfu_basis": "bf16 peak"}, "impossible rate", "300.9% of the bf16 peak"),
        ({"share_of_matmul": 1.26}, "impossible rate", "126.0% of the measured matmul rate, at most 125%"),
        ({"share": 1.51}, "impossible rate", "copy bandwidth"),
        ({"share_of_matmul": 1.24, "mfu": 1.24, "share": 1.49, "ms": 1.0, "gap": None}, "ok", ""),
        ({"status": "out of memory", "ms": math.nan}, "out of memory", ""),
    ],
)
def test_figures_that_cannot_be_true_are_refused(fields, status, says):
    row = {"kernel": "k", "repeats": 3, "status": "ok", **fields}
    found = believed(row)
    assert found["status"] == status
    if not says:
        assert found is row
        return
    assert says in found["detail"]
    assert (found["kernel"], found["repeats"]) == ("k", 3)
    assert not any(isinstance(value, float | list | dict) for value in found.values())


def test_a_rate_above_the_limit_is_believed_if_the_limit_was_disturbed():
    """A second measurement finds a faster machine; the higher limit stays."""
    slow = Limits("a test", {"fp32": 1.0}, 1.0, again=lambda: Limits("a test", {"fp32": 4.0}, 0.5))
    row: dict[str, Any] = {"kernel": "k", "status": "ok"}
    assert add_figures(row, slow, lambda: {"share_of_matmul": 3.0 / slow.matmul_flops["fp32"], "ms": 2.0})
    assert (row["share_of_matmul"], row["ms"], slow.copy_bytes_per_s) == (0.75, 2.0, 1.0)
    row = {"kernel": "k", "status": "ok", "host_ms": 1.0}
    assert not add_figures(row, slow, lambda: {"share_of_matmul": 30.0 / slow.matmul_flops["fp32"]})
    assert (row["status"], "host_ms" in row) == ("impossible rate", False)


@pytest.mark.parametrize(
    ("row", "wrong", "code"),
    [
        ({"status": "wrong result", "detail": "it is zero"}, 1, 1),
        ({"share_of_matmul": 3.009}, 1, 1),
        ({"status": "failed", "detail": "RuntimeError: broken"}, 0, 1),
        ({"status": "out of memory", "detail": "no room"}, 0, 0),
        ({"status": "unsupported", "detail": "not here"}, 0, 0),
    ],
)
def test_a_wrong_row_ends_with_exit_code_1(planted, tmp_path, terminal, monkeypatch, row, wrong, code):
    """Also of a bench from outside, and a row that failed; one that did not fit is neither."""
    good = {"planted": 1, "ms": 1.5, "status": "ok"}
    rows = [good, {"planted": 2, **row}]
    monkeypatch.setattr(BENCHES, "load", lambda name, load=BENCHES.load: only_rows(rows, load(name)))
    words = ["bench", "planted", "--set", "run.device=cpu", "--output", tmp_path / "out"]
    told = json.loads(terminal(*words, "--json", exit_code=code))
    assert len(told["wrong"]) == wrong
    lines = (tmp_path / "out" / "planted_results.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == good
    assert "ms" not in json.loads(lines[1])


def only_rows(rows: list[dict[str, Any]], bench: Any) -> Any:
    """A bench that returns these rows, in the module of another."""

    @wraps(bench)
    def replaced(context: Context) -> list[dict[str, Any]]:
        return [dict(row) for row in rows]

    return replaced
