"""`lmkit bench NAME`: a command for every registered bench, with a flag for every key of its table."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from lmkit.cli.console import Result, progress_on_stderr, show
from lmkit.cli.options import (
    Commands,
    ForceOption,
    Group,
    JsonOption,
    NprocOption,
    PrintRecipeOption,
    SetOption,
    option,
)
from lmkit.plugins import load_plugin
from lmkit.recipe.keys import Empties, FlagNames, Shortcut, of_class
from lmkit.registry import BENCHES

_LONGEST_METAVAR = 60  # characters; help has lines of 80

OutputOption = Annotated[
    Path | None,
    option(
        "Folder for the results.  [default: artifacts/benches/<run.name>/<bench>, overwritten by each run]",
        "--output",
    ),
]


class _Benches(Group):
    """Lists benches by what the registry knows, and makes the flags of one when it is called."""

    @property
    def commands(self) -> dict[str, Any]:
        return dict.fromkeys(_command_name(name) for name in BENCHES.names)

    @commands.setter
    def commands(self, value: object) -> None:
        """Do nothing: the registry knows the commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name.replace("-", "_")) if cmd_name in self.commands else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for flag, file in pairwise([*args, ""]):
            if flag == "--plugin" or flag.startswith("--plugin="):  # it may register the bench that is called
                load_plugin(Path(flag.partition("=")[2] or file))
        name, command, rest = super().resolve_command(ctx, args)
        return name, command, [_with_dashes(word) for word in rest]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(_command_name(name), BENCHES.facts(name).help) for name in BENCHES.names])


app = Commands(
    "Measure how fast each part is. Exit code 1 if a variant is wrong or failed, or nothing could be measured.",
    example="lmkit bench attention bench_attention_cpu",
    cls=_Benches,
)


@app.callback()
def _group() -> None:
    """Without a callback Typer makes a group without commands into nothing."""


def _command_name(name: str) -> str:
    return name.replace("_", "-")


def _with_dashes(word: str) -> str:
    """Return a flag as it is registered: `--timed_epochs` is `--timed-epochs`."""
    flag, equals, value = word.partition("=")
    return (flag.replace("_", "-") if flag.startswith("--") else flag) + equals + value


def _command(name: str) -> Any:
    """Make the command of one bench: a function whose signature has a parameter for every key of its table."""
    facts = BENCHES.facts(name)
    on_gpu, on_cpu = facts.recipes
    usual = f"{on_gpu} where there is CUDA, else {on_cpu}" if on_gpu != on_cpu else on_gpu or "defaults"
    recipe_help = f"A .toml file, or a name that `lmkit recipe list` shows. Left out: {usual}."
    flags = list(_flags(name))
    parameters: dict[str, tuple[Any, Any]] = {
        "recipe": (Annotated[str | None, typer.Argument(help=recipe_help, show_default=False)], None),
        "set_": (SetOption, None),
        **{flag.parameter: (flag.annotation, None) for flag in flags},
        **({"nproc": (NprocOption, 1)} if facts.ranks else {}),
        "output": (OutputOption, None),
        "force": (ForceOption, False),
        "print_recipe": (PrintRecipeOption, False),
        "as_json": (JsonOption, False),
    }

    def command(
        recipe: str | None,
        set_: list[str] | None,
        output: Path | None,
        force: bool,
        print_recipe: bool,
        as_json: bool,
        nproc: int = 1,
        **typed: Any,
    ) -> None:
        from lmkit.recipe.load import load_recipe, recipe_to_toml

        overrides, values = _given(name, {flag: typed[flag.parameter] for flag in flags}, set_ or [])
        source = recipe if recipe is not None else on_gpu or None
        loaded = load_recipe(source, overrides, flags=values, benches=True)
        if recipe is None and on_cpu != on_gpu and not _runs_on_gpu(loaded.run.device):
            source = on_cpu
            loaded = load_recipe(source, overrides, flags=values, benches=True)
        if print_recipe:
            show(Result(recipe_to_toml(loaded), loaded.model_dump(mode="json")), as_json=as_json)
            return
        from lmkit.bench.harness import check_place, run_bench

        check_place(loaded, output, force=force)
        with progress_on_stderr() as progress:
            result = run_bench(name, loaded, output, nproc=nproc, progress=progress)
        if result is not None:  # ranks other than the first print nothing
            show(result, as_json=as_json)
            if not result.is_fine:
                raise typer.Exit(1)

    keyword = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(parameter, keyword, annotation=kind, default=default)
            for parameter, (kind, default) in parameters.items()
        ]
    )
    command.__doc__ = facts.help
    single = Commands()
    example = facts.example or f"lmkit bench {_command_name(name)} {on_cpu}".rstrip()
    single.add(example, name=_command_name(name))(command)
    return typer.main.get_command(single)


