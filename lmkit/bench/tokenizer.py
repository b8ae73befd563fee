"""`lmkit bench tokenizer`: training and encoding, compared with Hugging Face tokenizers and tiktoken.

Every sample is a process of its own (`tokenizer_jobs`). Before anything is timed, each variant runs once to check
that all encoders return the same ids. Trainers break ties differently, so their merges are not compared.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from lmkit.bench.context import Context
from lmkit.bench.failures import failure_is_a_row, wrong_result
from lmkit.bench.harness import ratio_fields, time_fields
from lmkit.bench.trainings import SPREAD, Variant, interval, measure_figures
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.statistics import paired_ratio
from lmkit.measure.tables import Column, Rows
from lmkit.measure.timing import Clock, Work
from lmkit.recipe.tables import PositiveFloat, PositiveInt, Table
from lmkit.registry import BENCHES

OURS = "lmkit"
VARIANTS = {"train": (OURS, "tokenizers"), "encode": (OURS, "tokenizers", "tiktoken")}


@dataclass(frozen=True)
class Job:
    """A job for `tokenizer_jobs`, one of `VARIANTS`. Encoding needs the file of a tokenizer, and one for the ids."""

    task: str
    variant: str
    text: str
    workers: int
    vocab_size: int
    tokenizer: str = ""
    output: str = ""


class Options(Table):
    """`[bench.tokenizer]`."""

    texts: tuple[Path, ...] = ()
    """Text files; empty: `synth_mb` of generated stories."""
    synth_mb: PositiveFloat = 20.0
    """Size of the generated stories, in 10^6 bytes."""
    tasks: tuple[Literal["train", "encode"], ...] = ("train", "encode")
    """The jobs to time."""
    vocab_sizes: tuple[Annotated[PositiveInt, Field(ge=257)], ...] = (10_000,)
    """256 bytes + merges + `<|endoftext|>`."""
    workers: tuple[PositiveInt, ...] = (1, 2)
    """Numbers of threads to compare."""
    rounds: PositiveInt = 5
    """Interleaved samples of each variant."""


@BENCHES.register(
    "tokenizer",
    order=7,
    help="Tokenizer training and encoding, against installed rivals.",
    recipes=("bench_tokenizer", "bench_tokenizer"),
    stem="",
    row_keys=("task", "text", "vocab_size", "workers"),
)
def tokenizer(context: Context) -> Rows:
    """Return one row per text, task, vocabulary, number of threads and variant."""
    from lmkit.data.synth import write_stories

    options = context.options
    texts = {path.stem: path for path in options.texts}
    if len(texts) < len(options.texts):
        message = "bench.tokenizer.texts: two have the same name, and rows are named by the text"
        raise UsageError("bench.same_names", message, hint="rename one, or link to it under another name")
    for text in texts.values():
        if not text.is_file():
            hint = "make one with: lmkit data synth"
            raise UsageError("bench.missing_text", f"bench.tokenizer.texts: {text}: no such file", hint=hint)
    with tempfile.TemporaryDirectory(prefix="lmkit-bench-") as folder:
        if not texts:
            texts = {"stories": Path(folder) / "stories.txt"}
            seed = context.recipe.run.seed
            write_stories(texts["stories"], size_mb=options.synth_mb, seed=seed, progress=context.report)
        cases = product(texts.values(), options.tasks, options.vocab_sizes, options.workers)
        jobs = [Job(task, "", str(text), workers, vocab_size) for text, task, vocab_size, workers in cases]
        return context.rows_of("tokenizer", jobs, lambda job: measure(job, context, Path(folder)))


def measure(job: Job, context: Context, folder: Path) -> Rows:
    """Return one row per installed variant of a job."""
    text = Path(job.text)
    num_bytes = text.stat().st_size
    jobs = {
        name: _prepared(replace(job, variant=name), folder)
        for name in VARIANTS[job.task]
        if name == OURS or importlib.util.find_spec(name) is not None
    }
    facts: dict[str, Any] = {"task": job.task, "text": text.stem, "bytes": num_bytes}
    facts |= {"vocab_size": job.vocab_size, "workers": job.workers}
    rows = {name: {**facts, "variant": name, "status": "ok"} for name in jobs}
    ids = {}
    for name, row in rows.items():
        with failure_is_a_row(row, "cpu"):
            ids[name] = _run(jobs[name])["ids"]
    for name, why in _minorities(ids).items():
        rows[name] |= wrong_result(why)

    def figures(name: str, samples_ms: list[float]) -> dict[str, Any]:
        fields = time_fields(samples_ms)
        ms = fields["median_ms"]
        return fields | {"median_s": ms / 1e3, "mb_per_s": num_bytes / 1e3 / ms}

    variants = {name: Variant(rows[name], make=partial(jobs.__getitem__, name), run=_run) for name in jobs}
    turns = {"rounds": context.options.rounds, "clock": JobClock()}
    believed = measure_figures(variants, context, None, figures, **turns)
    for name in believed if OURS in believed else ():
        rows[name] |= ratio_fields(paired_ratio(believed[OURS], believed[name]))
    return list(rows.values())


def _minorities(ids: Mapping[str, str]) -> dict[str, str]:
    """Return variant -> what is wrong with its ids: most have others. If no ids have a majority, all are wrong."""
    votes = Counter(ids.values()).most_common(1)
    most = votes[0][0] if votes and (2 * votes[0][1] > len(ids) or len(set(ids.values())) == 1) else None
    return {
        name: "its ids differ from those of " + ", ".join(other for other in ids if ids[other] != own)
        for name, own in ids.items()
        if own != most
    }


class JobClock(Clock):
    """Reads the seconds of a job from its result."""

    name = "seconds of a process"

    def sample_ms(self, work: Work, calls: int, *, before: Sequence[Work] = ()) -> float:
        """Return the milliseconds of `calls` jobs; `work` returns the result of one."""
        for preparation in before:
            preparation()
        results: list[Any] = [work() for _ in range(calls)]
        return 1e3 * sum(result["seconds"] for result in results)


def _prepared(job: Job, folder: Path) -> Job:
    """Return a job with the files that encoding needs; the tokenizer is trained once."""
    from lmkit.tokenizer import train_tokenizer

    if job.task == "train":
        return job
    text = Path(job.text)
    tokenizer = folder / f"{text.stem}-{job.vocab_size}.json"
    if not tokenizer.exists():
        train_tokenizer([text], vocab_size=job.vocab_size).save(tokenizer)
    output = folder / ("ids.npy" if job.variant == OURS else "ids.bin")
    return replace(job, tokenizer=str(tokenizer), output=str(output))


def _run(job: Job) -> dict[str, Any]:
    command = [sys.executable, "-m", "lmkit.bench.tokenizer_jobs", json.dumps(asdict(job))]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        last = process.stderr.strip().splitlines()[-1:] or ["no message"]
        raise LmkitError("bench.variant_failed", f"{job.variant} failed to {job.task}: {last[0]}")
    return json.loads(process.stdout.splitlines()[-1])


TITLE, EACH = "Tokenizer", "task"
COLUMNS = (
    Column("task", "task"),
    Column("text", "text"),
    Column("vocab_size", "vocab", ",d"),
    Column("workers", "workers"),
    Column("variant", "variant"),
    Column("median_s", "median s", ".2f", instead="status"),
    SPREAD,
    Column("mb_per_s", "MB/s", ".1f", better="higher"),
    Column("speedup", "ours faster", ".2f", note="median over rounds of theirs / ours, wall clock"),
    *interval("speedup", ".2f"),
)
