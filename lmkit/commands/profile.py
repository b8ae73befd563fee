"""`lmkit profile nsys|kineto|memory`: record what training steps or a command do, and say it briefly."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lmkit.errors import LmkitError
from lmkit.measure.environment import describe_environment
from lmkit.measure.tables import wrote
from lmkit.parallel.process_group import local_device
from lmkit.profiling.run import ProfileResult, profile_any_command, profile_steps, summarize_file
from lmkit.profiling.steps import Mode, StepsOptions
from lmkit.recipe.load import required
from lmkit.recipe.schema import Recipe
from lmkit.storage import write_atomic


@dataclass(frozen=True)
class Profiled:
    """A summary, and where it and the recording lie."""

    folder: str
    files: tuple[str, ...]
    summary: dict[str, Any]
    text: str

    def __str__(self) -> str:
        return f"{self.text}\n{wrote(self.folder, self.files)}"


class CommandFailed(LmkitError):
    """The profiled command failed: its exit code becomes ours."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def command(arguments: Sequence[str], output: Path) -> Profiled:
    """Run any command under Nsight Systems; `lmkit ...` is run with this interpreter.

    Raises:
        UsageError: nsys is not installed.
        CommandFailed: the command failed; its exit code is kept.
    """
    own = [sys.executable, "-m", "lmkit", *arguments[1:]]
    result = profile_any_command(own if arguments[0] == "lmkit" else list(arguments), output)
    return _stored(result, output, what=" ".join(arguments))


def recording(path: Path, output: Path) -> Profiled:
    """Summarise a .sqlite, .nsys-rep, .json or .json.gz file."""
    return _stored(summarize_file(path), output, what=str(path))


def steps(
    recipe: Recipe, output: Path, *, engine: Literal["auto", "nsys", "kineto"], mode: Mode, number: int
) -> Profiled:
    """Record training steps (or passes) of a recipe's [model] and [train], on random tokens."""
    options = _options(recipe, mode, number)
    return _stored(profile_steps(options, output, engine=engine), output, what=recipe.run.name)


def memory(recipe: Recipe, output: Path, *, mode: Mode, number: int) -> Profiled:
    """Peak memory of training steps (or passes) by phase and category, a picture, a snapshot for memory_viz."""
    from lmkit.profiling.memory import run_profile

    # The first step counts here: that is where the optimizer's state appears.
    options = replace(_options(recipe, mode, number), warmup=0)
    result = run_profile(options)
    files = {**result.files, "environment.json": json.dumps(result.environment, indent=1) + "\n"}
    for name, content in files.items():
        write_atomic(output / name, content)
    return Profiled(str(output), tuple(files), {"peaks": result.rows}, result.table())


def _options(recipe: Recipe, mode: Mode, number: int) -> StepsOptions:
    model = required(recipe.model, "model", command="profile")
    train = required(recipe.train, "train", command="profile")
    vocab_size = model.vocab_size or (recipe.tokenizer.vocab_size if recipe.tokenizer else None)
    return StepsOptions(
        model=model.model_copy(update={"vocab_size": vocab_size}),
        device=local_device(recipe.run.device, local_rank=0).type,
        precision=train.precision,
        batch_size=train.batch_size // train.accumulation,
        mode=mode,
        steps=number,
        seed=recipe.run.seed,
        threads=recipe.run.threads,
        deterministic=recipe.run.deterministic,
    )


def _stored(result: ProfileResult, output: Path, *, what: str) -> Profiled:
    files = {**result.files, "environment.json": json.dumps(describe_environment(), indent=1) + "\n"}
    for name, content in files.items():
        write_atomic(output / name, content)
    if result.exit_code != 0 or result.summary is None:
        raise CommandFailed(
            f"{what}: ended with exit code {result.exit_code}",
            hint=f"what was recorded until then is in {output}",
            exit_code=result.exit_code if result.exit_code > 0 else 128 - result.exit_code,
        )
    return Profiled(str(output), tuple(files), result.summary.as_dict(), result.summary.text())
