"""Attention kernels against their targets on a Hopper GPU, in about four minutes.

    nox -s acceptance
    pytest tests/acceptance/test_attention.py -s

prints a table of target, measured figure and verdict, and writes the rows, the tables and a picture into the folder
that LMKIT_ACCEPTANCE names (default: artifacts/acceptance). The tests of the targets themselves need no GPU.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from lmkit.attention import attention_function
from lmkit.bench.attention import Case, Options, Sweep
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import measure_limits
from lmkit.measure.plots import line_panels
from lmkit.measure.statistics import spread
from lmkit.measure.tables import Column, markdown_table, row_files, terminal_table

DATA = get_args(Options.model_fields["data"].annotation)
Row = dict[str, Any]
Rows = Sequence[Row]

OURS, DETERMINISTIC, CUDNN, FLASH = (
    "flash_triton",
    "flash_triton:deterministic",
    "sdpa:cudnn",
    "sdpa:flash",
)
BARE = "bare Function"
_FIRST_CALLS = ("first call", "core", "head_dim", "float16")
OUTPUT = ("error_out",)
GRADIENTS = ("error_dq", "error_dk", "error_dv")


@dataclass(frozen=True)
class Target:
    """A target and a goal.

    Attributes:
        measured: the figure that the rows support, always the worst of the cases it covers; None: no row.
        at_most: smaller is better.
    """

    name: str
    must: float
    aim: float | None
    measured: Callable[[Rows], float | None]
    unit: str = "x"
    at_most: bool = False

    def verdict(self, figure: float | None) -> str:
        """ "aim", "met", "missed" or "not measured"."""
        if figure is None:
            return "not measured"
        sign = -1.0 if self.at_most else 1.0
        if self.aim is not None and sign * figure >= sign * self.aim:
            return "aim"
        return "met" if sign * figure >= sign * self.must else "missed"


def _chosen(rows: Rows, **fields: Any) -> list[Row]:
    """Rows with these values, of what was timed."""
    return [
        row
        for row in rows
        if row.get("median_ms") and all(row.get(key) == value for key, value in fields.items())
    ]


def _core(
    direction: str, *, head_dims: Sequence[int] = (64, 128), masks: Sequence[bool] = (False, True),
    shortest: int = 1024, longest: int = 16384, kernel: str = OURS,
) -> Callable[[Rows], float | None]:  # fmt: skip
    """The smallest ratio to the best PyTorch backend in the core cases."""

    def measured(rows: Rows) -> float | None:
        ratios = [
            row["versus_sdpa"]
            for row in _chosen(rows, direction=direction, kernel=kernel)
            if row["set"].startswith("core")
            and row["head_dim"] in head_dims
            and row["causal"] in masks
            and shortest <= row["num_keys"] <= longest
        ]
        return min(ratios, default=None)

    return measured


def _smallest(key: str, **fields: Any) -> Callable[[Rows], float | None]:
    return lambda rows: min((row[key] for row in _chosen(rows, **fields) if row.get(key)), default=None)


def _against_compiled(rows: Rows) -> float | None:
    ours = _chosen(rows, set="headline", kernel=OURS)
    compiled = _chosen(rows, set="headline", kernel="vectorized+compile")
    return compiled[0]["median_ms"] / ours[0]["median_ms"] if ours and compiled else None


def _times_of(rows: Rows, name: str) -> dict[tuple[int, str], float]:
    return {
        (row["head_dim"], row["direction"]): row["median_ms"] for row in _chosen(rows, set=name, kernel=OURS)
    }


def _between(slower: str, faster: str) -> Callable[[Rows], float | None]:
    """The largest ratio of our times in two sets, over head_dim and direction."""

    def measured(rows: Rows) -> float | None:
        above, below = _times_of(rows, slower), _times_of(rows, faster)
        return max((above[key] / below[key] for key in above if key in below), default=None)

    return measured


def _on_trained_data(rows: Rows) -> float | None:
    """Our lowest rate on data like a trained model's, in units of that on normal data."""
    chosen = _chosen(rows, set="data", kernel=OURS)

    def case(row: Row) -> tuple[Any, ...]:
        return row["head_dim"], row["causal"], row["direction"]

    normal = {case(row): row["tflops"] for row in chosen if row["data"] == "normal"}
    return min(
        (
            row["tflops"] / normal[case(row)]
            for row in chosen
            if row["data"] != "normal" and case(row) in normal
        ),
        default=None,
    )


