"""`[parallel]`: how gradients are synchronised between ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lmkit.recipe.table import PositiveFloat, StrategyName, Table


class ParallelConfig(Table):
    strategy: StrategyName = "bucketed"
    """With one rank every strategy is `none`."""
    bucket_mb: PositiveFloat = 50.0
    """Bucket size in MiB (`bucketed`, `torch_ddp`, `zero1`)."""
    wire_dtype: Literal["fp32", "bf16"] = "fp32"
    """As what fp32 gradients travel between ranks (`flat`, `bucketed`, `torch_ddp`, `zero1` with fp32 weights)."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """`zero1`: fp32 weights, or bf16 weights with fp32 master copies in the shards."""
    gather: Literal["auto", "collective"] = "auto"
    """`zero1`: weights are read from the other GPUs' memory where these reach one another, or by the backend."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: nccl on GPUs, gloo on CPUs."""
    timeout_s: Annotated[float, Field(gt=0, le=1e8)] = 600.0
    """A rank that does not answer for this long ends the job."""
