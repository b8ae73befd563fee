"""Which tile sizes a kernel runs with: shipped where we measured, otherwise tried out once and remembered on disk.

A case is (kernel, head_dim, causal, dtype, precision, bucket of the length, aligned); it has at most six
candidates. The winner goes to `<user cache>/lmkit/tilings-<device>-triton<version>-v<CANDIDATES_VERSION>.json`;
deleting that file is safe. Nothing is tried out while a CUDA graph is being captured, nor in Triton's interpreter.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lmkit.kernels.tilings import CANDIDATES_VERSION, LAST_RESORT, Tiling, candidate_tilings, shipped_tiling

LENGTH_BUCKETS = (512, 2048, 8192)  # keys; longer sequences share the last bucket's successor
INTERPRETER_TILING = Tiling(rows=32, columns=32, warps=4, stages=1)

logger = logging.getLogger("lmkit")


class Case(NamedTuple):
    """What a choice depends on."""

    kernel: str
    head_dim: int
    causal: bool
    dtype: torch.dtype
    precision: str
    bucket: int
    aligned: bool  # tensor descriptors can address the inputs

    def name(self) -> str:
        """The key in the cache file."""
        mask = "causal" if self.causal else "full"
        dtype = str(self.dtype).removeprefix("torch.")
        if self.dtype == torch.float32:
            dtype += f"-{self.precision}"
        reach = "aligned" if self.aligned else "strided"
        return f"{self.kernel}/{dtype}/D{self.head_dim}/{mask}/{self.bucket}/{reach}"


def length_bucket(length: int) -> int:
    """The smallest bucket that holds `length`."""
    return next((bucket for bucket in LENGTH_BUCKETS if length <= bucket), 2 * LENGTH_BUCKETS[-1])


class TilingChoices:
    """The choices of one process, backed by the file of the user's cache folder."""

    def __init__(self) -> None:
        self.chosen: dict[tuple[int | None, Case], Tiling] = {}

    def choose(self, case: Case, device: torch.device, launch: Callable[[Tiling], None]) -> Tiling:
        """The tiling of `case`; `launch(tiling)` runs the kernel on the caller's tensors, to time it."""
        key = (device.index, case)
        known = self.chosen.get(key)
        if known is not None:
            return known
        if device.type != "cuda":
            tiling = INTERPRETER_TILING
        else:
            capability = torch.cuda.get_device_capability(device)
            shipped = shipped_tiling(case, capability)
            candidates = candidate_tilings(case, capability)
            if shipped is None and torch.cuda.is_current_stream_capturing():
                return candidates[0]  # not remembered: a later call may still measure
            tiling = shipped or self.measure(case, candidates, cache_file(device), launch)
        self.chosen[key] = tiling
        return tiling

    def measure(
        self, case: Case, candidates: tuple[Tiling, ...], path: Path, launch: Callable[[Tiling], None]
    ) -> Tiling:
        """Reads the choice from the cache file, or times the candidates and writes it there."""
        kept = read_entries(path).get(case.name())
        for tiling in (*candidates, LAST_RESORT):
            if asdict(tiling) == kept:  # nothing else is taken from a file
                return tiling
        times: dict[Tiling, float] = {}
        for tiling in candidates:
            try:
                times[tiling] = milliseconds(launch, tiling)
            except triton.runtime.errors.OutOfResources:
                continue  # does not fit this chip's shared memory or registers
        best = min(times, key=times.__getitem__, default=LAST_RESORT)
        logger.info("tuned %s: %s of %d that fit", case.name(), best, len(times))
        # Read again: another process may have written.
        write_entries(path, read_entries(path) | {case.name(): asdict(best)})
        return best


CHOICES = TilingChoices()


def cache_file(device: torch.device) -> Path:
    """Where the choices for this chip and this Triton are kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmkit"
    chip = torch.cuda.get_device_name(device).replace(" ", "-")
    return folder / f"tilings-{chip}-triton{triton.__version__}-v{CANDIDATES_VERSION}.json"


def read_entries(path: Path) -> dict[str, dict]:
    """The cache file's content; a file that is missing, closed to us or damaged counts as empty."""
    try:
        entries = json.loads(path.read_bytes())
    except OSError:  # not there yet, or not ours to read
        return {}
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        logger.warning("%s is damaged; the tilings are measured again", path.name)
        return {}
    return entries


def write_entries(path: Path, entries: dict[str, dict]) -> None:
    """Replaces the cache file. Every process writes to a name of its own first: ranks tune at the same time."""
    mine = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mine.write_text(json.dumps(entries, indent=1, sort_keys=True))
        os.replace(mine, path)
    except OSError as error:  # a home that cannot be written to costs time at the next start, nothing else
        logger.warning("the tilings are not kept: %s", error)


def milliseconds(launch: Callable[[Tiling], None], tiling: Tiling) -> float:
    """The median time of one launch."""
    return triton.testing.do_bench(lambda: launch(tiling), warmup=5, rep=20, return_mode="median")


def choose_tiling(
    kernel: str,
    q: Tensor,
    k: Tensor,
    causal: bool,
    precision: str,
    aligned: bool,
    launch: Callable[[Tiling], None],
) -> Tiling:
    """The tiling for a call of `kernel` on these inputs."""
    case = Case(kernel, q.shape[3], causal, q.dtype, precision, length_bucket(k.shape[2]), aligned)
    return CHOICES.choose(case, q.device, launch)