def _times(ours: float, theirs: float) -> float:
    """Ours in units of theirs; both may be exactly 0 (one key that takes everything)."""
    if ours == theirs:
        return 1.0
    return ours / theirs if theirs else math.inf


def _error_ratio(*keys: str, normal: bool = True) -> Callable[[Rows], float | None]:
    """Our largest error in units of cuDNN's on the same inputs: core cases, or those whose data are not normal."""

    def counts(row: Row) -> bool:
        return row["set"].startswith("core") if normal else row["data"] != "normal"

    def measured(rows: Rows) -> float | None:
        def by_case(kernel: str) -> dict[tuple[Any, ...], Row]:
            chosen = [row for row in _chosen(rows, kernel=kernel) if counts(row)]
            identity = ("set", "head_dim", "num_keys", "causal", "direction", "data")
            return {tuple(row[key] for key in identity): row for row in chosen}

        theirs = by_case(CUDNN)
        return max(
            (
                _times(row[key], theirs[case][key])
                for case, row in by_case(OURS).items()
                for key in keys
                if key in row and case in theirs
            ),
            default=None,
        )

    return measured


def _longest(rows: Rows) -> float | None:
    """The most tokens of a sequence that went through forward and backward."""
    lengths = [
        {row["num_keys"] for row in _chosen(rows, kernel=OURS, direction=d)} for d in ("forward", "backward")
    ]
    return max(lengths[0] & lengths[1], default=None)


def _first_call(rows: Rows) -> float | None:
    """The most seconds that the first calls of one (head_dim, mask, dtype) took, forward and backward together.

    As the caches of compiled kernels were: rows of the set "first call" come from processes with empty ones.
    """
    seconds: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["kernel"] == OURS and row.get("first_call_s") and row["set"].startswith(_FIRST_CALLS):
            key = (row["head_dim"], row["causal"], row["dtype"])
            seconds[key] = seconds.get(key, 0.0) + row["first_call_s"]
    return max(seconds.values(), default=None)


def _wrong_results(rows: Rows) -> int | None:
    """Our timings that the gate refused: the other lines count only what was timed."""
    ours = [row for row in rows if row["kernel"].startswith(OURS)]
    return sum(row["status"] == "wrong result" for row in ours) if ours else None


def _host_time(rows: Rows) -> float | None:
    """Host microseconds of a forward call, less those of an autograd Function that launches one trivial kernel."""
    found = {row["kernel"]: row["median_ms"] * 1e3 for row in _chosen(rows, set="host time")}
    return found[OURS] - found[BARE] if OURS in found and BARE in found else None


# (head_dim, causal) or head_dim -> target and goal at 2k and longer, over the best of PyTorch's backends
FORWARD = {
    (128, False): (1.08, 1.15),
    (128, True): (1.15, 1.28),
    (64, False): (1.10, 1.30),
    (64, True): (1.06, 1.20),
}
BACKWARD = {128: (0.95, 1.10), 64: (1.02, 1.20)}


def _must_of(row: Row) -> float:
    if row["direction"] == "backward":
        return BACKWARD[row["head_dim"]][0]
    return FORWARD[row["head_dim"], row["causal"]][0]


def _musts_on_trained_data(rows: Rows) -> float | None:
    """On data like a trained model's: our lowest ratio to the best backend on the same data, in units of its
    target."""
    chosen = _chosen(rows, set="data", kernel=OURS)
    return min(
        (row["versus_sdpa"] / _must_of(row) for row in chosen if row["data"] != "normal"), default=None
    )


