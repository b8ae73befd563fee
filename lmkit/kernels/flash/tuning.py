"""Choose the tile sizes of the portable kernels: shipped where they were measured, otherwise tuned once.

A `Case` has at most six candidates. Where no choice ships, the candidates are timed on the caller's tensors and the
fastest is kept in `<user cache>/lmkit/tilings-<device>-triton<version>-v<CANDIDATES_VERSION>.json`; deleting that
file is safe. Nothing is timed while a CUDA graph is captured, nor in Triton's interpreter.

What the candidates follow from: 64 query rows to 4 warps, or 128 to 8, keep the accumulators in registers; three
tiles in flight hide the loads, and more than 113 KiB of shared memory leaves one CTA to an SM instead of two; TMA
(tensor descriptors) saves the registers of the addresses and needs 16-byte alignment and 16-bit values; splitting a
head of 80 as 64 + 16 saves products, padding it to 128 lets TMA load it. Triton 3.6's automatic warp specialisation
hung in these kernels on an H200, so no candidate asks for it.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lmkit.errors import LmkitError
from lmkit.kernels.launch import Start, capability, count_tiles, prepare_launch
from lmkit.kernels.versions import INTERPRETED
from lmkit.storage.atomic import write_atomic
from lmkit.storage.inputs import read_object

logger = logging.getLogger("lmkit")

CANDIDATES_VERSION = 3  # raise it when a kernel changes so that old choices no longer hold
LENGTH_BUCKETS = (512, 2048, 8192)  # keys; longer sequences share one more bucket


@dataclass(frozen=True)
class Tiling:
    """One way to run a kernel.

    rows: queries of a tile; columns: keys of a tile; warps: of a CTA; stages: tiles in flight.
    descriptors: tiles are loaded with TMA.
    split: a head_dim that is no power of two is held as two parts instead of being padded.
    registers: the tiles that a CTA keeps are read from registers, not from shared memory.
    apart: dK and dV come from two launches, each with half the accumulators, for one more product.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    descriptors: bool = False
    split: bool = False
    registers: bool = False
    apart: bool = False


# C is with TMA, R also with `registers`, S with `split`, A with `apart`.
T = Tiling
C, S, A = partial(T, descriptors=True), partial(T, split=True), partial(T, apart=True)
R = partial(C, registers=True)

# (kernel, largest head_dim) -> candidates for 16-bit inputs that TMA can reach; the first is the default.
ALIGNED: dict[tuple[str, int], tuple[Tiling, ...]] = {
    ("forward", 64): (C(64, 128, 4, 2), R(64, 64, 4, 3), C(64, 64, 4, 3), C(128, 64, 4, 3)),
    ("forward", 128): (
        C(64, 64, 4, 3), R(64, 64, 4, 3), C(128, 64, 4, 2), C(128, 128, 8, 3), C(64, 64, 4, 2),
    ),
    ("forward", 256): (C(128, 64, 8, 2), C(128, 32, 8, 3), C(64, 32, 4, 2)),
    ("dq", 64): (C(64, 64, 4, 3), R(64, 64, 4, 3), C(128, 64, 8, 3), C(64, 64, 4, 2)),
    ("dq", 128): (C(64, 64, 4, 2), C(128, 64, 8, 3), R(128, 64, 8, 3), C(64, 32, 4, 3), R(64, 64, 4, 3)),
    ("dq", 256): (C(128, 32, 8, 3), C(64, 32, 4, 3), C(64, 32, 4, 2)),
    ("dkdv", 64): (C(64, 64, 4, 3), C(32, 128, 4, 3), C(64, 64, 4, 2), C(32, 128, 8, 3), C(64, 128, 8, 3)),
    ("dkdv", 128): (C(32, 64, 4, 3), C(32, 64, 4, 2), C(64, 128, 8, 3), C(64, 128, 8, 2)),
    ("dkdv", 256): (
        C(32, 128, 8, 3, apart=True), C(32, 128, 8, 2, apart=True), C(64, 64, 4, 2, apart=True), C(32, 64, 8, 2),
    ),
}  # fmt: skip

# The same for heads that are worth splitting (see `head_parts`); they replace the candidates above.
SPLIT: dict[str, tuple[Tiling, ...]] = {
    "forward": (S(64, 64, 4, 3), C(64, 64, 4, 3), S(128, 64, 8, 3), R(64, 64, 4, 3)),
    "dq": (S(64, 32, 4, 3), S(64, 64, 4, 2), S(128, 32, 8, 3), C(64, 64, 4, 2), R(64, 64, 4, 3)),
    "dkdv": (S(64, 64, 4, 2), S(32, 64, 4, 3), C(64, 128, 8, 3), S(64, 128, 8, 2)),
}  # fmt: skip

