"""`lmkit rerun`: a run and a bench made again, and what drifted."""

import json
import math
import shutil
from pathlib import Path

import pytest

from lmkit.bench import harness
from lmkit.bench.harness import BenchStored


def test_a_run_is_made_again_bit_for_bit(run, terminal):
    found = json.loads(terminal(f"rerun {run} --json"))
    assert found["folder"] == f"{run}-rerun"
    assert found["drift"] == []
    differing = {losses["kind"]: (losses["steps"], losses["differing"]) for losses in found["losses"]}
    assert differing == {"train": (2, 0), "final": (1, 0)}
    paths = sorted(run.parent.glob("*/checkpoints/step-00000002/model.safetensors"))
    weights = [path.read_bytes() for path in paths]
    assert len(weights) == 2
    assert weights[0] == weights[1]
    terminal.refuses(f"rerun {run}", code="output.exists", says=["fish-rerun"])


def test_drift_is_listed(run, terminal):
    environment = json.loads((run / "environment.json").read_text())
    environment["packages"]["torch"] = "1.0"
    (run / "environment.json").write_text(json.dumps(environment))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changed = next(record for record in records if record["kind"] == "train" and record["step"] == 2)
    changed["loss"] += 0.25
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("keep_last = 2", "keep_last = 3"))
    found = json.loads(terminal(f"rerun {run} --output again --json"))
    drift = [line.partition(" -> ")[0] for line in found["drift"]]
    assert drift == ["packages.torch: 1.0", "checkpoint.keep_last: 2"]
    (losses,) = [losses for losses in found["losses"] if losses["differing"]]
    assert (losses["kind"], losses["first"], losses["differing"]) == ("train", 2, 1)
    assert math.isclose(losses["largest"], 0.25, rel_tol=1e-9)
    assert (Path("again") / "stories.txt").exists()  # all stages


@pytest.mark.full
def test_a_bench_is_made_again_and_compared(terminal):
    words = "--tiers 16:16 --kernels reference,sdpa --iters 6 --warmup 0 --no-backward"
    terminal(f"bench attention bench_attention_cpu {words} --set run.threads=1 --output before")
    found = json.loads(terminal("rerun before --output after --json"))
    assert found["bench"] == "attention"
    assert {row["verdict"] for row in found["rows"]} <= {"faster", "slower", "no difference", "unclear"}
    names = [sorted(path.name for path in Path(folder).iterdir()) for folder in ("before", "after")]
    assert names[0] == names[1]


def test_a_bench_that_is_wrong_when_it_is_made_again_ends_with_exit_code_1(terminal, monkeypatch):
    row = {"operation": "all_reduce", "dtype": "fp32", "bytes": 4, "status": "ok", "samples_ms": [1.0] * 6}
    Path("before").mkdir()
    (Path("before") / "recipe.toml").write_text("[run]\nname = 'x'\n")
    (Path("before") / "all_reduce_results.jsonl").write_text(json.dumps(row) + "\n")

    def run_bench(name: str, recipe: object, new: Path, **options: object) -> BenchStored:
        shutil.copytree("before", new)
        return BenchStored(name, str(new), (), [row], "", measured=True, wrong=("it is zero",))

    monkeypatch.setattr(harness, "run_bench", run_bench)
    found = json.loads(terminal("rerun before --output after --json", exit_code=1))
    assert found["bench"] == "all_reduce"


def test_what_is_no_result_is_named(terminal):
    Path("empty").mkdir()
    terminal.refuses("rerun empty", code="rerun.no_recipe", says=["empty"])
    (Path("empty") / "recipe.toml").write_text("[run]\nname = 'x'\n")
    terminal.refuses("rerun empty", code="rerun.no_results", says=["empty"])