TARGETS = (
    *(
        Target(f"forward, D={head_dim}, 2k and longer, {'causal' if causal else 'full'}", must, aim,
               _core("forward", head_dims=(head_dim,), masks=(causal,), shortest=2048))
        for (head_dim, causal), (must, aim) in FORWARD.items()
    ),
    Target("forward at 1k", 1.03, 1.15, _core("forward", longest=1024)),
    *(
        Target(f"backward, D={head_dim}, 2k and longer", must, aim,
               _core("backward", head_dims=(head_dim,), shortest=2048))
        for head_dim, (must, aim) in BACKWARD.items()
    ),
    Target("backward at 1k", 1.00, 1.12, _core("backward", longest=1024)),
    Target("deterministic backward, 4k and longer", 0.80, 0.95,
           _core("backward", shortest=4096, kernel=DETERMINISTIC)),
    Target("16 heads, D=64, 16384, causal, forward + backward", 4.1, 3.5,
           _smallest("median_ms", set="course", kernel=OURS, direction="fwd+bwd"), " ms", at_most=True),
    Target("4 x 8192, 12 heads, D=64, causal: over vectorized", 25, 32,
           _smallest("speedup", set="headline", kernel=OURS)),
    Target("the same: over vectorized+compile", 10, 13, _against_compiled),
    Target("the same in float32: over vectorized float32", 3, None,
           _smallest("speedup", set="float32", kernel=OURS)),
    Target("the same in tf32: over vectorized float32", 6.5, None,
           _smallest("speedup", set="float32", kernel="flash_triton:tf32")),
    *(
        Target(f"{direction}, D={head_dim}, 4k, causal", 0.75, 1.0,
               _smallest("versus_sdpa", set=f"head_dim {head_dim}", kernel=OURS, direction=direction))
        for head_dim in (32, 80, 96, 256) for direction in ("forward", "backward")
    ),
    Target("GQA 4:1, D=128, 4k, causal: time over repeated heads", 1.0, None,
           _between("grouped heads", "repeated heads"), at_most=True),
    Target("views of one projection: time over contiguous", 1.03, None,
           _between("projection", "contiguous"), at_most=True),
    Target("large logits, sinks, ramps: of the targets above", 0.9, None, _musts_on_trained_data),
    Target("the same: rate over that on normal data", 0.9, None, _on_trained_data),
    Target("forward error over cuDNN's", 1.2, None, _error_ratio(*OUTPUT), at_most=True),
    Target("backward error over cuDNN's", 1.2, None, _error_ratio(*GRADIENTS), at_most=True),
    Target("the same on large logits, sinks, ramps, forward", 1.2, None,
           _error_ratio(*OUTPUT, normal=False), at_most=True),
    Target("the same on large logits, sinks, ramps, backward", 1.2, None,
           _error_ratio(*GRADIENTS, normal=False), at_most=True),
    Target("results that the gate refused", 0, None, _wrong_results, at_most=True, unit=""),
    Target("longest sequence, forward and backward", 131_072, None, _longest, " tokens"),
    Target("first calls of one head_dim and mask, all lengths", 30, None, _first_call, " s", at_most=True),
    Target("host time of a warm call beyond a bare Function's", 30, None, _host_time, " us", at_most=True),
)  # fmt: skip


def _number(value: float, spec: str = ".3g") -> str:
    return f"{value:,.0f}" if value >= 1000 else format(value, spec)


