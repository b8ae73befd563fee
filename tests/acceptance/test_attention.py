"""Attention kernels against their targets (attention_targets.py) on a Hopper GPU, in about four minutes.

    nox -s acceptance
    pytest tests/acceptance/test_attention.py -s

prints a table of target, measured figure and verdict, and writes it and the rows into the folder that
LMKIT_ACCEPTANCE names (default: artifacts/acceptance). The tests of the targets themselves need no GPU.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from attention_targets import BARE, CUDNN, DETERMINISTIC, FLASH, OURS, TARGET_COLUMNS, Row, against_targets
from torch import Tensor

from lmkit.attention import attention_function
from lmkit.bench.attention import Case, Options, Sweep
from lmkit.bench.context import Context, Journal
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import measure_limits
from lmkit.measure.statistics import spread
from lmkit.measure.tables import markdown_table, row_files, terminal_table
from lmkit.parallel.ranks import Ranks
from lmkit.recipe.recipe import Recipe

DATA = get_args(Options.model_fields["data"].annotation)

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
        options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        q, k, v = (torch.randn(1, 16, 128, 64, **options) for _ in range(3))
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
        spreads = {name: spread(times) for name, times in self._samples.items()}
        return [
            HOST_CASE
            | {"kernel": name, "median_ms": found.median, "spread": found.relative}
            | {"samples_ms": self._samples[name]}
            for name, found in spreads.items()
        ]


HOST_CASE = {"set": "host time", "part": "tiers", "tier": "128", "num_queries": 128, "num_keys": 128}
HOST_CASE |= {"direction": "forward", "batch": 1, "heads": 16, "kv_heads": 16, "head_dim": 64, "causal": True}
HOST_CASE |= {"dtype": "bf16", "layout": "contiguous", "data": "normal", "status": "ok", "detail": ""}
HOST_CASE |= {"clock": "perf_counter"}


# The suite


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the targets are those of a Hopper GPU")
def test_all_targets_are_met(capsys):
    device = torch.device("cuda")
    limits = measure_limits(device, ("bf16", "fp16", "fp32", "tf32"))
    base = Options(warmup=3, iters=24, max_seconds=0.35)
    rows: list[Row] = []
    host_time = HostTime()
    for trial in trials(base):
        host_time.sample()
        case = Case("tiers", str(trial.length), trial.length, trial.length, trial.options.head_dim)
        journal = Journal(Path(os.devnull))
        sweep = Sweep(Context(Recipe(), trial.options, Ranks(device=device), print, journal), limits)
        found = sweep.measure(case, trial.kernels)
        if trial.options.backward:
            found += sweep.measure(case, (*trial.kernels, *trial.backward_only), trial.gradients)
        rows += [{"set": trial.name} | row for row in found]
    rows += host_time.rows()
    standing = against_targets(rows)
    files = row_files("acceptance", rows) | {"acceptance.md": markdown_table(standing, TARGET_COLUMNS)}
    environment = describe_environment() | {"limits": limits.as_dict()}
    files["environment.json"] = json.dumps(environment, indent=1)
    folder = Path(os.environ.get("LMKIT_ACCEPTANCE", "artifacts/acceptance"))
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with capsys.disabled():
        print("\n" + terminal_table(standing, TARGET_COLUMNS))
    assert [entry["target"] for entry in standing if entry["verdict"] in ("missed", "not measured")] == []


# The targets


def rows_of(trial, *, ratio=1.5, speedup=60.0, milliseconds=2.0):
    """What a machine would measure on which everything takes two milliseconds."""
    directions = ("forward", *(trial.gradients if trial.options.backward else ()))
    shape = ("head_dim", "batch", "heads", "kv_heads", "causal", "dtype", "data")
    case = {"set": trial.name, "status": "ok", "detail": ""}
    case |= {"num_queries": trial.length, "num_keys": trial.length}
    case |= {key: getattr(trial.options, key) for key in shape}
    case |= {"tflops": 500.0, "speedup": speedup, "first_call_s": 1.5}
    case |= {f"error_{name}": 0.002 for name in ("out", "dq", "dk", "dv")}
    for direction in directions:
        for kernel in (*trial.kernels, *(trial.backward_only if direction != "forward" else ())):
            times = 20.0 if kernel == "vectorized+compile" else 1.0
            yield case | {
                "direction": direction,
                "kernel": kernel,
                "median_ms": milliseconds * times,
                "versus_sdpa": None if kernel.startswith("sdpa") else ratio,
            }


@pytest.fixture
def rows():
    host_time = [HOST_CASE | {"kernel": name, "median_ms": ms} for name, ms in ((OURS, 0.045), (BARE, 0.016))]
    return [row for trial in trials(Options()) for row in rows_of(trial)] + host_time


def verdicts(rows):
    return {entry["target"]: entry["verdict"] for entry in against_targets(rows)}


def test_the_suite_measures_every_target(rows):
    assert set(verdicts(rows).values()) <= {"stretch", "met"}
    assert set(verdicts([]).values()) == {"not measured"}


def test_one_slow_length_misses_its_target_and_no_other(rows):
    for row in rows:
        core = row["set"] == "core D=64 causal" and row["kernel"] == OURS
        if core and row["direction"] == "forward" and row["num_keys"] == 2048:
            row["versus_sdpa"] = 1.01
    missed = [name for name, verdict in verdicts(rows).items() if verdict == "missed"]
    assert missed == ["forward, D=64, 2k and longer, causal"]
