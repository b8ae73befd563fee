"""`lmkit profile memory --contexts ... --precisions ...`: a table of the peaks of forward passes and whole steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from lmkit.bench.failures import failure_is_a_row
from lmkit.bench.summary import Summary, report_text, terminal_text
from lmkit.measure.decoration import decorate
from lmkit.measure.environment import describe_environment
from lmkit.measure.memory import release_memory
from lmkit.measure.plots import line_panels
from lmkit.measure.tables import Column, Rows
from lmkit.profile.memory import run_profile
from lmkit.profile.steps import Mode, Workload
from lmkit.profile.write_up import growth, most_computed, peak_row
from lmkit.recipe.run_folder import ENVIRONMENT
from lmkit.recipe.schema import Recipe

PICTURE = "memory_contexts.png"
MODES: tuple[Mode, ...] = ("forward", "step")
SNAPSHOT = "memory_snapshot.pickle"  # of every cell they would be hundreds of megabytes
COLUMNS = (
    Column("attention", "attention"),
    Column("context_length", "context", "d"),
    Column("dtype", "precision"),
    Column("forward_gib", "forward GiB", ".3f", instead="status"),
    Column("forward_computed_gib", "computed", ".3f"),
    Column("step_gib", "step GiB", ".3f"),
    Column("step_computed_gib", "computed", ".3f"),
)


def table(
    recipes: Sequence[Recipe], *, steps: int, write: Callable[[Mapping[str, bytes | str]], None]
) -> tuple[Rows, str]:
    """Profile recipes; return a row of each, and the table for a terminal. What does not fit, or fails, is a row.

    Args:
        write: takes files, most of them in folders: after each recipe its own and those of the table so far. So a run
            that is cut short leaves what it measured.
    """
    rows: Rows = []
    of_steps: list[Rows] = []
    text = ""
    for recipe in recipes:
        files: dict[str, bytes | str] = {}
        works = {mode: Workload(recipe, mode, steps, warmup=0) for mode in MODES}
        model, train = works["step"].model, works["step"].train
        row: dict[str, Any] = {
            "attention": model.attention,
            "context_length": model.context_length,
            "dtype": train.precision,
            "batch_size": train.batch_size,
            "status": "ok",
        }
        for mode, work in works.items():
            with failure_is_a_row(row, work.ranks.device):
                result = run_profile(work)
                row[f"{mode}_gib"] = peak_row(result.rows)["peak_gib"]
                row[f"{mode}_computed_gib"] = most_computed(result.rows)
                of_steps += [result.rows] if mode == "step" else []
                folder = f"{model.attention}_{mode}_{model.context_length}_{train.precision}"
                files |= {f"{folder}/{name}": text for name, text in result.files.items() if name != SNAPSHOT}
            release_memory(work.ranks.device)
        rows.append(row)
        text, of_table = _summarized(rows, growth(of_steps))
        write(files | of_table)
    return rows, text


def _summarized(rows: Rows, findings: Sequence[str]) -> tuple[str, dict[str, bytes | str]]:
    """Return the table for a terminal, and its files."""
    summary = Summary(
        "Memory by context and precision",
        COLUMNS,
        rows,
        about=f"Batch {rows[0]['batch_size']}",
        findings=findings,
        notes=(
            "GiB = 2^30 bytes, at the peak; computed: the largest sum of activations and temporary tensors at the "
            "peak of a phase; every cell has a folder with its phases and source lines",
        ),
    )
    environment = describe_environment()
    drawn = decorate(PICTURE, lambda: picture(rows))
    pictures = {PICTURE: drawn} if drawn else {}
    return terminal_text(summary), {
        **pictures,
        "memory_contexts.json": json.dumps(rows, indent=1) + "\n",
        "memory_contexts_report.md": report_text(summary, environment, [*pictures]),
        ENVIRONMENT: json.dumps(environment, indent=1) + "\n",
    }


def picture(rows: Rows) -> bytes:
    """Draw the computed memory over the context on logarithmic axes, where a square is twice as steep as a line."""
    shown = [
        {**row, "mode": mode, "gib": row.get(f"{mode}_computed_gib")} for row, mode in product(rows, MODES)
    ]
    return line_panels(
        shown,
        "context_length",
        Column("gib", "memory (GiB = 2^30 bytes)"),
        panel="mode",
        group="attention",
        kind="dtype",
        title="What forward and step compute: activations and temporary tensors at the peak",
        x_label="context (tokens)",
        log_y=True,
    )
