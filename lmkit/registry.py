"""Find kernels, strategies, optimizers, schedules, benches and datasets by name.

Each of them registers itself in its own file, with a decorator whose arguments are literals:

    @ATTENTION.register("flash_torch", windows=True)
    def flash_torch(q, k, v, *, causal, scale=None): ...

Names and facts are read from the source of the package, so that a recipe is validated and help is printed before
torch is imported; `load` imports the file. Code from outside registers in the same way: the decorator runs when the
file is imported (`--plugin FILE` on the command line, or an import in Python).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import filterfalse
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from lmkit.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Facts:
    """What is known of a registered object without importing its module.

    Attributes:
        order: position in lists; objects from outside are last.
        aliases: other spellings that recipes and functions accept.
        requires: packages that have to be installed, by the names that they are imported by.
    """

    order: int = 100
    aliases: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """The packages that it requires and that are not installed."""
        return list(filterfalse(importlib.util.find_spec, self.requires))


F = TypeVar("F", bound=Facts)
Registered = TypeVar("Registered", bound=Callable[..., Any])
_PACKAGE = Path(__file__).resolve().parent


@dataclass
class Entry(Generic[F]):
    """One registered object: its name, and the module to import with its name there; `loaded`: the object itself."""

    name: str
    module: str
    attribute: str
    facts: F
    loaded: Any = None

    @property
    def file(self) -> str:
        """The file of its imported module, for errors."""
        return str(getattr(sys.modules[self.module], "__file__", self.module))


class Registry(Generic[F]):
    """Named objects of one kind.

    Args:
        variable: the name of this registry in this module; decorators are found by it.
        noun: an object of this kind, in messages.
        facts: a dataclass; its fields are the keyword arguments of `register`.
        folders: the folders below `lmkit` whose files register objects.
        core: objects of `lmkit.core`, which knows no registry.
    """

    def __init__(
        self, variable: str, noun: str, facts: type[F], *folders: str, core: Sequence[Entry[F]] = ()
    ) -> None:
        self.noun = noun
        self._variable, self._facts, self._folders, self._core = variable, facts, folders, core

    def register(self, name: str, **facts: Any) -> Callable[[Registered], Registered]:
        """Register the decorated function or class under `name`; `facts` are fields of the registry's dataclass.

        A function or class that a module defines anew replaces its first definition.

        Raises:
            UsageError: another object has this name or alias ("registry.name_taken"), or the name has a character
                that separates names, variants or options ("registry.wrong_name").
        """

        def keep(thing: Registered) -> Registered:
            entry = Entry(name, thing.__module__, thing.__name__, self._facts(**facts), thing)
            if not re.fullmatch(r"[^\s:+,]+", name):
                message = f"{entry.file}: {self.noun} {name!r}: a name has neither spaces nor any of : + ,"
                hint = "they separate names, and names from variants and options"
                raise UsageError("registry.wrong_name", message, hint=hint)
            for other in self.entries.values():
                taken = {name, *entry.facts.aliases} & {other.name, *other.facts.aliases}
                is_same = (other.name, other.module, other.attribute) == (name, entry.module, entry.attribute)
                if taken and not is_same:
                    message = f"{entry.file}: there is {self.noun} {min(taken)!r} already, in {other.module}"
                    raise UsageError("registry.name_taken", message, hint="register it under another name")
            self.entries[name] = entry
            return thing

        return keep

    def unregister(self, name: str) -> None:
        """Forget an object from outside."""
        del self.entries[name]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, by their fact `order`, then those from outside."""
        return tuple(self.entries)

    @property
    def aliases(self) -> dict[str, str]:
        """Other spelling -> name."""
        return {alias: entry.name for entry in self.entries.values() for alias in entry.facts.aliases}

    def entry(self, name: str) -> Entry[F]:
        """Return the entry of a name or an alias; raise UsageError if there is none."""
        found = self.entries.get(name) or self.entries.get(self.aliases.get(name, ""))
        if found is None:
            message = f"no {self.noun} is called {name!r}{did_you_mean(name, self.names)}"
            raise UsageError("registry.unknown_name", message, hint="there are: " + ", ".join(self.names))
        return found

    def facts(self, name: str) -> F:
        return self.entry(name).facts

    def load(self, name: str) -> Any:
        """Import the module of an object and return the object; UsageError if a package that it needs is missing."""
        entry = self.entry(name)
        if entry.loaded is None:
            try:
                entry.loaded = getattr(importlib.import_module(entry.module), entry.attribute)
            except ModuleNotFoundError as error:
                missing = (error.name or "").split(".")[0]
                if missing not in entry.facts.requires:
                    raise
                others = (other.name for other in self.entries.values() if not other.facts.requires)
                message = f"{self.noun} {entry.name!r} needs {missing}, which is not installed"
                hint = f"pip install {missing}, or choose another: {', '.join(others)}"
                raise UsageError("registry.not_installed", message, hint=hint) from error
        return entry.loaded

    def function_of(self, name: str, function: str) -> Any:
        """Return another function of the module in which `name` is registered; UsageError if there is none."""
        module = sys.modules[self.load(name).__module__]
        if not callable(found := getattr(module, function, None)):
            message = f"{module.__file__}: {self.noun} {name!r}: there is no function {function!r}"
            hint = f"define it there{did_you_mean(function, vars(module))}"
            raise UsageError("registry.no_function", message, hint=hint)
        return found

    @cached_property
    def entries(self) -> dict[str, Entry[F]]:
        """Name -> entry, in the order of `names`."""
        # The decorator's arguments and the name of what it decorates
        decorated = rf"^@{self._variable}\.register\((.*?)\)\n(?:@.*\n)*(?:def|class) (\w+)"
        found = list(self._core)
        for folder in self._folders:
            for path in sorted((_PACKAGE / folder).glob("*.py")):
                module = ".".join(("lmkit", *path.relative_to(_PACKAGE).with_suffix("").parts))
                text = path.read_text("utf-8")
                for arguments, attribute in re.findall(decorated, text, re.MULTILINE | re.DOTALL):
                    call: Any = ast.parse(f"register({arguments})", mode="eval").body
                    facts = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                    name = ast.literal_eval(call.args[0])
                    found.append(Entry(name, module, attribute, self._facts(**facts)))
        found.sort(key=attrgetter("facts.order"))
        return dict(zip(map(attrgetter("name"), found), found, strict=True))


