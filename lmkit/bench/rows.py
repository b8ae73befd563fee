"""Rows of benches and profiles as they are read back: which bench wrote one, and whether its fields are right.

Benches write them; `lmkit report`, `lmkit compare` and a bench that goes on after running out of memory read them. A
table below lists the fields that a reader uses. Other fields are of no concern, and may be anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from lmkit.errors import LmkitError, UsageError, reason

Kind = Literal["attention", "lm-matrix", "model", "ddp", "all-reduce", "optimizer", "memory", "profile"]


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError("text", "Input should be one line of printable text")
    return text


_LARGEST = 1e18  # no measurement is larger, and sums and products of such numbers stay finite
Text = Annotated[str, AfterValidator(_one_line)]
Count = Annotated[int, Field(ge=0, lt=int(_LARGEST))]
PositiveCount = Annotated[int, Field(gt=0, lt=int(_LARGEST))]
Number = Annotated[float, Field(gt=-_LARGEST, lt=_LARGEST)]
NonNegative = Annotated[float, Field(ge=0, lt=_LARGEST)]
Positive = Annotated[float, Field(gt=0, lt=_LARGEST)]


class Part(BaseModel):
    """An object inside a row."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Row(Part):
    """Any row: raw samples are times."""

    samples_ms: list[Positive] | None = None
    samples_s: list[Positive] | None = None

    def needs(self) -> tuple[str, ...]:
        """Fields that may be null in other rows, but not in this one."""
        return ()


class AttentionRow(Row):
    kernel: Text
    direction: Text
    num_queries: PositiveCount
    num_keys: PositiveCount
    head_dim: PositiveCount
    batch: PositiveCount
    heads: PositiveCount
    kv_heads: PositiveCount
    causal: bool
    dtype: Text
    layout: Text
    status: Text
    set: Text | None = None
    data: Text = "normal"
    detail: str | None = None
    first_call_s: NonNegative | None = None
    median_ms: Positive | None = None
    tflops: NonNegative | None = None
    share_of_matmul: NonNegative | None = None
    versus_sdpa: Positive | None = None


class LmMatrixRow(Row):
    kernel: Text
    strategy: Text
    ranks: PositiveCount
    status: Text
    detail: str | None = None
    median_ms: Positive | None = None
    tokens_per_s: Positive | None = None
    mfu: NonNegative | None = None
    mfu_basis: Text | None = None
    peak_gb: Number | None = None  # on a CPU, what a process holds may shrink
    speedup: Positive | None = None
    spread: NonNegative | None = None
    losses: Annotated[list[Positive], Field(min_length=1)] | None = None
    first_loss: Number | None = None
    final_loss: Number | None = None

    def needs(self) -> tuple[str, ...]:
        measured = ("median_ms", "tokens_per_s", "mfu", "peak_gb", "samples_ms", "losses")
        return (*measured, "first_loss", "final_loss") if self.status == "ok" else ()


class ModelRow(Row):
    part: Text
    size: Text
    length: PositiveCount
    mode: Text
    precision: Text
    compile: Text
    status: Text
    detail: str | None = None
    warmup: Count | None = None
    median_ms: Positive | None = None
    mean_ms: Positive | None = None
    std_ms: NonNegative | None = None
    first_ms: Positive | None = None
    tokens_per_s: Positive | None = None
    mfu: NonNegative | None = None
    mfu_basis: Text | None = None
    repeats: PositiveCount | None = None
    peak_gb: Number | None = None  # on a CPU, what a process holds may shrink
    optimizer_floor_ms: NonNegative | None = None
    versus_fp32: Positive | None = None
    versus_fp32_verdict: Text | None = None

    def needs(self) -> tuple[str, ...]:
        if self.part != "model":
            return ("warmup", "median_ms") if self.mean_ms else ("warmup",)
        needed = ["median_ms"] if self.status == "ok" else []
        if self.median_ms:
            needed += ["tokens_per_s", "mfu", "mfu_basis", "repeats"]
            needed += ["optimizer_floor_ms"] if self.mode == "step" else []
        return (*needed, "versus_fp32_verdict") if self.versus_fp32 else tuple(needed)


