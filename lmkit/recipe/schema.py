"""The whole recipe: all tables, and the checks that concern several of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import Field, PrivateAttr

from lmkit.errors import did_you_mean
from lmkit.recipe.tables import (
    CheckpointConfig,
    CorpusConfig,
    DataConfig,
    GenerateConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    Table,
    TokenizerConfig,
    TrainConfig,
    WandbConfig,
    kernels_with_first,
)
from lmkit.recipe.values import flat
from lmkit.registry import ATTENTION, BENCHES, OPTIMIZERS, STRATEGIES


class Recipe(Table):
    """A validated recipe.

    The tables that say what to work on are None if the recipe lacks them (see `lmkit.recipe.load.required`); all
    other tables have defaults.
    """

    run: RunConfig = RunConfig()
    corpus: CorpusConfig | None = None
    tokenizer: TokenizerConfig | None = None
    data: DataConfig = DataConfig()
    model: ModelConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    generate: GenerateConfig = GenerateConfig()
    wandb: WandbConfig = WandbConfig()
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
        table: Table = BENCHES.options(name).model_validate_json(json.dumps(self.bench.get(name, {})))
        return table.changed(
            **{key: tuple(dict.fromkeys(value)) for key, value in table if isinstance(value, tuple)}
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.__dict__ == other.__dict__  # pydantic compares _origin, too


TABLES = tuple(name for name in Recipe.model_fields if name != "bench")
"""All tables but those of benches."""


def table_type(name: str) -> type[Table] | None:
    """Return the class of the table "train", or of "bench.ddp", whose file is imported; None if there is none."""
    if name.startswith("bench."):
        bench = name.removeprefix("bench.")
        return BENCHES.options(bench) if bench in BENCHES.names else None
    if name not in TABLES:
        return None
    annotation = Recipe.model_fields[name].annotation
    return next(kind for kind in (*get_args(annotation), annotation) if isinstance(kind, type))


# Each check gets the tables that are valid by themselves and yields complaints. Checks run even if other tables have
# mistakes, so that everything wrong with a recipe is reported at once.
Check = Callable[[Mapping[str, Any]], Iterator[str]]


def _half_precision_has_a_device(tables: Mapping[str, Any]) -> Iterator[str]:
    run, train = tables.get("run"), tables.get("train")
    if run and train and run.device == "cpu" and train.precision in ("fp8", "fp16"):
        needs = f'"{train.precision}" needs a GPU (run.device is "cpu")'
        yield f'train.precision: {needs}; "bf16" and "fp32" run anywhere'


def _kernel_hides_documents(tables: Mapping[str, Any]) -> Iterator[str]:
    data, model = tables.get("data"), tables.get("model")
    if data and model and data.sampling == "packed" and not ATTENTION.facts(model.attention).windows:
        why = f'attention = "{model.attention}" cannot hide documents from one another'
        yield f"data.sampling: {why}; use {kernels_with_first()}"


def _compiler_knows_no_fp8(tables: Mapping[str, Any]) -> Iterator[str]:
    train, model = tables.get("train"), tables.get("model")
    if train and model and train.precision == "fp8" and model.compile != "none":
        yield f'model.compile: "{model.compile}" does not go with train.precision = "fp8"; leave it out'


def _random_tokens_need_a_vocabulary(tables: Mapping[str, Any]) -> Iterator[str]:
    data, model = tables.get("data"), tables.get("model")
    if data and model and data.source == "random" and model.vocab_size is None:
        yield 'model.vocab_size: missing; data.source = "random" has no tokenizer that could give it'


_ANY_STRATEGY = ("strategy", "bucket_mb", "backend", "timeout_s", "options")
"""Keys of [parallel] that may be set under any strategy: `--set parallel.strategy=...` switches between them."""


def _strategy_uses_its_keys(tables: Mapping[str, Any]) -> Iterator[str]:
    if parallel := tables.get("parallel"):
        yield from strategy_mistakes(parallel)


def strategy_mistakes(parallel: ParallelConfig) -> Iterator[str]:
    """Yield complaints about keys that the strategy does not use, and about names or types in [parallel.options]."""
    strategy, facts = parallel.strategy, STRATEGIES.facts(parallel.strategy)
    for key, field in ParallelConfig.model_fields.items():
        value = getattr(parallel, key)
        if key not in (*_ANY_STRATEGY, *facts.uses) and value != field.default:
            users = ", ".join(name for name in STRATEGIES.names if key in STRATEGIES.facts(name).uses)
            yield f'parallel.{key}: "{value}" has no effect with strategy = "{strategy}"; it is for {users}'
    yield from _option_mistakes("parallel", strategy, parallel.options, facts.options)


def _optimizer_has_its_options(tables: Mapping[str, Any]) -> Iterator[str]:
    if optimizer := tables.get("optimizer"):
        known = OPTIMIZERS.facts(optimizer.name).options
        yield from _option_mistakes("optimizer", optimizer.name, optimizer.options, known)


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


def _shards_fit_the_optimizer(tables: Mapping[str, Any]) -> Iterator[str]:
    parallel, optimizer = tables.get("parallel"), tables.get("optimizer")
    if not parallel or not optimizer or "optimizer" not in STRATEGIES.facts(parallel.strategy).shards:
        return
    strategy, updates = parallel.strategy, OPTIMIZERS.facts(optimizer.name)
    if updates.on_host:
        yield f'parallel.strategy: "{strategy}" keeps shards on the GPUs, but "{optimizer.name}" all on the host'
    elif not updates.elementwise and not (STRATEGIES.facts(strategy).gives_shards and updates.takes_shards):
        yield f'parallel.strategy: "{strategy}" cuts flat shards, but "{optimizer.name}" updates whole matrices'


def _masters_have_a_keeper(tables: Mapping[str, Any]) -> Iterator[str]:
    train, optimizer = tables.get("train"), tables.get("optimizer")
    if not train or not optimizer or train.precision not in ("bf16", "fp8"):
        return
    if not OPTIMIZERS.facts(optimizer.name).keeps_masters:
        why = f'bf16 weights need float32 masters, which "{optimizer.name}" does not keep'
        yield f'train.precision: {why}; use "bf16-autocast"'


def _model_holds_the_vocabulary(tables: Mapping[str, Any]) -> Iterator[str]:
    corpus, tokenizer, data, model = map(tables.get, ("corpus", "tokenizer", "data", "model"))
    if not (corpus and tokenizer and data and model):
        return
    if tokenizer.path is not None or data.train is not None or data.source == "random":
        return  # the model is trained on the tokens of another tokenizer
    if model.vocab_size is not None and model.vocab_size < tokenizer.vocab_size:
        needed = tokenizer.vocab_size
        yield f"model.vocab_size: {model.vocab_size} is less than the tokenizer's {needed}; leave it out"


def _conversations_have_a_tokenizer(tables: Mapping[str, Any]) -> Iterator[str]:
    corpus, tokenizer = tables.get("corpus"), tables.get("tokenizer")
    if corpus and corpus.source == "chat" and tokenizer and tokenizer.path is None:
        yield 'tokenizer.path: missing; corpus.source = "chat" needs the tokenizer of the model to finetune'


CHECKS: tuple[Check, ...] = (
    _conversations_have_a_tokenizer,
    _half_precision_has_a_device,
    _kernel_hides_documents,
    _compiler_knows_no_fp8,
    _random_tokens_need_a_vocabulary,
    _strategy_uses_its_keys,
    _optimizer_has_its_options,
    _shards_fit_the_optimizer,
    _masters_have_a_keeper,
)
CHECKS_BEFORE_TOKENS: tuple[Check, ...] = (*CHECKS, _model_holds_the_vocabulary)
"""Checks of a recipe whose tokenizer is still to be trained. It may reach fewer tokens than the recipe asks for, so
the recipe that a checkpoint keeps need not pass the last check."""


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
    """Return lines such as `train.steps: 100 -> 200`, in the order of the schema.

    Args:
        old, new: recipes, or what `read_toml` returned.
        ignore: tables (`generate`) and keys (`checkpoint.resume`) that may differ.
    """
    before, after = (
        flat(tables if isinstance(tables, Mapping) else tables.model_dump(mode="json"))
        for tables in (old, new)
    )
    return tuple(
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in {**before, **after}
        if before.get(key) != after.get(key) and key not in ignore and key.split(".")[0] not in ignore
    )


def refused(changes: Iterable[str]) -> list[str]:
    """Return the lines of `differences` with which the run cannot go on."""
    return [line for line in changes if is_under(line, MUST_AGREE) and not is_under(line, MAY_CHANGE_WITHIN)]


def without_effect(changes: Iterable[str], *, step: int, steps: float) -> list[str]:
    """Return the lines of `differences` that have no effect, because the training has reached its end."""
    return [line for line in changes if step >= steps and is_under(line, NEED_STEPS)]


def keeps_state(before: str, now: str) -> bool:
    """Return whether the optimizer `now` goes on with the state of the optimizer `before`."""
    owners = {OPTIMIZERS.facts(name).state_of or name for name in (before, now)}
    return len(owners) == 1


def is_under(line: str, keys: tuple[str, ...]) -> bool:
    """Return whether a difference (`model.d_model: 64 -> 128`) is about one of these tables or keys."""
    name = line.partition(":")[0]
    return any(name == key or name.startswith(f"{key}.") for key in keys)
