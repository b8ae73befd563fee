"""The whole recipe: every table, and the checks that concern several of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from lmkit.errors import UsageError
from lmkit.recipe.bench import BenchConfig
from lmkit.recipe.checkpoint import CheckpointConfig
from lmkit.recipe.corpus import CorpusConfig
from lmkit.recipe.data import DataConfig
from lmkit.recipe.generate import GenerateConfig
from lmkit.recipe.model import ModelConfig
from lmkit.recipe.optimizer import OptimizerConfig
from lmkit.recipe.parallel import ParallelConfig
from lmkit.recipe.run import RunConfig
from lmkit.recipe.shipped import shipped_with
from lmkit.recipe.table import Table
from lmkit.recipe.tokenizer import TokenizerConfig
from lmkit.recipe.train import TrainConfig
from lmkit.recipe.wandb import WandbConfig
from lmkit.registry import STRATEGIES

T = TypeVar("T")


class Recipe(Table):
    """A validated recipe. Tables that say what to work on are `None` when absent (see `required`); tables that
    say how have defaults for everything."""

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
    bench: BenchConfig = BenchConfig()


TABLES: dict[str, type[Table]] = {
    "run": RunConfig,
    "corpus": CorpusConfig,
    "tokenizer": TokenizerConfig,
    "data": DataConfig,
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "parallel": ParallelConfig,
    "checkpoint": CheckpointConfig,
    "generate": GenerateConfig,
    "wandb": WandbConfig,
    "bench": BenchConfig,
}


def table_type(parent: type[Table], key: str) -> type[Table] | None:
    """The schema of the table `key` in `parent`, or None where there is no such key or it is a value."""
    field = parent.model_fields.get(key)
    if field is None:
        return None
    options = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in options if isinstance(kind, type) and issubclass(kind, Table)), None)


def required(table: T | None, name: str, *, command: str) -> T:
    """Return the table, or refuse: `command` cannot work without it."""
    if table is None:
        raise UsageError(
            f"the recipe has no [{name}] table, which `lmkit {command}` needs",
            hint=f"add [{name}], or take a shipped recipe that has it: {', '.join(shipped_with(name))}",
        )
    return table


# Each check sees the tables that are valid by themselves and returns one complaint or None. They run even when
# other tables have mistakes, so that everything wrong with a recipe is reported in one go.
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
    return 'model.vocab_size: data.source = "random" has no tokenizer to take it from; say how many'


def _zero1_alone_has_bf16_weights(tables: Mapping[str, Any]) -> str | None:
    parallel = tables.get("parallel")
    if parallel is None or parallel.weights == "fp32" or parallel.strategy == "zero1":
        return None
    return f'parallel.weights: "bf16" needs strategy = "zero1", not "{parallel.strategy}"'


def _wire_dtype_has_a_strategy(tables: Mapping[str, Any]) -> str | None:
    parallel = tables.get("parallel")
    if (
        parallel is None
        or parallel.wire_dtype == "fp32"
        or "wire_dtype" in STRATEGIES.facts(parallel.strategy).uses
    ):
        return None
    known = ", ".join(name for name in STRATEGIES.names if "wire_dtype" in STRATEGIES.facts(name).uses)
    return f'parallel.wire_dtype: "{parallel.strategy}" sends gradients as they are; "bf16" is for {known}'


def _model_holds_the_vocabulary(tables: Mapping[str, Any]) -> str | None:
    names = ("corpus", "tokenizer", "data", "model")
    corpus, tokenizer, data, model = (tables.get(name) for name in names)
    if corpus is None or tokenizer is None or data is None or model is None:
        return None
    if (
        tokenizer.path is not None or data.train is not None or data.source == "random"
    ):  # trained on other tokens
        return None
    if model.vocab_size is None or model.vocab_size >= tokenizer.vocab_size:
        return None
    return f"model.vocab_size: {model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size}; leave it out"


CHECKS_BEFORE_TOKENS: tuple[Check, ...] = (_model_holds_the_vocabulary,)
"""Of what is still to be made: a recipe that a checkpoint keeps may not agree with them, and was right."""

CHECKS: tuple[Check, ...] = (
    _half_precision_has_a_device,
    _random_tokens_need_a_vocabulary,
    _zero1_alone_has_bf16_weights,
    _wire_dtype_has_a_strategy,
)