def against_targets(rows: Rows) -> list[Row]:
    """For every target: `target`, `must`, `aim`, `measured` (text), `verdict`."""
    entries = []
    for target in TARGETS:
        figure = target.measured(rows)
        sign = "<= " if target.at_most else ">= "

        verdict = target.verdict(figure)
        measured = (
            "-"
            if figure is None
            else _number(figure, "d" if isinstance(figure, int) else "#.3g").rstrip(".") + target.unit
        )
        entries.append(
            {
                "target": target.name,
                "must": sign + _number(target.must),
                "aim": "" if target.aim is None else sign + _number(target.aim),
                "measured": f"**{measured}**" if verdict == "missed" else measured,
                "verdict": verdict,
            }
        )
    return entries


TARGET_COLUMNS = tuple(Column(key, key) for key in ("target", "must", "aim", "measured", "verdict"))
_OTHER_COLUMNS = (
    Column("set", "case"),
    Column("shape", "shape"),
    Column("direction", "direction"),
    Column("kernel", "kernel"),
    Column("median_ms", "ms", ".4g", instead="status"),
    Column("tflops", "TFLOP/s", ".3g"),
    Column("speedup", "x baseline", ".2f"),
    Column("versus_sdpa", "x best backend", ".2f"),
    Column("peak_gb", "GB", ".3g"),
)


def rate_table(rows: Rows, direction: str) -> str:
    """TFLOP/s of the core cases by length; in brackets the ratio to the best PyTorch backend of the same rounds."""
    core = [row for row in _chosen(rows, direction=direction) if row["set"].startswith("core")]
    lengths = sorted({row["num_keys"] for row in core})
    lines = []
    for head_dim in (128, 64):
        for mask in (False, True):
            kernels = (OURS, DETERMINISTIC) if direction == "backward" else (OURS,)
            for kernel in (*kernels, CUDNN, FLASH):
                found = {
                    row["num_keys"]: row
                    for row in core
                    if row["head_dim"] == head_dim and row["causal"] is mask and row["kernel"] == kernel
                }
                label = f"D={head_dim} {'causal' if mask else 'full'}, {kernel}"
                line: Row = {"case": label}
                for length, row in found.items():
                    ratio = row.get("versus_sdpa")
                    line[str(length)] = f"{row['tflops']:.0f}" + (f" ({ratio:.2f}x)" if ratio else "")
                if found:
                    lines.append(line)
    columns = [Column("case", direction), *(Column(str(n), f"{n // 1024}k") for n in lengths)]
    return markdown_table(lines, columns)


def tables(rows: Rows) -> str:
    """The acceptance report's tables as Markdown, from the rows alone."""
    others = [row | {"shape": _shape(row)} for row in rows if not row["set"].startswith("core")]
    failed = [row for row in rows if row["status"] != "ok"]
    parts = [
        "# Attention: acceptance",
        "TFLOP/s count 4 B H S^2 D, half if causal, 2.5 times that for the backward pass. Ratios are medians over "
        "paired rounds; a target's figure is the worst of its cases.",
        "## Against the targets",
        markdown_table(against_targets(rows), TARGET_COLUMNS),
        "## Core cases: bf16, 16k tokens, heads x head_dim = 2048",
        *(rate_table(rows, direction) for direction in ("forward", "backward")),
        "## The other cases",
        markdown_table(others, _OTHER_COLUMNS),
    ]
    if failed:
        parts.append("## Not measured")
        parts.append(
            "\n".join(
                f"- {row['set']}, {_shape(row)}, {row['direction']}, {row['kernel']}: {row['status']} "
                f"({row['detail']})"
                for row in failed
            )
        )
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _shape(row: Row) -> str:
    heads = f"{row['heads']}" if row["heads"] == row["kv_heads"] else f"{row['heads']}:{row['kv_heads']}"
    extra = ("" if row["causal"] else ", full") + ("" if row["data"] == "normal" else f", {row['data']}")
    return f"{row['batch']} x {row['num_keys']}, {heads} heads, D={row['head_dim']}{extra}"


