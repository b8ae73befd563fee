"""`lmkit verify`: check files, or that resuming is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmkit.cli.console import show
from lmkit.cli.options import Commands, JsonOption, SetOption, refuse_typed

app = Commands()


@app.add("lmkit verify artifacts/runs/quickstart", "lmkit verify quickstart --resume")
def verify(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            help="Run or Hugging Face folder, checkpoint, token file, tokenizer or recipe; with --resume, a recipe."
        ),
    ],
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Train the recipe for 2N steps and for N + N; both must agree bit for bit."
        ),
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="N of --resume.")] = 5,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check files, or check that resuming is exact.

    Exit code 1 if something is wrong.
    """
    if resume:
        from lmkit.recipe.load import load_recipe

        loaded = load_recipe(target, set_ or ())  # before torch is imported
        from lmkit.training.verify import verify_resume

        result = verify_resume(loaded, steps=steps)
    else:
        why = "only with --resume; files are checked as they are"
        hint = "leave it out, or: lmkit verify RECIPE --resume --steps N"
        refuse_typed(context, "set_", "steps", why=why, hint=hint)
        from lmkit.training.verify import verify_path

        result = verify_path(Path(target))
    show(result, as_json=as_json)
    if not result.ok:
        raise typer.Exit(1)
