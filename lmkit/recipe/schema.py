"""The whole recipe: all tables, and the checks that concern several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from pydantic import Field, SerializeAsAny

from lmkit.errors import did_you_mean
from lmkit.recipe.bench import BenchConfig, bench_config
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
)
from lmkit.registry import OPTIMIZERS, STRATEGIES


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
    bench: SerializeAsAny[BenchConfig] = Field(default_factory=lambda: bench_config()())


def table_type(parent: type[Table], key: str) -> type[Table] | None:
    """Return the class of the table `key` in `parent`; None if there is no such key or it is a value."""
    field = parent.model_fields.get(key)
    if field is None:
        return None
    options = get_args(field.annotation) or (field.annotation,)
    kind = next((kind for kind in options if isinstance(kind, type) and issubclass(kind, Table)), None)
    return bench_config() if kind is BenchConfig else kind


TABLES = tuple(Recipe.model_fields)


# Each check gets the tables that are valid by themselves and returns a complaint or None. Checks run even if other
# tables have mistakes, so that everything wrong with a recipe is reported at once.
Check = Callable[[Mapping[str, Any]], "str | None"]


def _half_precision_has_a_device(tables: Mapping[str, Any]) -> str | None:
    run, train = tables.get("run"), tables.get("train")
    if run is None or train is None or not (run.device == "cpu" and train.precision == "fp16"):
        return None
    return 'train.precision: "fp16" needs a GPU (run.device is "cpu"); "bf16" and "fp32" run anywhere'


def _random_tokens_need_a_vocabulary(tables: Mapping[str, Any]) -> str | None:
    data, model = tables.get("data"), tables.get("model")
    if data is None or model is None or data.source != "random" or model.vocab_size is not None:
        return None
    return 'model.vocab_size: missing; data.source = "random" has no tokenizer that could give it'


_ANY_STRATEGY = ("strategy", "bucket_mb", "backend", "timeout_s", "options")
"""Keys of [parallel] that may be set under any strategy: `--set parallel.strategy=...` switches between them."""


def _strategy_uses_its_keys(tables: Mapping[str, Any]) -> str | None:
    parallel = tables.get("parallel")
    return None if parallel is None else "; ".join(strategy_mistakes(parallel)) or None


def strategy_mistakes(parallel: ParallelConfig) -> Iterator[str]:
    """Yield complaints about keys that the strategy does not use, and about names or types in [parallel.options]."""
    strategy, facts = parallel.strategy, STRATEGIES.facts(parallel.strategy)
    for key, field in ParallelConfig.model_fields.items():
        value = getattr(parallel, key)
        if key not in (*_ANY_STRATEGY, *facts.uses) and value != field.default:
            users = ", ".join(name for name in STRATEGIES.names if key in STRATEGIES.facts(name).uses)
            yield f'parallel.{key}: "{value}" has no effect with strategy = "{strategy}"; it is for {users}'
    for name, value in parallel.options.items():
        if name not in facts.options:
            has = f"its options are {', '.join(facts.options)}" if facts.options else "it has none"
            near = did_you_mean(name, facts.options)
            yield f'parallel.options.{name}: strategy = "{strategy}" has no such option{near}; {has}'
            continue
        wanted = type(facts.options[name])
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            yield f"parallel.options.{name}: {strategy} expects {wanted.__name__}, not {value!r}"


def _shards_fit_the_optimizer(tables: Mapping[str, Any]) -> str | None:
    parallel, optimizer = tables.get("parallel"), tables.get("optimizer")
    if parallel is None or optimizer is None or OPTIMIZERS.facts(optimizer.name).elementwise:
        return None
    if "optimizer" not in STRATEGIES.facts(parallel.strategy).shards:
        return None
    return f'parallel.strategy: "{parallel.strategy}" cuts flat shards, but "{optimizer.name}" updates whole matrices'


def _model_holds_the_vocabulary(tables: Mapping[str, Any]) -> str | None:
    names = ("corpus", "tokenizer", "data", "model")
    corpus, tokenizer, data, model = (tables.get(name) for name in names)
    if corpus is None or tokenizer is None or data is None or model is None:
        return None
    # The model is trained on the tokens of another tokenizer.
    if tokenizer.path is not None or data.train is not None or data.source == "random":
        return None
    if model.vocab_size is None or model.vocab_size >= tokenizer.vocab_size:
        return None
    return f"model.vocab_size: {model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size}; leave it out"


CHECKS: tuple[Check, ...] = (
    _half_precision_has_a_device,
    _random_tokens_need_a_vocabulary,
    _strategy_uses_its_keys,
    _shards_fit_the_optimizer,
)
CHECKS_BEFORE_TOKENS: tuple[Check, ...] = (*CHECKS, _model_holds_the_vocabulary)
"""Checks of a recipe whose tokenizer is still to be trained. It may reach fewer tokens than the recipe asks for, so
the recipe that a checkpoint keeps need not pass the last check."""
