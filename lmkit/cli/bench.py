"""`lmkit bench NAME`: a command for every registered bench, with a flag for every key of its table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from lmkit.cli.console import Result, progress_on_stderr
from lmkit.cli.options import SHARED, Commands, command_of, option
from lmkit.plugins import load_plugin
from lmkit.recipe.keys import Empties, FlagNames, Shortcut, of_class
from lmkit.registry import BENCHES

_LONGEST_METAVAR = 60  # characters; help has lines of 80

_OUTPUT = "Folder for the results.  [default: artifacts/benches/<run.name>/<bench>, overwritten by each run]"


class _Benches(Commands):
    """Lists benches by what the registry knows, and makes the flags of one when it is called."""

    def name_all(self) -> None:
        """Take the names of all benches from the registry."""
        self.commands = {name.replace("_", "-"): None for name in BENCHES.names}

    def line(self, name: str) -> str:
        return BENCHES.facts(name.replace("-", "_")).help

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name.replace("-", "_")) if cmd_name in self.commands else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for flag, file in pairwise([*args, ""]):
            if flag == "--plugin" or flag.startswith("--plugin="):  # it may register the bench that is called
                load_plugin(Path(flag.partition("=")[2] or file))
        self.name_all()
        typed = args[:1]
        for word in args[1:]:  # --timed_epochs is --timed-epochs
            flag, equals, value = word.partition("=")
            typed.append((flag.replace("_", "-") if flag.startswith("--") else flag) + equals + value)
        return super().resolve_command(ctx, typed)


app = _Benches(
    "Measure how fast each part is. Exit code 1 if a variant is wrong or failed, or nothing could be measured.",
    example="lmkit bench attention bench_attention_cpu",
)
app.name_all()


def _command(name: str) -> Any:
    """Make the command of one bench, which has a flag for every key of its table."""
    facts = BENCHES.facts(name)
    on_gpu, on_cpu = facts.recipes
    usual = f"{on_gpu} where there is CUDA, else {on_cpu}" if on_gpu != on_cpu else on_gpu or "defaults"
    recipe_help = f"A .toml file, or a name that `lmkit recipe list` shows. Left out: {usual}."
    made = {flag.parameter: flag for flag in _flags(name)}
    options = {
        "recipe": (Annotated[str | None, typer.Argument(help=recipe_help, show_default=False)], None),
        **{parameter: (flag.annotation, None) for parameter, flag in made.items()},
        **({"nproc": (SHARED["nproc"], 1)} if facts.ranks else {}),
    }

    def command(
        set_: list[str] | None = None,
        *,
        flags: dict[str, Any],
        output: Path | None = None,
        force: bool = False,
        print_recipe: bool = False,
    ) -> Any:
        from lmkit.recipe.load import load_recipe, recipe_to_toml

        recipe, nproc = flags.pop("recipe"), flags.pop("nproc", 1)
        typed = {made[parameter]: value for parameter, value in flags.items() if value not in (None, [])}
        overrides = [*_emptied(name, typed, set_ or []), *(set_ or [])]
        values = {f"bench.{name}.{flag.key}": flag.value(value) for flag, value in typed.items()}
        loaded = load_recipe(
            recipe if recipe is not None else on_gpu or None, overrides, flags=values, benches=True
        )
        if recipe is None and on_cpu != on_gpu and not _runs_on_gpu(loaded.run.device):
            loaded = load_recipe(on_cpu, overrides, flags=values, benches=True)
        if print_recipe:
            return Result(recipe_to_toml(loaded), loaded.model_dump(mode="json"))
        from lmkit.bench.harness import check_place, run_bench

        check_place(loaded, output, force=force)
        with progress_on_stderr() as progress:  # ranks other than the first return nothing
            return run_bench(name, loaded, output, nproc=nproc, progress=progress)

    command.__doc__ = f"{facts.help}\n\nArgs:\n    output: {_OUTPUT}"
    dashed = name.replace("_", "-")
    example = facts.example or f"lmkit bench {dashed} {on_cpu}".rstrip()
    return command_of(dashed, command, options, epilog=f"Example: {example}")


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
    for key, (annotation, text) in of_class(BENCHES.entry(name).module, "Options").items():
        metadata = getattr(annotation, "__metadata__", ())
        type_ = get_args(annotation)[0] if metadata else annotation
        several = get_origin(type_) is tuple
        item = get_args(type_)[0] if several else type_
        kind = next((part for part in (item, *get_args(item)) if part in (int, float, bool)), str)
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


def _words(annotation: Any) -> str | None:
    """Return `<fp32|bf16>` for a key, or an array, of a few known words; else None."""
    if get_origin(annotation) is Literal:
        words = "|".join(map(str, get_args(annotation)))
        return f"<{words}>" if len(words) <= _LONGEST_METAVAR else None
    return next(filter(None, map(_words, get_args(annotation))), None)


def _number(word: str) -> Any:
    """Return a number; other words stay as they are, and the recipe's check names them."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def _emptied(name: str, typed: Iterable[_Flag], overrides: list[str]) -> list[str]:
    """Return overrides for the arrays that flags empty, unless one of them was typed."""
    named = {flag.key for flag in typed}
    named |= {override.partition("=")[0].strip().removeprefix(f"bench.{name}.") for override in overrides}
    arrays = [keys for flag in typed for keys in flag.empties if named.isdisjoint(keys)]
    return [f"bench.{name}.{key}=[]" for keys in arrays for key in keys]


def _runs_on_gpu(device: str) -> bool:
    """Return whether a recipe for GPUs would find one."""
    if device == "cpu":  # --set run.device=cpu
        return False
    from lmkit.parallel.ranks import local_device

    return local_device("auto", local_rank=0).type == "cuda"
