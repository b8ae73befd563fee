"""Run lm-eval (the package lm_eval, extra `lmkit[eval]`) on a model: `lmkit evaluate --harness`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.errors import LmkitError, UsageError
from lmkit.parallel.ranks import local_device
from lmkit.training.exchange import export_model
from lmkit.training.given_weights import is_hugging_face

ROWS = 8


@dataclass(frozen=True)
class HarnessResult:
    """What lm-eval found. `results`: task -> its metrics by lm-eval's names, such as "acc_norm,none"."""

    model: str
    lm_eval: str
    results: dict[str, dict[str, Any]]

    def __str__(self) -> str:
        lines = [f"model  {self.model}, by lm-eval {self.lm_eval}"]
        for task, metrics in self.results.items():
            for name, value in metrics.items():
                if isinstance(value, float) and not name.partition(",")[0].endswith("_stderr"):
                    error = metrics.get(name.replace(",", "_stderr,", 1))
                    spread = f" +- {error:.4f}" if isinstance(error, float) else ""
                    lines.append(f"{task}  {name.partition(',')[0]} {value:.4f}{spread}")
        return "\n".join(lines)


def run_harness(path: Path, tasks: Sequence[str], *, device: str = "auto") -> HarnessResult:
    """Let lm-eval evaluate a model on its tasks.

    Args:
        path: a Hugging Face folder; or a run or a checkpoint, which is exported to a temporary folder.
        tasks: names of lm-eval's tasks, or .yaml files of tasks. lm-eval downloads what they need.

    Raises:
        UsageError: lm_eval is not installed; or as `export_model`.
        LmkitError: lm-eval failed.
    """
    try:
        import lm_eval
    except ModuleNotFoundError as error:
        message, hint = f"--harness: {error.name} is not installed", "pip install 'lmkit[eval]'"
        raise UsageError("evaluate.no_harness", message, hint=hint) from error
    place = str(local_device(device, local_rank=0))
    with _hugging_face_folder(path) as folder, redirect_stdout(sys.stderr):  # stdout is for the result
        try:
            found = lm_eval.simple_evaluate(
                model="hf",
                model_args={"pretrained": str(folder), "dtype": "auto"},
                tasks=list(tasks),
                batch_size=ROWS,
                device=place,
                log_samples=False,
            )
        except (OSError, LookupError, ValueError, TypeError, RuntimeError, ImportError) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            hint = "--debug shows where; `lm_eval ls tasks` lists tasks, most of which are downloaded"
            raise LmkitError("evaluate.harness", f"lm-eval: {why}", hint=hint) from error
    assert found is not None
    return HarnessResult(str(path), lm_eval.__version__, {**found["results"]})


@contextmanager
def _hugging_face_folder(path: Path) -> Iterator[Path]:
    if is_hugging_face(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "exported")
        export_model(path, folder)
        yield folder
