"""`lmkit profile`: record training steps or a command, or summarize a recording, and store the results.

`python -m lmkit.profile.run WORKLOAD` (JSON of a `Workload`) runs training steps in a process of their own, for nsys.
"""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from lmkit.bench.harness import write_results
from lmkit.bench.summary import Summary, report_text
from lmkit.core.ranges import range_
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.environment import describe_environment, has_bf16
from lmkit.measure.plots import decorate, grouped_bars
from lmkit.measure.ranges import enable_ranges_from_environment, nvtx_is_available
from lmkit.measure.tables import Column, Row, enumeration
from lmkit.measure.trace import Trace, profile_work, read_chrome_trace
from lmkit.parallel.ranks import Ranks, local_device
from lmkit.profile.nsys import INSTALL, MISSING, profile_command, read_nsys_file
from lmkit.profile.summary import summarize, summarize_trace, text_of
from lmkit.recipe.load import required
from lmkit.recipe.recipe import Recipe
from lmkit.recipe.tables import ModelConfig, TrainConfig
from lmkit.tokenizer.vocabulary import required_model
from lmkit.training.precision import with_precision
from lmkit.training.process import numerics
from lmkit.training.setup import TrainingStep, check_device

Engine = Literal["auto", "nsys", "kineto"]
Mode = Literal["forward", "fwd+bwd", "step"]
PICTURE = "profile_ranges.png"
logger = logging.getLogger("lmkit")


@dataclass(frozen=True)
class Profiled:
    """A summary, and its folder."""

    folder: str
    files: tuple[str, ...]
    summary: dict[str, Any]
    text: str
    is_fine: bool = True

    def __str__(self) -> str:
        return f"{self.text}\n{enumeration(f'wrote {self.folder}', self.files)}"


def run_command(arguments: Sequence[str], output: Path) -> Profiled:
    """Run any command under Nsight Systems; `lmkit ...` runs with this interpreter."""
    own = [sys.executable, "-m", "lmkit", *arguments[1:]]
    return _run_under_nsys(own if arguments[0] == "lmkit" else arguments, output, what=" ".join(arguments))


def run_recording(path: Path, output: Path) -> Profiled:
    """Summarize a .sqlite, .nsys-rep, .json or .json.gz file."""
    is_chrome_trace = path.name.endswith((".json", ".json.gz"))
    return _store(read_chrome_trace(path) if is_chrome_trace else read_nsys_file(path), output)


def run_steps(recipe: Recipe, output: Path, *, engine: Engine, mode: Mode, steps: int) -> Profiled:
    """Record training steps (or passes) of a recipe's model, on random tokens."""
    work = Workload(recipe, mode, steps)
    if choose_engine(engine) == "nsys":
        command = [sys.executable, "-m", "lmkit.profile.run", work.as_json()]
        return _run_under_nsys(command, output, what=recipe.run.name, source=str(work), skip_steps=0)
    with numerics(work.recipe.run, work.ranks):
        call = call_of(make_training(work), work.mode)
        trace, content = profile_work(
            call, work.steps, warmup=work.warmup, device=work.ranks.device, source=str(work)
        )
    return _store(trace, output, chrome_trace=content, skip_steps=0)


def _run_under_nsys(
    command: Sequence[str], output: Path, *, what: str, source: str = "", skip_steps: int = 1
) -> Profiled:
    """Run a command, which errors call `what`, under nsys, which writes its own files into `output`."""
    exit_code, database = profile_command(command, output)
    if database is not None:
        trace = read_nsys_file(database)
        profiled = _store(replace(trace, source=source or trace.source), output, skip_steps=skip_steps)
    if exit_code != 0:
        failed = LmkitError(
            "profile.command_failed",
            f"{what}: ended with exit code {exit_code}",
            hint=f"{output} holds what was recorded before",
        )
        failed.exit_code = exit_code if exit_code > 0 else 128 - exit_code
        raise failed
    return profiled


def _store(trace: Trace, output: Path, *, chrome_trace: bytes = b"", skip_steps: int = 1) -> Profiled:
    """Write `profile_summary.json`, `profile_report.md`, `environment.json`, the recording, and, for recorded ranges,
    `profile_ranges.png`."""
    summary = summarize(trace, skip_steps=skip_steps)
    picture = decorate(PICTURE, lambda: _picture(summary)) if summary["ranges"] else None
    files: dict[str, bytes | str] = {
        "profile_summary.json": json.dumps(summary, indent=2, allow_nan=False) + "\n",
        **({PICTURE: picture} if picture else {}),
        **({"kineto_trace.json.gz": gzip.compress(chrome_trace, mtime=0)} if chrome_trace else {}),
    }
    written = write_profile(output, files, "profile_report.md", summarize_trace([summary]))
    return Profiled(str(output), written, summary, text_of(summary))