# float32, by precision. Never split: Triton 3.6 compiled such a kernel (head_dim 96) to one that read out of bounds.
# "bf16x6" spills at large head_dims and is several times as fast as "ieee" all the same, which spills too and whose
# unrolled products compile slowly.
FLOAT32: dict[tuple[str, str, int], tuple[Tiling, ...]] = {
    ("bf16x6", "forward", 64): (T(128, 64, 8, 2), T(64, 64, 4, 2), T(64, 32, 4, 2), T(128, 32, 8, 2)),
    ("bf16x6", "forward", 128): (T(128, 32, 8, 1), T(64, 32, 4, 2), T(64, 16, 4, 2)),
    ("bf16x6", "forward", 256): (T(128, 16, 8, 1), T(64, 32, 8, 1), T(64, 16, 4, 1)),
    ("bf16x6", "dq", 64): (T(64, 32, 4, 1), T(64, 32, 4, 2), T(128, 32, 8, 2)),
    ("bf16x6", "dq", 128): (T(128, 32, 8, 1), T(64, 16, 4, 1)),
    ("bf16x6", "dq", 256): (T(64, 16, 8, 1),),
    ("bf16x6", "dkdv", 64): (T(32, 64, 4, 2), T(32, 128, 8, 2)),
    ("bf16x6", "dkdv", 128): (A(32, 128, 8, 1), A(16, 64, 4, 1)),
    ("bf16x6", "dkdv", 256): (A(16, 64, 4, 1), A(16, 64, 8, 1)),
    ("ieee", "forward", 64): (T(64, 32, 8, 2), T(128, 32, 16, 2), T(64, 64, 16, 2), T(32, 32, 4, 2)),
    ("ieee", "dq", 64): (T(64, 32, 8, 2), T(32, 32, 8, 2)),
    ("ieee", "dkdv", 64): (T(32, 64, 8, 2), T(32, 32, 8, 2)),
    ("ieee", "forward", 256): (T(64, 64, 16, 2),),
    ("ieee", "dq", 256): (T(32, 32, 8, 2),),
    ("ieee", "dkdv", 256): (T(32, 32, 8, 2),),
    ("tf32", "forward", 256): (T(128, 64, 8, 2), T(128, 32, 8, 2), T(64, 32, 4, 3), T(64, 64, 4, 2)),
    ("tf32", "dq", 256): (T(128, 32, 8, 2), T(64, 32, 4, 2), T(64, 64, 8, 2)),
    ("tf32", "dkdv", 256): (T(32, 128, 8, 2), T(32, 64, 4, 2), T(32, 64, 8, 2)),
}

# For chips on which no candidate fits: 16 to 64 KiB of shared memory with any head_dim and dtype.
LAST_RESORT = T(16, 16, 4, 1)

INTERPRETER_TILING = T(32, 32, 4, 1)

KERNELS = ("forward", "dq", "dkdv")

# Measured on an H200 over 1024 and 4096 keys together: (head_dim, causal) -> the fastest tiling of each of KERNELS.
# bfloat16 stands for float16 too, and for inputs that TMA can reach; float32 for its default precision, "bf16x6".
SHIPPED_CAPABILITY = (9, 0)
MASKS = (True, False)
SHIPPED_BFLOAT16: dict[tuple[int, bool], tuple[Tiling, Tiling, Tiling]] = {
    (32, True): (C(64, 64, 4, 3), C(64, 64, 4, 3), C(64, 64, 4, 2)),
    (32, False): (C(64, 64, 4, 3), R(64, 64, 4, 3), C(32, 128, 4, 3)),
    (64, True): (R(64, 64, 4, 3), C(64, 64, 4, 3), C(64, 64, 4, 2)),
    (64, False): (C(64, 128, 4, 2), C(128, 64, 8, 3), C(32, 128, 4, 3)),
    (80, True): (S(64, 64, 4, 3), S(64, 32, 4, 3), S(64, 64, 4, 2)),
    (80, False): (S(64, 64, 4, 3), S(64, 32, 4, 3), S(64, 64, 4, 2)),
    (96, True): (R(64, 64, 4, 3), R(64, 64, 4, 3), S(64, 64, 4, 2)),
    (96, False): (C(64, 64, 4, 3), S(64, 64, 4, 2), C(64, 128, 8, 3)),
    (128, True): (R(64, 64, 4, 3), R(64, 64, 4, 3), C(32, 64, 4, 2)),
    (128, False): (C(64, 64, 4, 3), C(128, 64, 8, 3), C(64, 128, 8, 3)),
    (256, True): (C(128, 64, 8, 2), C(128, 32, 8, 3), C(32, 128, 8, 2, apart=True)),
    (256, False): (C(128, 64, 8, 2), C(128, 32, 8, 3), C(32, 128, 8, 3, apart=True)),
}  # fmt: skip
SHIPPED_FLOAT32: dict[tuple[int, bool], tuple[Tiling, Tiling, Tiling]] = {
    **dict.fromkeys(product((32,), MASKS), (T(64, 32, 4, 2), T(64, 32, 4, 1), T(32, 64, 4, 2))),
    **dict.fromkeys(product((64,), MASKS), (T(64, 64, 4, 2), T(64, 32, 4, 1), T(32, 64, 4, 2))),
    **dict.fromkeys(product((80, 96, 128), (True,)), (T(64, 32, 4, 2), T(128, 32, 8, 1), A(32, 128, 8, 1))),
    **dict.fromkeys(product((80, 96, 128), (False,)), (T(128, 32, 8, 1), T(128, 32, 8, 1), A(32, 128, 8, 1))),
    **dict.fromkeys(product((256,), MASKS), (T(128, 16, 8, 1), T(64, 16, 8, 1), A(16, 64, 4, 1))),
}


