"""`lmkit report`: find the rows of benches and profiles on disk and summarize them in four documents."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lmkit.bench.harness import bench_module
from lmkit.bench.summary import Summary, bullets, document, report_body, summary_of
from lmkit.errors import LmkitError, UsageError, reason
from lmkit.measure.tables import Rows, grouped
from lmkit.recipe.run_folder import ENVIRONMENT
from lmkit.registry import BENCHES
from lmkit.storage.atomic import write_atomic
from lmkit.storage.inputs import read_input
from lmkit.storage.outputs import refuse_existing

Made = TypeVar("Made")
Summarize = Callable[[Rows], Summary]
ARTIFACTS, PARTS = Path("artifacts"), ("benches", "profiles")
"""Where benches and profiles write by default."""
PROFILE_KEYS = {"profile": ("engine", "window", "ranges", "top_kernels"), "memory": ("phase", "peak_gib")}


@dataclass(frozen=True)
class Results:
    """The rows of one kind (a bench, "profile" or "memory") in one file below the folder that was searched, and the
    `environment.json` ({} without one) and the pictures beside it."""

    kind: str
    path: Path
    rows: Rows
    environment: dict[str, Any]
    pictures: tuple[str, ...] = ()


def kind_of(row: Mapping[str, Any]) -> str | None:
    """Return the bench or the kind of profile that wrote a row; None if it is of neither."""
    keys = {name: BENCHES.facts(name).row_keys for name in BENCHES.names} | PROFILE_KEYS
    fitting = [name for name, needed in keys.items() if needed and row.keys() >= set(needed)]
    return max(fitting, key=lambda name: len(keys[name]), default=None)


def read_rows(path: Path) -> Rows:
    """Return the objects of a file of JSON lines, or of one JSON object."""
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            json.dumps(row, ensure_ascii=False, allow_nan=False).encode()  # refuses NaN and half characters
        except (ValueError, RecursionError) as error:
            message = f"{path}: line {number} is not a JSON object ({error})"
            hint = "results are JSON lines; run the command that wrote the file again"
            raise LmkitError("rows.damaged", message, hint=hint) from None
        if "contender" in row:  # records of before 0.2.0
            row["variant"] = row.pop("contender")
        rows.append(row)
    return rows


def _lines(path: Path) -> list[str]:
    try:
        text = read_input(path).decode()
    except OSError as error:
        raise UsageError("rows.unreadable", f"{path}: {reason(error)}", hint="check the path") from None
    except UnicodeDecodeError:
        raise LmkitError("rows.damaged", f"{path}: not UTF-8 text", hint="results are JSON lines") from None
    return [" ".join(text.splitlines())] if path.suffix == ".json" else text.splitlines()


def find_results(root: Path, parts: Sequence[str] = ("",)) -> list[Results]:
    """Return every file of rows below those `parts` of a folder that exist, in the order of their paths.

    Files of other JSON lines are skipped.
    """
    folders = [root / part for part in parts if (root / part).is_dir()]
    searched = " and ".join(str(root / part) for part in parts)
    hint = "name a folder with results, or run a bench: lmkit bench attention bench_attention_cpu"
    if not folders:
        raise UsageError("report.no_folder", f"{searched}: not a folder", hint=hint)
    found = []
    for folder in folders:
        files = [*folder.rglob("*.jsonl"), *folder.rglob("profile_summary.json")]
        for path in sorted(file for file in files if file.is_file()):
            by_kind = grouped([row for row in read_rows(path) if kind_of(row) is not None], kind_of)
            facts = path.parent / ENVIRONMENT
            environment = read_rows(facts)[0] if by_kind and facts.is_file() else {}
            pictures = tuple(sorted(picture.name for picture in path.parent.glob("*.png")))
            for kind, rows in by_kind.items():
                found.append(Results(str(kind), path.relative_to(root), rows, environment, pictures))
    if not found:
        raise UsageError("report.no_results", f"{searched}: no results of a bench or a profile", hint=hint)
    return found


WRITE_UPS = {
    "attention": ("attention",),
    "data_parallelism": ("ddp", "all_reduce"),
    "optimizer_sharding": ("optimizer",),
    "profiling": ("model", "lm_matrix", "profile", "memory"),
}
"""Name of a document, whose text is in `explained` -> the kinds of rows that it summarizes."""


@dataclass(frozen=True)
class Reported:
    """The result of `lmkit report`; no row is about the documents `without_results`."""

    folder: str
    sources: tuple[str, ...]
    written: tuple[str, ...]
    without_results: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"read {len(self.sources)} results below {self.folder}"]
        lines += [f"wrote {name}" for name in self.written]
        lines += [f"no rows for {name}" for name in self.without_results]
        return "\n".join(lines)


def write_reports(
    folder: Path | None, output: Path | None, *, force: bool = False, profiles: Mapping[str, Summarize]
) -> Reported:
    """Write every document for which there are rows below a folder.

    Args:
        folder: by default artifacts/benches and artifacts/profiles, as far as they exist.
        output: by default `reports` in the folder, or in artifacts/benches.
        profiles: how to summarize rows of kind "profile" and "memory".
    """
    root, parts = (ARTIFACTS, PARTS) if folder is None else (folder, ("",))
    found = find_results(root, parts)
    target = output or root / parts[0] / "reports"
    paths = {name: target / f"{name}.md" for name in WRITE_UPS}
    texts = Path(__file__).parent / "explained"
    explained = {name: (texts / f"{name}.md").read_text("utf-8") for name in paths}
    for name, path in paths.items():
        title = explained[name].partition("\n")[0]
        is_ours = path.is_file() and read_input(path).startswith(f"{title}\n".encode())
        refuse_existing(path, force=force or is_ours)
    written, missing = [], []
    for name, kinds in WRITE_UPS.items():
        chosen = [results for kind in kinds for results in found if results.kind == kind]
        if not chosen:
            missing.append(paths[name].name)
            continue
        short: list[str] = []
        figures: list[str] = []
        for results in chosen:
            figures += _section(results, profiles, root.resolve(), target.resolve(), short)
        introduction, heading, how = explained[name].partition("## How it works\n")
        text = document(introduction, bullets(short), heading, how, "## Figures", *figures)
        write_atomic(paths[name], text)
        written.append(str(paths[name]))
    searched = " and ".join(str(root / part) for part in parts)
    sources = tuple(results.path.as_posix() for results in found)
    return Reported(searched, sources, tuple(written), tuple(missing))


def _section(
    results: Results, profiles: Mapping[str, Summarize], root: Path, output: Path, short: list[str]
) -> list[str]:
    """Return the paragraphs on one file of rows; add its first sentence to `short`."""
    kind, path = results.kind, results.path
    summarize = profiles[kind] if kind in profiles else partial(summary_of, bench_module(kind))
    summary = _or_damaged(root / path, partial(summarize, results.rows))
    alone = path.stem.endswith(("_results", "_summary", "_peaks"))
    title = (path.parent if alone else path.with_suffix("")).as_posix()
    source = Path(os.path.relpath(root / path, output))
    if said := [*summary.wrong, *summary.findings]:
        short.append(f"**{title}**: {said[0]}")
    facts = root / path.parent / ENVIRONMENT
    return [
        f"## {summary.title}: {title}",
        f"Rows with raw samples: [{path.as_posix()}]({source.as_posix()}).",
        *_or_damaged(facts, partial(report_body, summary, results.environment, level=3)),
        *(
            f"![{name[:-4].replace('_', ' ')}]({(source.parent / name).as_posix()})"
            for name in results.pictures
        ),
    ]


def _or_damaged(where: object, read: Callable[[], Made]) -> Made:
    """Return the result of `read`, or say that a row lacks a key or has a value of another type."""
    try:
        return read()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as error:
        message = f"{where}: not what `lmkit bench` writes ({type(error).__name__}: {error})"
        raise LmkitError("rows.damaged", message, hint="run the command that wrote the file again") from None