class StepRow(Row):
    """A contender's training step on several ranks."""

    contender: Text
    case: Text
    world_size: PositiveCount
    part: Text | None = None
    status: Text | None = None
    step_ms: Positive | None = None
    p10_ms: Positive | None = None
    p90_ms: Positive | None = None
    spread: NonNegative | None = None
    tokens_per_s: Positive | None = None
    mfu: NonNegative | None = None
    scaling: Positive | None = None
    scaling_low: Number | None = None
    scaling_high: Number | None = None
    exposed_ms: Number | None = None
    communication_alone_ms: NonNegative | None = None
    host_ms: NonNegative | None = None
    ahead_ms: NonNegative | None = None
    calls_per_step: Count | None = None
    link_bytes: NonNegative | None = None
    expected_link_bytes: NonNegative | None = None
    link_mb: NonNegative | None = None
    expected_mb: NonNegative | None = None
    peak_bytes: NonNegative | None = None
    peak_overhead: Number | None = None

    def needs(self) -> tuple[str, ...]:
        return (
            *(("p10_ms", "p90_ms") if self.step_ms else ()),
            *(("scaling_low", "scaling_high") if self.scaling else ()),
            *(("link_bytes",) if self.communication_alone_ms else ()),
        )


class DdpRow(StepRow):
    def needs(self) -> tuple[str, ...]:
        return (*super().needs(), *(("calls_per_step",) if self.step_ms else ()))


class AllReduceRow(Row):
    operation: Text
    dtype: Text
    world_size: PositiveCount
    bytes: PositiveCount
    median_us: Positive
    bus_gb_per_s: NonNegative


class OptimizerRow(StepRow):
    state_bytes: NonNegative
    state_share: NonNegative | None = None
    state_mb: NonNegative | None = None
    init_mb: NonNegative | None = None
    before_mb: NonNegative | None = None
    after_mb: NonNegative | None = None


class MemoryRow(Row):
    phase: Text
    peak_gib: NonNegative
    parameters_gib: NonNegative
    gradients_gib: NonNegative
    optimizer_state_gib: NonNegative
    activations_gib: NonNegative
    temporary_gib: NonNegative
    context_length: PositiveCount | None = None
    batch_size: PositiveCount | None = None
    model: Text | None = None
    mode: Text | None = Field(default=None, alias="pass")
    dtype: Text | None = None
    attention: Text | None = None

    def needs(self) -> tuple[str, ...]:
        return ("batch_size", "model", "mode", "dtype", "attention") if self.context_length else ()


class ProfileRange(Part):
    name: Text
    instances: Count
    gpu_ms: NonNegative | None
    wall_ms: NonNegative | None = None
    dispatch_ms: NonNegative | None = None
    dispatch_share: NonNegative | None = None
    wait_ms: NonNegative | None = None
    launches: NonNegative | None = None


class ProfileKernel(Part):
    name: Text
    calls: Count
    total_ms: NonNegative
    share: NonNegative


class ProfileSummary(Row):
    engine: Text
    window: Text
    window_ms: NonNegative
    steps: Count
    undisturbed_ms: NonNegative | None
    undisturbed_gpu_share: NonNegative | None
    launches_per_forward: NonNegative | None
    launches_per_step: NonNegative | None
    gpu_busy_share: NonNegative | None
    dispatch_share: NonNegative | None
    wait_share: NonNegative | None
    communication_ms: NonNegative | None
    communication_overlap_share: NonNegative | None = None
    ranges: list[ProfileRange]
    top_kernels: list[ProfileKernel]
    warnings: list[Text]

    def needs(self) -> tuple[str, ...]:
        return (
            *(("wait_share",) if None not in (self.gpu_busy_share, self.dispatch_share) else ()),
            *(("undisturbed_ms",) if self.undisturbed_gpu_share is not None else ()),
            *(("communication_overlap_share",) if self.communication_ms else ()),
        )


class Named(Part):
    name: Text


class Environment(Row):
    """`environment.json`, as far as write-ups tell of it."""

    gpus: list[Named] = []
    cpu: Named = Named(name="")
    packages: dict[str, Text | None] = {}
    time_utc: Text | None = None


