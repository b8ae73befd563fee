"""`lmkit compare`: two result files of one bench, row by row: what became faster, slower, or stopped working."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmkit.bench.report import read_rows
from lmkit.bench.summary import WRONG
from lmkit.errors import LmkitError, UsageError
from lmkit.measure.statistics import compare_runs, median, verdict_in_words
from lmkit.measure.tables import Column, Rows, terminal_table

# Text and whole numbers that are results: they do not identify a measurement.
RESULT_KEYS = {
    *("status", "detail", "repeats", "rounds", "epochs", "calls_per_sample", "calls_per_step", "graph"),
    *("clock", "mfu_basis", "verdict", "versus_fp32_verdict", "versus_sdpa_verdict", "best_sdpa"),
    "implementation",
}
# Rows of other projects' code, which is equal in both runs: if these change, the machine did.
REFERENCE_KEYS = ("kernel", "variant", "strategy")
REFERENCE = re.compile(r"(sdpa|torch|tiktoken|tokenizers|rustbpe)\b|torch_ddp")
SMALLEST_DIFFERENCE = 0.03
Samples = list[float]
Key = tuple[tuple[str, Any], ...]
COLUMNS = (
    Column("what", "what"),
    Column("before_ms", "before ms", ".4g"),
    Column("after_ms", "after ms", ".4g"),
    Column("speedup", "speedup", ".3f"),
    Column("low", "98% from", ".3f"),
    Column("high", "to", ".3f"),
    Column("verdict", "verdict"),
)


@dataclass(frozen=True)
class Compared:
    """One row per measurement that either file has.

    Attributes:
        compared: how many have an interval: measured in both, often and steadily enough.
        unclear: how many of these have too wide an interval.
        worse: how many became slower or wrong, now fail, or are missing.
    """

    rows: Rows
    compared: int
    unclear: int
    worse: int
    threshold: float

    def __str__(self) -> str:
        if self.worse:
            verdict = f"{self.worse} of {len(self.rows)} became worse"
        elif self.compared:
            unclear = f", {self.unclear} of them unclear" if self.unclear else ""
            verdict = f"nothing became worse ({self.compared} of {len(self.rows)} compared{unclear})"
        else:
            verdict = "nothing was compared: no measurement has enough steady samples in both"
        told = [dict(row) for row in self.rows]
        for row in told:
            if "low" in row:
                row["verdict"] = verdict_in_words(row["verdict"], row["low"], row["high"], self.threshold)
        return terminal_table(told, COLUMNS) + verdict

    @property
    def is_fine(self) -> bool:
        """Whether at least one row was compared, and none became worse."""
        return self.compared > 0 and self.worse == 0


def compare_files(before: Path, after: Path, *, threshold: float) -> Compared:
    """Compare the rows of two result files or folders; smaller relative differences than `threshold` do not count."""
    if not math.isfinite(threshold):
        message = f"--threshold: {threshold} is not a share"
        raise UsageError("compare.threshold", message, hint="0.05 lets 5% pass")
    old, new = stored_rows(before), stored_rows(after)
    try:
        compared = compare_rows(old, new, smallest_difference=threshold)
    except (TypeError, ValueError, ArithmeticError) as error:
        message = f"{before} or {after}: samples are not positive numbers ({error})"
        raise LmkitError("rows.damaged", message, hint="run the bench that wrote the file again") from None
    if all(row["verdict"] in ("new", "missing") for row in compared.rows):
        message = f"{after}: no measurement of {before} is in it"
        hint = "compare two results of the same bench and recipe"
        raise UsageError("compare.nothing_in_common", message, hint=hint)
    return compared


def stored_rows(path: Path) -> Rows:
    """Return the rows of a result file, or of the only one in a folder."""
    found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if len(found) != 1:
        message = f"{path}: needs one .jsonl file, has {', '.join(file.name for file in found) or 'none'}"
        raise UsageError("compare.which_file", message, hint="name the file itself")
    if rows := read_rows(found[0]):
        return rows
    hint = "results of a bench are JSON lines"
    raise UsageError("compare.no_rows", f"{found[0]}: holds no results", hint=hint)


def compare_rows(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    *,
    smallest_difference: float = SMALLEST_DIFFERENCE,
) -> Compared:
    """Match rows by all fields that are not results, and compare their raw samples by `compare_runs`."""
    old, new = ({identity(row): row for row in rows} for rows in (before, after))
    keys = list(dict.fromkeys([*old, *new]))
    values = Counter(name for name, _ in {pair for key in keys for pair in key})
    rows: Rows = []
    measured: list[tuple[dict[str, Any], bool, tuple[Samples, Samples]]] = []
    for key in keys:
        # Name only the fields in which rows differ.
        what = " ".join(str(value) for name, value in key if values[name] > 1) or "all"
        rows.append({"what": what})
        was_wrong, is_wrong = (run.get(key, {}).get("status") in WRONG for run in (old, new))
        if is_wrong:
            rows[-1]["verdict"] = "wrong in both" if was_wrong else new[key]["status"]
        elif key not in old or key not in new:
            rows[-1]["verdict"] = "missing" if key in old else "new"
        elif all(samples := (samples_ms(old[key]), samples_ms(new[key]))):
            measured.append((rows[-1], _is_reference(new[key]), samples))
        else:
            now = "works now" if samples[1] else "not measured"
            rows[-1]["verdict"] = "stopped working" if samples[0] else now
    _, references, pairs = zip(*measured, strict=True) if measured else ((), (), ())
    found = compare_runs(pairs, references, smallest_difference=smallest_difference)
    for (row, _, samples), ratio in zip(measured, found, strict=True):
        row |= {"before_ms": median(samples[0]), "after_ms": median(samples[1]), **asdict(ratio)}
    verdicts = [row["verdict"] for row in rows]
    unclear = verdicts.count("unclear")
    return Compared(
        rows,
        compared=unclear + sum(verdict in ("faster", "slower", "no difference") for verdict in verdicts),
        unclear=unclear,
        worse=sum(verdict in ("slower", "stopped working", "missing", *WRONG) for verdict in verdicts),
        threshold=smallest_difference,
    )


def identity(row: Mapping[str, Any]) -> Key:
    """Return the sorted (key, value) pairs that identify a measurement: text, whole numbers and switches."""
    told = {key for key, value in row.items() if isinstance(value, (str, int)) and not key.endswith("_bytes")}
    return tuple(sorted((key, row[key]) for key in told - RESULT_KEYS))


def _is_reference(row: Mapping[str, Any]) -> bool:
    names = [row[key] for key in REFERENCE_KEYS if isinstance(row.get(key), str)]
    return bool(names) and all(REFERENCE.match(name) for name in names)


def samples_ms(row: Mapping[str, Any]) -> Samples:
    """Return the samples of a row in milliseconds; [] if it has none."""
    return row.get("samples_ms") or [sample * 1e3 for sample in row.get("samples_s") or ()]