def forward_picture(rows: Rows) -> bytes:
    """PNG: forward rates of the core cases over the length, ours beside PyTorch's backends, a panel per head_dim."""
    names = {OURS: "lmkit", CUDNN: "PyTorch cuDNN", FLASH: "PyTorch flash"}
    panels: dict[str, dict[tuple[str, str], list[tuple[float, float]]]] = {}
    for head_dim in (64, 128):
        for causal in (True, False):
            for kernel, name in names.items():
                found = _chosen(rows, direction="forward", head_dim=head_dim, causal=causal, kernel=kernel)
                points = [(row["num_keys"], row["tflops"]) for row in found if row["set"].startswith("core")]
                if points:
                    line = (name, "causal" if causal else "full")
                    panels.setdefault(f"head_dim {head_dim}", {})[line] = points
    return line_panels(
        panels,
        title="Attention forward, bf16 (16k tokens, heads x head_dim = 2048)",
        x_label="sequence length (tokens)",
        y_label="TFLOP/s",
    )


# The cases

TOKENS = 16384  # of a batch, where a case says nothing else
WIDTH = 2048  # heads x head_dim, likewise


@dataclass(frozen=True)
class Trial:
    """One case of the suite: `length` queries and keys, `kernels` timed in turns."""

    name: str
    length: int
    kernels: tuple[str, ...]
    options: Options
    gradients: tuple[str, ...] = ("backward",)
    backward_only: tuple[str, ...] = ()


