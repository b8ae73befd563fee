"""`lmkit bench tokenizer`: training and encoding, compared with Hugging Face tokenizers, rustbpe and tiktoken.

Every sample is a process of its own (`tokenizer_jobs`). The variants of a case take turns, and the same round of two
variants is compared. Before anything is timed, each variant runs once to measure its memory and to check that all
encoders return the same ids. (Trainers break ties differently, so their merges are not compared here.)
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from lmkit.bench.context import Context, wrong_result
from lmkit.bench.harness import ratio_fields
from lmkit.bench.summary import Summary
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.memory import process_tree_memory
from lmkit.measure.statistics import median
from lmkit.measure.tables import Column, Rows
from lmkit.measure.timing import Timing, Work, time_variants
from lmkit.recipe.tables import PositiveFloat, PositiveInt, Table
from lmkit.registry import BENCHES

if TYPE_CHECKING:
    from lmkit.bench.tokenizer_jobs import Job

OURS = "lmkit"
VARIANTS = {"train": (OURS, "tokenizers", "rustbpe"), "encode": (OURS, "tokenizers", "tiktoken")}
SECONDS_BETWEEN_LOOKS = 0.02
PROMPT = (
    "The quick brown fox didn't jump over 3 lazy dogs; it walked around them, whistling a tune from 1997.\n"
    * 2
)


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


@dataclass(frozen=True)
class Case:
    """One job for several variants.

    Attributes:
        name: what the table calls the text.
        vocab_size: of the tokenizer that is trained or that encodes.
    """

    task: str
    text: Path
    name: str
    workers: int
    vocab_size: int


@BENCHES.register(
    "tokenizer",
    order=7,
    help="Tokenizer training and encoding, against installed rivals.",
    recipes=("bench_tokenizer", "bench_tokenizer"),
    stem="",
    row_keys=("task", "text", "vocab_size", "workers"),
)
def tokenizer(context: Context) -> Rows:
    """Return one row per case and variant, and what a short prompt costs.

    Raises:
        UsageError: a text is missing, or two have one name.
        LmkitError: a variant failed.
    """
    from lmkit.data.synth import write_stories

    options = context.options
    texts = {path.stem: path for path in options.texts}
    if len(texts) < len(options.texts):
        names = [path.stem for path in options.texts]
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(
            "bench.same_names",
            f"bench.tokenizer.texts: two are called {twice}, and rows are named by the text",
            hint="rename one, or link to it under another name",
        )
    for text in texts.values():
        if not text.is_file():
            raise UsageError(
                "bench.missing_text", f"{text}: no such file", hint="make one with: lmkit data synth"
            )
    with tempfile.TemporaryDirectory(prefix="lmkit-bench-") as folder:
        if not texts:
            texts = {"stories": Path(folder) / "stories.txt"}
            seed = context.recipe.run.seed
            write_stories(texts["stories"], size_mb=options.synth_mb, seed=seed, progress=context.report)
        cases = [
            Case(task, text, name, workers, vocab_size)
            for name, text in texts.items()
            for task in options.tasks
            for vocab_size in options.vocab_sizes
            for workers in options.workers
        ]
        rows: Rows = []
        for case in context.each("tokenizer", cases):
            rows += measure(case, options.rounds, Path(folder))
            context.journal.replace(rows)
        return rows + prompt_rows(cases)


def measure(case: Case, rounds: int, folder: Path) -> Rows:
    """Return one row per installed variant of a case.

    Raises:
        LmkitError: a variant failed.
    """
    jobs = {name: _job(case, name, folder) for name in VARIANTS[case.task] if is_installed(name)}
    peaks: dict[str, int] = {}
    ids: dict[str, str] = {}
    for name, job in jobs.items():
        result, peaks[name] = _run_watched(job)
        ids[name] = result["ids"]
    wrong = _minorities(ids)
    cpu: dict[str, list[float]] = {name: [] for name in jobs}

    def run(name: str) -> dict[str, Any]:
        result = _result(jobs[name], _start(jobs[name]))
        cpu[name].append(result["cpu_seconds"])
        return result

    works = {name: partial(run, name) for name in jobs if name not in wrong}
    timings: dict[str, Timing] = {}
    if works:
        timings = time_variants(works, repeats=rounds, warmup=0, clock=JobClock())
    num_bytes = case.text.stat().st_size
    rows: Rows = []
    for name in jobs:
        facts = {"task": case.task, "text": case.name, "bytes": num_bytes, "vocab_size": case.vocab_size}
        facts |= {"workers": case.workers, "variant": name}
        if name in wrong:
            rows.append(facts | wrong_result(wrong[name]))
            continue
        measured = {"cpu_s": median(cpu[name]), "peak_pss_mb": peaks[name] / 1e6, "samples_cpu_s": cpu[name]}
        measured |= {"status": "ok"}
        rows.append(facts | _speed_fields(timings[name], timings.get(OURS), num_bytes) | measured)
    return rows


def _minorities(ids: Mapping[str, str]) -> dict[str, str]:
    """Return variant -> what is wrong with its ids: most have others. If no ids have a majority, all are wrong."""
    votes = Counter(ids.values())
    most = max(votes, key=lambda one: votes[one])
    if 2 * votes[most] <= len(ids) and len(votes) > 1:
        most = ""
    return {
        name: "its ids differ from those of " + ", ".join(other for other in ids if ids[other] != own)
        for name, own in ids.items()
        if own != most
    }


class JobClock:
    """Reads the seconds of a job from its result."""

    name = "seconds of a process"

    def sample_ms(self, work: Work, calls: int, *, before: Sequence[Work]) -> float:
        """Return the milliseconds of `calls` jobs; `work` returns the result of one."""
        results: list[Any] = [work() for _ in range(calls)]
        return 1e3 * sum(result["seconds"] for result in results)


def _speed_fields(timing: Timing, ours: Timing | None, num_bytes: int) -> dict[str, Any]:
    times = timing.spread
    return {
        "median_s": times.median / 1e3,
        "p10_s": times.p10 / 1e3,
        "p90_s": times.p90 / 1e3,
        "minimum_s": times.minimum / 1e3,
        "mb_per_s": num_bytes / 1e3 / times.median,
        **({} if ours is None else ratio_fields(ours.versus(timing))),
        "samples_ms": list(timing.samples_ms),
    }


def _job(case: Case, name: str, folder: Path) -> Job:
    from lmkit.bench.tokenizer_jobs import Job
    from lmkit.tokenizer import train_tokenizer

    if case.task == "train":
        return Job("train", name, str(case.text), case.workers, case.vocab_size)
    tokenizer = folder / f"{case.name}-{case.vocab_size}.json"
    if not tokenizer.exists():
        train_tokenizer([case.text], vocab_size=case.vocab_size).save(tokenizer)
    output = folder / ("ids.npy" if name == OURS else "ids.bin")
    return Job("encode", name, str(case.text), case.workers, case.vocab_size, str(tokenizer), str(output))


def _run_watched(job: Job) -> tuple[dict[str, Any], int]:
    """Run the job once; also return the peak PSS of all its processes, in bytes (loading included)."""
    process = _start(job)
    peak = process_tree_memory(process.pid)
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            peak = max(peak, process_tree_memory(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return _result(job, process), peak
    finally:
        ended.set()
        watcher.join()


def _start(job: Job) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lmkit.bench.tokenizer_jobs", job.as_argument()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _result(job: Job, process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate()
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        raise LmkitError(
            "bench.variant_failed",
            f"{job.variant} failed to {job.task}: {last[0]}",
            hint="run it alone to see more",
        )
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def prompt_rows(cases: Sequence[Case]) -> Rows:
    """Return what it costs to encode a prompt of 200 characters, warm, with the first encoding case's vocabulary."""
    from lmkit.tokenizer import train_tokenizer

    case = next((case for case in cases if case.task == "encode"), None)
    if case is None:
        return []
    tokenizer = train_tokenizer([case.text], vocab_size=case.vocab_size)
    encoders: dict[str, Callable[[], object]] = {OURS: lambda: tokenizer.encode(PROMPT)}
    if is_installed("tiktoken"):
        from lmkit.bench.tokenizer_jobs import tiktoken_encoding

        encoding = tiktoken_encoding(tokenizer)
        encoders["tiktoken"] = lambda: encoding.encode(PROMPT, allowed_special="all")
    timings = time_variants(encoders, repeats=15, warmup=100, min_sample_ms=3.0)
    facts = {"task": "encode a prompt", "text": f"{len(PROMPT)} characters", "bytes": len(PROMPT)}
    facts |= {"vocab_size": case.vocab_size, "workers": 1}
    return [
        facts
        | {"variant": name, "microseconds": 1e3 * timing.median_ms}
        | _speed_fields(timing, timings[OURS], len(PROMPT))
        for name, timing in timings.items()
    ]


