import json
import logging
import os
import sys

import pytest
import torch
from raising import raises

from lmkit.core.ranges import range_
from lmkit.errors import UsageError
from lmkit.measure.ranges import disable_ranges, observe_ranges
from lmkit.measure.timing import time_variants
from lmkit.profile import run as profiling
from lmkit.profile.memory import run_memory
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from lmkit.training.setup import TrainingStep

MODEL = ModelConfig(vocab_size=64, context_length=16, d_model=32, d_ff=64, num_layers=1, num_heads=2)
RECIPE = Recipe(run=RunConfig(device="cpu"), model=MODEL, train=TrainConfig(batch_size=2))
WORK = profiling.Workload(RECIPE, steps=2, warmup=1)
RANGES = ["step", "data", "forward", "attention", "loss", "backward", "sync", "clip", "optimizer"]


def names(summary):
    return [entry["name"] for entry in summary["ranges"]]


@pytest.mark.parametrize("missing", [None, "nsys", "nvtx_is_available"])
def test_auto_takes_nsys_where_it_can_work_else_kineto_and_says_so(monkeypatch, caplog, missing):
    monkeypatch.setattr(profiling, "nvtx_is_available", lambda: missing != "nvtx_is_available")
    monkeypatch.setattr(profiling.shutil, "which", lambda name: None if missing == name else name)
    assert profiling.choose_engine("kineto") == "kineto"
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING, logger="lmkit"):
        assert profiling.choose_engine("auto") == ("kineto" if missing else "nsys")
    assert ("kineto" in caplog.text) == bool(missing)
    if missing is None:
        assert profiling.choose_engine("nsys") == "nsys"
        return
    with raises(UsageError, "nsys.missing", hint="kineto"):
        profiling.choose_engine("nsys")


def test_kineto_profiles_the_trainers_own_step(tmp_path):
    result = profiling.run_steps(RECIPE, tmp_path, engine="kineto", mode="step", steps=2)
    assert result.summary["steps"] == 2
    assert names(result.summary) == RANGES
    assert set(result.files) == {path.name for path in tmp_path.iterdir()}
    names_of_profile = {f"profile_{name}" for name in ("summary.json", "report.md", "ranges.png")}
    assert set(result.files) == names_of_profile | {"kineto_trace.json.gz", "environment.json"}
    assert json.loads((tmp_path / "profile_summary.json").read_text()) == result.summary
    assert result.summary["gpu_busy_share"] is None
    assert result.summary["ranges"][0]["wall_ms"] > 0
    # The stored trace gives the same summary again.
    again = profiling.run_recording(tmp_path / "kineto_trace.json.gz", tmp_path / "again")
    assert names(again.summary) == RANGES


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        (
            {"optimizer": OptimizerConfig(name="muon", options={"momentum": 2.0})},
            "optimizer.wrong_option",
            "",
        ),
        ({"train": TrainConfig(batch_size=2, precision="fp16")}, "train.wrong_device", "train.precision"),
        ({"train": TrainConfig(batch_size=2, precision="fp8")}, "train.wrong_device", "train.precision"),
        ({"model": MODEL.changed(attention="flash_triton")}, "attention.unsupported", "flash_triton"),
        ({"model": ModelConfig()}, "recipe.no_vocabulary", ""),
    ],
)
def test_what_does_not_train_is_not_profiled(changes, code, named):
    with raises(UsageError, code, named):
        profiling.make_training(profiling.Workload(RECIPE.model_copy(update=changes)))


def test_ranges_that_are_off_are_far_below_half_a_percent_of_a_step():
    """Both are measured here, so the machine's speed cancels; the least of 40 times counts."""
    step = profiling.make_training(WORK)
    opened = []
    observe_ranges(lambda name, opens: opened.append(name) if opens else None)
    step.run()
    disable_ranges()

    def as_many_ranges() -> None:
        for name in opened * 100:
            with range_(name):
                pass

    timings = time_variants({"ranges": as_many_ranges, "step": step.run}, repeats=40, warmup=3)
    assert min(timings["ranges"].samples_ms) / 100 < 0.005 * min(timings["step"].samples_ms)
    assert len(opened) == len(RANGES)


def test_an_nsys_database_is_summarized(two_steps, tmp_path):
    result = profiling.run_recording(two_steps.path, tmp_path / "out")
    assert result.summary["launches"] == 4
    assert (tmp_path / "out/profile_ranges.png").read_bytes()[:4] == b"\x89PNG"
    assert str(two_steps.path.parent) not in json.dumps(result.summary)


def test_the_workload_survives_its_way_to_another_process(monkeypatch):
    assert profiling.workload_from_json(WORK.as_json()) == WORK
    monkeypatch.setenv("LMKIT_RANGES", "kineto")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        profiling.main([WORK.as_json()])
    disable_ranges()
    steps = [event for event in profiler.events() if event.name == "step"]
    assert len(steps) == WORK.steps  # not the warm-up


def test_the_threads_of_the_recipe_are_obeyed(tmp_path, monkeypatch):
    seen = []
    real = TrainingStep.run
    monkeypatch.setattr(
        TrainingStep, "run", lambda step, **wait: seen.append(torch.get_num_threads()) or real(step)
    )
    recipe = RECIPE.changed(run={"threads": 3})
    before = torch.get_num_threads()
    profiling.run_steps(recipe, tmp_path, engine="kineto", mode="step", steps=1)
    run_memory(recipe, tmp_path, mode="step", steps=1)
    profiling.main([profiling.Workload(recipe, steps=1).as_json()])
    assert set(seen) == {3} != {before}
    assert torch.get_num_threads() == before


@pytest.mark.skipif(profiling.shutil.which("nsys") is None, reason="nsys (Nsight Systems) is not installed")
@pytest.mark.skipif(
    not profiling.nvtx_is_available(), reason="neither a CUDA build of torch nor the nvtx package"
)
def test_the_real_nsys_sees_the_ranges(tmp_path):
    result = profiling.run_steps(RECIPE, tmp_path, engine="nsys", mode="step", steps=2)
    assert result.summary["steps"] == 2
    assert names(result.summary) == RANGES
    assert os.path.exists(tmp_path / "profile.nsys-rep")
    assert sys.executable not in (tmp_path / "profile_report.md").read_text()