def trials(base: Options) -> Iterator[Trial]:
    """All cases. Those whose figures are compared with each other follow one another."""

    def options(head_dim: int, length: int = 4096, **change: Any) -> Options:
        heads = WIDTH // head_dim
        common: dict[str, Any] = {"batch": max(1, TOKENS // length), "heads": heads, "kv_heads": heads}
        common |= {"head_dim": head_dim, "dtype": "bf16", "causal": True, "backward": True, "baseline": CUDNN}
        return base.model_copy(update=common | change)

    headline: dict[str, Any] = {"batch": 4, "heads": 12, "kv_heads": 12}
    headline |= {"baseline": "vectorized", "backward": False}
    yield Trial("headline", 8192, ("vectorized", "vectorized+compile", OURS, CUDNN), options(64, **headline))
    one_sequence = options(64, batch=1, heads=16, kv_heads=16)
    yield Trial("course", 16384, (OURS, CUDNN), one_sequence, gradients=("fwd+bwd", "backward"))
    for causal in (False, True):
        for head_dim in (128, 64):
            for length in (1024, 2048, 4096, 8192, 16384):
                name = f"core D={head_dim} {'causal' if causal else 'full'}"
                core = options(head_dim, length, causal=causal)
                yield Trial(name, length, (OURS, CUDNN, FLASH), core, backward_only=(DETERMINISTIC,))
    for head_dim in (32, 80, 96, 256):
        yield Trial(f"head_dim {head_dim}", 4096, (OURS, CUDNN, FLASH), options(head_dim))
    for head_dim in (64, 128):
        yield Trial("float16", 4096, (OURS, CUDNN), options(head_dim, dtype="fp16"))
    for name, kv_heads in (("repeated heads", 16), ("grouped heads", 4)):
        yield Trial(name, 4096, (OURS, CUDNN), options(128, kv_heads=kv_heads))
    for head_dim in (64, 128):
        for name, projection in (("contiguous", False), ("projection", True)):
            yield Trial(name, 4096, (OURS,), options(head_dim, projection_layout=projection))
    for head_dim in (64, 128):
        for causal in (False, True):
            for data in DATA:
                yield Trial("data", 4096, (OURS, CUDNN), options(head_dim, causal=causal, data=data))
    float32 = ("vectorized", OURS, "flash_triton:tf32")
    yield Trial("float32", 8192, float32, options(64, **headline, dtype="fp32"))
    yield Trial("long", 131_072, (OURS, CUDNN), options(64, batch=1, heads=12, kv_heads=12))


# The host's time

CALLS = 50  # queued at once; far fewer than a stream holds, so that no call waits for the device


@cache
def _store_one() -> Any:
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # the kernel's source names it

    @triton.jit
    def store_one(pointer):
        tl.store(pointer, 1.0)

    return store_one


class _Bare(torch.autograd.Function):
    """Launch one trivial Triton kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _store_one()[(1,)](out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class HostTime:
    """Rounds of both calls, forward with autograd recording, whenever `sample` is called.

    Hosts are slow for seconds at a time: rounds that lie far apart do not all fall into one such spell.
    """

    def __init__(self) -> None:
        q, k, v = (
            torch.randn(1, 16, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        flash = attention_function("flash_triton")
        self._calls: dict[str, Callable[[], object]] = {
            OURS: lambda: flash(q, k, v, causal=True),
            BARE: lambda: _Bare.apply(q),
        }
        self._samples: dict[str, list[float]] = {name: [] for name in self._calls}
        for call in self._calls.values():
            call()  # compiles

    def sample(self) -> None:
        """One round."""
        for name, call in self._calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            self._samples[name].append((time.perf_counter() - began) * 1e3 / CALLS)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each of the two: milliseconds of the host a call, over all rounds."""
        return [_row(name, times) for name, times in self._samples.items()]


def _row(name: str, times: list[float]) -> dict[str, Any]:
    found = spread(times)
    return {
        "set": "host time",
        "part": "tiers",
        "tier": "128",
        "num_queries": 128,
        "num_keys": 128,
        "head_dim": 64,
        "direction": "forward",
        "batch": 1,
        "heads": 16,
        "kv_heads": 16,
        "causal": True,
        "dtype": "bf16",
        "layout": "contiguous",
        "data": "normal",
        "status": "ok",
        "detail": "",
        "clock": "perf_counter",
        "kernel": name,
        "median_ms": found.median,
        "spread": found.relative,
        "samples_ms": times,
    }


# The suite


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the targets are those of a Hopper GPU")
def test_all_targets_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    device = torch.device("cuda")
    limits = measure_limits(device, ("bf16", "fp16", "fp32", "tf32"))
    base = Options(warmup=3, iters=24, max_seconds=0.35)
    rows: list[Row] = []
    host_time = HostTime()
    for trial in trials(base):
        host_time.sample()
        case = Case("tiers", str(trial.length), trial.length, trial.length, trial.options.head_dim)
        sweep = Sweep(trial.options, limits, device=device, seed=0)
        found = sweep.measure(case, trial.kernels)
        if trial.options.backward:
            found += sweep.measure(case, (*trial.kernels, *trial.backward_only), trial.gradients)
        rows += [{"set": trial.name} | row for row in found]
    rows += host_time.rows()
    store(rows, describe_environment() | {"limits": limits.as_dict()})
    standing = against_targets(rows)
    with capsys.disabled():
        print("\n" + terminal_table(standing, TARGET_COLUMNS))
    assert [entry["target"] for entry in standing if entry["verdict"] in ("missed", "not measured")] == []


def store(rows: Rows, environment: dict[str, Any]) -> None:
    folder = Path(os.environ.get("LMKIT_ACCEPTANCE", "artifacts/acceptance"))
    folder.mkdir(parents=True, exist_ok=True)
    files = row_files("acceptance", rows) | {
        "acceptance.md": tables(rows),
        "forward.png": forward_picture(rows),
    }
    files["environment.json"] = json.dumps(environment, indent=1)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


# The targets


def rows_of(trial, *, ratio=1.5, speedup=60.0, milliseconds=2.0):
    """What a machine would measure on which everything takes two milliseconds."""
    options = trial.options
    directions = ("forward", *(trial.gradients if options.backward else ()))
    for direction in directions:
        for kernel in (*trial.kernels, *(trial.backward_only if direction != "forward" else ())):
            yield {
                "set": trial.name,
                "num_queries": trial.length,
                "num_keys": trial.length,
                "head_dim": options.head_dim,
                "batch": options.batch,
                "heads": options.heads,
                "kv_heads": options.kv_heads,
                "causal": options.causal,
                "dtype": options.dtype,
                "data": options.data,
                "direction": direction,
                "kernel": kernel,
                "status": "ok",
                "detail": "",
                "median_ms": milliseconds * (20.0 if kernel == "vectorized+compile" else 1.0),
                "tflops": 500.0,
                "speedup": speedup,
                "versus_sdpa": None if kernel.startswith("sdpa") else ratio,
                "first_call_s": 1.5,
                **{f"error_{name}": 0.002 for name in ("out", "dq", "dk", "dv")},
            }


def host_time_rows():
    row = {
        "set": "host time",
        "status": "ok",
        "direction": "forward",
        "batch": 1,
        "num_keys": 128,
        "heads": 16,
    }
    row |= {"kv_heads": 16, "head_dim": 64, "causal": True, "dtype": "bf16", "data": "normal"}
    return [row | {"kernel": kernel, "median_ms": ms} for kernel, ms in ((OURS, 0.045), (BARE, 0.016))]


@pytest.fixture
def rows():
    return [row for trial in trials(Options()) for row in rows_of(trial)] + host_time_rows()


def verdicts(rows):
    return {entry["target"]: entry["verdict"] for entry in against_targets(rows)}


def test_the_suite_measures_every_target(rows):
    assert set(verdicts(rows).values()) <= {"aim", "met"}
    assert "**" not in tables(rows)
    assert set(verdicts([]).values()) == {"not measured"}


def test_the_core_cases_hold_as_many_tokens_and_dimensions_at_every_length():
    for trial in trials(Options()):
        if trial.name.startswith("core"):
            assert trial.options.batch * trial.length == 16384
            assert trial.options.heads * trial.options.head_dim == 2048


@pytest.mark.parametrize("at_most", [False, True])
def test_a_verdict_looks_in_the_right_direction(at_most):
    must, aim = (4.1, 3.5) if at_most else (3.5, 4.1)
    target = Target("", must, aim, lambda rows: None, at_most=at_most)
    found = [target.verdict(figure) for figure in (3.4, 3.5, 3.6, 4.1, 4.2)]
    expected = ["aim", "aim", "met", "met", "missed"]
    assert found == (expected if at_most else ["missed", "met", "met", "aim", "aim"])
    assert target.verdict(None) == "not measured"


def test_one_slow_length_misses_its_target_and_no_other(rows):
    for row in rows:
        core = row["set"] == "core D=64 causal" and row["kernel"] == "flash_triton"
        if core and row["direction"] == "forward" and row["num_keys"] == 2048:
            row["versus_sdpa"] = 1.01
    missed = [name for name, verdict in verdicts(rows).items() if verdict == "missed"]
    assert missed == ["forward, D=64, 2k and longer, causal"]
    assert "| **1.01x** | missed |" in tables(rows)


def test_errors_of_exactly_zero_are_even_or_infinitely_apart(rows):
    name = "the same on large logits, sinks, ramps, forward"
    zeros = [row | {"error_out": 0.0} if row["data"] == "sink" else row for row in rows]
    assert verdicts(zeros)[name] == "met"
    ours = [
        row | {"error_out": 1e-9} if row["data"] == "sink" and row["kernel"] == OURS else row for row in zeros
    ]
    assert verdicts(ours)[name] == "missed"


def test_a_refused_result_misses_a_target():
    def measured(*statuses):
        rows = [{"kernel": OURS, "status": status, "set": "data"} for status in statuses]
        return next(e for e in against_targets(rows) if e["target"] == "results that the gate refused")

    assert (measured("ok", "ok")["measured"], measured("ok")["verdict"]) == ("0", "met")
    assert (measured("ok", "wrong result")["measured"], measured("wrong result")["verdict"]) == (
        "**1**",
        "missed",
    )