def is_installed(variant: str) -> bool:
    """Return whether the package of a variant is installed."""
    return variant == OURS or importlib.util.find_spec(variant) is not None


# Rows in words

COLUMNS = (
    Column("task", "task"),
    Column("text", "text"),
    Column("vocab_size", "vocab", ",d"),
    Column("workers", "workers"),
    Column("variant", "variant"),
    Column("median_s", "median s", ".2f", instead="status"),
    Column("mb_per_s", "MB/s", ".1f"),
    Column("speedup", "ours faster", ".2f"),
    Column("peak_pss_mb", "peak MB", ",.0f"),
)


def summarize(rows: Rows) -> Summary:
    """Say how fast each variant is, and what a prompt costs."""
    jobs = [row for row in rows if "microseconds" not in row]
    prompts = [row for row in rows if "microseconds" in row]
    measured = {(row["task"], row["variant"]) for row in jobs}
    tasks = {task for task, _ in measured if task in VARIANTS}
    missing = {name for task in tasks for name in VARIANTS[task] if (task, name) not in measured}
    costs = ", ".join(f"{row['variant']} {row['microseconds']:.1f} us" for row in prompts)
    return Summary(
        "Tokenizer",
        COLUMNS,
        jobs,
        notes=(
            "ours faster: median over rounds of theirs / ours, wall clock; peak MB: 10^6 bytes, PSS of all processes",
            *([f"A prompt of {prompts[0]['text']}, warm: {costs}"] if prompts else []),
            *(f"{name} is not installed." for name in sorted(missing)),
        ),
        wide=(
            Column("p10_s", "p10 s", ".2f"),
            Column("p90_s", "p90 s", ".2f"),
            Column("cpu_s", "CPU s", ".2f"),
        ),
    )
