"""The whole recipe: all tables, and the checks that concern several of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import Field, PrivateAttr

from lmkit.errors import did_you_mean
from lmkit.recipe import tables as t
from lmkit.recipe.tables import ParallelConfig, Table, kernels_with_first
from lmkit.recipe.values import flat
from lmkit.registry import ATTENTION, BENCHES, OPTIMIZERS, STRATEGIES


class Recipe(Table):
    """A validated recipe.

    The tables that say what to work on are None if the recipe lacks them (see `lmkit.recipe.load.required`); all
    other tables have defaults.
    """

    run: t.RunConfig = t.RunConfig()
    corpus: t.CorpusConfig | None = None
    tokenizer: t.TokenizerConfig | None = None
    data: t.DataConfig = t.DataConfig()
    model: t.ModelConfig | None = None
    optimizer: t.OptimizerConfig = t.OptimizerConfig()
    train: t.TrainConfig | None = None
    parallel: t.ParallelConfig = t.ParallelConfig()
    checkpoint: t.CheckpointConfig = t.CheckpointConfig()
    generate: t.GenerateConfig = t.GenerateConfig()
    wandb: t.WandbConfig = t.WandbConfig()
    bench: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """name -> [bench.NAME], which is not validated before `bench_table` or `load_recipe(benches=True)`."""
    _origin: str = PrivateAttr("the recipe")
    _source: str = PrivateAttr("RECIPE")

    @property
    def origin(self) -> str:
        """Where its values come from, for errors: "quickstart and the command line"."""
        return self._origin

    @property
    def source(self) -> str:
        """The name or file to give to a command, for hints."""
        return self._source

    def bench_table(self, name: str) -> Any:
        """Return [bench.NAME] as the bench's `Options`, each item of its arrays once; imports the bench."""
        kind: type[Table] = BENCHES.function_of(name, "Options")
        table = kind.model_validate_json(json.dumps(self.bench.get(name, {})))
        return table.changed(**{k: tuple(dict.fromkeys(v)) for k, v in table if isinstance(v, tuple)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.__dict__ == other.__dict__  # pydantic compares _origin, too


TABLES = tuple(name for name in Recipe.model_fields if name != "bench")
"""All tables but those of benches."""


def table_type(name: str) -> type[Table] | None:
    """Return the class of the table "train", or of "bench.ddp", whose file is imported; None if there is none."""
    if name.startswith("bench."):
        bench = name.removeprefix("bench.")
        return BENCHES.function_of(bench, "Options") if bench in BENCHES.names else None
    if name not in TABLES:
        return None
    annotation = Recipe.model_fields[name].annotation
    kinds = get_args(annotation) or (annotation,)  # `TrainConfig | None`, or the class
    kind: type[Table] = kinds[0]
    return kind


def conflicts(tables: Mapping[str, Any], *, resolved: bool) -> Iterator[str]:
    """Yield complaints about tables that do not go together, so that everything wrong is reported at once.

    Args:
        tables: those that are valid by themselves.
        resolved: the tokenizer has been trained; it may have reached fewer tokens than the recipe asks for.
    """
    run, corpus, tokenizer, data = map(tables.get, ("run", "corpus", "tokenizer", "data"))
    model, optimizer, train, parallel = map(tables.get, ("model", "optimizer", "train", "parallel"))
    precision = train.precision if train else "fp32"
    if corpus and corpus.source == "chat" and tokenizer and tokenizer.path is None:
        yield 'tokenizer.path: missing; corpus.source = "chat" needs the tokenizer of the model to finetune'
    if run and run.device == "cpu" and precision in ("fp8", "fp16"):
        needs = f'"{precision}" needs a GPU (run.device is "cpu")'
        yield f'train.precision: {needs}; "bf16" and "fp32" run anywhere'
    if data and model and data.sampling == "packed" and not ATTENTION.facts(model.attention).windows:
        why = f'attention = "{model.attention}" cannot hide documents from one another'
        yield f"data.sampling: {why}; use {kernels_with_first()}"
    if model and precision == "fp8" and model.compile != "none":
        yield f'model.compile: "{model.compile}" does not go with train.precision = "fp8"; leave it out'
    if data and model and data.source == "random" and model.vocab_size is None:
        yield 'model.vocab_size: missing; data.source = "random" has no tokenizer that could give it'
    if parallel:
        yield from strategy_mistakes(parallel)
    if optimizer:
        updates = OPTIMIZERS.facts(optimizer.name)
        yield from _option_mistakes("optimizer", optimizer.name, optimizer.options, updates.options)
        if parallel and "optimizer" in (shards := STRATEGIES.facts(parallel.strategy)).shards:
            strategy = f'parallel.strategy: "{parallel.strategy}"'
            if updates.on_host:
                yield f'{strategy} keeps shards on the GPUs, but "{optimizer.name}" all on the host'
            elif not updates.elementwise and not (shards.gives_shards and updates.takes_shards):
                yield f'{strategy} cuts flat shards, but "{optimizer.name}" updates whole matrices'
        if precision in ("bf16", "fp8") and not updates.keeps_masters:
            why = f'bf16 weights need float32 masters, which "{optimizer.name}" does not keep'
            yield f'train.precision: {why}; use "bf16-autocast"'
    # Unless the model is trained on the tokens of another tokenizer.
    if corpus and tokenizer and data and model and tokenizer.path is None and data.is_made:
        size, needed = model.vocab_size, tokenizer.vocab_size
        if not resolved and data.source != "random" and size is not None and size < needed:
            yield f"model.vocab_size: {size} is less than the tokenizer's {needed}; leave it out"


_ANY_STRATEGY = ("strategy", "bucket_mb", "backend", "timeout_s", "options")
"""Keys of [parallel] that may be set under any strategy: `--set parallel.strategy=...` switches between them."""


def strategy_mistakes(parallel: ParallelConfig) -> Iterator[str]:
    """Yield complaints about keys that the strategy does not use, and about names or types in [parallel.options]."""
    strategy, facts = parallel.strategy, STRATEGIES.facts(parallel.strategy)
    for key, field in ParallelConfig.model_fields.items():
        value = getattr(parallel, key)
        if key not in (*_ANY_STRATEGY, *facts.uses) and value != field.default:
            users = ", ".join(name for name in STRATEGIES.names if key in STRATEGIES.facts(name).uses)
            yield f'parallel.{key}: "{value}" has no effect with strategy = "{strategy}"; it is for {users}'
    yield from _option_mistakes("parallel", strategy, parallel.options, facts.options)


def _option_mistakes(
    table: str, owner: str, given: Mapping[str, Any], known: Mapping[str, Any]
) -> Iterator[str]:
    """Yield complaints about names or types in [TABLE.options] of a registered object."""
    for name, value in given.items():
        if name not in known:
            has = f"its options are {', '.join(known)}" if known else "it has none"
            yield f'{table}.options.{name}: "{owner}" has no such option{did_you_mean(name, known)}; {has}'
            continue
        wanted = type(known[name])
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            yield f"{table}.options.{name}: {owner} expects {wanted.__name__}, not {value!r}"


MUST_AGREE = ("run.seed", "model", "data.source", "data.sampling", "train.batch_size", "train.precision")
"""Keys that a resumed run may not change: the weights would not fit, or the steps would not continue the run.
Everything else may change (learning rate, steps, intervals, ranks) and is reported. The other keys of [data] say
where files lie; files are compared by content."""

MAY_CHANGE_WITHIN = (
    *("model.preset", "model.attention", "model.operations", "model.compile"),
    *("model.activation_checkpointing", "model.activation_gb"),
)
"""Exceptions to `MUST_AGREE`: other ways to compute the same function."""

NEED_STEPS = ("optimizer", "train.grad_clip", "train.accumulation")
"""Keys that may change, but have an effect on further steps only."""


def differences(
    old: Recipe | Mapping[str, Any], new: Recipe | Mapping[str, Any], *, ignore: Collection[str] = ()
) -> tuple[str, ...]:
    """Return lines such as `train.steps: 100 -> 200`, in the order of the schema."""
    dumps = (it if isinstance(it, Mapping) else it.model_dump(mode="json") for it in (old, new))
    before, after = map(flat, dumps)
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    counted = [key for key in changed if key not in ignore and key.split(".")[0] not in ignore]
    return tuple(f"{key}: {before.get(key)} -> {after.get(key)}" for key in counted)


def refused(changes: Iterable[str]) -> list[str]:
    """Return the lines of `differences` with which the run cannot go on."""
    return [line for line in changes if is_under(line, MUST_AGREE) and not is_under(line, MAY_CHANGE_WITHIN)]


def keeps_state(before: str, now: str) -> bool:
    """Return whether the optimizer `now` goes on with the state of the optimizer `before`."""
    owners = {OPTIMIZERS.facts(name).state_of or name for name in (before, now)}
    return len(owners) == 1


def is_under(line: str, keys: tuple[str, ...]) -> bool:
    """Return whether a difference (`model.d_model: 64 -> 128`) is about one of these tables or keys."""
    name = line.partition(":")[0]
    return any(name == key or name.startswith(f"{key}.") for key in keys)
