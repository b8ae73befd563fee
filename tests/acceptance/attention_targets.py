"""The targets of the attention kernels, and what rows of measurements say of them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmkit.measure.tables import Column

Row = dict[str, Any]
Rows = Sequence[Row]

OURS, DETERMINISTIC, CUDNN, FLASH = ("flash_triton", "flash_triton:deterministic", "sdpa:cudnn", "sdpa:flash")
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
    stretch: float | None
    measured: Callable[[Rows], float | None]
    unit: str = "x"
    at_most: bool = False

    def verdict(self, figure: float | None) -> str:
        """ "stretch", "met", "missed" or "not measured"."""
        if figure is None:
            return "not measured"
        sign = -1.0 if self.at_most else 1.0
        if self.stretch is not None and sign * figure >= sign * self.stretch:
            return "stretch"
        return "met" if sign * figure >= sign * self.must else "missed"


def _chosen(rows: Rows, **fields: Any) -> list[Row]:
    """Rows with these values, of what was timed."""
    return [row for row in rows if row.get("median_ms") and fields.items() <= row.items()]


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


def _ratios(key: str, mine: Sequence[Row], theirs: Sequence[Row], *same: str) -> list[float]:
    """Mine over theirs, of rows in which the fields `same` are equal; 1 where both are 0 (one key takes all)."""
    beside = {tuple(row[name] for name in same): row[key] for row in theirs if key in row}
    pairs = [(row[key], beside.get(tuple(row[name] for name in same))) for row in mine if key in row]
    return [
        1.0 if own == other else own / other if other else math.inf
        for own, other in pairs
        if other is not None
    ]


def _against_compiled(rows: Rows) -> float | None:
    ours, compiled = (_chosen(rows, set="headline", kernel=name) for name in (OURS, "vectorized+compile"))
    return min(_ratios("median_ms", compiled, ours), default=None)


def _between(slower: str, faster: str) -> Callable[[Rows], float | None]:
    """The largest ratio of our times in two sets, over head_dim and direction."""

    def measured(rows: Rows) -> float | None:
        times = (_chosen(rows, set=name, kernel=OURS) for name in (slower, faster))
        return max(_ratios("median_ms", *times, "head_dim", "direction"), default=None)

    return measured


def _on_trained_data(rows: Rows) -> float | None:
    """Our lowest rate on data like a trained model's, in units of that on normal data."""
    chosen = _chosen(rows, set="data", kernel=OURS)
    trained = [row for row in chosen if row["data"] != "normal"]
    normal = _chosen(chosen, data="normal")
    return min(_ratios("tflops", trained, normal, "head_dim", "causal", "direction"), default=None)


def _error_ratio(*keys: str, normal: bool = True) -> Callable[[Rows], float | None]:
    """Our largest error in units of cuDNN's on the same inputs: core cases, or those whose data are not normal."""

    def measured(rows: Rows) -> float | None:
        def counted(kernel: str) -> list[Row]:
            chosen = _chosen(rows, kernel=kernel)
            return [x for x in chosen if (x["set"].startswith("core") if normal else x["data"] != "normal")]

        ours, theirs = counted(OURS), counted(CUDNN)
        same = ("set", "head_dim", "num_keys", "causal", "direction", "data")
        return max((ratio for key in keys for ratio in _ratios(key, ours, theirs, *same)), default=None)

    return measured


def _longest(rows: Rows) -> float | None:
    """The most tokens of a sequence that went through forward and backward."""
    forward, backward = (
        {row["num_keys"] for row in _chosen(rows, kernel=OURS, direction=d)} for d in ("forward", "backward")
    )
    return max(forward & backward, default=None)


def _first_call(rows: Rows) -> float | None:
    """The most seconds that the first calls of one (head_dim, mask, dtype) took, forward and backward together.

    As the caches of compiled kernels were: rows of the set "first call" come from processes with empty ones.
    """
    seconds: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        if row["kernel"] == OURS and row.get("first_call_s") and row["set"].startswith(_FIRST_CALLS):
            seconds[row["head_dim"], row["causal"], row["dtype"]] += row["first_call_s"]
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
FORWARD = {(128, False): (1.08, 1.15), (128, True): (1.15, 1.28)}
FORWARD |= {(64, False): (1.10, 1.30), (64, True): (1.06, 1.20)}
BACKWARD = {128: (0.95, 1.10), 64: (1.02, 1.20)}


def _musts_on_trained_data(rows: Rows) -> float | None:
    """On data like a trained model's: our lowest ratio to the best backend on the same data, in units of its
    target."""
    found = []
    for row in _chosen(rows, set="data", kernel=OURS):
        head_dim = row["head_dim"]
        of_backward = row["direction"] == "backward"
        must, _ = BACKWARD[head_dim] if of_backward else FORWARD[head_dim, row["causal"]]
        if row["data"] != "normal":
            found.append(row["versus_sdpa"] / must)
    return min(found, default=None)


TARGETS = (
    *(
        Target(f"forward, D={head_dim}, 2k and longer, {'causal' if causal else 'full'}", must, stretch,
               _core("forward", head_dims=(head_dim,), masks=(causal,), shortest=2048))
        for (head_dim, causal), (must, stretch) in FORWARD.items()
    ),
    Target("forward at 1k", 1.03, 1.15, _core("forward", longest=1024)),
    *(
        Target(f"backward, D={head_dim}, 2k and longer", must, stretch,
               _core("backward", head_dims=(head_dim,), shortest=2048))
        for head_dim, (must, stretch) in BACKWARD.items()
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
    """For every target: `target`, `must`, `stretch`, `measured` (text), `verdict`."""
    entries = []
    for target in TARGETS:
        figure = target.measured(rows)
        sign = "<= " if target.at_most else ">= "
        entry = {"target": target.name, "must": sign + _number(target.must), "stretch": "", "measured": "-"}
        if target.stretch is not None:
            entry["stretch"] = sign + _number(target.stretch)
        if figure is not None:
            spec = "d" if isinstance(figure, int) else "#.3g"
            entry["measured"] = _number(figure, spec).rstrip(".") + target.unit
        entries.append(entry | {"verdict": target.verdict(figure)})
    return entries


TARGET_COLUMNS = tuple(Column(key, key) for key in ("target", "must", "stretch", "measured", "verdict"))
