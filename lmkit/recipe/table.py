"""What every recipe table has in common: frozen, strict, closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lmkit.errors import did_you_mean
from lmkit.registry import ATTENTION, STRATEGIES, Registry


class Table(BaseModel):
    """A TOML table. Unknown keys, wrong types (`true` or `"12"` for an integer), inf and nan are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class RegisteredName:
    """Accepts the names of a registry and their aliases; the value is the name."""

    registry: Registry[Any]

    def __call__(self, value: str) -> str:
        name = self.registry.aliases.get(value, value)
        if name not in self.registry.names:
            known = ", ".join(self.registry.names)
            raise ValueError(f'"{value}" is not one of {known}{did_you_mean(value, self.registry.names)}')
        return name


AttentionName = Annotated[str, AfterValidator(RegisteredName(ATTENTION))]
StrategyName = Annotated[str, AfterValidator(RegisteredName(STRATEGIES))]
_LARGEST = (1 << 63) - 1  # of TOML's integers
PositiveInt = Annotated[int, Field(gt=0, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Workers = Annotated[int, Field(ge=0, le=1024)]
"""A number of worker threads or processes; 0 means one per usable CPU."""