# A row is recognised by the fields that only its bench writes; the first match counts.
_KINDS: dict[Kind, tuple[frozenset[str], type[Row]]] = {
    "attention": (frozenset({"kernel", "direction", "num_queries", "num_keys"}), AttentionRow),
    "lm-matrix": (frozenset({"kernel", "strategy", "ranks"}), LmMatrixRow),
    "model": (frozenset({"size", "mode", "precision", "length"}), ModelRow),
    "all-reduce": (frozenset({"operation", "bytes", "bus_gb_per_s"}), AllReduceRow),
    "optimizer": (frozenset({"contender", "state_bytes"}), OptimizerRow),
    "ddp": (frozenset({"contender", "case", "world_size"}), DdpRow),
    "memory": (frozenset({"phase", "peak_gib"}), MemoryRow),
    "profile": (frozenset({"engine", "window", "ranges", "top_kernels"}), ProfileSummary),
}
# Of two trainings of a matrix these are compared number by number.
_AS_LONG = ("samples_ms", "losses")
_LINES = "results of a bench are JSON lines"
_AGAIN = "run the command that wrote it again"


def kind_of(row: dict[str, Any]) -> Kind | None:
    """Which bench or profile wrote the row; None: none of those that have a write-up."""
    return next((kind for kind, (fields, _) in _KINDS.items() if fields <= row.keys()), None)


def read_rows(file: Path, *, complete: bool = True) -> list[dict[str, Any]]:
    """The JSON objects of a file of JSON lines, those of a known kind with the fields that they should have.

    Args:
        complete: whether all that a write-up needs must be there. Versions add fields: what is not needed may be
            missing from the rows of an older one.

    Raises:
        UsageError: it cannot be read.
        LmkitError: a line is something else, or has a field that is something else (the message says which).
    """
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"{file}: {reason(error)}", hint="check the path") from None
    except UnicodeDecodeError:
        raise LmkitError(f"{file}: not UTF-8 text", hint=_LINES) from None
    rows: list[dict[str, Any]] = []
    trained: dict[str, Any] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = _parse(line)
        except (ValueError, RecursionError) as error:
            raise LmkitError(f"{file}: line {number} is not a JSON object ({error})", hint=_LINES) from None
        where = f"{file}: line {number}"
        _check(row, where, complete=complete)
        if complete and kind_of(row) == "lm-matrix" and row["status"] == "ok":
            trained = trained or row
            for key in _AS_LONG:
                if len(row[key]) != len(trained[key]):
                    raise LmkitError(
                        f"{where}: {key}: {len(row[key])} numbers, and {len(trained[key])} in a line before",
                        hint=_AGAIN,
                    )
        rows.append(row)
    return rows


def read_summary(file: Path) -> dict[str, Any]:
    """The content of a `profile_summary.json`.

    Raises:
        LmkitError: it is something else (the message says which field).
    """
    content = _read_object(file)
    _check(content, str(file), complete=True)
    return content


def read_environment(file: Path) -> dict[str, Any]:
    """The content of an `environment.json`.

    Raises:
        LmkitError: it is something else (the message says which field).
    """
    content = _read_object(file)
    _validate(Environment, content, str(file), complete=True)
    return content


def _check(row: dict[str, Any], where: str, *, complete: bool) -> None:
    kind = kind_of(row)
    _validate(_KINDS[kind][1] if kind else Row, row, where, complete=complete)


def _validate(table: type[Row], row: dict[str, Any], where: str, *, complete: bool) -> None:
    try:
        found = table.model_validate(row)
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_input=False)
        first = next((entry for entry in mistakes if complete or entry["type"] != "missing"), None)
        if first is not None:
            key, said = ".".join(map(str, first["loc"])), first["msg"]
            raise LmkitError(f"{where}: {key}: {said[:1].lower()}{said[1:]}", hint=_AGAIN) from None
        return
    for name in found.needs() if complete else ():
        if getattr(found, name) is None:
            key = table.model_fields[name].alias or name
            raise LmkitError(f"{where}: {key}: missing or null, though the rest needs it", hint=_AGAIN)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return _parse(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LmkitError(f"{path}: not a JSON object ({error})", hint=_AGAIN) from None


def _parse(text: str) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("it is something else")
    json.dumps(content, ensure_ascii=False).encode()  # refuses halves of characters, which no file could hold
    return content
