"""What every recipe table has in common: frozen, strict, closed."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Table(BaseModel):
    """A TOML table. Unknown keys, wrong types (`true` or `"12"` for an integer), inf and nan are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


_LARGEST = (1 << 63) - 1  # of TOML's integers
PositiveInt = Annotated[int, Field(gt=0, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Workers = Annotated[int, Field(ge=0, le=1024)]
"""A number of worker threads or processes; 0 means one per usable CPU."""
