"""`lmkit profile nsys|kineto|memory`: record what a command or a recipe's training steps do, and say it briefly."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.load import load_recipe
from lmkit.recipe.schema import Recipe, required
from lmkit.storage import write_atomic

RECORDINGS = (".sqlite", ".nsys-rep")
TRACES = (".json", ".gz")


@dataclass(frozen=True)
class Profiled:
    """A summary, and where it and the recording lie."""

    folder: str
    files: tuple[str, ...]
    summary: dict[str, Any]
    text: str

    def __str__(self) -> str:
        return f"{self.text}\nwrote {self.folder}: {', '.join(self.files)}"


class CommandFailed(LmkitError):
    """The profiled command failed: its exit code becomes ours."""

    def __init__(self, message: str, *, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def nsys(target: Sequence[str], output: Path, *, engine: Literal["auto", "nsys"]) -> Profiled:
    """Summarise a recording, or run a command under Nsight Systems and summarise that.

    Where nsys is not installed, `engine = "auto"` profiles the recipe of an `lmkit train RECIPE` command with
    kineto instead, and says so; anything else is refused.

    Raises:
        UsageError: nsys is missing, or the file is not a recording.
        CommandFailed: the command failed; its exit code is kept.
    """
    from lmkit.profiling.nsys import find_nsys, profile_command, read_nsys_file
    from lmkit.profiling.summary import summarize

    if len(target) == 1 and target[0].endswith(RECORDINGS):
        return _stored(summarize(read_nsys_file(Path(target[0]))), output, {})
    command = [sys.executable, "-m", "lmkit", *target[1:]] if target[0] == "lmkit" else list(target)
    if (
        engine == "auto"
        and find_nsys() is None
        and list(target[:2]) == ["lmkit", "train"]
        and len(target) > 2
    ):
        print("nsys is not installed: profiling with kineto instead", file=sys.stderr)
        return kineto(load_recipe(target[2]), output, steps=5)
    done = profile_command(command, output)
    if done.exit_code != 0:
        raise CommandFailed(
            f"{' '.join(target)}: ended with exit code {done.exit_code}",
            hint=f"what was recorded until then is in {output}",
            exit_code=done.exit_code if done.exit_code > 0 else 128 - done.exit_code,
        )
    assert done.database is not None
    return _stored(summarize(read_nsys_file(done.database)), output, {})


def kineto(recipe: Recipe, output: Path, *, steps: int) -> Profiled:
    """Record training steps of a recipe's [model] and [train], on random tokens, with torch.profiler."""
    from lmkit.benches.training_step import TrainingStep
    from lmkit.data.batches import RandomTokens
    from lmkit.parallel.process_group import process_group
    from lmkit.profiling.kineto import profile_work
    from lmkit.profiling.summary import summarize

    config = required(recipe.model, "model", command="profile kineto")
    train = required(recipe.train, "train", command="profile kineto")
    vocab_size = config.vocab_size or (recipe.tokenizer.vocab_size if recipe.tokenizer else None)
    if vocab_size is None:
        raise UsageError("model.vocab_size: the recipe has no tokenizer to take it from", hint="say how many")
    config = config.model_copy(update={"vocab_size": vocab_size})
    with process_group(recipe.run.device) as ranks:
        batches = RandomTokens(
            vocab_size,
            batch_size=train.batch_size,
            context_length=config.context_length,
            seed=recipe.run.seed,
            accumulation=train.accumulation,
        )
        step = TrainingStep(config, ranks, batches, precision=train.precision, seed=recipe.run.seed)
        recorded = profile_work(
            step.run, steps=steps + 1, warmup=3, device=ranks.device, source=recipe.run.name
        )
    return _stored(
        summarize(recorded.trace), output, {"trace.json.gz": gzip.compress(recorded.chrome_trace, mtime=0)}
    )


def trace(path: Path, output: Path) -> Profiled:
    """Summarise a chrome trace that torch.profiler wrote earlier."""
    from lmkit.profiling.kineto import read_chrome_trace
    from lmkit.profiling.summary import summarize

    return _stored(summarize(read_chrome_trace(path)), output, {})


def _stored(summary: Any, output: Path, files: dict[str, bytes]) -> Profiled:
    contents: dict[str, bytes | str] = {
        **files,
        "summary.json": json.dumps(summary.as_dict(), indent=1) + "\n",
        "summary.md": summary.markdown(),
    }
    for name, content in contents.items():
        write_atomic(output / name, content)
    return Profiled(str(output), tuple(contents), summary.as_dict(), summary.text())
