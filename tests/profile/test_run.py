import json
import logging
import os
import sys
from dataclasses import replace

import pytest
import torch

from lmkit.errors import UsageError
from lmkit.measure.ranges import disable_ranges, observe_ranges, range_
from lmkit.measure.timing import time_variants
from lmkit.profile import run as profiling
from lmkit.profile.memory import run_profile as run_memory_profile
from lmkit.profile.run import choose_engine, profile_any_command, profile_steps, summarize_file
from lmkit.profile.steps import Workload, build_step, main, workload_from_json
from lmkit.recipe.schema import Recipe
from lmkit.recipe.tables import ModelConfig, RunConfig, TrainConfig
from lmkit.training.setup import TrainingStep

MODEL = ModelConfig(vocab_size=64, context_length=16, d_model=32, d_ff=64, num_layers=1, num_heads=2)
WORK = Workload(
    Recipe(run=RunConfig(device="cpu"), model=MODEL, train=TrainConfig(batch_size=2)), steps=2, warmup=1
)
RANGES = ["step", "data", "forward", "attention", "loss", "backward", "sync", "clip", "optimizer"]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_auto_takes_nsys_where_it_can_work(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(profiling, "nvtx_is_available", lambda: True)
    monkeypatch.setattr(profiling, "find_nsys", lambda: tmp_path / "nsys")
    assert choose_engine("auto") == "nsys"
    assert choose_engine("nsys") == "nsys"
    assert choose_engine("kineto") == "kineto"
    assert caplog.text == ""


@pytest.mark.parametrize("missing", ["find_nsys", "nvtx_is_available"])
def test_auto_falls_to_kineto_and_says_so_and_a_forced_nsys_is_refused(
    monkeypatch, tmp_path, caplog, missing
):
    monkeypatch.setattr(profiling, "nvtx_is_available", lambda: missing != "nvtx_is_available")
    monkeypatch.setattr(profiling, "find_nsys", lambda: None if missing == "find_nsys" else tmp_path / "nsys")
    with caplog.at_level(logging.WARNING, logger="lmkit"):
        assert choose_engine("auto") == "kineto"
    assert "kineto" in caplog.text
    with pytest.raises(UsageError) as caught:
        choose_engine("nsys")
    assert caught.value.code == "nsys.missing"
    assert "kineto" in caught.value.hint


def test_kineto_profiles_the_trainers_own_step(tmp_path):
    result = profile_steps(WORK, tmp_path, engine="kineto")
    assert result.exit_code == 0
    assert result.summary.steps == 2
    assert [entry.name for entry in result.summary.ranges] == RANGES
    assert set(result.files) == {
        "profile_summary.json",
        "profile_report.md",
        "profile_ranges.png",
        "kineto_trace.json.gz",
    }
    summary = json.loads(result.files["profile_summary.json"])
    assert summary["gpu_busy_share"] is None
    assert summary["ranges"][0]["wall_ms"] > 0
    # The stored trace gives the same summary again.
    path = tmp_path / "kineto_trace.json.gz"
    path.write_bytes(result.files["kineto_trace.json.gz"])
    again = summarize_file(path).summary
    assert [entry.name for entry in again.ranges] == RANGES


def test_ranges_that_are_off_are_far_below_half_a_percent_of_a_step():
    """Both are measured here, so the machine's speed cancels, and so does what else it does: the least of 40 times.
    The model is small, to be quick: of its steps of 1.4 ms the ranges (0.2 us each) are 0.18%, of the quickstart's
    of 200 ms 0.003% (artifacts/cpu/stopwatch)."""
    step = build_step(WORK)
    opened = []
    observe_ranges(lambda name, opens: opened.append(name) if opens else None)
    step.run()
    disable_ranges()

    def as_many_ranges() -> None:
        for name in opened * 100:
            with range_(name):
                pass

    timings = time_variants({"ranges": as_many_ranges, "step": step.run}, repeats=40, warmup=3, kind="wall")
    assert timings["ranges"].spread.minimum / 100 < 0.005 * timings["step"].spread.minimum
    assert len(opened) == len(RANGES)


def test_an_nsys_database_is_summarised(two_steps):
    result = summarize_file(two_steps.path)
    assert result.summary.launches == 4
    assert result.files["profile_ranges.png"][:4] == b"\x89PNG"
    assert str(two_steps.path.parent) not in json.dumps(result.summary.as_dict())


def test_a_command_that_dies_before_nsys_records_anything(monkeypatch, tmp_path):
    monkeypatch.setattr(profiling, "profile_command", lambda command, folder: profiling_run(5))

    def profiling_run(code):
        from lmkit.profile.nsys import NsysRun

        return NsysRun(code, None, None)

    result = profile_any_command(["x"], tmp_path)
    assert (result.summary, result.files, result.exit_code) == (None, {}, 5)


def test_the_workload_survives_its_way_to_another_process(monkeypatch):
    assert workload_from_json(WORK.as_json()) == WORK
    monkeypatch.setenv("LMKIT_RANGES", "kineto")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profiler:
        main([WORK.as_json()])
    disable_ranges()
    steps = [event for event in profiler.events() if event.name == "step"]
    assert len(steps) == WORK.steps  # not the warm-up


def test_the_threads_of_the_recipe_are_obeyed(tmp_path, monkeypatch):
    seen = []
    real = TrainingStep.run
    monkeypatch.setattr(TrainingStep, "run", lambda step: seen.append(torch.get_num_threads()) or real(step))
    run = WORK.recipe.run.model_copy(update={"threads": 3})
    work = replace(WORK, recipe=WORK.recipe.model_copy(update={"run": run}))
    before = torch.get_num_threads()
    profile_steps(work, tmp_path, engine="kineto")
    run_memory_profile(work)
    main([work.as_json()])
    assert set(seen) == {3} != {before}
    assert torch.get_num_threads() == before


def test_a_model_without_vocabulary_is_refused():
    with pytest.raises(UsageError) as caught:
        build_step(Workload(Recipe(model=ModelConfig(), train=TrainConfig())))
    assert caught.value.code == "profile.no_vocabulary"
    assert "model.vocab_size" in caught.value.message


@pytest.mark.skipif(profiling.find_nsys() is None, reason="nsys (Nsight Systems) is not installed")
@pytest.mark.skipif(
    not profiling.nvtx_is_available(), reason="neither a CUDA build of torch nor the nvtx package"
)
def test_the_real_nsys_sees_the_ranges(tmp_path):
    result = profile_steps(WORK, tmp_path, engine="nsys")
    assert result.exit_code == 0
    assert result.summary.steps == WORK.steps
    assert [entry.name for entry in result.summary.ranges] == RANGES
    assert os.path.exists(tmp_path / "profile.nsys-rep")
    assert sys.executable not in result.files["profile_report.md"]