@dataclass(frozen=True)
class KernelFacts(Facts):
    """An attention kernel: `kernel(q, k, v, *, causal, scale=None) -> out`, see `lmkit.attention`.

    `check`, `implementation` and `fallback` name functions of the module.

    Attributes:
        check: `check(q)` raises UsageError for a dtype, head_dim or device that the kernel does not support.
        masks: whether it takes `mask=`.
        windows: whether it takes `first=`: with `causal`, query i sees no key before first[i].
        sees_all: whether each query sees all keys, or with `causal` all earlier ones. If not, generation reads the
            whole text again for every token: the attention of the key-value cache sees all keys.
        keeps_scores: whether it holds all scores in memory, in the dtype of the inputs.
        implementation: `implementation(q, k, v)` names what a call would run.
        fallback: `fallback(q, k, v)` says why a call does not run the fastest implementation; None if it does.
        variants: name -> keyword arguments of the kernel, for `bench attention --kernels KERNEL:NAME`.
        joined: "module:function" of the same causal attention on a joined projection,
            `joined(qkv, *, kv_heads, head_dim) -> out`: (batch, seq, (heads + 2 kv_heads) * head_dim) ->
            (batch, seq, heads * head_dim). With the fact `windows` it takes `first=`, too.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    check: str | None = None
    masks: bool = False
    windows: bool = False
    sees_all: bool = True
    keeps_scores: bool = False
    implementation: str | None = None
    fallback: str | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    joined: str | None = None


@dataclass(frozen=True)
class OperationsFacts(Facts):
    """What a model computes around its matrix products: a subclass of `lmkit.model.operations.Operations`.

    Attributes:
        check: a function of the module: `check(weight)` raises UsageError for a wrong device or dtype.
        reuses_memory: whether RoPE turns q and k in place, SwiGLU keeps its input only, and the loss writes gradients
            over the logits; see `lmkit.model.memory`.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    check: str | None = None
    reuses_memory: bool = False


