"""`lmkit compare` and `lmkit report`: compare two results, and write reports of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lmkit.cli.options import Commands, ForceOption, PluginOption, option
from lmkit.errors import UsageError
from lmkit.recipe.run_folder import METRICS

app = Commands()


@app.add("lmkit compare before/ after/", "lmkit compare artifacts/runs/quickstart artifacts/runs/wider")
def compare(
    before: Annotated[
        Path, typer.Argument(help="A bench's results, folder or .jsonl file; a run, or a folder of runs.")
    ],
    after: Annotated[Path, typer.Argument(help="The newer one, likewise.")],
    threshold: Annotated[
        float | None,
        option(
            "Smallest relative difference that counts.  [default: 0.03 of a time, 0.005 of a held-out loss]",
            min=0,
        ),
    ] = None,
    plugin: PluginOption = None,
) -> Any:
    """Compare two results of one bench, row by row, or two trainings.

    For trainings: which recipe has the lower held-out loss at equal steps, tokens and minutes, with 95% intervals
    over seeds (`lmkit run --seeds 3` makes such runs).

    "No difference above D" says that the whole interval is inside +-D, the threshold; otherwise the verdict is
    "unclear" and says between what the difference lies.

    Verdicts on benches allow for the machine's noise and for its drift, which rows of other people's code (sdpa,
    torch) show. On a busy machine most verdicts are unclear. Exit code 1 if a bench's row is worse, wrong or may be
    worse, or nothing was compared.
    """
    if any((path / METRICS).exists() or any(path.glob(f"*/{METRICS}")) for path in (before, after)):
        from lmkit.training import compare_runs

        smallest = compare_runs.SMALLEST_DIFFERENCE if threshold is None else threshold
        return compare_runs.compare_training(before, after, threshold=smallest)
    from lmkit.bench.compare import SMALLEST_DIFFERENCE, compare_files

    return compare_files(before, after, threshold=SMALLEST_DIFFERENCE if threshold is None else threshold)


@app.add(
    "lmkit report",
    "lmkit report artifacts/profiles --output write_ups",
    "lmkit report artifacts/runs/quickstart --html",
)
def report(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Where the results of benches and profiles lie, at any depth; with --html a run folder.  "
            "[default: artifacts/benches and artifacts/profiles]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        option(
            "Folder of the documents, or the file of the page.  "
            "[default: `reports` in that folder, or in artifacts/benches; `report.html` in the run folder]"
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing; exit code 1 if a document does not say what the rows say."
        ),
    ] = False,
    html: Annotated[
        bool, typer.Option("--html", help="Write one page about a run, which a browser opens.")
    ] = False,
    beside: Annotated[list[Path] | None, option("With --html: another run on the same page.")] = None,
    force: ForceOption = False,
) -> Any:
    """Write reports on measured results, or a page about a run.

    Attention, data parallelism, optimizer sharding and profiling have a document each, if there are results. With
    --html: one page about a run, with its curves, texts, recipe and environment.
    """
    if (beside and not html) or (html and (folder is None or check)):
        raise UsageError(
            "report.options_exclude",
            "--html takes a run folder and not --check; --beside belongs to --html",
            hint="for example: lmkit report artifacts/runs/quickstart --html --beside artifacts/runs/other",
        )
    if html:
        from lmkit.training.page import write_page

        assert folder is not None
        return write_page(folder, beside or (), output=output, force=force)
    from lmkit.bench.report import write_reports
    from lmkit.profile.write_up import SUMMARIES, side_by_side

    return write_reports(
        folder, output, check=check, force=force, profiles=SUMMARIES, side_by_side=side_by_side
    )
