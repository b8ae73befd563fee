"""`lmkit profile`: find out why it is slow."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from lmkit.cli.options import Commands, option
from lmkit.errors import UsageError

RECORDINGS = (".sqlite", ".nsys-rep", ".json", ".json.gz")

Mode = Annotated[
    Literal["forward", "fwd+bwd", "step"],
    typer.Option(help="What to record of a recipe: whole steps, or only forward (and backward) passes."),
]
Steps = Annotated[int, typer.Option(min=1, max=1000, help="Training steps to record.")]
_OUTPUT = "Folder for the recording and its summary. [default: artifacts/profiles/<command>, overwritten]"
Output = Annotated[Path | None, option(_OUTPUT)]

app = Commands("Find out where time and memory go.", example="lmkit profile kineto quickstart")


class _TakesCommand(TyperCommand):
    """Keep the words after `--` apart; the parser joins them with the words before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[__name__] = args[args.index("--") + 1 :] if "--" in args else []
        return super().parse_args(ctx, args)


@app.add(
    "lmkit profile nsys quickstart",
    "lmkit profile nsys old.sqlite",
    "lmkit profile nsys -- lmkit train quickstart --stop-at-step 20",
    cls=_TakesCommand,
)
def nsys(
    context: typer.Context,
    target: list[str],
    set_: list[str] | None = None,
    engine: Literal["auto", "nsys", "kineto"] = "auto",
    mode: Mode = "step",
    steps: Steps = 5,
    output: Output = None,
    force: bool = False,
) -> Any:
    """Time of training steps, or of any command, with Nsight Systems.

    An existing recording (.sqlite, .nsys-rep) is summarised.

    Args:
        target: A recipe, a .sqlite or .nsys-rep file, or `--` and a command with its arguments.
        engine: auto: a recipe is profiled with kineto where nsys is missing.
    """
    arguments = context.meta[__name__]
    if len(target) > 1 and target != arguments:
        message = f"{' '.join(target)}: more than a recipe or a recording"
        hint = "put a command after `--`: lmkit profile nsys -- COMMAND"
        raise UsageError("profile.too_many_targets", message, hint=hint)
    folder = _folder(output, "nsys", force=force)
    if not arguments:
        return _profile(target[0], set_, folder, engine=engine, mode=mode, steps=steps)
    from lmkit.profile.run import run_command

    return run_command(arguments, folder)


@app.add("lmkit profile kineto quickstart --steps 5")
def kineto(
    target: str,
    set_: list[str] | None = None,
    mode: Mode = "step",
    steps: Steps = 5,
    output: Output = None,
    force: bool = False,
) -> Any:
    """Time of training steps with torch.profiler, on a CPU too.

    An existing recording (.json, .json.gz) is summarised.

    Args:
        target: A recipe, or a .json[.gz] trace of torch.profiler.
    """
    folder = _folder(output, "kineto", force=force)
    return _profile(target, set_, folder, engine="kineto", mode=mode, steps=steps)


@app.add(
    "lmkit profile memory quickstart",
    "lmkit profile memory quickstart --contexts 128,512 --kernels reference,flash_torch",
)
def memory(
    recipe: str,
    set_: list[str] | None = None,
    mode: Mode = "step",
    contexts: str | None = None,
    precisions: str | None = None,
    kernels: str | None = None,
    steps: Steps = 2,
    output: Output = None,
    force: bool = False,
) -> Any:
    """Peak memory of training steps by phase, category and source line.

    Writes a picture and, on a GPU, a snapshot for pytorch.org/memory_viz. With a list of contexts, precisions
    or kernels: a table of the forward pass and the whole step for every combination.

    Args:
        contexts: Table: context lengths, 128,512,2048.
        precisions: Table: precisions of [train], fp32,bf16.
        kernels: Table: attention kernels, reference,flash_torch.
    """
    folder = _folder(output, "memory", force=force)
    from lmkit.recipe.load import load_recipe

    loaded = load_recipe(recipe, set_ or ())  # before torch is imported
    lists = {"model.attention": kernels, "train.precision": precisions, "model.context_length": contexts}
    if any(lists.values()):
        given = {key: _words(text) for key, text in lists.items() if text}
        combinations = [dict(zip(given, values, strict=True)) for values in product(*given.values())]
        recipes = [load_recipe(recipe, set_ or (), flags=flags) for flags in combinations]
        from lmkit.profile.memory import run_memory_table

        return run_memory_table(recipes, folder, steps=steps)
    from lmkit.profile.memory import run_memory

    return run_memory(loaded, folder, mode=mode, steps=steps)


def _words(text: str) -> list[int | str]:
    words = (word.strip() for word in text.split(","))
    return [int(word) if word.isdecimal() else word for word in words if word]


def _folder(output: Path | None, command: str, *, force: bool) -> Path:
    from lmkit.recipe.run_folder import refuse_results
    from lmkit.storage.outputs import refuse_unwritable

    folder = output or Path("artifacts/profiles") / command
    refuse_results(folder, force=force or output is None)
    refuse_unwritable(folder)
    return folder


def _profile(target: str, overrides: list[str] | None, folder: Path, **options: Any) -> Any:
    """Summarise a recording, or record a recipe."""
    if target.endswith(RECORDINGS):
        from lmkit.profile.run import run_recording

        return run_recording(Path(target), folder)
    if Path(target).is_file() and not target.endswith(".toml"):
        raise UsageError(
            "trace.wrong_kind",
            f"{target}: neither a recipe (.toml) nor a recording ({', '.join(RECORDINGS)})",
            hint="torch.profiler writes .json[.gz], Nsight Systems .nsys-rep and .sqlite; "
            "a command is profiled with: lmkit profile nsys -- COMMAND",
        )
    from lmkit.recipe.load import load_recipe

    recipe = load_recipe(target, overrides or ())  # before torch is imported
    from lmkit.profile.run import run_steps

    return run_steps(recipe, folder, **options)
