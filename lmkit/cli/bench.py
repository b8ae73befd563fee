"""`lmkit bench`: find out how fast each part is."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lmkit.cli.options import (
    SEVERAL,
    DebugOption,
    ForceOption,
    Group,
    JsonOption,
    KernelsOption,
    NprocOption,
    PluginOption,
    PrintRecipeOption,
    ResultsOption,
    SetOption,
    given,
    split,
)
from lmkit.cli.progress import progress_on_stderr
from lmkit.cli.render import show

# What is measured where no recipe is named: with CUDA, and without.
USUAL = {
    "attention": ("bench_attention", "bench_attention_cpu"),
    "model": ("bench_model", "bench_model_cpu"),
    "lm_matrix": ("lm_matrix", "lm_matrix_cpu"),
    "tokenizer": ("bench_tokenizer", "bench_tokenizer"),
    "ddp": ("bench_ddp", "bench_ddp_cpu"),
    "all_reduce": ("bench_ddp", "bench_ddp_cpu"),
    "optimizer": ("bench_ddp", "bench_ddp_cpu"),
}


def _recipe_of(bench: str) -> Any:
    """The argument of a bench that may be left out."""
    on_gpu, on_cpu = USUAL[bench]
    usual = on_gpu if on_gpu == on_cpu else f"{on_gpu} where there is CUDA, else {on_cpu}"
    return typer.Argument(
        help=f"A .toml file, or a name that `lmkit recipe list` shows. Left out: {usual}.", show_default=False
    )


app = typer.Typer(
    cls=Group, no_args_is_help=True, rich_markup_mode=None,
    help="Find out how fast each part is. Exit code 1 if nothing could be measured.",
    epilog="Example: lmkit bench attention bench_attention_cpu",
)  # fmt: skip


@app.command(epilog="Example: lmkit bench attention bench_attention --tiers 128:64,XXL --backward")
def attention(
    recipe: Annotated[str | None, _recipe_of("attention")] = None,
    set_: SetOption = None,
    plugin: PluginOption = None,
    tiers: Annotated[
        list[str] | None,
        typer.Option(
            "--tiers",
            "--custom-tiers",
            "--custom_tiers",
            help=f"Sequence lengths, Small ... XXL, 4k ... 128k, a number, or queries:keys ({SEVERAL}).",
            show_default=False,
        ),
    ] = None,
    kernels: KernelsOption = None,
    backward: Annotated[
        bool | None,
        typer.Option("--backward/--no-backward", help="Time the backward pass too.", show_default=False),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Calls before those that are timed.", show_default=False)
    ] = None,
    iters: Annotated[int | None, typer.Option(help="Timed calls, at most.", show_default=False)] = None,
    output: ResultsOption = None,
    force: ForceOption = False,
    print_recipe: PrintRecipeOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Attention kernels over lengths, checked, then timed."""
    flags = given(
        bench__attention__tiers=split(tiers),
        bench__attention__kernels=split(kernels),
        bench__attention__backward=backward,
        bench__attention__warmup=warmup,
        bench__attention__iters=iters,
    )
    _bench("attention", recipe, set_, flags, output, force=force, print_recipe=print_recipe, as_json=as_json)


@app.command(epilog="Example: lmkit bench model bench_model_cpu --compare-precision")
def model(
    recipe: Annotated[str | None, _recipe_of("model")] = None,
    set_: SetOption = None,
    plugin: PluginOption = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--sizes", help=f"tiny, small, medium, large, xl, 2.7b ({SEVERAL}).", show_default=False
        ),
    ] = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option("--lengths", help=f"Context lengths ({SEVERAL}).", show_default=False),
    ] = None,
    compare_precision: Annotated[
        bool, typer.Option("--compare-precision", help="Measure fp32 and bf16 side by side.")
    ] = False,
    compile_: Annotated[
        list[str] | None,
        typer.Option("--compile", help=f"none, block, whole ({SEVERAL}).", show_default=False),
    ] = None,
    output: ResultsOption = None,
    force: ForceOption = False,
    print_recipe: PrintRecipeOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Forward, backward and whole training steps of named sizes."""
    flags = given(
        bench__model__sizes=split(sizes),
        bench__model__lengths=_whole_numbers(split(lengths)),
        bench__model__precisions=["fp32", "bf16"] if compare_precision else None,
        bench__model__compile=split(compile_),
    )
    _bench("model", recipe, set_, flags, output, force=force, print_recipe=print_recipe, as_json=as_json)


@app.command("lm-matrix", epilog="Example: lmkit bench lm-matrix lm_matrix_cpu --nproc 2")
def lm_matrix(
    recipe: Annotated[str | None, _recipe_of("lm_matrix")] = None,
    set_: SetOption = None,
    plugin: PluginOption = None,
    kernels: KernelsOption = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategies",
            "--wrappers",
            help=f"naive, flat, overlap, bucketed, zero1, torch_ddp, none ({SEVERAL}).",
            show_default=False,
        ),
    ] = None,
    timed_epochs: Annotated[
        int | None, typer.Option("--timed-epochs", help="Samples per cell.", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences per step, over all ranks.", show_default=False)
    ] = None,
    num_layers: Annotated[int | None, typer.Option(help="Blocks of the model.", show_default=False)] = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the model.", show_default=False)] = None,
    d_ff: Annotated[
        int | None, typer.Option(help="Width inside its feed-forward part.", show_default=False)
    ] = None,
    num_heads: Annotated[int | None, typer.Option(help="Its attention heads.", show_default=False)] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Tokens per sequence.", show_default=False)
    ] = None,
    nproc: NprocOption = 1,
    output: ResultsOption = None,
    force: ForceOption = False,
    print_recipe: PrintRecipeOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Short trainings: attention kernels x gradient strategies."""
    flags = given(
        bench__lm_matrix__kernels=split(kernels),
        bench__lm_matrix__strategies=split(strategies),
        bench__lm_matrix__timed_epochs=timed_epochs,
        bench__lm_matrix__batch_size=batch_size,
        bench__lm_matrix__num_layers=num_layers,
        bench__lm_matrix__d_model=d_model,
        bench__lm_matrix__d_ff=d_ff,
        bench__lm_matrix__num_heads=num_heads,
        bench__lm_matrix__context_length=context_length,
    )
    _bench(
        "lm_matrix",
        recipe,
        set_,
        flags,
        output,
        nproc=nproc,
        force=force,
        print_recipe=print_recipe,
        as_json=as_json,
    )


