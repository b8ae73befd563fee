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
from lmkit.training.judging import refuse_not_finite
from lmkit.training.weights import is_hugging_face

ROWS = 8
_SUMS = (ArithmeticError, AssertionError)  # a perplexity beyond all floats; a blank question without a prefix


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

    A document that lm-eval scores stands behind one begin-of-text token, as with `--by-document`. lm-eval by itself
    puts two there if the tokenizer puts one before every text.

    Args:
        path: a Hugging Face folder; or a run or a checkpoint, which is exported to a temporary folder.
        tasks: names of lm-eval's tasks, or .yaml files of tasks. lm-eval downloads what they need.

    Raises:
        UsageError: lm_eval is not installed; or as `export_model`.
        LmkitError: lm-eval failed, or a figure is not finite.
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
                model=_model(folder, place, path), tasks=list(tasks), log_samples=False
            )
        except (OSError, LookupError, ValueError, TypeError, RuntimeError, ImportError, *_SUMS) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            hint = "--debug shows where; `lm_eval ls tasks` lists tasks, most of which are downloaded"
            raise LmkitError("evaluate.harness", f"lm-eval: {why}", hint=hint) from error
    assert found is not None
    for task, metrics in found["results"].items():
        figures = {name: value for name, value in metrics.items() if "_stderr" not in name}
        refuse_not_finite([value for value in figures.values() if isinstance(value, float)], path, task)
    return HarnessResult(str(path), lm_eval.__version__, {**found["results"]})


def _model(folder: Path, device: str, path: Path) -> Any:
    """Return lm-eval's model of a Hugging Face folder; it refuses log-likelihoods that are not finite."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(folder), dtype="auto", batch_size=ROWS, device=device)
    of_ends, of_documents = model.loglikelihood, model.loglikelihood_rolling

    def loglikelihood(requests: Any, **options: Any) -> Any:
        found = of_ends(requests, **options)
        refuse_not_finite([nats for nats, _ in found], path, "a task")
        return found

    def loglikelihood_rolling(requests: Any, **options: Any) -> Any:
        model.add_bos_token, kept = False, model.add_bos_token
        found = of_documents(requests, **options)
        model.add_bos_token = kept
        refuse_not_finite(found, path, "a task")
        return found

    model.loglikelihood, model.loglikelihood_rolling = loglikelihood, loglikelihood_rolling
    return model


@contextmanager
def _hugging_face_folder(path: Path) -> Iterator[Path]:
    if is_hugging_face(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "exported")
        export_model(path, folder)
        yield folder