def write_profile(
    output: Path, files: Mapping[str, bytes | str], report: str, summary: Summary
) -> tuple[str, ...]:
    """Write the files of a profile, its report, which shows the pictures among them, and the environment."""
    environment = describe_environment()
    return write_results(output, {**files, report: report_text(summary, environment, [*files])}, environment)


def choose_engine(engine: Engine) -> Literal["nsys", "kineto"]:
    """Return nsys where it works, else kineto with a warning in the log."""
    if engine == "kineto":
        return "kineto"
    if shutil.which("nsys") is None:
        missing, remedy = MISSING, INSTALL
    elif not nvtx_is_available():
        missing = "nsys needs NVTX ranges, and this torch is a CPU build without them"
        remedy = "pip install 'nvtx==0.2.10'"
    else:
        return "nsys"
    if engine == "nsys":
        raise UsageError("nsys.missing", missing, hint=f"{remedy}, or use --engine kineto")
    logger.warning("%s: profiling with kineto (torch.profiler) instead", missing)
    return "kineto"


def _picture(summary: Row) -> bytes:
    unit = summary["window"].rpartition(" x ")[2] if summary["steps"] else "recording"
    fields = {"wall": "wall", "dispatch": "CPU dispatches", "wait": "CPU waits", "gpu": "GPU works"}
    rows = []
    for field, label in fields.items():
        for entry in summary["ranges"]:
            # Add up the instances of a step (the attention of every layer, say).
            times = entry["instances"] / max(1, summary["steps"])
            ms = None if (ms := entry[f"{field}_ms"]) is None else ms * times
            rows.append({"range": entry["name"], "kind": label, "ms": ms, "status": "none"})
    return grouped_bars(
        rows,
        Column("ms", "time (ms)", ".2f"),
        group="range",
        series="kind",
        title=f"Where the time of a {unit} goes ({summary['engine']}; ranges lie inside one another)",
        x_label="range",
    )


# ---- the steps that are profiled


@dataclass(frozen=True)
class Workload:
    """Recorded steps of a recipe (and unrecorded ones, `warmup`, before them) on one device, on random tokens; or
    passes alone: "forward" (without gradients) or "fwd+bwd" (gradients are dropped)."""

    recipe: Recipe
    mode: Mode = "step"
    steps: int = 5
    warmup: int = 3

    @cached_property
    def model(self) -> ModelConfig:
        return required_model(self.recipe, command="profile")

    @property
    def train(self) -> TrainConfig:
        required(self.recipe.train, "train", self.recipe, command="profile")
        return cast(TrainConfig, with_precision(self.recipe, has_bf16=has_bf16(self.ranks.device)).train)

    @property
    def ranks(self) -> Ranks:
        return Ranks(device=local_device(self.recipe.run.device, local_rank=0))

    def as_json(self) -> str:
        """Return the argument of `main`."""
        recipe = self.recipe.model_dump(mode="json", exclude_none=True)  # TOML has no null
        return json.dumps({"recipe": recipe, "mode": self.mode, "steps": self.steps, "warmup": self.warmup})

    def __str__(self) -> str:
        model, train = self.model, self.train
        name = model.preset or f"{model.num_layers} layers, d_model {model.d_model}"
        return (
            f"{name}, {self.mode}, context {model.context_length}, "
            f"batch {train.accumulation} x {train.batch_size // train.accumulation}, "
            f"{train.precision}, attention {model.attention}, compile {model.compile}"
        )


def workload_from_json(text: str) -> Workload:
    fields: dict[str, Any] = json.loads(text)
    return Workload(Recipe.model_validate_json(json.dumps(fields.pop("recipe"))), **fields)


def make_training(work: Workload) -> TrainingStep:
    """Return the model with its optimizer and endless random tokens."""
    train = work.train.changed(cuda_graph="off")  # of a graph a profile would not show the phases
    recipe = work.recipe.changed(model=work.model, train=train)
    check_device(recipe, work.ranks.device)
    return TrainingStep(recipe, work.ranks)


def call_of(step: TrainingStep, mode: Mode) -> Callable[[], object]:
    """Return a call that runs one step, or one pass in a range of its own, and waits for the device."""
    if mode == "step":
        return partial(step.run, wait=True)
    run = step.forward if mode == "forward" else step.forward_backward

    def one_pass() -> None:
        with range_("pass"):
            run().item()

    return one_pass


def main(arguments: Sequence[str]) -> None:
    """Run the workload that the JSON argument describes, with the ranges that LMKIT_RANGES asks for."""
    (text,) = arguments
    work = workload_from_json(text)
    with numerics(work.recipe.run, work.ranks):
        call = call_of(make_training(work), work.mode)
        for _ in range(work.warmup):
            call()
        enable_ranges_from_environment()
        for _ in range(work.steps):
            call()
        if work.ranks.device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