class Case(NamedTuple):
    """What a choice depends on."""

    kernel: str  # one of KERNELS
    head_dim: int
    causal: bool
    dtype: torch.dtype
    precision: str
    bucket: int
    aligned: bool  # TMA can reach the inputs

    def name(self) -> str:
        """Return the key in the cache file."""
        dtype = str(self.dtype).removeprefix("torch.")
        if self.dtype == torch.float32:
            dtype += f"-{self.precision}"
        mask, reach = ("full", "causal")[self.causal], ("strided", "aligned")[self.aligned]
        return f"{self.kernel}/{dtype}/D{self.head_dim}/{mask}/{self.bucket}/{reach}"


def length_bucket(length: int) -> int:
    """Return the smallest bucket that holds `length`."""
    return next((bucket for bucket in LENGTH_BUCKETS if length <= bucket), 2 * LENGTH_BUCKETS[-1])


def shipped_tiling(case: Case, capability: tuple[int, int]) -> Tiling | None:
    """Return the tiling that ships for this case, if there is one."""
    if case.dtype == torch.float32:
        measured, table = case.precision == "bf16x6", SHIPPED_FLOAT32
    else:
        measured, table = case.aligned, SHIPPED_BFLOAT16
    if capability != SHIPPED_CAPABILITY or not measured or (case.head_dim, case.causal) not in table:
        return None
    return table[case.head_dim, case.causal][KERNELS.index(case.kernel)]


def candidate_tilings(case: Case, capability: tuple[int, int]) -> tuple[Tiling, ...]:
    """Return at most six tilings worth trying; the first is a safe default."""
    sizes = [size for size in (64, 128, 256) if case.head_dim <= size]
    if case.dtype == torch.float32:
        keys = [(case.precision, case.kernel, size) for size in sizes]
        return next(FLOAT32[key] for key in keys if key in FLOAT32)
    if 64 < case.head_dim <= 96 or 128 < case.head_dim <= 192:
        candidates = SPLIT[case.kernel]
    else:
        candidates = ALIGNED[case.kernel, sizes[0]]
    if case.aligned and capability >= (9, 0):
        return candidates
    # Without TMA: the same tiles through pointers.
    return tuple(dict.fromkeys(replace(tiling, descriptors=False, registers=False) for tiling in candidates))


_chosen: dict[tuple[int | None, Case], Tiling] = {}


def choose_tiling(case: Case, device: torch.device, launch: Callable[[Tiling], None]) -> Tiling:
    """Return the tiling of `case` on this device, remembered for the process. `launch` runs the kernel."""
    tiling = _chosen.get((device.index, case))
    if tiling is not None:
        return tiling
    tiling = shipped_tiling(case, capability(device)) if device.type == "cuda" else INTERPRETER_TILING
    if tiling is None:
        candidates = candidate_tilings(case, capability(device))
        if torch.cuda.is_current_stream_capturing():
            return candidates[0]  # not remembered: a later call may still measure
        tiling = measure(case, candidates, cache_file(device), launch)
    _chosen[device.index, case] = tiling
    return tiling


def measure(
    case: Case, candidates: tuple[Tiling, ...], path: Path, launch: Callable[[Tiling], None]
) -> Tiling:
    """Return the fastest candidate, from the cache file if it is there."""
    kept = read_entries(path).get(case.name())
    for tiling in candidates:
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
    entries = read_entries(path) | {case.name(): asdict(best)}  # read again: another process may have written
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(entries, indent=1, sort_keys=True))
    # A home that cannot be written to costs time at the next start, nothing else.
    except (OSError, LmkitError) as error:
        logger.warning("the tilings are not kept: %s", error)
    return best


def milliseconds(launch: Callable[[Tiling], None], tiling: Tiling) -> float:
    """Return the median time of one launch."""
    return triton.testing.do_bench(lambda: launch(tiling), warmup=5, rep=20, return_mode="median")


