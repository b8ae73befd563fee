"""The acceptance suite of the attention kernels: fixed cases on one GPU, and how they stand against their targets.

`lmkit bench attention bench_attention_acceptance` measures them, ours beside PyTorch's backends in the same rounds,
and writes `acceptance.jsonl`, `acceptance.csv`, the tables as `acceptance.md` and the picture `forward.png`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmkit.bench.attention_cases import DATA, AttentionOptions, Case
from lmkit.bench.attention_sweep import Sweep
from lmkit.bench.attention_targets import (
    CUDNN,
    DETERMINISTIC,
    FLASH,
    OURS,
    TARGET_COLUMNS,
    against_targets,
    forward_picture,
    tables,
)
from lmkit.bench.journal import Journal
from lmkit.bench.report import BenchResult
from lmkit.errors import UsageError
from lmkit.measure.environment import describe_environment
from lmkit.measure.limits import measure_limits
from lmkit.measure.tables import row_files

if TYPE_CHECKING:
    from lmkit.bench.attention_host_time import HostTime

TOKENS = 16384  # of a batch, where a case says nothing else
WIDTH = 2048  # heads x head_dim, likewise


@dataclass(frozen=True)
class Trial:
    """One case of the suite: `length` queries and keys, `kernels` timed in turns."""

    name: str
    length: int
    kernels: tuple[str, ...]
    options: AttentionOptions
    gradients: tuple[str, ...] = ("backward",)
    backward_only: tuple[str, ...] = ()


def trials(base: AttentionOptions) -> Iterator[Trial]:
    """All cases. Those whose figures are compared with each other follow one another."""

    def options(head_dim: int, length: int = 4096, **change: Any) -> AttentionOptions:
        heads = WIDTH // head_dim
        common: dict[str, Any] = {"batch": max(1, TOKENS // length), "heads": heads, "kv_heads": heads}
        common |= {"head_dim": head_dim, "dtype": "bf16", "causal": True, "backward": True, "baseline": CUDNN}
        return replace(base, **(common | change))

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


def run_acceptance(
    base: AttentionOptions,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    journal: Journal | None = None,
) -> BenchResult:
    """Measure every trial; rows (with the trial's name as `set`), tables against the targets, the picture.

    Raises:
        UsageError: the device is not a GPU.
    """
    if not base.device.startswith("cuda"):
        raise UsageError(
            'bench.attention.suite: "acceptance" needs a GPU',
            hint='leave out suite = "acceptance", or take the recipe bench_attention_cpu',
        )
    limits = measure_limits(base.device, ("bf16", "fp16", "fp32", "tf32"))
    environment = describe_environment() | {"limits": limits.as_dict()}
    rows: list[dict[str, Any]] = []
    host_time = _host_time()
    todo = list(trials(base))
    for done, trial in enumerate(todo):
        if progress is not None:
            progress("attention", done, len(todo))
        host_time.sample()
        case = Case("tiers", str(trial.length), trial.length, trial.length, trial.options.head_dim)
        found = Sweep(trial.options, limits).measure(
            case, trial.kernels, trial.gradients, trial.backward_only
        )
        found = [{"set": trial.name} | row for row in found]
        rows += found
        if journal is not None:
            journal.add(found)
    found = host_time.rows()
    rows += found
    if journal is not None:
        journal.add(found)
    files = row_files("acceptance", rows)
    files["acceptance.md"] = tables(rows)
    files["forward.png"] = forward_picture(rows)
    standing = against_targets(rows)
    open_ones = [entry for entry in standing if entry["verdict"] in ("missed", "not measured")]
    notes = (f"{len(standing) - len(open_ones)} of {len(standing)} targets met",)
    return BenchResult("attention", rows, TARGET_COLUMNS, files, environment, notes, standing)


def _host_time() -> HostTime:
    from lmkit.bench.attention_host_time import HostTime  # needs Triton, which a CPU machine may lack

    return HostTime()