@dataclass(frozen=True, eq=False)
class _Flag:
    """A parameter of a command that gives the value of a key of the bench's table.

    Attributes:
        items: the type of the items if the key is an array, else None.
        constant: what the flag stands for if it takes no value, else None.
        empties: arrays of the recipe that the flag empties together.
    """

    parameter: str
    key: str
    annotation: Any
    items: type | None = None
    constant: Any = None
    empties: tuple[tuple[str, ...], ...] = ()

    def value(self, typed: Any) -> Any:
        """Return the key's value for what was typed."""
        if self.constant is not None:
            return self.constant
        if self.items is None:
            return typed
        words = [word.strip() for text in typed for word in text.split(",")]
        return [_number(word) for word in words] if self.items in (int, float) else words


def _flags(name: str) -> Iterator[_Flag]:
    """Yield a flag for every key of a bench's table, and those that stand for a value of a key."""
    for key, (annotation, text) in of_class(BENCHES.module(name), "Options").items():
        metadata = getattr(annotation, "__metadata__", ())
        type_ = get_args(annotation)[0] if metadata else annotation
        several = get_origin(type_) is tuple
        kind = _scalar(get_args(type_)[0] if several else type_)
        dashed = "--" + key.replace("_", "-")
        names = [other for extra in metadata if isinstance(extra, FlagNames) for other in extra.names]
        declared = [f"{dashed}/--no-{dashed[2:]}"] if kind is bool else [dashed, *names]
        if several:
            text = f"{text.rstrip('.')} (comma-separated, or repeat the option)."
        typed: Any = list[str] if several else kind
        shown = _words(type_) or (f"<{kind.__name__},...>" if several else None)
        flag = Annotated[typed | None, option(text, *declared, metavar=shown)]
        empties = tuple(extra.keys for extra in metadata if isinstance(extra, Empties))
        yield _Flag(key, key, flag, items=kind if several else None, empties=empties)
        for extra in metadata:
            if isinstance(extra, Shortcut):
                short = Annotated[bool | None, option(extra.help, extra.name)]
                yield _Flag(extra.name.strip("-").replace("-", "_"), key, short, constant=extra.value)


def _scalar(annotation: Any) -> type:
    """Return int, float or bool if a key takes one, else str."""
    return next((part for part in (annotation, *get_args(annotation)) if part in (int, float, bool)), str)


def _words(annotation: Any) -> str | None:
    """Return `<fp32|bf16>` for a key, or an array, of a few known words; else None."""
    if get_origin(annotation) is Literal:
        words = "|".join(map(str, get_args(annotation)))
        return f"<{words}>" if len(words) <= _LONGEST_METAVAR else None
    return next(filter(None, map(_words, get_args(annotation))), None)


def _number(word: str) -> int | float | str:
    """Return a number; other words stay as they are, and the recipe's check names them."""
    if re.fullmatch("-?[0-9]{1,18}", word):
        return int(word)
    return float(word) if re.fullmatch(r"-?[0-9]{0,18}\.?[0-9]{1,18}(e-?[0-9]{1,3})?", word) else word


def _given(name: str, typed: dict[_Flag, Any], overrides: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return overrides and values for `load_recipe`: what was typed, and the arrays that it empties."""
    given = {flag: value for flag, value in typed.items() if value is not None and value != []}
    values = {f"bench.{name}.{flag.key}": flag.value(value) for flag, value in given.items()}
    named = {*values, *(override.partition("=")[0].strip() for override in overrides)}
    emptied = [
        f"bench.{name}.{key}=[]"
        for flag in given
        for empties in flag.empties
        if not any(f"bench.{name}.{key}" in named for key in empties)
        for key in empties
    ]
    return [*emptied, *overrides], values


def _runs_on_gpu(device: str) -> bool:
    """Return whether a recipe for GPUs would find one."""
    if device == "cpu":  # --set run.device=cpu
        return False
    from lmkit.parallel.ranks import local_device

    return local_device("auto", local_rank=0).type == "cuda"