def cache_file(device: torch.device) -> Path:
    """Return the path of the choices for this chip and this version of Triton."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmkit"
    chip = torch.cuda.get_device_name(device).replace(" ", "-")
    return folder / f"tilings-{chip}-triton{triton.__version__}-v{CANDIDATES_VERSION}.json"


def read_entries(path: Path) -> dict[str, dict]:
    """Return the cache file's content; a missing, unreadable or damaged file counts as empty."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def prepare_tuned(
    kernel: str,
    prepare: Callable[[Tiling], Start],
    tensors: tuple[Tensor, ...],
    loaded: tuple[int, ...],
    options: tuple[bool, str, Tiling | None],
) -> Start:
    """Return `prepare(tiling)`; where the tiling is None, of the one that is chosen for the case.

    `tensors` and `loaded`: as of `prepare_tiled`. `options`: causal, precision, tiling.
    """
    causal, precision, tiling = options
    prepare = cache(prepare)
    if tiling is None:
        pointers = [x.data_ptr() for x in tensors]
        q, bucket = tensors[0], length_bucket(tensors[1].shape[2])
        aligned = tma_reaches(*[tensors[i] for i in loaded])
        case = Case(kernel, q.shape[3], causal, q.dtype, precision, bucket, aligned)
        tiling = choose_tiling(case, q.device, lambda tiling: prepare(tiling)(*pointers))
    return prepare(tiling)


def prepare_tiled(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    loaded: tuple[int, ...],
    scales: tuple[float, ...],
    constants: dict[str, Any],
    tiling: Tiling,
    *,
    by_keys: bool = False,
) -> Start:
    """Prepare a launch of one of the kernels, whose parameters after the tensors follow one pattern.

    Args:
        tensors: q, k and v first. A tensor of four dimensions also gives the kernel its strides, but for the
            last one, 1.
        loaded: indices of the tensors that the kernel loads tiles from: tiles of keys from k and v, tiles of
            queries from the others.
        scales: the last of the kernel's numbers.
        constants: compile-time parameters of this kernel, CAUSAL and PRECISION among them.
        by_keys: a CTA owns a tile of keys of one key head, not of queries of one query head, which takes CUT.
    """
    batch, heads, num_queries, head_dim = tensors[0].shape
    kv_heads, num_keys = tensors[1].shape[1:3]
    main, rest = head_parts(head_dim, tiling.split and not tiling.descriptors)
    sources: list[Tensor | TensorDescriptor] = list(tensors)
    if tiling.descriptors:
        for i in loaded:
            x, rows = tensors[i], tiling.columns if i in (1, 2) else tiling.rows
            sources[i] = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, main])
    strides = [stride for x in tensors if x.dim() == 4 for stride in x.stride()[:3]]
    owners, tiles = kv_heads, count_tiles(num_keys, tiling.columns)
    if not by_keys:
        owners, tiles = heads, count_tiles(num_queries, tiling.rows)
        constants = {**constants, "CUT": constants["CAUSAL"] or num_keys % tiling.columns != 0}
    if INTERPRETED:
        constants["PRECISION"] = "ieee"  # NumPy multiplies exactly, whatever was asked for
    numbers = (*strides, owners, heads // kv_heads, num_queries, num_keys, *scales)
    of_head = {"HEAD_DIM": head_dim, "MAIN": main, "REST": rest}
    of_tile = {"ROWS": tiling.rows, "COLUMNS": tiling.columns, "REGISTERS": tiling.registers}
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    constants = {**of_head, **of_tile, **options, **constants}
    return prepare_launch(kernel, (tiles * batch * owners, 1), sources, numbers, constants)


def tma_reaches(*tensors: Tensor) -> bool:
    """Return whether tensor descriptors can address all tensors: 16-byte aligned, 16-bit, innermost stride 1."""
    for x in tensors:
        batch, head, row, dim = x.stride()
        if dim != 1 or (batch | head | row) % 8 or not (batch and head and row):
            return False
        if x.itemsize != 2 or x.data_ptr() % 16:
            return False
    return True


@cache  # `next_power_of_2` costs a microsecond, and every new length asks
def head_parts(head_dim: int, split: bool) -> tuple[int, int]:
    """Return (main, rest): the powers of two that a head is held in; rest = 0 if it is one part.

    >>> head_parts(80, split=True), head_parts(80, split=False), head_parts(64, split=True)
    ((64, 16), (128, 0), (64, 0))
    """
    padded = max(16, triton.next_power_of_2(head_dim))
    if not split or padded == head_dim or padded == 16:
        return padded, 0
    rest = max(16, triton.next_power_of_2(head_dim - padded // 2))
    return (padded, 0) if rest == padded // 2 else (padded // 2, rest)
