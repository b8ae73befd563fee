"""`lmkit bench tokenizer`: training and encoding beside Hugging Face tokenizers, rustbpe and tiktoken.

Every sample is a process of its own (`tokenizer_contenders`), the contenders of a case take turns, and round i of one
is compared with round i of another. Before anything is timed, each contender runs once: its memory is watched, and
the ids of all encoders must be the same. (Trainers break ties differently, so their merges are not compared here; the
tests compare ours with the textbook.)
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.bench.report import BenchResult
from lmkit.bench.tokenizer_contenders import Job, as_argument
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.memory import process_tree_memory
from lmkit.measure.statistics import median, paired_ratio, spread
from lmkit.measure.tables import Column, markdown_table, row_files
from lmkit.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer

OURS = "lmkit"
_PACKAGES = {"tokenizers": "tokenizers", "rustbpe": "rustbpe", "tiktoken": "tiktoken"}
_SECONDS_BETWEEN_LOOKS = 0.02
_PROMPT = (
    "The quick brown fox didn't jump over 3 lazy dogs; it walked around them, whistling a tune from 1997.\n"
    * 2
)

Report = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One job for several contenders.

    Attributes:
        task: "train" or "encode".
        text: the file; it should hold `<|endoftext|>` and end with it and a newline.
        name: what the table calls the text.
        contenders: names from `CONTENDERS`; those that are not installed are left out and noted.
        vocab_size: of the tokenizer that is trained, or encoded with.
    """

    task: str
    text: Path
    name: str
    workers: int
    vocab_size: int
    contenders: tuple[str, ...]


COLUMNS = (
    Column("task", "task"),
    Column("text", "text"),
    Column("vocab_size", "vocab", ",d"),
    Column("workers", "workers"),
    Column("contender", "contender"),
    Column("median_s", "median s", ".2f"),
    Column("p10_s", "p10 s", ".2f"),
    Column("p90_s", "p90 s", ".2f"),
    Column("mb_per_s", "MB/s", ".1f"),
    Column("speedup", "ours faster", ".2f"),
    Column("cpu_s", "CPU s", ".2f"),
    Column("peak_pss_mb", "peak MB", ",.0f"),
)
_ONLY_IN_FILES = ("p10_s", "p90_s", "cpu_s")  # a terminal has no room for them


def bench_tokenizer(cases: Sequence[Case], *, rounds: int = 5, report: Report | None = None) -> BenchResult:
    """Measure all cases; see `measure`."""
    jobs = measure(cases, rounds=rounds, report=report)
    prompts = short_text_rows(cases)
    notes = [
        "ours faster: median over rounds of theirs / ours, wall clock; peak MB: 10^6 bytes, PSS of all processes.",
        *(
            f"A prompt of {row['text']}, warm, {row['contender']}: {row['microseconds']:.1f} us."
            for row in prompts
        ),
        *(f"{name} is not installed." for name in _missing(cases)),
    ]
    report_text = "# Tokenizer\n\n" + markdown_table(jobs, COLUMNS) + "\n"
    return BenchResult(
        name="tokenizer",
        rows=jobs + prompts,
        columns=tuple(column for column in COLUMNS if column.key not in _ONLY_IN_FILES),
        files=row_files("results", jobs + prompts)
        | {"report.md": report_text + "".join(f"- {note}\n" for note in notes)},
        environment=describe_environment(),
        notes=tuple(notes),
        shown=jobs,
    )