@app.command(epilog="Example: lmkit bench tokenizer bench_tokenizer")
def tokenizer(
    recipe: Annotated[str | None, _recipe_of("tokenizer")] = None,
    set_: SetOption = None,
    plugin: PluginOption = None,
    output: ResultsOption = None,
    force: ForceOption = False,
    print_recipe: PrintRecipeOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Tokenizer training and encoding beside installed rivals."""
    _bench("tokenizer", recipe, set_, {}, output, force=force, print_recipe=print_recipe, as_json=as_json)


@app.command(epilog="Example: lmkit bench ddp bench_ddp_cpu --nproc 2")
def ddp(
    recipe: Annotated[str | None, _recipe_of("ddp")] = None,
    set_: SetOption = None,
    plugin: PluginOption = None,
    nproc: NprocOption = 1,
    output: ResultsOption = None,
    force: ForceOption = False,
    print_recipe: PrintRecipeOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Gradient synchronisation: all strategies, and what they cost."""
    _bench(
        "ddp", recipe, set_, {}, output, nproc=nproc, force=force, print_recipe=print_recipe, as_json=as_json
    )


@app.command("all-reduce", epilog="Example: lmkit bench all-reduce bench_ddp_cpu --nproc 2")
def all_reduce(
    recipe: Annotated[str | None, _recipe_of("all_reduce")] = None,
    set_: SetOption = None,
    plugin: PluginOption = None,
    nproc: NprocOption = 1,
    output: ResultsOption = None,
    force: ForceOption = False,
    print_recipe: PrintRecipeOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """all-reduce, reduce-scatter and all-gather over message sizes."""
    _bench(
        "all_reduce",
        recipe,
        set_,
        {},
        output,
        nproc=nproc,
        force=force,
        print_recipe=print_recipe,
        as_json=as_json,
    )


@app.command(epilog="Example: lmkit bench optimizer bench_ddp_cpu --nproc 2")
def optimizer(
    recipe: Annotated[str | None, _recipe_of("optimizer")] = None,
    set_: SetOption = None,
    plugin: PluginOption = None,
    nproc: NprocOption = 1,
    output: ResultsOption = None,
    force: ForceOption = False,
    print_recipe: PrintRecipeOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Plain against sharded optimizer state: memory and speed."""
    _bench(
        "optimizer",
        recipe,
        set_,
        {},
        output,
        nproc=nproc,
        force=force,
        print_recipe=print_recipe,
        as_json=as_json,
    )


def _whole_numbers(words: list[str] | None) -> list[int | str] | None:
    """What is no number stays what it is: the recipe's own check names it."""
    if words is None:
        return None
    return [int(word) if re.fullmatch("-?[0-9]{1,18}", word) else word for word in words]


def _bench(
    name: str,
    recipe: str | None,
    overrides: list[str] | None,
    flags: dict[str, Any],
    output: Path | None,
    *,
    force: bool,
    print_recipe: bool,
    as_json: bool,
    **options: Any,
) -> None:
    from lmkit.recipe.load import load_recipe, recipe_to_toml

    on_gpu, on_cpu = USUAL[name]
    loaded = load_recipe(on_gpu if recipe is None else recipe, overrides or (), flags=flags)
    if recipe is None and on_cpu != on_gpu and not _runs_on_gpu(loaded.run.device):
        loaded = load_recipe(on_cpu, overrides or (), flags=flags)
    if print_recipe:
        typer.echo(recipe_to_toml(loaded), nl=False)
        return
    from lmkit.commands import bench as commands

    commands.check_place(loaded, output, force=force)
    command: Callable[..., Any] = getattr(commands, name)
    try:
        with progress_on_stderr() as progress:
            result = command(loaded, output, progress=progress, **options)
    except commands.Interrupted as stop:  # said here, where the bar is gone
        typer.echo(str(stop), err=True)
        raise
    if result is not None:  # ranks other than 0 say nothing
        show(result, as_json=as_json)
        if not result.measured:
            raise typer.Exit(1)


def _runs_on_gpu(device: str) -> bool:
    """Whether a recipe for GPUs, with what was typed on top, has one to run on."""
    if device == "cpu":  # --set run.device=cpu
        return False
    from lmkit.parallel.ranks import local_device

    return local_device("auto", local_rank=0).type == "cuda"