@dataclass(frozen=True)
class StrategyFacts(Facts):
    """A strategy of gradient synchronisation, see `lmkit.parallel.strategy`.

    Attributes:
        uses: the keys of [parallel] that make a difference to it.
        shards: what it divides among the ranks, of "optimizer" (its state), "gradients" and "parameters".
        gathers: the blocks (or the embedding, or the head) whose weights a rank holds whole at a time, if it shards
            "parameters"; all of them if its option `reshard_after_forward` is false.
        packs: which gradients are copied into another tensor to be reduced: "", "bucket" or "all".
        rival: whether it is PyTorch's, here to be compared with.
        steps_alike: whether every step does the same, so that a CUDA graph may repeat one.
        gives_shards: whether it sets the attribute `shards` of an optimizer that takes them.
        options: name -> default (an int, float, str or bool) of its own options, the table [parallel.options].
    """

    uses: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    gathers: int = 2
    packs: str = ""
    rival: bool = False
    steps_alike: bool = True
    gives_shards: bool = False
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerFacts(Facts):
    """An optimizer: `make(groups, options) -> torch.optim.Optimizer`, `options` being the table [optimizer].

    Attributes:
        elementwise: whether every weight is updated from its own gradient and state alone, so that flat shards of
            parameters can be updated in its place. Otherwise its groups have the key "is_matrix", see
            `lmkit.optim.Muon`.
        takes_shards: whether it updates shards of whole matrices that a strategy describes, see `lmkit.optim.muon`.
        keeps_masters: whether it has the method `keep_masters` of AdamW, which `train.precision = "bf16"` needs.
        moments: float32 numbers of state for each weight, masters not counted; if it is not elementwise, for each
            weight of the blocks' matrices, and all other weights have two.
        on_host: whether state and masters lie in the host's memory, where the step is made.
        state_of: the optimizer whose state it keeps, too, and goes on with; "": none.
        options: name -> default of its own options, the table [optimizer.options].
    """

    elementwise: bool = True
    takes_shards: bool = False
    keeps_masters: bool = False
    moments: int = 2
    on_host: bool = False
    state_of: str = ""
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class ScheduleFacts(Facts):
    """A learning-rate schedule; `uses`: further keys of [optimizer], which it gets by name."""

    uses: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchFacts(Facts):
    """A benchmark: `bench(context) -> rows`, see `lmkit.bench.harness`.

    Its module defines the table `Options`, from which the recipe's [bench.NAME] and the flags of `lmkit bench NAME`
    are made. It may define `check(recipe)` and `pictures(rows)`, and declare columns (`bench.summary.summary_of`).

    Attributes:
        help: one line for `lmkit bench --help`.
        recipes: the shipped recipes that it runs without one: with CUDA, and without.
        ranks: whether it can run on several ranks ("optional"), needs them ("required"), or uses one process ("").
        folder: where its results lie below the run's name; by default `NAME`.
        stem: how the names of its files begin; by default `NAME`.
        example: a command line for its help.
        row_keys: keys that only its rows have together; `lmkit report` recognizes rows by them.
    """

    help: str = ""
    recipes: tuple[str, str] = ("", "")
    ranks: str = ""
    folder: str | None = None
    stem: str | None = None
    example: str = ""
    row_keys: tuple[str, ...] = ()

    def prefix(self, name: str) -> str:
        """Return how the names of the files of the bench of that name begin."""
        return f"{name}_" if self.stem is None else f"{self.stem}_" if self.stem else ""


@dataclass(frozen=True)
class DatasetFacts(Facts):
    """A dataset to download; `tokens`: whether it holds token files and not text."""

    tokens: bool = False


_REFERENCE = KernelFacts(1, ("scaled_dot_prod_attention",), masks=True, windows=True, keeps_scores=True)
_IN_CORE = [
    Entry("reference", "lmkit.core.attention", "reference", _REFERENCE),
    Entry("flash_torch", "lmkit.core.attention", "flash_torch", KernelFacts(order=3, windows=True)),
]
ATTENTION = Registry("ATTENTION", "attention kernel", KernelFacts, "attention", core=_IN_CORE)
OPERATIONS = Registry("OPERATIONS", "set of operations", OperationsFacts, "model")
STRATEGIES = Registry("STRATEGIES", "strategy", StrategyFacts, "parallel", "bench/rivals")
OPTIMIZERS = Registry("OPTIMIZERS", "optimizer", OptimizerFacts, "optim")
BENCHES = Registry("BENCHES", "bench", BenchFacts, "bench")
SCHEDULES = Registry(
    "SCHEDULES",
    "learning-rate schedule",
    ScheduleFacts,
    "optim",
    core=[
        Entry(name, "lmkit.core.schedule", f"{name}_lr", ScheduleFacts(uses=uses))
        for name, uses in {"cosine": (), "linear": (), "constant": (), "wsd": ("cooldown_steps",)}.items()
    ],
)
"""Functions `schedule(step, *, lr, min_lr, warmup_steps, total_steps, **uses) -> lr`; see `lmkit.core.schedule`."""
DATASETS = Registry("DATASETS", "dataset", DatasetFacts, "data")
"""Functions that return their `lmkit.data.download.Dataset`."""
REGISTRIES: tuple[Registry[Any], ...] = (
    *(ATTENTION, OPERATIONS, STRATEGIES, OPTIMIZERS, BENCHES, SCHEDULES, DATASETS),
)
