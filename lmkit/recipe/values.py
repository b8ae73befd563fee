"""What the tables of a recipe are made of: their base class, and types of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from lmkit.errors import did_you_mean
from lmkit.registry import ATTENTION, DATASETS, OPERATIONS, OPTIMIZERS, SCHEDULES, STRATEGIES, Registry
from lmkit.storage.inputs import in_home

T = TypeVar("T", bound="Table")


def _plain(value: Any) -> Any:
    """Return a number of NumPy as Python's; also those in tuples and tables."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


class Table(BaseModel):
    """A TOML table. Refuses unknown keys, wrong types (`true` or `"12"` for an integer), inf and nan.

    In Python, numbers of NumPy count as Python's.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        super().__init__(**_plain(values))

    # Not called for JSON, whose arrays would then be lists, which are no tuples.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def changed(self: T, **values: Any) -> T:
        """Return a copy with other values, which are not validated: `recipe.changed(train={"steps": 3})`."""
        values = _plain(values)
        for key, value in values.items():
            if isinstance(value, dict) and isinstance(table := getattr(self, key), Table):
                values[key] = table.changed(**value)
        return self.model_copy(update=values)

    @field_validator("*")
    @classmethod
    def _names_files(cls, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cls._names_files, value))
        return in_home(value) if isinstance(value, Path) else value


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted keys with their values."""
    keys: dict[str, Any] = {}
    for key, value in tables.items():
        keys |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return keys


class UnregisteredName(ValueError):
    """A name that nothing registered: a typing error, or a plugin is missing."""


@dataclass(frozen=True)
class RegisteredName:
    """Validate a name of a registry, or one of `also`; an alias becomes the name.

    With `with_variant`, `name:variant` and `name+compile` are accepted, and unknown names are left to the bench.
    """

    registry: Registry[Any]
    also: tuple[str, ...] = ()
    with_variant: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.also, *self.registry.names)

    def __call__(self, value: str) -> str:
        if self.with_variant:
            name, plus, variant = value.partition("+")
            return self.registry.aliases.get(name, name) + plus + variant
        if value in self.also or value in self.registry.names:
            return value
        if value not in self.registry.aliases:
            known = ", ".join(self.names) + did_you_mean(value, self.names)
            raise UnregisteredName(f'"{value}" is not one of {known}, and no --plugin FILE registers it')
        return self.registry.aliases[value]


AttentionName = Annotated[str, AfterValidator(RegisteredName(ATTENTION))]
AttentionVariant = Annotated[str, AfterValidator(RegisteredName(ATTENTION, with_variant=True))]
CorpusSource = Annotated[str, AfterValidator(RegisteredName(DATASETS, also=("synth", "files", "chat")))]
OperationsName = Annotated[str, AfterValidator(RegisteredName(OPERATIONS, also=("auto",)))]
OptimizerName = Annotated[str, AfterValidator(RegisteredName(OPTIMIZERS))]
ScheduleName = Annotated[str, AfterValidator(RegisteredName(SCHEDULES))]
StrategyName = Annotated[str, AfterValidator(RegisteredName(STRATEGIES))]
StrategyVariant = Annotated[str, AfterValidator(RegisteredName(STRATEGIES, with_variant=True))]
_LARGEST = 1_000_000_000  # the product of two counts, in bytes of int64, has 63 bits
PositiveInt = Annotated[int, Field(gt=0, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
LARGEST_INT64 = (1 << 63) - 1
Int64 = Annotated[int, Field(ge=0, le=LARGEST_INT64)]
"""A seed, or a number of tokens."""


def _paths(value: Any) -> Any:
    """Refuse in one message what is neither a path nor an array of paths."""
    items = value if isinstance(value, list | tuple) else [value]
    if not items or not all(isinstance(item, str | Path) for item in items):
        raise ValueError("must be a path, or an array of paths")
    return tuple(value) if isinstance(value, list) else value  # pydantic takes no list for a tuple


Paths = Annotated[Path | tuple[Path, ...], BeforeValidator(_paths)]
"""One file or glob, or several."""
# Other floats are 0 or infinite in float32, or become so in a product.
PositiveFloat = Annotated[float, Field(ge=1e-30, le=1e30)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e30)]
Workers = Annotated[int, Field(ge=0, le=1024)]
"""A number of worker threads or processes; 0 means one per usable CPU."""