def measure(cases: Sequence[Case], *, rounds: int = 5, report: Report | None = None) -> list[dict[str, Any]]:
    """Return one row per case and contender, with all samples.

    Raises:
        UsageError: a text is missing.
        LmkitError: a contender failed, or two encoders disagree.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="lmkit-bench-") as folder:
        for case in cases:
            if not case.text.is_file():
                raise UsageError(f"{case.text}: no such file", hint="make one with: lmkit data synth")
            rows += _measure_case(case, rounds, Path(folder), report or (lambda line: None))
    return rows


def _measure_case(case: Case, rounds: int, folder: Path, report: Report) -> list[dict[str, Any]]:
    jobs = {name: _job(case, name, folder) for name in case.contenders if _is_installed(name)}
    peaks, ids = {}, {}
    for name, job in jobs.items():
        sample, peaks[name] = _run_watched(job)
        ids[name] = sample["ids"]
    if len(set(ids.values())) > 1:
        raise LmkitError(f"{case.name}: the encoders disagree: {ids}", hint="nothing was timed")
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    for number in range(rounds):
        order = list(jobs)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            samples[name].append(_run(jobs[name]))
            report(f"{case.task} {case.name} {case.vocab_size} {name}: {samples[name][-1]['seconds']:.2f} s")
    return [_row(case, name, samples, peaks[name]) for name in jobs]


def _row(case: Case, name: str, samples: dict[str, list[dict[str, Any]]], peak: int) -> dict[str, Any]:
    seconds = [sample["seconds"] for sample in samples[name]]
    ours = [sample["seconds"] for sample in samples[OURS]]
    wide = spread(seconds)
    ratio = paired_ratio(ours, seconds)
    num_bytes = case.text.stat().st_size
    return {
        "task": case.task,
        "text": case.name,
        "bytes": num_bytes,
        "vocab_size": case.vocab_size,
        "workers": case.workers,
        "contender": name,
        "median_s": wide.median,
        "p10_s": wide.p10,
        "p90_s": wide.p90,
        "minimum_s": wide.minimum,
        "mb_per_s": num_bytes / 1e6 / wide.median,
        "speedup": ratio.speedup,
        "speedup_low": ratio.low,
        "speedup_high": ratio.high,
        "speedup_of_medians": wide.median / median(ours),
        "cpu_s": median([sample["cpu_seconds"] for sample in samples[name]]),
        "peak_pss_mb": peak / 1e6,
        "samples_s": seconds,
        "samples_cpu_s": [sample["cpu_seconds"] for sample in samples[name]],
    }


def _job(case: Case, name: str, folder: Path) -> Job:
    if case.task == "train":
        return Job("train", name, str(case.text), case.workers, case.vocab_size)
    tokenizer = folder / f"{case.name}-{case.vocab_size}.json"
    if not tokenizer.exists():
        train_tokenizer([case.text], vocab_size=case.vocab_size).save(tokenizer)
    output = folder / ("ids.npy" if name.startswith(OURS) else "ids.bin")
    return Job("encode", name, str(case.text), case.workers, case.vocab_size, str(tokenizer), str(output))


def _run(job: Job) -> dict[str, Any]:
    return _result(job, _start(job))


def _run_watched(job: Job) -> tuple[dict[str, Any], int]:
    """Run the job once; also return the peak PSS of all its processes, in bytes (loading included)."""
    process = _start(job)
    peak = process_tree_memory(process.pid).pss_bytes
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            try:
                peak = max(peak, process_tree_memory(process.pid).pss_bytes)
            except ProcessLookupError:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return _result(job, process), peak
    finally:
        ended.set()
        watcher.join()


def _start(job: Job) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lmkit.bench.tokenizer_contenders", as_argument(job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _result(job: Job, process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate()
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        raise LmkitError(f"{job.contender} failed to {job.task}: {last[0]}", hint="run it alone to see more")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def short_text_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What it costs to encode a prompt of 200 characters, warm, with the vocabulary of the first encoding case."""
    case = next((case for case in cases if case.task == "encode"), None)
    if case is None:
        return []
    tokenizer = train_tokenizer([case.text], vocab_size=case.vocab_size)
    encoders: dict[str, Callable[[], object]] = {OURS: lambda: tokenizer.encode(_PROMPT)}
    if _is_installed("tiktoken"):
        encoders["tiktoken"] = _tiktoken_prompt(tokenizer)
    seconds: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(15):
        for name, encode in encoders.items():
            seconds[name].append(timeit.timeit(encode, number=300) / 300)
    return [
        {
            "task": "encode a prompt",
            "text": f"{len(_PROMPT)} characters",
            "bytes": len(_PROMPT),
            "vocab_size": case.vocab_size,
            "workers": 1,
            "contender": name,
            "median_s": median(taken),
            "microseconds": 1e6 * median(taken),
            "speedup": paired_ratio(seconds[OURS], taken).speedup,
            "mb_per_s": len(_PROMPT) / 1e6 / median(taken),
            "samples_s": taken,
        }
        for name, taken in seconds.items()
    ]


def _tiktoken_prompt(tokenizer: Tokenizer) -> Callable[[], object]:
    import tiktoken

    from lmkit.tokenizer.pretokenize import PATTERN

    special = set(tokenizer.special_ids.values())
    ranks = {token: token_id for token_id, token in tokenizer.vocab.items() if token_id not in special}
    encoding = tiktoken.Encoding(
        "prompt", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=tokenizer.special_ids
    )
    return lambda: encoding.encode(_PROMPT, allowed_special={END_OF_TEXT})


def _is_installed(contender: str) -> bool:
    package = _PACKAGES.get(contender)
    return package is None or importlib.util.find_spec(package) is not None


def _missing(cases: Sequence[Case]) -> list[str]:
    names = {name for case in cases for name in case.contenders}
    return sorted(name for name in names if not _is_installed(name))
