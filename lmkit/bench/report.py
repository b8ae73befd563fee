"""`lmkit report`: find the rows of benches and profiles on disk and summarize them in four documents."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lmkit.bench.harness import bench_module, grouped
from lmkit.bench.summary import Summary, bullets, document, report_body, summarized
from lmkit.errors import LmkitError, UsageError, reason
from lmkit.measure.plots import decorate, grouped_bars, heat_map, timeline
from lmkit.measure.tables import Column, Rows
from lmkit.recipe.run_folder import ENVIRONMENT
from lmkit.registry import BENCHES
from lmkit.storage import write_atomic
from lmkit.storage.inputs import read_input
from lmkit.storage.outputs import refuse_existing

Made = TypeVar("Made")
Summarize = Callable[[Rows], Summary]
ARTIFACTS, PARTS = Path("artifacts"), ("benches", "profiles")
"""Where benches and profiles write by default."""
PROFILE_KEYS = {"profile": ("engine", "window", "ranges", "top_kernels"), "memory": ("phase", "peak_gib")}


# Rows on disk


@dataclass(frozen=True)
class Results:
    """The rows of one kind in one file.

    Attributes:
        kind: the bench, or "profile" or "memory".
        path: the file, below the folder that was searched.
        environment: content of the `environment.json` in its folder; {} without one.
        pictures: names of the PNG files in its folder.
    """

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
    """Return the objects of a file of JSON lines, or of one JSON object.

    Raises:
        UsageError: the file cannot be read.
        LmkitError: a line is not a JSON object.
    """
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            json.dumps(row, ensure_ascii=False, allow_nan=False).encode()  # refuses NaN and half characters
        except (ValueError, RecursionError) as error:
            raise LmkitError(
                "rows.damaged",
                f"{path}: line {number} is not a JSON object ({error})",
                hint="results are JSON lines; run the command that wrote the file again",
            ) from None
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
    """Return every file of rows below a folder, in the order of their paths. Files of other JSON lines are skipped.

    Args:
        parts: folders in `root` to look in; not all need exist.

    Raises:
        UsageError: there is no folder, or no result in it.
        LmkitError: a file is damaged.
    """
    folders = [root / part for part in parts if (root / part).is_dir()]
    searched = " and ".join(str(root / part) for part in parts)
    hint = "name a folder with results, or run a bench: lmkit bench attention bench_attention_cpu"
    if not folders:
        raise UsageError("report.no_folder", f"{searched}: not a folder", hint=hint)
    found = [results for folder in folders for path in _row_files(folder) for results in _read(path, root)]
    if not found:
        raise UsageError("report.no_results", f"{searched}: no results of a bench or a profile", hint=hint)
    return found


def _row_files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort(key=_natural)
        for name in sorted(names, key=_natural):
            if name.endswith(".jsonl") or name == "profile_summary.json":
                yield Path(parent) / name


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort numbers in names by value: step_512 before step_2048."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _read(path: Path, root: Path) -> Iterator[Results]:
    by_kind = grouped([row for row in read_rows(path) if kind_of(row) is not None], kind_of)
    facts = path.parent / ENVIRONMENT
    environment = read_rows(facts)[0] if by_kind and facts.is_file() else {}
    pictures = tuple(sorted(picture.name for picture in path.parent.glob("*.png")))
    for kind, rows in by_kind.items():
        yield Results(str(kind), path.relative_to(root), rows, environment, pictures)


# The documents


@dataclass(frozen=True)
class WriteUp:
    """One document of `lmkit report`.

    Attributes:
        sections: kind of rows -> the function of its module that summarizes them.
    """

    title: str
    introduction: str
    sections: Mapping[str, str]


WRITE_UPS = {
    "attention.md": WriteUp(
        "FlashAttention",
        "Naive attention stores a length x length matrix of scores: its memory and most of its time grow with the "
        "square of the length. FlashAttention computes the same result tile by tile with a running softmax: memory "
        "grows linearly. The limit is the rate of a large matrix product, measured in the same run.",
        {"attention": "summarize"},
    ),
    "data_parallelism.md": WriteUp(
        "Data parallelism",
        "Every rank computes the gradients of its rows of the batch; before the optimizer step they are averaged "
        "over the ranks. Strategies differ in how many calls they make and when: after the backward pass or during "
        "it. An all-reduce of n bytes over W ranks makes each rank send at least 2 (W-1)/W n bytes.",
        {"ddp": "summarize", "all_reduce": "summarize"},
    ),
    "optimizer_sharding.md": WriteUp(
        "Optimizer state sharding (ZeRO-1)",
        "AdamW keeps two fp32 numbers per parameter, the same on every rank. ZeRO-1 gives each of W ranks 1/W of "
        "them: gradients are reduce-scattered, each rank updates its shard, and the new weights are gathered. That "
        "moves the bytes of one all-reduce and divides the optimizer's time by W.",
        {"optimizer": "summarize", "ddp": "summarize_sharding"},
    ),
    "profiling.md": WriteUp(
        "Profiling",
        "First whole passes of models, timed from outside; then, inside a step, how long the CPU dispatches work to "
        "the GPU, how long it waits, and how long the GPU is busy; last, what fills the memory at its peak. If the "
        "GPU is not always busy and the CPU never waits, larger batches, compilation or CUDA graphs help more than "
        "faster kernels.",
        {"model": "summarize", "lm_matrix": "summarize", "profile": "summarize", "memory": "summarize"},
    ),
}


@dataclass(frozen=True)
class Reported:
    """The result of `lmkit report`.

    Attributes:
        written: paths of the documents; none with `--check`.
        without_results: documents that no row is about.
    """

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
    folder: Path | None,
    output: Path | None,
    *,
    check: bool = False,
    force: bool = False,
    profiles: Mapping[str, Summarize],
) -> Reported:
    """Write every document for which there are rows below a folder.

    Args:
        folder: by default artifacts/benches and artifacts/profiles, as far as they exist.
        output: by default `reports` in the folder, or in artifacts/benches.
        check: write nothing, and compare the files with what would be written.
        force: replace files that `lmkit report` did not write.
        profiles: how to summarize rows of kind "profile" and "memory".

    Raises:
        UsageError: no folder, or no result in it; `output` holds such a file ("output.exists").
        LmkitError: a result is damaged, or (`check`) a document is stale.
    """
    root, parts = (ARTIFACTS, PARTS) if folder is None else (folder, ("",))
    found = find_results(root, parts)
    searched = " and ".join(str(root / part) for part in parts)
    target = output or root / parts[0] / "reports"
    for name, write_up in () if check else WRITE_UPS.items():
        path = target / name
        is_ours = path.is_file() and read_input(path).startswith(f"# {write_up.title}\n".encode())
        refuse_existing(path, force=force or is_ours)
        refuse_existing(target / _picture_of(path.stem), force=force or is_ours)
    written, missing, stale = [], [], []
    for name, write_up in WRITE_UPS.items():
        chosen = [results for results in found if results.kind in write_up.sections]
        stem = name.removesuffix(".md")
        text = _write_up(write_up, stem, chosen, profiles, root.resolve(), target.resolve())
        path = target / name
        if text is None:
            missing.append(name)
        elif not check:
            write_atomic(path, text)
            if picture := decorate(_picture_of(path.stem), PICTURES[path.stem]):
                write_atomic(target / _picture_of(path.stem), picture)
            written.append(str(path))
        elif not path.is_file() or read_input(path) != text.encode():
            stale.append(str(path))
    if stale:
        words = [] if folder is None else [str(folder)]
        words += [] if output is None else ["--output", str(output)]
        raise LmkitError(
            "report.stale",
            f"{', '.join(stale)}: does not say what the rows below {searched} say",
            hint=f"write it again: {shlex.join(['lmkit', 'report', *words])}",
        )
    sources = tuple(results.path.as_posix() for results in found)
    return Reported(searched, sources, tuple(written), tuple(missing))


def _write_up(
    write_up: WriteUp,
    stem: str,
    found: Sequence[Results],
    profiles: Mapping[str, Summarize],
    root: Path,
    output: Path,
) -> str | None:
    """Return the document; None if there are no rows for it."""
    short: list[str] = []
    parts: list[str] = []
    for kind, function in write_up.sections.items():
        for results in found:
            if results.kind != kind:
                continue
            summarize = profiles[kind] if kind in profiles else getattr(bench_module(kind), function)
            summary = _or_damaged(root / results.path, partial(summarized, summarize, results.rows))
            if not summary.rows:
                continue
            alone = results.path.stem.endswith(("_results", "_summary", "_peaks"))
            title = (results.path.parent if alone else results.path.with_suffix("")).as_posix()
            source = Path(os.path.relpath(root / results.path, output)).as_posix()
            if said := [*summary.wrong, *summary.findings]:
                short.append(f"**{title}**: {said[0]}")
            parts += [
                f"## {summary.title}: {title}",
                f"Rows with raw samples: [{results.path.as_posix()}]({source}).",
            ]
            facts = root / results.path.parent / ENVIRONMENT
            parts += _or_damaged(facts, partial(report_body, summary, results.environment, level=3))
            parts += [
                f"![{name[:-4].replace('_', ' ')}]({Path(source).parent.as_posix()}/{name})"
                for name in results.pictures
            ]
    if not parts:
        return None
    explained = ["## How it works", f"![{write_up.title}]({_picture_of(stem)})", page(stem)]
    figures = ["## Figures", *parts]
    return document(f"# {write_up.title}", write_up.introduction, bullets(short), *explained, *figures)


def _picture_of(stem: str) -> str:
    return f"{stem}_explained.png"


def _or_damaged(where: object, read: Callable[[], Made]) -> Made:
    """Return the result of `read`, which works on rows from files.

    Raises:
        LmkitError: a row lacks a key or has a value of another type.
    """
    try:
        return read()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as error:
        raise LmkitError(
            "rows.damaged",
            f"{where}: not what `lmkit bench` writes ({type(error).__name__}: {error})",
            hint="run the command that wrote the file again",
        ) from None


# How the algorithms of the write-ups work

TILES = 8
RANKS = (1, 2, 4, 8)


def page(name: str) -> str:
    """Return the page of a write-up (`attention`), Markdown below a heading of the second level."""
    return (Path(__file__).parent / "explained" / f"{name}.md").read_text("utf-8")


def tiles() -> bytes:
    """Draw the tiles of causal attention, with the order in which they are visited."""
    order = [[float(key + 1) if key <= query else None for key in range(TILES)] for query in range(TILES)]
    return heat_map(
        [str(key) for key in range(TILES)],
        [str(query) for query in range(TILES)],
        order,
        title="Causal FlashAttention: visits of tiles; grey tiles are skipped, those on the diagonal masked",
        x_label="tile of keys",
        y_label="tile of queries",
        value_label="visit of its row",
        spec=".0f",
    )


def overlap() -> bytes:
    """Draw a step of `naive` and of `bucketed`: three layers, whose backward passes take two units each."""
    return timeline(
        {
            "naive: compute": [(0, 3), (3, 9), (12.6, 13.6)],
            "naive: all-reduces": [(9 + 0.4 * call, 9.35 + 0.4 * call) for call in range(9)],
            "bucketed: compute": [(0, 3), (3, 9), (9.8, 10.8)],
            "bucketed: all-reduces": [(5, 5.8), (7, 7.8), (9, 9.8)],
        },
        title="A step: forward 0 to 3, backward 3 to 9, gradients averaged, optimizer",
        x_label="time (any unit)",
    )


def bytes_per_parameter() -> bytes:
    """Draw what a rank holds of each fp32 parameter under ZeRO-1."""
    return grouped_bars(
        [
            {"ranks": f"{ranks} rank{'s' if ranks > 1 else ''}", "part": part, "bytes": size}
            for ranks in RANKS
            for part, size in (("weight", 4.0), ("gradient", 4.0), ("AdamW's moments", 8.0 / ranks))
        ],
        Column("bytes", "bytes"),
        group="ranks",
        series="part",
        title="ZeRO-1: bytes per fp32 parameter on each rank",
        x_label="",
    )


def queue() -> bytes:
    """Draw a GPU that is the limit, and one that waits for its CPU."""
    return timeline(
        {
            "large kernels: CPU": [(0.6 * call, 0.6 * call + 0.5) for call in range(6)],
            "large kernels: GPU": [(0.5 + 1.5 * call, 1.95 + 1.5 * call) for call in range(6)],
            "small kernels: CPU": [(1.1 * call, 1.1 * call + 1.0) for call in range(8)],
            "small kernels: GPU": [(1.0 + 1.1 * call, 1.3 + 1.1 * call) for call in range(8)],
        },
        title="The GPU is the limit (above); the CPU is the limit (below)",
        x_label="time (any unit)",
    )


PICTURES: dict[str, Callable[[], bytes]] = {
    "attention": tiles,
    "data_parallelism": overlap,
    "optimizer_sharding": bytes_per_parameter,
    "profiling": queue,
}
"""Write-up -> its picture, `<write-up>_explained.png` beside it."""
